// What a session's codes on the device are planned from.
#include "runtime/stream/device_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu/pinned_memory.h"
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

/// Rows of which nobody looks at a byte.
struct CountedRows final : CodeSource {
  explicit CountedRows(const ModelShape& of) : model(of) {
    balance_.key_scale.assign(of.head_dim, 1.0F);
  }
  /// Of layer 1 alone.
  KvView rows(uint32_t layer) const override {
    RowsView view = dense_rows(reinterpret_cast<const void*>(uintptr_t{1} << 40U),
                               layer == 1 ? count : 0, model.head_dim, DType::f16);
    view.heads = model.kv_heads;
    view.head_stride = ptrdiff_t{1} << 30;
    return {view, view};
  }
  const uint16_t* scales(uint32_t) const override { return nullptr; }
  uint32_t row_block() const override { return kCodeBlock; }
  void learn_balances(uint32_t) override {}
  const index::Balance& balance(uint32_t, uint32_t) override { return balance_; }
  void set_pinned(uint32_t, size_t) override {}
  bool is_shared(uint32_t, size_t) const override { return has_copies; }

  const ModelShape& model;
  size_t count = 0;
  bool has_copies = false;  ///< which read the pages that rows lie on

 private:
  index::Balance balance_;
};

struct AnyPins final : gpu::PinnedMemory {
  void add(const std::byte*, size_t) override {}
  void drop(const std::byte*, const std::byte*) noexcept override {}
  size_t bytes() const override { return 0; }
};

/// Codes that only count.
struct CountedCodes final : gpu::Codes {
  void set_balance(uint32_t, uint32_t, const float*, float) override {}
  void set_rows(uint32_t, const KvView&) override {}
  void encode(uint32_t, uint32_t first, uint32_t count, gpu::Stream) override {
    blocks = first + count;
  }
  void truncate(uint32_t, uint32_t to, gpu::Stream) override {
    blocks = to;
    keep_lists(to * kCodeBlock);
    used = std::min(used, made_lists(1));
  }
  uint32_t count(uint32_t) const override { return blocks; }
  [[nodiscard]] bool takes_lists(uint32_t) const override { return can; }
  bool make_lists(uint32_t layer, uint32_t begin, uint32_t rows) override {
    EXPECT_EQ(layer, 1U);
    EXPECT_LE(begin + rows, blocks * kCodeBlock);
    EXPECT_EQ(begin, made_lists(layer));
    if (busy) return false;
    asked.emplace_back(begin, rows);
    ends.push_back(begin + rows);
    return true;
  }
  void use_lists(uint32_t, gpu::Stream) override { used = made_lists(1); }
  void stop_lists(uint32_t) override {
    ++stopped;
    keep_lists(used);
  }
  uint32_t made_lists(uint32_t) const override { return ends.empty() ? 0 : ends.back(); }
  uint32_t listed(uint32_t) const override { return used; }
  /// Of lists those that steps of the other use.
  void copy_layer(uint32_t layer, Codes& from) override {
    blocks = from.count(layer);
    ends = static_cast<const CountedCodes&>(from).ends;
    used = from.listed(layer);
    keep_lists(used);
  }
  void complete() override {}
  uint32_t serve_rows(uint32_t) override { return 0; }
  void give_up_rows(uint32_t) override {}
  uint32_t most_tokens(uint32_t) const override { return 1; }
  void read(uint32_t, uint32_t, uint32_t, std::byte*) const override {}
  size_t bytes() const override { return 0; }

  /// Forgets lists of rows that reach beyond the first `rows`.
  void keep_lists(uint32_t rows) {
    while (!ends.empty() && ends.back() > rows) ends.pop_back();
  }

  using Asked = std::vector<std::pair<uint32_t, uint32_t>>;
  uint32_t blocks = 0;
  bool can = true, busy = false;
  uint32_t used = 0, stopped = 0;
  std::vector<uint32_t> ends;  ///< of rows that were listed together
  Asked asked;                 ///< (begin, rows), since it was cleared
};

