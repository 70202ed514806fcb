// Random sequences of calls of the C API, legal and not, on random shapes, dtypes, specs, budgets and settings, beside
// exact attention in double precision: every answer is the truth, and an illegal call changes nothing.
//   KEYHOLE_RANDOM_SEEDS=N    sequences of calls of a test
//   KEYHOLE_RANDOM_FIRST=N    the first one's seed (default 1)
#pragma once

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tests/runtime/faults/random_tensor.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {

/// A step on a stream whose answer has not been looked at. The stream reads and writes here until it has done the step.
struct StepUnderWay {
  uint32_t layer;
  bool appends;  ///< otherwise k and v are of no use
  RandomTensor q, k, v;
  Answer seen;
  std::vector<double> o, lse;  ///< the truth
};

/// One sequence of calls on an engine of random shape. Sessions attend in host memory; see RandomStreamCalls for steps on
/// a stream.
class RandomCalls {
 public:
  explicit RandomCalls(uint64_t seed) : random_(seed) {
    constexpr uint32_t kDims[] = {64, 80, 96, 128, 256};
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    ec_ = small_engine(1 + random_.below(3));
    ec_.layers = 1 + random_.below(3);
    ec_.head_dim = kDims[random_.below(5)];
    ec_.kv_heads = 1 + random_.below(3);
    ec_.q_heads = ec_.kv_heads * (1 + random_.below(6));
    ec_.kv_dtype = kTypes[random_.below(3)];
    ec_.softcap = random_.below(3) == 0 ? 10.0F : 0.0F;
    ec_.scale = 0.05F;
    ec_.rope_theta = 10000.0F;
    sc_ = small_session();
    sc_.max_tokens = 1500;
    sc_.index = pick_spec();
    sc_.sink = random_.below(9);
    sc_.window = 1 + random_.below(24);
    sc_.flush_block = 1 + random_.below(16);
    sc_.append_block = 1 + random_.below(40);
    sc_.append_mode = random_.below(2) == 0 ? KEYHOLE_APPEND_BACKGROUND : KEYHOLE_APPEND_IN_STEP;
    sc_.audit_share = random_.below(3) == 0 ? 0.2 : 0.0;
    sc_.training_queries = random_.below(2) == 0 ? 32 : 0;
  }
  virtual ~RandomCalls() = default;

  void run(keyhole_engine* engine) {
    engine_ = engine;
    sequences_.reserve(kMostSequences);  // references stay valid
    sequences_.push_back({{}, Model(ec_), make_session(engine, sc_)});
    for (int i = 0; i < 60 && !::testing::Test::HasFailure(); ++i) {
      const uint32_t what = random_.below(20);
      SCOPED_TRACE("call " + std::to_string(i) + ", of kind " + std::to_string(what));
      Sequence& s = sequences_[random_.below(static_cast<uint32_t>(sequences_.size()))];
      call(what, s);
      if (!::testing::Test::HasFailure()) look_at(s);
    }
    for (Sequence& s : sequences_) {
      if (!::testing::Test::HasFailure()) check(s);
    }
    sequences_.clear();
  }

  [[nodiscard]] const keyhole_engine_config& engine_config() const { return ec_; }
  [[nodiscard]] uint64_t heads_checked() const { return heads_checked_; }

 protected:
  struct Sequence {
    std::vector<StepUnderWay> under_way;  ///< outlives the session, whose stream may still read it
    Model model;
    SessionPtr session;
  };

  /// A step of every layer.
  virtual void step(Sequence& s) {
    for (uint32_t l = 0; l < ec_.layers; ++l) step_in_host_memory(s, l);
  }
  /// After a call.
  virtual void look_at(Sequence& s) { check(s); }
  /// Waits for steps under way and looks at their answers.
  virtual void settle(Sequence&) {}

  void step_in_host_memory(Sequence& s, uint32_t l) {
    const auto k = random_.many(shape().kv(1)), v = random_.many(k.size()),
               q = random_.many(shape().q(1));
    const RandomTensor gk = row(k, ec_.kv_heads), gv = row(v, ec_.kv_heads),
                       gq = row(q, ec_.q_heads);
    Answer a{std::vector<float>(q.size()), std::vector<float>(ec_.q_heads)};
    const keyhole_tensor out = tensor(a.o, {ec_.q_heads, ec_.head_dim});
    keyhole_session* const session = s.session.get();
    if (random_.below(2) == 0) {
      ASSERT_OK(keyhole_attend(session, l, &gq.tensor, &gk.tensor, &gv.tensor, &out, a.lse.data()));
    } else {
      ASSERT_OK(keyhole_attend_begin(session, l, &gq.tensor, &gk.tensor, &gv.tensor));
      ASSERT_EQ(keyhole_truncate(session, 0), KEYHOLE_BUSY) << "inside a step";
      ASSERT_OK(keyhole_attend_end(session, &out, a.lse.data()));
    }
    s.model.append(l, k, v);
    expect_truth(s, l, q, a);
  }

  void prefill(Sequence& s, uint32_t n) {
    if (!has_room(s, n)) return;
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const auto k = random_.many(shape().kv(n)), v = random_.many(k.size()),
                 q = random_.many(shape().q(n));
      const RandomTensor gk(k, n, ec_.kv_heads, ec_.head_dim, random_, false),
          gv(v, n, ec_.kv_heads, ec_.head_dim, random_, false),
          gq(q, n, ec_.q_heads, ec_.head_dim, random_, false);
      ASSERT_OK(keyhole_prefill(s.session.get(), l, &gk.tensor, &gv.tensor,
                                random_.below(2) == 0 ? &gq.tensor : nullptr));
      s.model.append(l, k, v);
    }
  }

  /// Tokens and answers of all layers.
  void check(Sequence& s) {
    settle(s);
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const keyhole_layer_tokens t = layer_tokens(s.session.get(), l);
      ASSERT_EQ(t.total, s.model.tokens(l));
      ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
      if (t.total == 0) continue;
      const auto q = random_.many(shape().q(1));
      expect_truth(s, l, q, attend_only(s.session.get(), shape(), l, q));
    }
  }
  void expect_truth(const Sequence& s, uint32_t layer, const std::vector<float>& q,
                    const Answer& a) {
    std::vector<double> lse;
    const auto o = s.model.attend_all(layer, q, lse);
    expect_truth(a, o, lse);
  }
  void expect_truth(const Answer& a, const std::vector<double>& o, const std::vector<double>& lse) {
    expect_near(a, o, lse);
    heads_checked_ += lse.size();
  }

  [[nodiscard]] RandomTensor row(const std::vector<float>& numbers, uint32_t heads) {
    return {numbers, 1, heads, ec_.head_dim, random_, true};
  }
  [[nodiscard]] Shape shape() const { return Shape(ec_); }
  /// Whether there is room for `tokens` more, and a few that calls add by themselves.
  [[nodiscard]] bool has_room(const Sequence& s, uint32_t tokens) const {
    return s.model.tokens(0) + tokens + 20 <= sc_.max_tokens;
  }

  void set_budget(Sequence& s) {
    const keyhole_budget b = pick_budget();
    const uint32_t layer = random_.below(2) == 0 ? KEYHOLE_ALL : random_.below(ec_.layers);
    const uint32_t head = random_.below(2) == 0 ? KEYHOLE_ALL : random_.below(ec_.kv_heads);
    ASSERT_OK(keyhole_session_set_budget(s.session.get(), layer, head, &b));
  }

  /// A call that must be refused.
  void break_a_rule(Sequence& s);

  Numbers random_;
  keyhole_engine_config ec_;
  keyhole_session_config sc_;
  uint32_t longest_prompt_ = 150;

  // What differs with the index: specs whose effort covers every key, whatever is indexed, and budgets that read every key.
  virtual const char* pick_spec() {
    constexpr const char* kSpecs[] = {"flat",
                                      "flat:codec=int8",
                                      "ivf:C=4,probe=16777216",
                                      "ivf:C=8,probe=16777216,rope=undo",
                                      "hnsw:M=6,ef=100000,efc=20",
                                      "roargraph:M=8,ef=100000,Nq=10,beam=12",
                                      "sparq:r=256"};
    return kSpecs[random_.below(std::size(kSpecs))];
  }
  virtual keyhole_budget pick_budget() {
    keyhole_budget b;
    keyhole_budget_init(&b);
    b.top_k = sc_.max_tokens;
    if (random_.below(3) == 0) {
      b.tail = KEYHOLE_TAIL_SECOND;
      b.min_keys = sc_.max_tokens;  // all are read, and the tail is empty
    }
    return b;
  }

 private:
  static constexpr uint32_t kMostSequences = 4;

  void call(uint32_t what, Sequence& s) {
    keyhole_session* const session = s.session.get();
    switch (what) {
      case 0:
      case 1:
      case 2: return prefill(s, random_.below(random_.below(4) == 0 ? longest_prompt_ : 12));
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
        if (has_room(s, 0)) step(s);
        return;
      case 8: ASSERT_OK(keyhole_build(session, nullptr, nullptr)); return;
      case 9:
      case 10: {
        const uint32_t n = random_.below(s.model.tokens(0) + 4);
        ASSERT_OK(keyhole_truncate(session, n));
        s.model.truncate(n);
        return;
      }
      case 11: return copy(s, true);
      case 12: return copy(s, false);
      case 13: ASSERT_OK(keyhole_session_set_index(session, pick_spec())); return;
      case 14: {
        constexpr keyhole_mode kModes[] = {KEYHOLE_MODE_INDEXED, KEYHOLE_MODE_EXACT};
        ASSERT_OK(keyhole_session_set_mode(session, kModes[random_.below(2)], 0));
        return;
      }
      case 15: return set_budget(s);
      default: return break_a_rule(s);
    }
  }

  void copy(Sequence& s, bool in_memory) {
    keyhole_session* made = nullptr;
    if (in_memory) {
      ASSERT_OK(keyhole_fork(s.session.get(), &made));
    } else {
      const std::string path = folder_ / "session";
      ASSERT_OK(keyhole_save(s.session.get(), path.c_str()));
      ASSERT_OK(keyhole_load(engine_, path.c_str(), &made));
    }
    Sequence other{{}, s.model, SessionPtr(made)};
    check(other);
    if (sequences_.size() < kMostSequences) {
      sequences_.push_back(std::move(other));
    } else {
      std::swap(sequences_[random_.below(kMostSequences)], other);
    }
  }

  keyhole_engine* engine_ = nullptr;
  std::vector<Sequence> sequences_;
  TemporaryFolder folder_;
  uint64_t heads_checked_ = 0;
};

