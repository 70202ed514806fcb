// A copy of a session, through memory or a file, answers with the same bits, whatever has happened to the session: over
// all index types, ways to attend and tails, with indexes that have grown in steps and were cut. What a copy in memory
// shares with its session neither changes for the other one.
//   KEYHOLE_RANDOM_SEEDS=N    sequences of calls of each (default 1)
#include <cstdlib>
#include <string>
#include <vector>

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

struct CopyCase {
  const char* spec;
  keyhole_attend_mode attend;
  keyhole_tail_mode tail;
};
void PrintTo(const CopyCase& c, std::ostream* out) {
  *out << c.spec << " attend " << c.attend << " tail " << c.tail;
}

class CopyBits : public ::testing::TestWithParam<CopyCase> {
 protected:
  /// All have the same tokens and answer alike, to the last bit. Each makes the same calls: a step may take pending
  /// tokens in.
  void expect_same(const std::vector<keyhole_session*>& sessions) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      for (int i = 0; i < 3; ++i) {
        const auto q = rough(shape_.q(1));
        Answer first;
        keyhole_layer_tokens tokens{};
        for (size_t n = 0; n < sessions.size(); ++n) {
          const keyhole_layer_tokens t = layer_tokens(sessions[n], l);
          if (t.total == 0) return;
          const Answer answer = attend_only(sessions[n], shape_, l, q);
          if (n == 0) {
            tokens = t;
            first = answer;
            continue;
          }
          SCOPED_TRACE("copy " + std::to_string(n) + ", layer " + std::to_string(l));
          ASSERT_EQ(t.total, tokens.total);
          ASSERT_EQ(t.indexed, tokens.indexed);
          ASSERT_EQ(answer.o, first.o);
          ASSERT_EQ(answer.lse, first.lse);
        }
      }
    }
  }
  /// Numbers whose sums depend on their order, other than those of Numbers.
  std::vector<float> rough(size_t n) {
    std::vector<float> v = numbers_.many(n);
    for (float& x : v) x = x * 0.3719F + static_cast<float>(numbers_.below(1000)) * 1.7e-4F;
    return v;
  }
  void append(keyhole_session* s, uint32_t n, bool as_steps) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      for (uint32_t t = 0; t < (as_steps ? n : 1); ++t) {
        const uint32_t rows = as_steps ? 1 : n;
        const auto k = rough(shape_.kv(rows)), v = rough(k.size()), q = rough(shape_.q(rows));
        if (!as_steps) {
          const auto tk = tensor(k, {n, shape_.hkv, shape_.d}),
                     tv = tensor(v, {n, shape_.hkv, shape_.d}),
                     tq = tensor(q, {n, shape_.hq, shape_.d});
          ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
          continue;
        }
        std::vector<float> o(shape_.q(1));
        const auto tk = tensor(k, {shape_.hkv, shape_.d}), tv = tensor(v, {shape_.hkv, shape_.d}),
                   tq = tensor(q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
        ASSERT_OK(keyhole_session_attend(s, l, &tq, &tk, &tv, &out, nullptr));
      }
    }
  }

  keyhole_engine_config ec_ = small_engine(3);
  Numbers numbers_{1};
  Shape shape_{ec_};
};

