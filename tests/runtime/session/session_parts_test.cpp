// Small parts of a session, each alone.
#include <gtest/gtest.h>

#include "runtime/session/extend_args.h"
#include "runtime/session/extended_tokens.h"
#include "runtime/session/host_memory.h"
#include "runtime/session/step_totals.h"
#include "tests/runtime/fixture.h"

namespace keyhole::runtime {
namespace {

TEST(HostMemory, AddsUpWhatPartsHoldWhenAsked) {
  SessionParams params;
  params.host_memory_limit = 100;
  HostMemory memory(params);
  uint64_t rows = 40, promised = 0;
  memory.count([&] { return rows; });
  memory.count([] { return uint64_t{10}; });
  memory.promise([&] { return promised; });
  EXPECT_EQ(memory.held(), 50U);
  memory.check(50, "rows");
  promised = 1;
  EXPECT_EQ(memory.accounted(), 51U);
  EXPECT_EQ(memory.held(), 50U);
  try {
    memory.check(50, "rows");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_memory);
    EXPECT_STREQ(e.what(), "rows needs 50 bytes more than the 51 held, host_memory_limit is 100");
  }
  memory.note_peak();
  rows = 0;
  memory.note_peak();
  EXPECT_EQ(memory.peak(), 50U);
}

TEST(HostMemory, WithoutALimitRefusesNothing) {
  SessionParams params;
  params.host_memory_limit = 0;
  HostMemory memory(params);
  memory.count([] { return UINT64_MAX; });
  EXPECT_FALSE(memory.is_limited());
  memory.check(1, "rows");
}

TEST(ExtendedTokens, LayersAgreeUntilOneChanges) {
  const Engine engine(test::small_engine(1));
  const Sequence sequence(engine, check_session(test::small_session(), engine.model()));
  ExtendedTokens extended(engine.model().layers);
  EXPECT_THROW((void)extended.agreed(sequence), Error);
  for (uint32_t layer = 0; layer < extended.layers(); ++layer) extended.set(layer, 7, 3, true);
  EXPECT_EQ(extended.agreed(sequence).before, 7U);
  EXPECT_EQ(extended.agreed(sequence).tokens, 3U);
  extended.clear(0);
  EXPECT_FALSE(extended.takes_part(0));
  EXPECT_EQ(extended.agreed(sequence).tokens, 3U);
  extended.note_change(1);
  EXPECT_THROW((void)extended.agreed(sequence), Error);
  // Those on the host are there at once.
  extended.set(1, 7, 3, false);
  EXPECT_THROW((void)extended.agreed(sequence), Error);
}

TEST(ExtendArgs, ASliceHasItsOwnTokens) {
  std::vector<float> q(4 * 2 * 64), lse(4 * 2);
  ExtendArgs args;
  args.q = {.data = reinterpret_cast<const std::byte*>(q.data()),
            .token_stride = 2 * 64 * sizeof(float),
            .head_stride = 64 * sizeof(float),
            .tokens = 4,
            .heads = 2,
            .dim = 64};
  args.k = args.v = args.q;
  args.out.data = reinterpret_cast<std::byte*>(q.data());
  args.out.token_stride = args.q.token_stride;
  args.lse = lse.data();
  const ExtendArgs part = slice(args, 1, 2);
  EXPECT_EQ(part.q.tokens, 2U);
  EXPECT_EQ(part.q.data, args.q.row(1, 0));
  EXPECT_EQ(part.out.data, args.out.row(1, 0));
  EXPECT_EQ(part.lse, lse.data() + 2);
  check_counts(part);
  const uint64_t mask[] = {1, 2, 4, 9};  // word 0 lacks nothing, the last one sees token 0
  args.mask = mask;
  check_counts(args);
  const uint64_t other[] = {1, 1, 4, 8};
  args.mask = other;
  EXPECT_THROW(check_counts(args), Error);
  args.mask = nullptr;
  args.v.tokens = 3;
  EXPECT_THROW(check_counts(args), Error);
}

TEST(StepTotals, StepsOfHostAndDeviceAddUp) {
  StepTotals totals;
  StepCost cost;
  cost.keys_attended = 5;
  cost.keys_scored = 11;
  totals.add(cost, 3);
  totals.add_on_device(2, 100);
  totals.add_search(cost);
  totals.add_seconds(0.5, 1.0);
  EXPECT_EQ(totals.figures().attends, 5U);
  EXPECT_EQ(totals.figures().keys_attended, 105U);
  EXPECT_EQ(totals.figures().keys_scored, 22U);
  EXPECT_EQ(totals.figures().append_seconds, 0.5);
  totals.reset();
  EXPECT_EQ(totals.figures().attends, 0U);
}

}  // namespace
}  // namespace keyhole::runtime