inline void RandomCalls::break_a_rule(Sequence& s) {
  keyhole_session* const session = s.session.get();
  const auto n = static_cast<int64_t>(1 + random_.below(5));
  auto k = random_.many(shape().kv(static_cast<uint32_t>(n)));
  const auto v = random_.many(k.size()), q = random_.many(shape().q(1));
  keyhole_tensor tk = tensor(k, {n, ec_.kv_heads, ec_.head_dim}),
                 tv = tensor(v, {n, ec_.kv_heads, ec_.head_dim}),
                 tq = tensor(q, {ec_.q_heads, ec_.head_dim});
  std::vector<float> o(q.size());
  const keyhole_tensor out = tensor(o, {ec_.q_heads, ec_.head_dim});
  keyhole_status status = KEYHOLE_OK;
  switch (random_.below(10)) {
    case 0: status = keyhole_prefill(session, ec_.layers, &tk, &tv, nullptr); break;
    case 1:
      tk.shape[1] += 1;
      status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
      break;
    case 2:
      tv.shape[0] -= 1;
      status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
      break;
    case 3:
      k[random_.below(static_cast<uint32_t>(k.size()))] = random_.below(2) == 0 ? NAN : INFINITY;
      status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
      EXPECT_EQ(status, KEYHOLE_NOT_FINITE);
      break;
    case 4:
      tq.shape[1] /= 2;
      status = keyhole_attend(session, 0, &tq, nullptr, nullptr, &out, nullptr);
      break;
    case 5: status = keyhole_attend_end(session, &out, nullptr); break;
    case 6: status = keyhole_session_set_index(session, "ivf:C=0x"); break;
    case 7: status = keyhole_session_set_mode(session, 7, 0); break;
    case 8: {
      keyhole_budget b;
      keyhole_budget_init(&b);
      b.error_target = 2.0F;
      status = keyhole_session_set_budget(session, KEYHOLE_ALL, KEYHOLE_ALL, &b);
      break;
    }
    default: {
      const int64_t many = sc_.max_tokens + 1;
      const std::vector<float> all(shape().kv(static_cast<uint32_t>(many)));
      tk = tv = tensor(all, {many, ec_.kv_heads, ec_.head_dim});
      status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
    }
  }
  EXPECT_NE(status, KEYHOLE_OK);
  EXPECT_NE(status, KEYHOLE_INTERNAL) << keyhole_last_error();
}

/// `run(seed)`, which returns the heads that it has checked, of as many seeds as the environment asks for, `seeds` without
/// it. Returns their number; ends with the first that fails.
template <class Run>
uint64_t for_random_seeds(uint64_t seeds, Run&& run) {
  const auto from_environment = [](const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  const uint64_t first = from_environment("KEYHOLE_RANDOM_FIRST", 1);
  seeds = from_environment("KEYHOLE_RANDOM_SEEDS", seeds);
  uint64_t heads_checked = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    heads_checked += run(seed);
    if (::testing::Test::HasFailure()) return seed - first;
  }
  std::printf("%" PRIu64 " heads checked\n", heads_checked);
  return seeds;
}

}  // namespace keyhole::test
