// The host's part of a step from inside: what it holds is counted when it may be, and limits mean what they say.
#include <atomic>
#include <chrono>
#include <thread>

#include "index/types/factory.h"
#include "keyhole/index.h"
#include "runtime/step/decode_step.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/step_arrays.h"

namespace keyhole::runtime {
namespace {

using test::Numbers;
using test::StepArrays;
using test::StepRows;

// A search in a larger index than was reserved for takes more memory. It is counted at the end of the step, not
// while workers search: the figure may be asked for by another thread.
TEST(DecodeStepBytes, StayTheSameWhileAStepIsUnderWay) {
  const Engine engine(test::step_engine(2));
  const StepRows small(engine, 100, 61);
  const StepRows large(engine, 5000, 62);
  DecodeStep step(engine);
  std::vector<Selection::Use> uses{{small.index("flat"), KEYHOLE_ATTEND_SCORED}};
  step.reserve(uses, 10);
  const size_t reserved = step.bytes();
  for (uint32_t h = 0; h < engine.model().kv_heads; ++h) {
    step.work(h) = large.work("flat", {.k = 10, .attend = KEYHOLE_ATTEND_SCORED});
  }
  StepArrays out(engine.model());
  step.start(0, large.queries().data(), out);
  // The other thread of the pool does all of it: this one takes part in finish() only.
  while (out.delivered() < engine.model().kv_heads) std::this_thread::yield();
  EXPECT_EQ(step.bytes(), reserved);
  (void)step.finish();
  EXPECT_GT(step.bytes(), reserved + 5000 * sizeof(float));
  const size_t grown = step.bytes();
  step.start(0, large.queries().data(), out);
  (void)step.finish();
  EXPECT_GE(step.bytes(), grown);
}

// As many keys as it takes, said in two ways: no limit, and the largest there is.
TEST(TailLimits, TheLargestMaxKeysIsNoLimit) {
  const keyhole_engine_config ec = test::small_engine(1);
  const test::EnginePtr engine = test::make_engine(ec);
  keyhole_index* index = nullptr;
  ASSERT_OK(keyhole_index_create(engine.get(), "flat", 0, 0, &index));
  Numbers numbers(63);
  const uint32_t n = 2000;
  const auto keys = numbers.many(size_t{n} * ec.head_dim);
  const auto values = numbers.many(keys.size());
  constexpr uint32_t kQueries = 24;  // of which the cost tells of 16
  const auto queries = numbers.many(size_t{kQueries} * ec.head_dim);
  const auto tk = test::tensor(keys, {n, ec.head_dim});
  const auto tv = test::tensor(values, {n, ec.head_dim});
  const auto tq = test::tensor(queries, {kQueries, ec.head_dim});
  ASSERT_OK(keyhole_index_build(index, &tk, &tv, nullptr, nullptr, 0, nullptr, nullptr));
  ASSERT_OK(keyhole_index_build_tail(index, 16, nullptr, nullptr));
  keyhole_search_options options;
  keyhole_search_options_init(&options);
  options.budget.top_k = 10;
  options.budget.tail = KEYHOLE_TAIL_SECOND;
  options.budget.mass_target = 0.99F;
  std::vector<float> o(queries.size()), lse(kQueries);
  std::vector<uint32_t> opened;
  for (const uint32_t max_keys : {0U, UINT32_MAX, UINT32_MAX - 5, n}) {
    options.budget.max_keys = max_keys;
    keyhole_search_cost cost;
    keyhole_search_cost_init(&cost);
    ASSERT_OK(
        keyhole_index_attend(index, &tq, &options, o.data(), lse.data(), nullptr, nullptr, &cost));
    opened.push_back(cost.keys_opened);
    for (const float missing : cost.missing) {
      EXPECT_LE(missing, 0.01F + 1e-5F) << "max_keys " << max_keys;
    }
  }
  EXPECT_GT(opened[0], 0U);
  for (const uint32_t count : opened) EXPECT_EQ(count, opened[0]);
  keyhole_index_destroy(index);
}

}  // namespace
}  // namespace keyhole::runtime
