// Builds: progress, cancel, failure, appends while decoding, changing the index type.
#include <algorithm>
#include <atomic>
#include <vector>

#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

class Build : public ::testing::Test {
 protected:
  void make(uint32_t n) {
    engine_ = make_engine(ec_);
    session_ = make_session(engine_.get(), sc_);
    ASSERT_NE(session_, nullptr);
    for (uint32_t l = 0; l < ec_.layers; ++l)
      prefill_both(session_.get(), model_, shape_, l, n, numbers_);
  }
  void expect_all_exact() {
    for (uint32_t l = 0; l < ec_.layers; ++l)
      expect_exact(session_.get(), model_, shape_, l, numbers_);
  }

  keyhole_engine_config ec_ = small_engine();
  keyhole_session_config sc_ = small_session();
  EnginePtr engine_;
  SessionPtr session_;
  Numbers numbers_{11};
  Model model_{ec_};
  Shape shape_{ec_};
};

TEST_F(Build, ReportsRisingProgressUpToOne) {
  sc_.index = "ivf:C=8,probe=16777216";
  make(600);
  std::vector<double> seen;
  ASSERT_OK(keyhole_session_build(
      session_.get(),
      [](void* user, double fraction, const char* what) -> int32_t {
        static_cast<std::vector<double>*>(user)->push_back(fraction);
        EXPECT_NE(what, nullptr);
        return 0;
      },
      &seen));
  ASSERT_FALSE(seen.empty());
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_DOUBLE_EQ(1.0, seen.back());
}

TEST_F(Build, CancelLosesNothingAndCanBeRepeated) {
  sc_.index = "ivf:C=8,probe=16777216";
  make(600);
  EXPECT_EQ(KEYHOLE_CANCELLED,
            keyhole_session_build(
                session_.get(), [](void*, double, const char*) -> int32_t { return 1; }, nullptr));
  expect_all_exact();
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  EXPECT_EQ(0U, layer_tokens(session_.get(), 0).pending);
  expect_all_exact();
}

TEST_F(Build, TokensAreIndexedWhereTheyAreInEveryHead) {
  sc_.index = "ivf:C=8,probe=16777216";
  ec_.threads = 1;  // several would share the progress among heads of which none is done
  make(600);
  // After the first head of the first layer.
  EXPECT_EQ(
      KEYHOLE_CANCELLED,
      keyhole_session_build(
          session_.get(),
          [](void*, double fraction, const char*) -> int32_t { return fraction > 0.25; }, nullptr));
  EXPECT_GT(statistics(session_.get()).index_bytes, 0U);
  EXPECT_EQ(0U, layer_tokens(session_.get(), 0).indexed) << "not in the other heads";
  expect_all_exact();
  EXPECT_GT(statistics(session_.get()).keys_scored, 0U) << "which the first one searches";
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  EXPECT_EQ(0U, layer_tokens(session_.get(), 0).pending);
}

TEST_F(Build, ChangingTheIndexMakesAllPending) {
  make(300);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_index(session_.get(), "flatt"));
  EXPECT_EQ(0U, layer_tokens(session_.get(), 0).pending);
  for (const char* spec : {"ivf:C=4,probe=16777216", "hnsw:M=16,ef=4096", "roargraph:ef=4096",
                           "sparq:r=256", "flat"}) {
    ASSERT_OK(keyhole_session_set_index(session_.get(), spec));
    EXPECT_EQ(0U, layer_tokens(session_.get(), 0).indexed);
    expect_all_exact();
    ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
    EXPECT_EQ(0U, layer_tokens(session_.get(), 0).pending);
    expect_all_exact();
    EXPECT_EQ(std::string(spec).substr(0, 3) != "fla", statistics(session_.get()).index_bytes > 0);
  }
}

TEST_F(Build, AppendsPendingTokensBlockByBlockWhileDecoding) {
  sc_.append_block = 16;
  make(300);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  const uint32_t indexed = layer_tokens(session_.get(), 0).indexed;
  for (int i = 0; i < 100; ++i) {
    const auto k = numbers_.many(shape_.kv(1));
    const auto v = numbers_.many(shape_.kv(1));
    const auto q = numbers_.many(shape_.q(1));
    std::vector<float> o(shape_.q(1));
    const auto tk = tensor(k, {shape_.hkv, shape_.d});
    const auto tv = tensor(v, {shape_.hkv, shape_.d});
    const auto tq = tensor(q, {shape_.hq, shape_.d});
    const auto out = tensor(o, {shape_.hq, shape_.d});
    ASSERT_OK(keyhole_session_attend(session_.get(), 0, &tq, &tk, &tv, &out, nullptr));
    model_.append(0, k, v);
    // One block on its way, one that fills; one flush may come on top before the next step sees it.
    ASSERT_LE(layer_tokens(session_.get(), 0).pending, 2 * sc_.append_block + sc_.flush_block);
  }
  EXPECT_GT(layer_tokens(session_.get(), 0).indexed, indexed + 40);
  expect_all_exact();
}