/// A session's codes that only count, of heads that all ask for lists.
struct CountedSession {
  explicit CountedSession(const std::string& index = "codes:k=4,v=4,lists=64,from=32768") {
    params.max_tokens = 100000;
    HeadParams head;
    head.index = index;
    head.budget.tail = KEYHOLE_TAIL_CODES;
    heads.assign(size_t{engine.model().layers} * engine.model().kv_heads, head);
  }
  void plan() {
    std::vector<const HeadParams*> all;
    for (const HeadParams& head : heads) all.push_back(&head);
    codes.plan(all);
    ASSERT_NE(made, nullptr);
  }
  using Asked = CountedCodes::Asked;
  /// What a step asks for behind so many rows.
  Asked asks(size_t count) {
    made->asked.clear();
    rows.count = count;
    codes.update(1, {});
    return made->asked;
  }
  /// What taking a prompt in asks for.
  Asked asks_beside(size_t count) {
    made->asked.clear();
    rows.count = count;
    codes.pin_beside(1);
    codes.pin_beside(0);  // rows of another layer come: what is left of this one is pinned, too
    while (!codes.is_current(1)) codes.encode_pinned({});
    return made->asked;
  }

  SessionParams params{};
  const Engine engine{test::small_engine(1)};
  CountedRows rows{engine.model()};
  CountedCodes* made = nullptr;
  uint32_t list_rows = 0, lists_from = 0;  ///< of the newest codes that were asked for
  bool lists_fit = true;                   ///< otherwise a device takes no codes with lists
  uint64_t room = UINT64_MAX;
  std::vector<HeadParams> heads;
  DeviceCodes codes{params,
                    engine.model(),
                    [this](const gpu::CodesShape& shape) {
                      list_rows = shape.list_rows;
                      lists_from = shape.lists_from;
                      if (shape.list_rows != 0 && !lists_fit) {
                        throw Error(Status::out_of_device_memory, "planted: lists are too large");
                      }
                      auto counted = std::make_unique<CountedCodes>();
                      made = counted.get();
                      return counted;
                    },
                    [] { return std::make_unique<AnyPins>(); },
                    [this](size_t) { return room; },
                    rows,
                    engine.log()};
};

TEST(DeviceCodesTest, PutsRowsInListsAsTheyCome) {
  CountedSession s;
  s.plan();
  EXPECT_EQ(s.list_rows, 64U);
  using Asked = CountedCodes::Asked;
  EXPECT_EQ(s.asks(32512), Asked{}) << "all codes are as fast";
  EXPECT_EQ(s.asks(33024), (Asked{{0, 16384}, {16384, 16384}}));
  EXPECT_EQ(s.asks(33024), Asked{});
  EXPECT_EQ(s.asks(36608), Asked{});
  EXPECT_EQ(s.made->used, 32768U) << "what an earlier step has asked for";
  EXPECT_EQ(s.asks(36864), (Asked{{32768, 4096}}));
  EXPECT_EQ(s.asks(41216), (Asked{{36864, 4352}})) << "lists stay as they are";
  EXPECT_EQ(s.asks(53504), (Asked{{41216, 12288}}));
  s.codes.truncate(1, 40192, {});
  EXPECT_EQ(s.asks(40192), Asked{});
  EXPECT_EQ(s.asks(41216), (Asked{{36864, 4352}})) << "what was listed beyond was cut";
  // While a prompt comes, whole stretches alone.
  EXPECT_EQ(s.asks_beside(57344), Asked{});
  EXPECT_EQ(s.asks_beside(57600), (Asked{{41216, 16384}}));
  EXPECT_EQ(s.asks_beside(61696), Asked{});
  EXPECT_EQ(s.asks(61696), (Asked{{57600, 4096}}));
  s.made->busy = true;
  EXPECT_EQ(s.asks_beside(80128), Asked{}) << "the device has enough to do";
  s.made->busy = false;
  s.codes.encode_pinned({});
  EXPECT_EQ(s.made->asked, (Asked{{61696, 16384}})) << "a later call begins it";
  s.made->can = false;
  EXPECT_EQ(s.asks(90112), Asked{}) << "a device that has no use for lists makes none";
  EXPECT_EQ(s.made->stopped, 0U);
  s.codes.give_up_first("planted");
  EXPECT_EQ(s.made->stopped, 1U) << "rows of lists that are being made stay pinned until then";
}

