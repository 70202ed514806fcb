// Steady-state decoding allocates nothing: every operator new of the process is counted, and those of the
// decoding thread apart.
#include <atomic>
#include <tuple>

#include "tests/replaced_new.h"
#include "tests/runtime/fixture.h"

namespace {
std::atomic<uint64_t> allocations{0};
thread_local uint64_t own_allocations = 0;

const keyhole::test::BeforeAllocation hook([] {
  ++allocations;
  ++own_allocations;
});
}  // namespace

namespace keyhole::test {
namespace {

using Param = std::tuple<const char*, keyhole_attend_mode>;

class StepAllocation : public ::testing::TestWithParam<Param> {};

constexpr uint32_t kPrompt = unless_sanitized(1500, 700);

TEST_P(StepAllocation, NoneInAStep) {
  const auto ec = small_engine(3);
  auto sc = small_session();
  sc.index = std::get<0>(GetParam());
  sc.budget.attend = std::get<1>(GetParam());
  sc.budget.top_k = 20;
  sc.append_block = 100000;
  sc.audit_share = 0.5;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(6);
  Model model(ec);
  const Shape shape(ec);
  for (uint32_t l = 0; l < ec.layers; ++l)
    prefill_both(session.get(), model, shape, l, kPrompt, numbers);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  const auto k = numbers.many(shape.kv(1));
  const auto q = numbers.many(shape.q(1));
  std::vector<float> o(shape.q(1));
  const auto tk = tensor(k, {shape.hkv, shape.d});
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  const auto step = [&] {
    for (uint32_t l = 0; l < ec.layers; ++l) {
      if (keyhole_session_attend(session.get(), l, &tq, &tk, &tk, &out, nullptr) != KEYHOLE_OK)
        return false;
    }
    return true;
  };
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(step());
  keyhole_audit audit;
  keyhole_audit_init(&audit);
  ASSERT_OK(keyhole_session_get_audit(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
  const uint64_t audits = audit.audits;
  const uint64_t before = allocations;
  bool ok = true;
  constexpr uint32_t kSteps = unless_sanitized(200, 60);  // several window flushes among them
  for (uint32_t i = 0; i < kSteps; ++i) ok = step() && ok;
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(ok);
  ASSERT_OK(keyhole_session_get_audit(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
  EXPECT_GT(audit.audits, audits + kSteps * 5 / 2);  // of about 4 a step
}

// 256 tokens leave the window together, and become int8 on all threads.
TEST(AllocationInInt8, NoneInAStep) {
  const auto ec = small_engine(3);
  auto sc = small_session();
  sc.kv_host = KEYHOLE_KV_HOST_INT8;
  sc.flush_block = KEYHOLE_AUTO;
  sc.mode = KEYHOLE_MODE_EXACT;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(6);
  Model model(ec);
  const Shape shape(ec);
  for (uint32_t l = 0; l < ec.layers; ++l)
    prefill_both(session.get(), model, shape, l, 1500, numbers);
  const auto k = numbers.many(shape.kv(1));
  const auto q = numbers.many(shape.q(1));
  std::vector<float> o(shape.q(1));
  const auto tk = tensor(k, {shape.hkv, shape.d});
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  const auto rows = [&] {
    const auto t = layer_tokens(session.get(), 0);
    return t.total - t.sink - t.window;
  };
  const uint32_t rows_before = rows();
  bool ok = true;
  const auto steps = [&](uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      for (uint32_t l = 0; l < ec.layers; ++l) {
        ok = ok &&
             keyhole_session_attend(session.get(), l, &tq, &tk, &tk, &out, nullptr) == KEYHOLE_OK;
      }
    }
  };
  steps(20);
  const uint64_t before = allocations;
  constexpr uint32_t kBlocks = unless_sanitized(2, 1);
  steps(kBlocks * 256 + 80);
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(ok);
  EXPECT_GE(rows(), rows_before + kBlocks * 256);
}

// Every head with a budget of its own: each worker has room for all of them from the beginning.
TEST_P(StepAllocation, NoneInAStepWhereHeadsDiffer) {
  auto ec = small_engine(3);
  ec.kv_heads = 4;
  ec.q_heads = 8;
  auto sc = small_session();
  sc.index = std::get<0>(GetParam());
  sc.append_block = 100000;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(6);
  Model model(ec);
  const Shape shape(ec);
  for (uint32_t l = 0; l < ec.layers; ++l) {
    prefill_both(session.get(), model, shape, l, (2 + l) * unless_sanitized(500, 200), numbers);
  }
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  for (uint32_t i = 0; i < 8; ++i) {
    keyhole_budget budget;
    keyhole_budget_init(&budget);
    budget.top_k = 1 + 9 * i;
    budget.attend = i % 4 == 0 ? std::get<1>(GetParam()) : KEYHOLE_ATTEND_TOPK;
    ASSERT_OK(keyhole_session_set_budget(session.get(), i / 4, i % 4, &budget));
  }
  const auto k = numbers.many(shape.kv(1));
  const auto q = numbers.many(shape.q(1));
  std::vector<float> o(shape.q(1));
  const auto tk = tensor(k, {shape.hkv, shape.d});
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  bool ok = true;
  const auto step = [&] {
    for (uint32_t l = 0; l < ec.layers; ++l) {
      ok = keyhole_session_attend(session.get(), l, &tq, &tk, &tk, &out, nullptr) == KEYHOLE_OK &&
           ok;
    }
  };
  step();
  const uint64_t before = allocations;
  for (uint32_t i = 0; i < unless_sanitized(100, 40); ++i) step();
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(ok);
}

TEST(CodesAllocation, NoneInAStepByCodes) {
  const auto ec = small_engine(3);
  auto sc = small_session();
  sc.index = "codes";
  sc.budget.tail = KEYHOLE_TAIL_CODES;
  sc.budget.top_k = 16;
  sc.max_tokens = 20000;
  sc.append_block = 100000;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(9);
  Model model(ec);
  const Shape shape(ec);
  for (uint32_t l = 0; l < ec.layers; ++l) {
    prefill_both(session.get(), model, shape, l, unless_sanitized(9000, 4000), numbers);
  }
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  const auto k = numbers.many(shape.kv(1));
  auto q = numbers.many(shape.q(1));
  std::vector<float> o(shape.q(1));
  const auto tk = tensor(k, {shape.hkv, shape.d});
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  bool ok = true;
  const auto step = [&] {
    for (uint32_t l = 0; l < ec.layers; ++l) {
      ok = keyhole_session_attend(session.get(), l, &tq, &tk, &tk, &out, nullptr) == KEYHOLE_OK &&
           ok;
    }
  };
  for (int i = 0; i < 20; ++i) step();
  const uint64_t before = allocations;
  for (int i = 0; i < 100; ++i) {
    q[static_cast<size_t>(i)] += 1.0F;
    step();
  }
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(ok);
}

// What a limit is compared with is counted when it changes.
TEST_P(StepAllocation, NoneInAStepUnderAMemoryLimitWhileAFirstIndexIsUnderWay) {
  const auto ec = small_engine(1);
  auto sc = small_session();
  sc.index = std::get<0>(GetParam());
  sc.budget.attend = std::get<1>(GetParam());
  sc.append_block = 400;
  sc.append_mode = KEYHOLE_APPEND_IN_STEP;  // the step that takes it in does the work
  sc.host_memory_limit = size_t{1} << 30;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(8);
  Model model(ec);
  const Shape shape(ec);
  prefill_both(session.get(), model, shape, 0, kPrompt, numbers);
  const auto k = numbers.many(shape.kv(1));
  const auto q = numbers.many(shape.q(1));
  std::vector<float> o(shape.q(1));
  const auto tk = tensor(k, {shape.hkv, shape.d});
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  bool ok = true;
  const auto step = [&] {
    ok = keyhole_session_attend(session.get(), 0, &tq, &tk, &tk, &out, nullptr) == KEYHOLE_OK && ok;
  };
  for (int i = 0; i < 10; ++i) step();
  const uint64_t before = allocations;
  for (int i = 0; i < 80; ++i) step();
  EXPECT_EQ(before, allocations.load());
  keyhole_layer_tokens tokens;
  keyhole_layer_tokens_init(&tokens);
  ASSERT_OK(keyhole_session_get_layer_tokens(session.get(), 0, &tokens));
  EXPECT_EQ(tokens.indexed, 0U);
  for (int i = 0; i < 100; ++i) step();
  ASSERT_OK(keyhole_session_get_layer_tokens(session.get(), 0, &tokens));
  EXPECT_GT(tokens.indexed, kPrompt - 500) << "it was under way";
  EXPECT_TRUE(ok);
}

TEST_P(StepAllocation, WhileTheIndexGrowsOnlyInStepsThatTakeABlockIn) {
  const auto ec = small_engine(1);
  auto sc = small_session();
  sc.index = std::get<0>(GetParam());
  sc.budget.attend = std::get<1>(GetParam());
  sc.budget.top_k = 20;
  sc.append_block = 40;
  const EnginePtr engine = make_engine(ec);
  const SessionPtr session = make_session(engine.get(), sc);
  Numbers numbers(7);
  Model model(ec);
  const Shape shape(ec);
  prefill_both(session.get(), model, shape, 0, kPrompt, numbers);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  const auto k = numbers.many(shape.kv(1));
  const auto q = numbers.many(shape.q(1));
  std::vector<float> o(shape.q(1));
  const auto tk = tensor(k, {shape.hkv, shape.d});
  const auto tq = tensor(q, {shape.hq, shape.d});
  const auto out = tensor(o, {shape.hq, shape.d});
  uint32_t quiet = 0;
  uint32_t taken = 0;
  constexpr uint32_t kSteps = unless_sanitized(600, 200);
  for (uint32_t i = 0; i < kSteps; ++i) {
    const auto before = layer_tokens(session.get(), 0);
    const uint64_t allocated = own_allocations;
    ASSERT_EQ(KEYHOLE_OK, keyhole_session_attend(session.get(), 0, &tq, &tk, &tk, &out, nullptr));
    const uint64_t more = own_allocations - allocated;
    const auto after = layer_tokens(session.get(), 0);
    if (after.indexed != before.indexed) {
      ++taken;
    } else if (taken > 0) {  // the first block begins in a step that takes none in
      EXPECT_EQ(0U, more) << "step " << i;
      ++quiet;
    }
  }
  EXPECT_GT(taken, kSteps / 75);
  EXPECT_GT(quiet, unless_sanitized(400, 100));
}

std::string name_of(const ::testing::TestParamInfo<Param>& p) {
  const std::string spec = std::get<0>(p.param);
  const char* modes[] = {"_topk", "_scored", "_weight"};
  return spec.substr(0, spec.find(':')) + modes[std::get<1>(p.param)];
}

INSTANTIATE_TEST_SUITE_P(
    Types, StepAllocation,
    ::testing::Combine(::testing::Values("flat", "ivf:C=16,probe=4", "hnsw:M=8,ef=40",
                                         "roargraph:M=8,ef=20", "sparq:r=8"),
                       ::testing::Values(KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_SCORED,
                                         KEYHOLE_ATTEND_WEIGHT)),
    name_of);

}  // namespace
}  // namespace keyhole::test
