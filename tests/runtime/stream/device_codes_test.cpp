// What a session's codes on the device are planned from.
#include "runtime/stream/device_codes.h"

#include <gtest/gtest.h>

#include "runtime/engine/engine.h"
#include "tests/runtime/fixture.h"

namespace keyhole::runtime {
namespace {

/// No layer has a row yet.
struct EmptyRows final : CodeSource {
  KvView rows(uint32_t) const override { return {}; }
  const uint16_t* scales(uint32_t) const override { return nullptr; }
  uint32_t row_block() const override { return kCodeBlock; }
  void learn_balances(uint32_t) override {}
  const index::Balance& balance(uint32_t, uint32_t) override {
    throw Error(Status::internal, "planted: no rows");
  }
  void set_pinned(uint32_t, size_t) override {}
  bool is_shared(uint32_t, size_t) const override { return false; }
};

TEST(DeviceCodesTest, ParsesASpecOnceHoweverOftenBudgetsChange) {
  const Engine engine(test::small_engine(1));
  const ModelShape& model = engine.model();
  SessionParams params;
  EmptyRows rows;
  uint32_t asked = 0;
  DeviceCodes codes(
      params, model,
      [&](const gpu::CodesShape& shape) -> std::unique_ptr<gpu::Codes> {
        asked = shape.exact_rows;
        throw Error(Status::out_of_device_memory, "planted: no room");
      },
      []() -> std::unique_ptr<gpu::PinnedMemory> { return nullptr; }, {}, rows, engine.log());
  std::vector<HeadParams> heads(size_t{model.layers} * model.kv_heads);
  std::vector<const HeadParams*> all;
  for (HeadParams& head : heads) {
    head.index = "codes:k=2,v=2";
    head.budget.tail = KEYHOLE_TAIL_CODES;
    all.push_back(&head);
  }
  for (uint32_t n = 1; n <= 30; ++n) {
    for (HeadParams& head : heads) head.budget.top_k = n;
    codes.plan(all);
    EXPECT_EQ(asked, n) << "the plan is that of the budgets as they are now";
  }
  EXPECT_EQ(codes.parsed_specs(), 1U);
  heads[0].index = "flat";
  for (uint32_t n = 1; n <= 30; ++n) {
    heads[1].budget.top_k = n;
    codes.plan(all);
  }
  EXPECT_EQ(codes.parsed_specs(), 2U);
}

TEST(DeviceCodesTest, NeverAsksADeviceForBitsThatItHasNoKernelsFor) {
  const Engine engine(test::small_engine(1));
  const ModelShape& model = engine.model();
  for (const char* spec : {"codes:k=1,v=1", "codes:k=2,v=4", "codes:k=4,v=0"}) {
    for (const uint32_t place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_DEVICE}) {
      SessionParams params;
      params.offload_placement = place;
      EmptyRows rows;
      DeviceCodes codes(
          params, model,
          [](const gpu::CodesShape&) -> std::unique_ptr<gpu::Codes> {
            ADD_FAILURE() << "asked for";
            return nullptr;
          },
          []() -> std::unique_ptr<gpu::PinnedMemory> { return nullptr; }, {}, rows, engine.log());
      std::vector<HeadParams> heads(size_t{model.layers} * model.kv_heads);
      std::vector<const HeadParams*> all;
      for (HeadParams& head : heads) {
        head.index = spec;
        head.budget.tail = KEYHOLE_TAIL_CODES;
        all.push_back(&head);
      }
      try {
        codes.plan(all);
        EXPECT_EQ(place, KEYHOLE_PLACE_AUTO) << spec;
      } catch (const Error& e) {
        EXPECT_EQ(place, KEYHOLE_PLACE_DEVICE) << spec;
        EXPECT_EQ(e.status(), Status::unsupported) << e.what();
        EXPECT_NE(std::string(e.what()).find("allowed are 2 of both or 4 of both"),
                  std::string::npos)
            << e.what();
      }
      for (uint32_t l = 0; l < model.layers; ++l) EXPECT_FALSE(codes.layer_has(l));
    }
  }
}

TEST(DeviceCodesTest, RefusesToBeOnTheDeviceWithoutHeadsThatHaveThem) {
  const Engine engine(test::small_engine(1));
  const ModelShape& model = engine.model();
  for (const uint32_t place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_HOST, KEYHOLE_PLACE_DEVICE}) {
    SessionParams params;
    params.offload_placement = place;
    EmptyRows rows;
    DeviceCodes codes(
        params, model,
        [](const gpu::CodesShape&) -> std::unique_ptr<gpu::Codes> {
          ADD_FAILURE() << "asked for";
          return nullptr;
        },
        []() -> std::unique_ptr<gpu::PinnedMemory> { return nullptr; }, {}, rows, engine.log());
    std::vector<HeadParams> heads(size_t{model.layers} * model.kv_heads);
    std::vector<const HeadParams*> all;
    for (HeadParams& head : heads) {
      head.index = "flat";
      head.budget.tail = KEYHOLE_TAIL_SECOND;
      all.push_back(&head);
    }
    try {
      codes.plan(all);
      EXPECT_NE(place, KEYHOLE_PLACE_DEVICE);
    } catch (const Error& e) {
      EXPECT_EQ(place, KEYHOLE_PLACE_DEVICE);
      EXPECT_EQ(e.status(), Status::invalid_argument) << e.what();
      EXPECT_NE(std::string(e.what()).find("KEYHOLE_PLACE_DEVICE"), std::string::npos) << e.what();
    }
  }
}

TEST(CodeSpecsTest, SaysWhatTheTypeSays) {
  CodeSpecs specs;
  for (const char* spec : {"codes", "codes:k=2,v=4", "flat", "ivf:C=64", "codes:k=1,v=0"}) {
    for (int i = 0; i < 2; ++i) EXPECT_EQ(specs.bits(spec), index::code_bits(spec)) << spec;
  }
  EXPECT_EQ(specs.parsed(), 5U);
  EXPECT_THROW((void)specs.bits("no such type"), Error);
  for (uint32_t i = 0; i < 3000; ++i) (void)specs.bits("ivf:C=" + std::to_string(64 + i));
  EXPECT_EQ(specs.bits("codes:k=2,v=2"), index::code_bits("codes:k=2,v=2"));
}

}  // namespace
}  // namespace keyhole::runtime