TEST_P(CopyBits, AreTheSameAfterAnyCalls) {
  const CopyCase& c = GetParam();
  const TemporaryFolder folder;
  const std::string path = folder / "session";
  const char* const asked = std::getenv("KEYHOLE_RANDOM_SEEDS");
  const uint64_t seeds = asked == nullptr ? 1 : std::strtoull(asked, nullptr, 10);
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    numbers_ = Numbers(seed);
    constexpr uint32_t kDims[] = {64, 80, 320, 128, 256};
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    ec_ = small_engine(1 + numbers_.below(3));
    ec_.head_dim = kDims[numbers_.below(c.tail == KEYHOLE_TAIL_CODES ? 4 : 5)];
    ec_.kv_heads = 1 + numbers_.below(2);
    ec_.q_heads = ec_.kv_heads * (1 + numbers_.below(5));
    ec_.kv_dtype = kTypes[numbers_.below(3)];
    ec_.rope_theta = 10000.0F;
    shape_ = Shape(ec_);
    const EnginePtr engine = make_engine(ec_);
    keyhole_session_config sc = small_session();
    sc.index = c.spec;
    sc.budget.top_k = 10 + numbers_.below(30);
    sc.budget.attend = c.attend;
    sc.budget.tail = c.tail;
    if (c.attend == KEYHOLE_ATTEND_NONE) sc.budget.min_keys = 40;
    if (c.tail != KEYHOLE_TAIL_NONE && c.tail != KEYHOLE_TAIL_CODES && numbers_.below(2) == 0) {
      sc.budget.error_target = 0.1F;
    }
    sc.tail_partition = 4 + numbers_.below(8);
    // Blocks that a thread of the session's own takes in come at another time in each copy.
    const bool is_background = numbers_.below(3) == 0;
    sc.append_mode = is_background ? KEYHOLE_APPEND_BACKGROUND : KEYHOLE_APPEND_IN_STEP;
    sc.append_block = 8 + numbers_.below(40);
    sc.training_queries = 32;
    SessionPtr s = make_session(engine.get(), sc);
    append(s.get(), 150 + numbers_.below(200), false);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    for (uint64_t i = 0; i < unless_sanitized(8, 2); ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      switch (numbers_.below(7)) {
        case 0: append(s.get(), 1 + numbers_.below(60), false); break;
        case 1: append(s.get(), 1 + numbers_.below(60), true); break;
        case 2:
          ASSERT_OK(keyhole_session_truncate(s.get(),
                                             layer_tokens(s.get(), 0).total - numbers_.below(60)));
          break;
        case 3:
          ASSERT_OK(keyhole_session_truncate(s.get(),
                                             numbers_.below(layer_tokens(s.get(), 0).total + 1)));
          break;
        case 4: {
          keyhole_budget b = sc.budget;
          b.top_k = 1 + numbers_.below(60);
          ASSERT_OK(keyhole_session_set_budget(s.get(), numbers_.below(ec_.layers),
                                               numbers_.below(ec_.kv_heads), &b));
          break;
        }
        case 5: ASSERT_OK(keyhole_session_set_index(s.get(), c.spec)); break;
        default: ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
      }
      if (is_background || numbers_.below(3) == 0) {
        ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
      }
      SessionPtr owner = fork_of(s.get());
      keyhole_session* const forked = owner.get();
      ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
      const SessionPtr loaded = load_of(engine.get(), path);
      expect_same({s.get(), forked, loaded.get()});
      if (HasFatalFailure()) return;
      if (i % 4 ==
          3) {  // the copy alone is cut and grows: the session stays like the file, whoever made it
        const uint32_t n = numbers_.below(layer_tokens(s.get(), 0).total + 1);
        ASSERT_OK(keyhole_session_truncate(forked, n));
        append(forked, 1 + numbers_.below(60), false);
        ASSERT_OK(keyhole_session_build(forked, nullptr, nullptr));
        expect_same({s.get(), loaded.get()});
        if (HasFatalFailure()) return;
        const SessionPtr owned = fork_of(forked);
        ASSERT_OK(keyhole_session_save(forked, path.c_str()));
        const SessionPtr third = load_of(engine.get(), path);
        if (numbers_.below(2) == 0) std::swap(s, owner);
        owner.reset();  // of a family, any may go first
        expect_same({s.get() == forked ? s.get() : owned.get(), owned.get(), third.get()});
        if (HasFatalFailure()) return;
        continue;
      }
      if (i % 4 != 1 || is_background) continue;
      // And they go on alike.
      const Numbers now = numbers_;
      for (keyhole_session* each : {s.get(), forked, loaded.get()}) {
        numbers_ = now;
        append(each, 40, true);
      }
      expect_same({s.get(), forked, loaded.get()});
      if (HasFatalFailure()) return;
    }
  }
}

std::vector<CopyCase> copy_cases() {
  std::vector<CopyCase> all;
  for (const char* spec :
       {"flat", "flat:codec=int8", "ivf:C=4,probe=3", "ivf:C=8,probe=4,rope=undo",
        "hnsw:M=6,ef=30,efc=20", "roargraph:M=8,ef=30,Nq=10,beam=12", "sparq:r=16"}) {
    for (const keyhole_tail_mode tail :
         {KEYHOLE_TAIL_NONE, KEYHOLE_TAIL_MEAN, KEYHOLE_TAIL_CENTROID, KEYHOLE_TAIL_SECOND}) {
      for (const keyhole_attend_mode attend : {KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_SCORED,
                                               KEYHOLE_ATTEND_WEIGHT, KEYHOLE_ATTEND_NONE}) {
        if (attend == KEYHOLE_ATTEND_NONE && tail == KEYHOLE_TAIL_NONE) continue;
        all.push_back({spec, attend, tail});
      }
    }
  }
  all.push_back({"codes:k=2,v=2", KEYHOLE_ATTEND_TOPK, KEYHOLE_TAIL_CODES});
  all.push_back({"codes:k=4,v=4", KEYHOLE_ATTEND_NONE, KEYHOLE_TAIL_CODES});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Ways, CopyBits, ::testing::ValuesIn(unless_sanitized(copy_cases(), 4)));

}  // namespace
}  // namespace keyhole::test
