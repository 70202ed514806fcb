// A step that is to be made larger and finds no memory: all workers stay as they were, at whichever allocation
// it failed. Memory fails through operator new.
#include <atomic>

#include "tests/replaced_new.h"
#include "tests/runtime/step_arrays.h"

namespace {

std::atomic<int64_t> left{-1};  // allocations until they fail; negative: they never do

const keyhole::test::BeforeAllocation hook([] {
  if (left == 0) throw std::bad_alloc();
  if (left > 0) --left;
});

}  // namespace

namespace keyhole::test {
namespace {

using runtime::DecodeStep;
using runtime::Engine;
using runtime::SearchParams;
using runtime::Selection;

std::vector<float> run(DecodeStep& step, const Engine& engine, const StepRows& rows,
                       const std::string& spec, const SearchParams& search) {
  StepArrays out(engine.model());
  for (uint32_t h = 0; h < engine.model().kv_heads; ++h) step.work(h) = rows.work(spec, search);
  step.start(0, rows.queries().data(), out);
  (void)step.finish();
  return out.o();
}

TEST(StepFault, AReservationThatFailsChangesNoWorker) {
  const Engine engine(step_engine(3));
  const StepRows rows(engine, 3000, 71);
  const std::string other = "ivf:C=8,probe=2,segment=500,iters=1";
  const Selection::Use small{rows.index("flat"), KEYHOLE_ATTEND_TOPK};
  const Selection::Use scored{rows.index("flat"), KEYHOLE_ATTEND_SCORED};
  const Selection::Use typed{rows.index(other), KEYHOLE_ATTEND_TOPK};
  const Selection::Use tailed{rows.index("flat"), KEYHOLE_ATTEND_TOPK, rows.tail()};
  const Selection::Use large[] = {scored, typed, tailed};
  SearchParams with_tail{.k = 200};
  with_tail.tail = {.tree = rows.tail(), .mode = index::TailMode::second, .goal = {}, .other = {}};

  DecodeStep fresh(engine);
  fresh.reserve(large, 200);
  const auto with_flat = run(fresh, engine, rows, "flat", with_tail);
  const auto with_other = run(fresh, engine, rows, other, {.k = 200});

  DecodeStep step(engine);
  step.reserve({&small, 1}, 10);
  const auto before = run(step, engine, rows, "flat", {.k = 10});
  const size_t bytes = step.bytes();
  int64_t failures = 0;
  for (;; ++failures) {
    ASSERT_LT(failures, 100000);
    bool failed = false;
    left = failures;
    try {
      step.reserve(large, 200);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    left = -1;
    if (!failed) break;
    SCOPED_TRACE("allocation " + std::to_string(failures));
    ASSERT_EQ(step.capacity_k(), 10U);
    ASSERT_EQ(step.bytes(), bytes);
    ASSERT_TRUE(step.fits(small));
    for (const Selection::Use& use : large) ASSERT_FALSE(step.fits(use));
    ASSERT_EQ(run(step, engine, rows, "flat", {.k = 200}), before) << "k is cut to capacity_k";
  }
  EXPECT_GT(failures, 3 * 5);  // several for each worker
  EXPECT_EQ(step.capacity_k(), 200U);
  for (const Selection::Use& use : large) EXPECT_TRUE(step.fits(use));
  EXPECT_EQ(run(step, engine, rows, "flat", with_tail), with_flat);
  EXPECT_EQ(run(step, engine, rows, other, {.k = 200}), with_other);
}

/// Lets reserve() fail at its first allocation, its second, and so on until it succeeds; returns how often it
/// failed. What grew before a failure stays, so that it ends.
template <class T>
int64_t reserve_until_it_fits(T& object, const index::TailTree& few, const index::TailTree& many) {
  object.reserve(few, 2);
  for (int64_t failures = 0;; ++failures) {
    left = failures;
    bool failed = false;
    try {
      object.reserve(many, 16);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    left = -1;
    EXPECT_TRUE(object.fits(few, 2));
    EXPECT_EQ(object.fits(many, 16), !failed) << "after " << failures << " failures";
    if (!failed) return failures;
  }
}

// A worker's parts say by themselves what they are large enough for.
TEST(StepFault, WhatCouldNotGrowDoesNotClaimToHave) {
  const Engine engine(step_engine(1));
  const StepRows few(engine, 200, 72);
  const StepRows many(engine, 4000, 73);
  index::TailEstimate estimate;
  EXPECT_GT(reserve_until_it_fits(estimate, *few.tail(), *many.tail()), 3);
  runtime::TailReader reader;
  EXPECT_GT(reserve_until_it_fits(reader, *few.tail(), *many.tail()), 3);
}

}  // namespace
}  // namespace keyhole::test
