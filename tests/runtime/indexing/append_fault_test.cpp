// Appends in the background that run out of memory, or are slow: the decoding goes on, and is right. Memory
// fails through operator new, for all threads but the one that decodes.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/replaced_new.h"
#include "tests/runtime/fixture.h"

namespace {

std::atomic<bool> others_fail{false};
std::atomic<int> slow_allocations{0};  // of the other threads, 50 ms each
thread_local bool decodes = false;
std::atomic<int> failures{0};

const keyhole::test::BeforeAllocation hook([] {
  if (!decodes && others_fail) {
    ++failures;
    throw std::bad_alloc();
  }
  if (!decodes && slow_allocations > 0) {
    --slow_allocations;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
});

}  // namespace

namespace keyhole::test {
namespace {

class AppendFault : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    decodes = true;
    ec_.log = [](void* user, int32_t level, const char* text) {
      if (level == KEYHOLE_LOG_WARNING)
        static_cast<std::vector<std::string>*>(user)->emplace_back(text);
    };
    ec_.log_user = &warnings_;
    auto sc = small_session();
    sc.index = GetParam();
    sc.append_block = 16;
    engine_ = make_engine(ec_);
    session_ = make_session(engine_.get(), sc);
    for (uint32_t l = 0; l < ec_.layers; ++l)
      prefill_both(session_.get(), model_, shape_, l, 250, numbers_);
    ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  }
  void TearDown() override {
    others_fail = false;
    slow_allocations = 0;
  }
  /// Steps whose answers are checked against double precision.
  void steps(int n) {
    for (int i = 0; i < n; ++i) {
      for (uint32_t l = 0; l < ec_.layers; ++l) {
        const auto k = numbers_.many(shape_.kv(1));
        const auto v = numbers_.many(shape_.kv(1));
        const auto q = numbers_.many(shape_.q(1));
        Answer a{std::vector<float>(shape_.q(1)), std::vector<float>(ec_.q_heads)};
        const auto tk = tensor(k, {shape_.hkv, shape_.d});
        const auto tv = tensor(v, {shape_.hkv, shape_.d});
        const auto tq = tensor(q, {shape_.hq, shape_.d});
        const auto out = tensor(a.o, {shape_.hq, shape_.d});
        ASSERT_OK(keyhole_session_attend(session_.get(), l, &tq, &tk, &tv, &out, a.lse.data()));
        model_.append(l, k, v);
        std::vector<double> lse;
        const auto o = model_.attend_all(l, q, lse);
        expect_near(a, o, lse);
        const auto t = layer_tokens(session_.get(), l);
        ASSERT_EQ(model_.tokens(l), t.sink + t.window + t.indexed + t.pending);
      }
    }
  }
  [[nodiscard]] size_t warnings_with(const std::string& part) const {
    size_t n = 0;
    for (const auto& w : warnings_) n += w.find(part) != std::string::npos ? 1 : 0;
    return n;
  }

  std::vector<std::string> warnings_;
  keyhole_engine_config ec_ = small_engine(1);  // all other threads are builders
  EnginePtr engine_;
  SessionPtr session_;
  Numbers numbers_{31};
  Model model_{ec_};
  Shape shape_{ec_};
};

TEST_P(AppendFault, WithoutMemoryTokensStayPendingAndAreTriedAgain) {
  steps(20);  // the builder has its thread
  const uint32_t indexed = layer_tokens(session_.get(), 0).indexed;
  others_fail = true;
  steps(100);
  EXPECT_GT(failures, 0);
  EXPECT_GT(warnings_with("could not be indexed"), 0U);
  others_fail = false;
  const auto starved = layer_tokens(session_.get(), 0);
  steps(60);
  const auto after = layer_tokens(session_.get(), 0);
  EXPECT_GT(after.indexed, indexed + 100);
  EXPECT_LT(after.pending, starved.pending + 60);
  EXPECT_LE(after.pending, 2 * 16U + 8U);
}

TEST_P(AppendFault, AFirstIndexWithoutMemoryIsTriedAgain) {
  steps(20);  // the builder has its thread
  ASSERT_OK(keyhole_session_set_index(session_.get(), GetParam()));
  failures = 0;
  others_fail = true;
  steps(100);
  EXPECT_GT(failures, 0);
  EXPECT_GT(warnings_with("could not be indexed"), 0U);
  others_fail = false;
  steps(120);
  const auto after = layer_tokens(session_.get(), 0);
  EXPECT_GT(after.indexed, 400U);
  EXPECT_LE(after.pending, 2 * 16U + 8U);
}

TEST_P(AppendFault, ASlowBuilderIsWaitedForAndReported) {
  slow_allocations = 20;
  steps(150);
  const auto st = statistics(session_.get());
  EXPECT_GT(st.append_blocks, 8U);
  EXPECT_GT(st.append_waits, 0U);
  EXPECT_GT(st.append_wait_seconds, 0.0);
  const size_t warned = warnings_with("not indexed in time");
  EXPECT_GT(warned, 0U);
  EXPECT_LE(warned, 7U) << "1st, 2nd, 4th ... time";
  EXPECT_LE(layer_tokens(session_.get(), 0).pending, 2 * 16U + 8U);
}

// Effort that covers everything: the answers are exact, whatever is indexed.
INSTANTIATE_TEST_SUITE_P(Types, AppendFault,
                         ::testing::Values("ivf:C=8,probe=16777216,segment=64",
                                           "hnsw:M=6,ef=100000,efc=20",
                                           "roargraph:M=8,ef=100000,Nq=10,beam=12", "sparq:r=256"),
                         [](const auto& p) {
                           return std::string(p.param).substr(0, std::string(p.param).find(':'));
                         });

}  // namespace
}  // namespace keyhole::test