/// Steps choose among lists once so many rows are in them as the device was told: rows that are there wait for no more
/// to come.
TEST(DeviceCodesTest, PutsAsManyRowsInListsAsStepsChooseAmong) {
  using Asked = CountedCodes::Asked;
  const Asked four = {{0, 16384}, {16384, 16384}, {32768, 16384}, {49152, 16384}};
  const auto with = [&](std::pair<uint32_t, uint32_t> last) {
    Asked all = four;
    all.push_back(last);
    return all;
  };
  for (const uint32_t from : {66048U, 65800U}) {  // the other one is not whole blocks
    CountedSession s("codes:k=4,v=4,lists=64,from=" + std::to_string(from));
    s.plan();
    EXPECT_EQ(s.lists_from, from);
    EXPECT_EQ(s.asks(65792), Asked{}) << from;
    EXPECT_EQ(s.asks(66048), with({65536, 512})) << from;
    EXPECT_GE(s.made->made_lists(1), from);
    EXPECT_EQ(s.asks(69888), Asked{}) << "rows that come behind wait for more";
    EXPECT_EQ(s.asks(70144), (Asked{{66048, 4096}}));
    // What a truncation takes away comes again, once there are as many rows.
    s.codes.truncate(1, 65792, {});
    EXPECT_EQ(s.asks(65792), Asked{}) << from;
    EXPECT_EQ(s.asks(66304), (Asked{{65536, 768}})) << from;
  }
  // A prompt's rows come in whole stretches, and the first step makes them as many as it needs.
  CountedSession s("codes:k=4,v=4,lists=64,from=66048");
  s.plan();
  EXPECT_EQ(s.asks_beside(66048), four);
  EXPECT_EQ(s.asks(66048), (Asked{{65536, 512}}));
}

/// The source's lists are the copy's, and from then on each has its own. That their memory is, too, these codes cannot
/// show: they have none.
TEST(DeviceCodesTest, GoesOnFromTheListsOfACopy) {
  using Asked = CountedCodes::Asked;
  CountedSession one, two;
  one.plan();
  EXPECT_EQ(one.asks(40192), (Asked{{0, 16384}, {16384, 16384}, {32768, 7424}}));
  EXPECT_EQ(one.asks(44544), (Asked{{40192, 4352}})) << "which no step uses yet";
  two.codes.expect_copy_of(one.codes);
  two.plan();
  two.rows.count = 44544;
  two.codes.copy();
  EXPECT_EQ(two.made->made_lists(1), 40192U);
  two.codes.encode_pinned({});
  EXPECT_EQ(two.made->asked, Asked{}) << "none of its rows is pinned";
  EXPECT_EQ(two.asks(44544), (Asked{{40192, 4352}})) << "it makes those itself";
  EXPECT_EQ(two.asks(48640), (Asked{{44544, 4096}}));
  EXPECT_EQ(one.made->made_lists(1), 44544U);

  // The source loses a part of what they have in common.
  one.rows.has_copies = two.rows.has_copies = true;
  one.rows.count = 36864;
  one.codes.truncate(1, 36864, {});
  EXPECT_EQ(one.made->stopped, 1U) << "its pages are exchanged";
  EXPECT_EQ(one.made->made_lists(1), 32768U);
  EXPECT_EQ(two.made->stopped, 0U);
  EXPECT_EQ(two.made->made_lists(1), 48640U);
  EXPECT_EQ(two.asks(52736), (Asked{{48640, 4096}}));
  EXPECT_EQ(one.asks(41472), (Asked{{32768, 8704}}));
  // And the copy in its turn, with lists that no step uses yet.
  EXPECT_EQ(two.made->used, 48640U);
  two.rows.count = 52736;
  two.codes.truncate(1, 52736, {});
  EXPECT_EQ(two.made->stopped, 1U);
  EXPECT_EQ(two.made->made_lists(1), 48640U);
  EXPECT_EQ(two.asks(52736), (Asked{{48640, 4096}})) << "begun anew, of rows that are pinned again";
  EXPECT_EQ(one.made->made_lists(1), 41472U);
}