TEST_F(Build, HostMemoryLimitRefusesBeforeItTakes) {
  sc_.host_memory_limit = 1 << 20;
  sc_.training_queries = 0;
  make(200);
  const auto before = layer_tokens(session_.get(), 0);
  const auto k = numbers_.many(shape_.kv(2000));
  const auto tk = tensor(k, {2000, shape_.hkv, shape_.d});
  EXPECT_EQ(KEYHOLE_OUT_OF_MEMORY, keyhole_session_append(session_.get(), 0, &tk, &tk, nullptr));
  expect_error_text("host_memory_limit");
  EXPECT_EQ(before.total, layer_tokens(session_.get(), 0).total);
  expect_all_exact();
}

// Blocks that steps take in count, too: where there is no room for one, its tokens stay pending.
TEST_F(Build, StepsIndexNoMoreThanTheHostMemoryLimitHasRoomFor) {
  sc_.append_block = 64;
  sc_.append_mode = KEYHOLE_APPEND_IN_STEP;
  constexpr int kSteps = 260;
  const auto make_built = [&](uint64_t limit) {
    sc_.host_memory_limit = limit;
    model_ = Model(ec_);
    make(600);
    ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  };
  const auto step = [&] {
    const auto k = numbers_.many(shape_.kv(1)), q = numbers_.many(shape_.q(1));
    std::vector<float> o(shape_.q(1));
    const auto tk = tensor(k, {shape_.hkv, shape_.d}), tq = tensor(q, {shape_.hq, shape_.d}),
               out = tensor(o, {shape_.hq, shape_.d});
    const keyhole_status status =
        keyhole_session_attend(session_.get(), 0, &tq, &tk, &tk, &out, nullptr);
    if (status == KEYHOLE_OK) model_.append(0, k, k);
    return status;
  };
  for (const char* index :
       {"codes:k=4,v=4", "ivf:C=8,probe=3,segment=64", "hnsw:M=16", "roargraph:M=16,Nq=10"}) {
    SCOPED_TRACE(index);
    sc_.index = index;
    make_built(0);
    // One byte less than there is after the step that takes the last block in.
    uint64_t limit = 0;
    uint32_t indexed = layer_tokens(session_.get(), 0).indexed, taken_in = 0;
    for (int i = 0; i < kSteps; ++i) {
      ASSERT_OK(step());
      const uint32_t now = layer_tokens(session_.get(), 0).indexed;
      if (now == indexed) continue;
      indexed = now;
      taken_in += 1;
      limit = statistics(session_.get()).host_bytes - 1;
    }
    ASSERT_GE(taken_in, 3U);
    make_built(limit);
    keyhole_status status = KEYHOLE_OK;
    for (int i = 0; i < kSteps && status == KEYHOLE_OK; ++i) {
      status = step();
      ASSERT_LE(statistics(session_.get()).host_bytes, limit) << "step " << i;
    }
    EXPECT_TRUE(status == KEYHOLE_OK || status == KEYHOLE_OUT_OF_MEMORY) << keyhole_last_error();
    const auto left = layer_tokens(session_.get(), 0);
    EXPECT_LT(left.indexed, indexed);
    EXPECT_GT(left.indexed, 600U) << "there was room for some";
  }
}

TEST_F(Build, OfAnEmptySessionDoesNothing) {
  make(0);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  model_ = Model(ec_);
  make(20);  // all resident
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  EXPECT_EQ(0U, layer_tokens(session_.get(), 0).indexed);
  expect_all_exact();
}

TEST_F(Build, APoorGraphIsSaidToBeOne) {
  // Without queries in the prefill nothing guides the graph; partitions do not mind.
  std::vector<std::string> warnings;
  ec_.log = [](void* user, int32_t level, const char* text) {
    if (level == KEYHOLE_LOG_WARNING)
      static_cast<std::vector<std::string>*>(user)->emplace_back(text);
  };
  ec_.log_user = &warnings;
  sc_.index = "ivf";
  sc_.training_queries = 0;  // what the prefill brings is not kept
  make(300);
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  EXPECT_TRUE(warnings.empty());
  ASSERT_OK(keyhole_session_set_index(session_.get(), "roargraph:M=4"));
  ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  ASSERT_EQ(1U, warnings.size());
  EXPECT_NE(warnings[0].find("no training query"), std::string::npos) << warnings[0];
}

}  // namespace
}  // namespace keyhole::test
