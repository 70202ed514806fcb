// Steady-state decoding allocates nothing: every operator new of the process is counted, and those of the
// decoding thread apart.
#include <atomic>
#include <functional>
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

/// A session with a prompt of `tokens` tokens in each layer, and steps that allocate nothing themselves.
class Stepped {
 public:
  Stepped(const keyhole_engine_config& ec, const keyhole_session_config& sc, uint32_t tokens)
      : Stepped(ec, sc, [&](uint32_t) { return tokens; }) {}
  /// `tokens(l)` tokens in layer l.
  Stepped(const keyhole_engine_config& ec, const keyhole_session_config& sc,
          const std::function<uint32_t(uint32_t)>& tokens)
      : layers_(ec.layers),
        shape_(ec),
        engine_(make_engine(ec)),
        session_(make_session(engine_.get(), sc)) {
    Numbers numbers(6);
    Model model(ec);
    for (uint32_t l = 0; l < layers_; ++l)
      prefill_both(session_.get(), model, shape_, l, tokens(l), numbers);
    k_ = numbers.many(shape_.kv(1));
    q_ = numbers.many(shape_.q(1));
    o_.resize(shape_.q(1));
    tk_ = tensor(k_, {shape_.hkv, shape_.d});
    tq_ = tensor(q_, {shape_.hq, shape_.d});
    out_ = tensor(o_, {shape_.hq, shape_.d});
  }
  Stepped(const Stepped&) = delete;
  Stepped& operator=(const Stepped&) = delete;

  keyhole_session* session() const { return session_.get(); }
  void build() { ASSERT_OK(keyhole_session_build(session(), nullptr, nullptr)); }
  std::vector<float>& q() { return q_; }
  void step() {
    for (uint32_t l = 0; l < layers_; ++l) step_of(l);
  }
  /// A step of one layer alone.
  void step_of(uint32_t layer) {
    is_ok_ =
        keyhole_session_attend(session(), layer, &tq_, &tk_, &tk_, &out_, nullptr) == KEYHOLE_OK &&
        is_ok_;
  }
  void steps(uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) step();
  }
  /// Whether all steps until now went well.
  bool is_ok() const { return is_ok_; }

 private:
  uint32_t layers_;
  Shape shape_;
  EnginePtr engine_;
  SessionPtr session_;
  std::vector<float> k_, q_, o_;
  keyhole_tensor tk_, tq_, out_;
  bool is_ok_ = true;
};

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
  Stepped s(ec, sc, kPrompt);
  s.build();
  s.steps(20);
  ASSERT_TRUE(s.is_ok());
  keyhole_audit audit;
  keyhole_audit_init(&audit);
  ASSERT_OK(keyhole_session_get_audit(s.session(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
  const uint64_t audits = audit.audits;
  const uint64_t before = allocations;
  constexpr uint32_t kSteps = unless_sanitized(200, 60);  // several window flushes among them
  s.steps(kSteps);
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(s.is_ok());
  ASSERT_OK(keyhole_session_get_audit(s.session(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
  EXPECT_GT(audit.audits, audits + kSteps * 5 / 2);  // of about 4 a step
}

// 256 tokens leave the window together, and become int8 on all threads.
TEST(AllocationInInt8, NoneInAStep) {
  const auto ec = small_engine(3);
  auto sc = small_session();
  sc.kv_host = KEYHOLE_KV_HOST_INT8;
  sc.flush_block = KEYHOLE_AUTO;
  sc.mode = KEYHOLE_MODE_EXACT;
  Stepped s(ec, sc, 1500);
  const auto rows = [&] {
    const auto t = layer_tokens(s.session(), 0);
    return t.total - t.sink - t.window;
  };
  const uint32_t rows_before = rows();
  s.steps(20);
  const uint64_t before = allocations;
  constexpr uint32_t kBlocks = unless_sanitized(2, 1);
  s.steps(kBlocks * 256 + 80);
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(s.is_ok());
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
  Stepped s(ec, sc, [](uint32_t l) { return (2 + l) * unless_sanitized(500, 200); });
  s.build();
  for (uint32_t i = 0; i < 8; ++i) {
    keyhole_budget budget;
    keyhole_budget_init(&budget);
    budget.top_k = 1 + 9 * i;
    budget.attend = i % 4 == 0 ? std::get<1>(GetParam()) : KEYHOLE_ATTEND_TOPK;
    ASSERT_OK(keyhole_session_set_budget(s.session(), i / 4, i % 4, &budget));
  }
  s.step();
  const uint64_t before = allocations;
  s.steps(unless_sanitized(100, 40));
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(s.is_ok());
}

TEST(CodesAllocation, NoneInAStepByCodes) {
  const auto ec = small_engine(3);
  auto sc = small_session();
  sc.index = "codes";
  sc.budget.tail = KEYHOLE_TAIL_CODES;
  sc.budget.top_k = 16;
  sc.max_tokens = 20000;
  sc.append_block = 100000;
  Stepped s(ec, sc, unless_sanitized(9000, 4000));
  s.build();
  s.steps(20);
  const uint64_t before = allocations;
  for (int i = 0; i < 100; ++i) {
    s.q()[static_cast<size_t>(i)] += 1.0F;
    s.step();
  }
  EXPECT_EQ(before, allocations.load());
  EXPECT_TRUE(s.is_ok());
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
  Stepped s(ec, sc, kPrompt);
  s.steps(10);
  const uint64_t before = allocations;
  s.steps(80);
  EXPECT_EQ(before, allocations.load());
  keyhole_layer_tokens tokens;
  keyhole_layer_tokens_init(&tokens);
  ASSERT_OK(keyhole_session_get_layer_tokens(s.session(), 0, &tokens));
  EXPECT_EQ(tokens.indexed, 0U);
  s.steps(100);
  ASSERT_OK(keyhole_session_get_layer_tokens(s.session(), 0, &tokens));
  EXPECT_GT(tokens.indexed, kPrompt - 500) << "it was under way";
  EXPECT_TRUE(s.is_ok());
}

TEST_P(StepAllocation, WhileTheIndexGrowsOnlyInStepsThatTakeABlockIn) {
  const auto ec = small_engine(1);
  auto sc = small_session();
  sc.index = std::get<0>(GetParam());
  sc.budget.attend = std::get<1>(GetParam());
  sc.budget.top_k = 20;
  sc.append_block = 40;
  Stepped s(ec, sc, kPrompt);
  s.build();
  uint32_t quiet = 0;
  uint32_t taken = 0;
  constexpr uint32_t kSteps = unless_sanitized(600, 200);
  for (uint32_t i = 0; i < kSteps; ++i) {
    const auto before = layer_tokens(s.session(), 0);
    const uint64_t allocated = own_allocations;
    s.step_of(0);  // layers take their blocks in in turns
    ASSERT_TRUE(s.is_ok());
    const uint64_t more = own_allocations - allocated;
    const auto after = layer_tokens(s.session(), 0);
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