TEST(DeviceCodesTest, ReadsNoRowsOfACopyBeforeTheyArePinned) {
  CountedSession one, two;
  one.plan();
  one.made->can = false;
  EXPECT_EQ(one.asks(40192), CountedCodes::Asked{});
  two.codes.expect_copy_of(one.codes);
  two.plan();
  two.rows.count = 40192;
  two.codes.copy();
  ASSERT_EQ(two.made->count(1) * kCodeBlock, 40192U);
  two.codes.encode_pinned({});
  EXPECT_EQ(two.made->asked, CountedCodes::Asked{});
  EXPECT_EQ(two.asks(40192), (CountedCodes::Asked{{0, 16384}, {16384, 16384}, {32768, 7424}}));
}

TEST(DeviceCodesTest, GivesListsUpBeforeLayers) {
  using Asked = CountedCodes::Asked;
  for (const uint32_t place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_DEVICE}) {
    CountedSession s;
    s.params.offload_placement = place;
    s.lists_fit = false;
    s.plan();
    EXPECT_EQ(s.list_rows, 0U);
    EXPECT_EQ(s.codes.layers(), s.engine.model().layers);
    EXPECT_FALSE(s.codes.rows_by_host());
    EXPECT_EQ(s.asks(40192), Asked{});
    // With room again they come back.
    s.lists_fit = true;
    s.codes.retry();
    s.plan();
    EXPECT_EQ(s.list_rows, 64U);
    EXPECT_NE(s.asks(40192), Asked{});
  }
}

TEST(DeviceCodesTest, HasNoListsBeyondTheLimitOfDeviceMemory) {
  CountedSession s;
  s.params.offload_placement = KEYHOLE_PLACE_DEVICE;
  const ModelShape& model = s.engine.model();
  CodePlan without;
  without.shape = {model.head_dim, 4, 4};
  without.exact_rows = gpu::kMostDeviceRows;  // of the 100 that a budget has
  without.layers.assign(model.layers, 1);
  s.params.device_memory_limit = gpu::cuda_resident_bytes(s.params.resident_shape(model)) +
                                 code_bytes(without, s.params.max_tokens, s.params, model).device;
  s.plan();
  EXPECT_EQ(s.list_rows, 0U);
  EXPECT_EQ(s.codes.layers(), model.layers);
  CountedSession less;
  less.params = s.params;
  less.params.device_memory_limit -= 1;
  EXPECT_THROW(less.plan(), Error) << "no layer may make way";
}

TEST(DeviceCodesTest, PlansNoListsWhereLayersTakeTheRoom) {
  CountedSession s;
  CodePlan without;
  without.shape = {s.engine.model().head_dim, 4, 4};
  without.exact_rows = gpu::kMostDeviceRows;  // of the 100 that a budget has
  without.layers.assign(s.engine.model().layers, 1);
  s.room = code_bytes(without, s.params.max_tokens, s.params, s.engine.model()).device;
  s.plan();
  EXPECT_EQ(s.list_rows, 0U);
  EXPECT_EQ(s.codes.layers(), s.engine.model().layers);
  EXPECT_FALSE(s.codes.rows_by_host()) << "the device has room for what reads rows itself";
  s.room = UINT64_MAX;
  s.codes.retry();
  s.plan();
  EXPECT_EQ(s.list_rows, 64U);
}

