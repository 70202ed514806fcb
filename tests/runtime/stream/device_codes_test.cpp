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

/// Heads of all layers of an engine, with one index and one tail, and their codes.
struct Planned {
  Planned(const SessionParams& params, const char* index, keyhole_tail_mode tail,
          DeviceCodes::Make make = &must_not_make)
      : codes(
            params, model, std::move(make),
            []() -> std::unique_ptr<gpu::PinnedMemory> { return nullptr; }, {}, rows,
            engine.log()) {
    for (HeadParams& head : heads) {
      head.index = index;
      head.budget.tail = tail;
      all.push_back(&head);
    }
  }
  static std::unique_ptr<gpu::Codes> must_not_make(const gpu::CodesShape&) {
    ADD_FAILURE() << "asked for";
    return nullptr;
  }

  const Engine engine{test::small_engine(1)};
  const ModelShape& model = engine.model();
  EmptyRows rows;
  DeviceCodes codes;
  std::vector<HeadParams> heads = std::vector<HeadParams>(size_t{model.layers} * model.kv_heads);
  std::vector<const HeadParams*> all;
};

TEST(DeviceCodesTest, ParsesASpecOnceHoweverOftenBudgetsChange) {
  const SessionParams params{};
  uint32_t asked = 0;
  Planned of(params, "codes:k=2,v=2", KEYHOLE_TAIL_CODES,
             [&](const gpu::CodesShape& shape) -> std::unique_ptr<gpu::Codes> {
               asked = shape.exact_rows;
               throw Error(Status::out_of_device_memory, "planted: no room");
             });
  for (uint32_t n = 1; n <= 30; ++n) {
    for (HeadParams& head : of.heads) head.budget.top_k = n;
    of.codes.plan(of.all);
    EXPECT_EQ(asked, n) << "the plan is that of the budgets as they are now";
  }
  EXPECT_EQ(of.codes.parsed_specs(), 1U);
  of.heads[0].index = "flat";
  for (uint32_t n = 1; n <= 30; ++n) {
    of.heads[1].budget.top_k = n;
    of.codes.plan(of.all);
  }
  EXPECT_EQ(of.codes.parsed_specs(), 2U);
}

TEST(DeviceCodesTest, NeverAsksADeviceForBitsThatItHasNoKernelsFor) {
  for (const char* spec : {"codes:k=1,v=1", "codes:k=2,v=4", "codes:k=4,v=0"}) {
    for (const uint32_t place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_DEVICE}) {
      SessionParams params;
      params.offload_placement = place;
      Planned of(params, spec, KEYHOLE_TAIL_CODES);
      try {
        of.codes.plan(of.all);
        EXPECT_EQ(place, KEYHOLE_PLACE_AUTO) << spec;
      } catch (const Error& e) {
        EXPECT_EQ(place, KEYHOLE_PLACE_DEVICE) << spec;
        EXPECT_EQ(e.status(), Status::unsupported) << e.what();
        EXPECT_NE(std::string(e.what()).find("allowed are 2 of both or 4 of both"),
                  std::string::npos)
            << e.what();
      }
      for (uint32_t l = 0; l < of.model.layers; ++l) EXPECT_FALSE(of.codes.layer_has(l));
    }
  }
}

TEST(DeviceCodesTest, RefusesToBeOnTheDeviceWithoutHeadsThatHaveThem) {
  for (const uint32_t place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_HOST, KEYHOLE_PLACE_DEVICE}) {
    SessionParams params;
    params.offload_placement = place;
    Planned of(params, "flat", KEYHOLE_TAIL_SECOND);
    try {
      of.codes.plan(of.all);
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