TEST(CodeSpecsTest, SaysWhatTheTypeSays) {
  CodeSpecs specs;
  for (const char* spec : {"codes", "codes:k=2,v=4", "flat", "ivf:C=64", "codes:k=1,v=0,lists=5"}) {
    for (int i = 0; i < 2; ++i) {
      const auto codes = specs.codes(spec);
      ASSERT_EQ(codes.has_value(), index::has_codes(spec)) << spec;
      if (!codes) continue;
      EXPECT_EQ(codes->bits, index::code_bits(spec)) << spec;
      EXPECT_EQ(codes->lists, index::code_listing(spec)) << spec;
    }
  }
  EXPECT_EQ(specs.parsed(), 5U);
  EXPECT_THROW((void)specs.codes("no such type"), Error);
  for (uint32_t i = 0; i < 3000; ++i) (void)specs.codes("ivf:C=" + std::to_string(64 + i));
  EXPECT_EQ(specs.codes("codes:k=2,v=2")->bits, index::code_bits("codes:k=2,v=2"));
}

TEST(CodePlanTest, LosesItsListsBeforeALayer) {
  SessionParams params;
  params.exact_rows_by = KEYHOLE_ROWS_BY_DEVICE;
  Planned of(params, "codes:k=4,v=4,lists=64,from=32768", KEYHOLE_TAIL_CODES);
  CodeSpecs specs;
  constexpr uint64_t kTokens = 65536;
  params.max_tokens = kTokens;
  const CodePlan with = plan_codes(params, of.model, of.all, specs);
  CodePlan without = with;
  without.lists = {};
  const auto bytes = [&](const CodePlan& plan) {
    return code_bytes(plan, kTokens, params, of.model).device;
  };
  const auto fit = [&](uint64_t room) {
    return fitting(with, {room, UINT64_MAX}, kTokens, params, of.model);
  };
  ASSERT_GT(with.count(), 1U);
  EXPECT_EQ(fit(bytes(with)), with);
  EXPECT_EQ(fit(bytes(with) - 1), without);
  EXPECT_EQ(fit(bytes(without)), without);
  EXPECT_EQ(fit(bytes(without) - 1).count(), with.count() - 1);
}

TEST(CodePlanTest, HasTheListsThatAllHeadsAskFor) {
  EXPECT_EQ(index::code_listing("codes:k=4,v=4").rows, 0U);
  EXPECT_EQ(index::code_listing("codes:k=4,v=4,lists=64,read=25"),
            (index::CodeListing{64, 0.25F, 0.7F}));
  EXPECT_EQ(index::code_listing("codes:lists=3").rows, 16U) << "lists have no fewer rows";
  SessionParams params{};
  Planned of(params, "codes:k=4,v=4,lists=64,read=25,from=32768", KEYHOLE_TAIL_CODES);
  CodeSpecs specs;
  const auto plan = [&] { return plan_codes(params, of.model, of.all, specs); };
  params.max_tokens = 65536;
  EXPECT_EQ(plan().lists, (index::CodeListing{64, 0.25F, 0.7F, 32768}));
  const auto shape = [&](const CodePlan& p, uint64_t tokens) {
    return codes_shape(p, tokens, params, of.model);
  };
  EXPECT_EQ(shape(plan(), 65536).list_rows, 64U);
  EXPECT_EQ(shape(plan(), 65536).list_share.share, 0.25F);
  EXPECT_EQ(shape(plan(), 65536).list_share.miss, 0.7F);
  CodePlan without = plan();
  without.lists = {};
  EXPECT_GT(gpu::codes_bytes(shape(plan(), 65536)), 2 * gpu::codes_bytes(shape(without, 65536)));
  EXPECT_EQ(shape(plan(), 16384).list_rows, 0U) << "too few rows for lists";
  CodePlan early = plan();
  early.lists.from = 8192;
  EXPECT_EQ(shape(early, 16384).list_rows, 64U) << "the spec says from how many rows on";
  EXPECT_EQ(shape(early, 16384).lists_from, 8192U);
  CodePlan by_host = plan();
  by_host.rows_by_host = true;
  EXPECT_EQ(shape(by_host, 65536).list_rows, 0U) << "the device does not read the rows";
  of.heads.back().index = "codes:k=4,v=4,lists=32,read=25";
  EXPECT_EQ(plan().lists.rows, 0U) << "one head asks for others";
  EXPECT_EQ(plan().count(), of.model.layers) << "and has codes of as many bits";
}

}  // namespace
}  // namespace keyhole::runtime
