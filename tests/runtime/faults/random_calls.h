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

#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/faults/random_tensor.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/states_calls.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {

/// A step on a stream whose answer has not been looked at yet. The stream reads and writes here until it has done the
/// step.
struct StepUnderWay {
  uint32_t layer;
  bool appends;  ///< otherwise k and v are of no use
  RandomTensor q, k, v;
  Answer seen;
  std::vector<double> o, lse;  ///< the truth
};

/// One sequence of calls on an engine of random shape. Sessions attend in host memory; RandomStreamCalls makes steps
/// on a stream.
class RandomCalls {
 public:
  /// on_host: groups and heads may be larger than a device takes.
  explicit RandomCalls(uint64_t seed, bool on_host = true) : random_(seed) {
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    ec_ = small_engine(1 + random_.below(3));
    ec_.layers = 1 + random_.below(3);
    const uint32_t dim = random_.below(1000);
    ec_.head_dim = on_host ? some_head_dim(dim) : kDeviceDims[dim % std::size(kDeviceDims)];
    ec_.kv_heads = 1 + random_.below(3);
    if (on_host && random_.below(3) == 0) {
      ec_.value_dim = 16 * (1 + random_.below(ec_.head_dim / 16));
      ec_.values_in_keys = random_.below(2) == 0 ? 1 : 0;
    }
    const bool any_group = on_host && random_.below(8) == 0;
    const uint32_t group = any_group ? some_group(random_.below(1000)) : 1 + random_.below(6);
    ec_.q_heads = ec_.kv_heads * group;
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
    pick_layers();
  }
  RandomCalls(const RandomCalls&) = delete;
  RandomCalls& operator=(const RandomCalls&) = delete;
  virtual ~RandomCalls() = default;

  void run(keyhole_engine* engine) {
    engine_ = engine;
    sequences_.reserve(kMostSequences);  // references stay valid
    sequences_.push_back({{}, Model(ec_), make_session(engine, sc_), false});
    for (int i = 0; i < 60 && !::testing::Test::HasFailure(); ++i) {
      const uint32_t what = random_.below(28);
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
    bool turned = false;  ///< its keys are no longer sixteenths, whose products are exact
  };

  /// Makes a step of every layer.
  virtual void step(Sequence& s) {
    for (uint32_t l = 0; l < ec_.layers; ++l) step_in_host_memory(s, l);
  }
  /// Looks at a sequence after a call.
  virtual void look_at(Sequence& s) { check(s); }
  /// Waits for steps under way and looks at their answers.
  virtual void settle(Sequence&) {}

  void step_in_host_memory(Sequence& s, uint32_t l) {
    const auto k = random_.many(shape().kv(1)), v = shape().values_of(k, random_),
               q = random_.many(shape().q(1));
    const RandomTensor gk = row(k, ec_.kv_heads), gv(v, 1, ec_.kv_heads, shape().dv, random_, true),
                       gq = row(q, ec_.q_heads);
    const keyhole_tensor* const tv = shape().given(gv.tensor);
    Answer a{std::vector<float>(shape().o(1)), std::vector<float>(ec_.q_heads)};
    const keyhole_tensor out = tensor(a.o, {ec_.q_heads, shape().dv});
    keyhole_session* const session = s.session.get();
    if (random_.below(2) == 0) {
      ASSERT_OK(keyhole_session_attend(session, l, &gq.tensor, &gk.tensor, tv, &out, a.lse.data()));
    } else {
      ASSERT_OK(keyhole_session_attend_begin(session, l, &gq.tensor, &gk.tensor, tv));
      ASSERT_EQ(keyhole_session_truncate(session, 0), KEYHOLE_BUSY) << "inside a step";
      ASSERT_OK(keyhole_session_attend_end(session, &out, a.lse.data()));
    }
    s.model.append(l, k, v);
    expect_truth(s, l, q, a);
  }

  /// Takes several tokens at once through every layer, causal or as a tree; then perhaps some of them stay.
  void extend(Sequence& s, bool accepts) {
    const uint32_t n = 1 + random_.below(random_.below(4) == 0 ? longest_prompt_ : 9);
    if (!has_room(s, n)) return;
    // Perhaps sets a pattern of prompts whose lists are full, which holds until another one is set.
    if (shape().dv == ec_.head_dim && random_.below(3) == 0) {
      constexpr const char* kPatterns[] = {nullptr, "dense", "a-shape:first=999999",
                                           "sampled:mass=1000,first=999999,from=0"};
      ASSERT_OK(keyhole_session_set_extend_pattern(s.session.get(), kPatterns[random_.below(4)],
                                                   random_.below(40)));
    }
    const uint32_t before = s.model.tokens(0);
    std::vector<uint64_t> mask;
    if (n <= 64 && random_.below(2) == 0) {
      for (uint32_t i = 0; i < n; ++i) {
        const uint64_t bits = uint64_t{random_.below(UINT32_MAX)} << 32 | random_.below(UINT32_MAX);
        const uint64_t self = uint64_t{1} << i;
        mask.push_back((bits & (self - 1)) | self);
      }
    }
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const NewRows rows = new_rows(n);
      std::vector<float> o(shape().o(n)), lse(size_t{n} * ec_.q_heads);
      const keyhole_tensor out = tensor(o, {n, ec_.q_heads, shape().dv});
      ASSERT_OK(keyhole_session_extend(s.session.get(), l, &rows.tq.tensor, &rows.tk.tensor,
                                       shape().given(rows.tv.tensor),
                                       mask.empty() ? nullptr : mask.data(), &out, lse.data()));
      s.model.append(l, rows.k, rows.v);
      expect_truth_of_many(s, l, before, rows.q, mask, o.data(), lse.data());
      if (::testing::Test::HasFatalFailure()) return;
    }
    if (accepts) accept(s, n);
  }

  /// Lets some of the n newest tokens stay: the first of them, or others.
  void accept(Sequence& s, uint32_t n) {
    keyhole_session* const session = s.session.get();
    ASSERT_EQ(keyhole_session_accept(session, n + 1, nullptr), KEYHOLE_INVALID_ARGUMENT);
    if (random_.below(6) == 0) {
      const keyhole_budget b = pick_budget();  // changes no token
      ASSERT_OK(keyhole_session_set_budget(session, KEYHOLE_ALL, KEYHOLE_ALL, &b));
    }
    std::vector<uint32_t> path;
    keyhole_status status = KEYHOLE_OK;
    if (random_.below(3) == 0) {
      const uint32_t m = random_.below(n + 1);
      for (uint32_t i = 0; i < m; ++i) path.push_back(i);
      status = keyhole_session_accept(session, m, nullptr);
    } else {
      const uint32_t one_in = 1 + random_.below(3);
      for (uint32_t i = 0; i < n; ++i) {
        if (random_.below(one_in) == 0) path.push_back(i);
      }
      path.reserve(1);  // not NULL
      status = keyhole_session_accept(session, static_cast<uint32_t>(path.size()), path.data());
    }
    // It can be refused for the same reason as a truncation.
    if (status == KEYHOLE_INVALID_ARGUMENT && can_refuse_truncation_) return;
    ASSERT_OK(status);
    for (uint32_t l = 0; l < ec_.layers; ++l) s.model.keep(l, n, path);
    ASSERT_EQ(keyhole_session_accept(session, 0, nullptr), KEYHOLE_INVALID_ARGUMENT) << "once more";
  }

  /// Extends all sequences at once, perhaps with one that fails.
  void extend_batch() {
    std::vector<uint32_t> start{0}, before;
    std::vector<keyhole_session*> sessions;
    for (Sequence& s : sequences_) {
      const uint32_t n = random_.below(random_.below(6) == 0 ? 80 : 6);
      start.push_back(start.back() + (has_room(s, n) ? n : 0));
      sessions.push_back(s.session.get());
      before.push_back(s.model.tokens(0));
    }
    const uint32_t total = start.back();
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      NewRows rows = new_rows(total);
      // The last layer's call is the one that fails, so that all of a sequence fail or none.
      const bool breaks =
          l + 1 == ec_.layers && ec_.layers == 1 && total != 0 && random_.below(2) == 0;
      const uint32_t broken = breaks ? random_.below(total) : total;
      if (breaks) {
        std::vector<float> bad = rows.q;
        bad[broken * shape().q(1) + random_.below(static_cast<uint32_t>(shape().q(1)))] = NAN;
        rows.tq.set(bad);
      }
      std::vector<float> o(shape().o(total)), lse(size_t{total} * ec_.q_heads);
      std::vector<keyhole_status> statuses(sessions.size(), 1);
      const keyhole_tensor out = tensor(o, {total, ec_.q_heads, shape().dv});
      const keyhole_status status = keyhole_session_extend_batch(
          sessions.data(), static_cast<uint32_t>(sessions.size()), l, &rows.tq.tensor,
          &rows.tk.tensor, shape().given(rows.tv.tensor), start.data(), &out, lse.data(),
          statuses.data());
      ASSERT_EQ(status, breaks ? KEYHOLE_NOT_FINITE : KEYHOLE_OK) << keyhole_last_error();
      for (size_t i = 0; i < sessions.size(); ++i) {
        const bool fails = broken >= start[i] && broken < start[i + 1];
        ASSERT_EQ(statuses[i], fails ? KEYHOLE_NOT_FINITE : KEYHOLE_OK);
        if (fails || start[i] == start[i + 1]) continue;
        const auto part = [&](const std::vector<float>& all, size_t of_token) {
          return slice(all, start[i] * of_token, start[i + 1] * of_token);
        };
        Sequence& s = sequences_[i];
        s.model.append(l, part(rows.k, shape().kv(1)), part(rows.v, shape().v(1)));
        expect_truth_of_many(s, l, before[i], part(rows.q, shape().q(1)), {},
                             o.data() + start[i] * shape().o(1),
                             lse.data() + start[i] * ec_.q_heads);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }

  void prefill(Sequence& s, uint32_t n) {
    if (!has_room(s, n)) return;
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const auto k = random_.many(shape().kv(n)), v = shape().values_of(k, random_),
                 q = random_.many(shape().q(n));
      const RandomTensor gk(k, n, ec_.kv_heads, ec_.head_dim, random_, false),
          gv(v, n, ec_.kv_heads, shape().dv, random_, false),
          gq(q, n, ec_.q_heads, ec_.head_dim, random_, false);
      ASSERT_OK(keyhole_session_append(s.session.get(), l, &gk.tensor, shape().given(gv.tensor),
                                       random_.below(2) == 0 ? &gq.tensor : nullptr));
      s.model.append(l, k, v);
    }
  }

  /// Checks tokens and answers of all layers.
  void check(Sequence& s) {
    settle(s);
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const keyhole_layer_tokens t = layer_tokens(s.session.get(), l);
      ASSERT_EQ(t.total, s.model.tokens(l));
      if (const uint32_t window = window_of(l); window != 0) {
        ASSERT_EQ(t.sink + t.indexed + t.pending, 0U);
        ASSERT_EQ(t.window, std::min(window, t.total));
      } else {
        ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
      }
      if (t.total == 0) continue;
      const auto q = random_.many(shape().q(1));
      expect_truth(s, l, q, attend_only(s.session.get(), shape(), l, q));
    }
  }
  /// Checks, of new tokens that the model has by now, the first, the last and some between.
  void expect_truth_of_many(const Sequence& s, uint32_t layer, uint32_t before,
                            const std::vector<float>& q, const std::vector<uint64_t>& mask,
                            const float* o, const float* lse) {
    const auto n = static_cast<uint32_t>(q.size() / shape().q(1));
    const size_t width = shape().q(1), o_width = shape().o(1);
    for (uint32_t i = 0; i < n;
         i += i + 1 < n ? std::min(n - 1 - i, 1 + random_.below(1 + n / 4)) : 1) {
      SCOPED_TRACE("new token " + std::to_string(i) + " of " + std::to_string(n));
      const auto sees = [&](uint32_t t) {
        if (t < before) return true;
        const uint32_t j = t - before;
        return mask.empty() ? j <= i : j < 64 && (mask[i] >> j & 1) != 0;
      };
      std::vector<double> true_lse;
      const auto true_o =
          s.model.attend(layer, slice(q, i * width, (i + 1) * width), true_lse, sees);
      const Answer seen{std::vector<float>(o + i * o_width, o + (i + 1) * o_width),
                        std::vector<float>(lse + i * ec_.q_heads, lse + (i + 1) * ec_.q_heads)};
      expect_truth(seen, true_o, true_lse);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  void expect_truth(const Sequence& s, uint32_t layer, const std::vector<float>& q,
                    const Answer& a) {
    std::vector<double> lse;
    const auto o = s.model.attend_all(layer, q, lse);
    expect_truth(a, o, lse);
  }
  void expect_truth(const Answer& a, const std::vector<double>& o, const std::vector<double>& lse) {
    compare(a, o, lse);
    heads_checked_ += lse.size();
  }

  struct NewRows {
    std::vector<float> k, v, q;
    RandomTensor tk, tv, tq;
  };
  [[nodiscard]] NewRows new_rows(uint32_t n) {
    auto k = random_.many(shape().kv(n)), v = shape().values_of(k, random_),
         q = random_.many(shape().q(n));
    RandomTensor tk(k, n, ec_.kv_heads, ec_.head_dim, random_, false),
        tv(v, n, ec_.kv_heads, shape().dv, random_, false),
        tq(q, n, ec_.q_heads, ec_.head_dim, random_, false);
    return {std::move(k), std::move(v), std::move(q), std::move(tk), std::move(tv), std::move(tq)};
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

  /// Makes a call that must be refused.
  void break_a_rule(Sequence& s);

  /// Gives some of the sequences learned sinks, and layers of their own.
  void pick_layers() {
    if (random_.below(3) == 0) {
      sinks_ = random_.many(size_t{ec_.layers} * ec_.q_heads);
      if (random_.below(2) == 0) sinks_[0] = -INFINITY;
      ec_.sink_logits = sinks_.data();
    }
    if (random_.below(2) == 0) return;
    layers_.resize(ec_.layers);
    for (keyhole_layer_config& l : layers_) {
      keyhole_layer_config_init(&l, &ec_);
      l.scale = 0.02F * static_cast<float>(1 + random_.below(4));
      l.softcap = random_.below(3) == 0 ? 7.0F : 0.0F;
      l.rope_dim = 2 * random_.below(ec_.head_dim / 2);
      if (random_.below(2) == 0) continue;
      l.window = 1 + random_.below(80);
      const bool keeps_all = random_.below(2) == 0;
      l.window_slack = keeps_all ? sc_.max_tokens : random_.below(60);
      can_refuse_truncation_ = can_refuse_truncation_ || !keeps_all;
    }
    ec_.layer_configs = layers_.data();
    ec_.layer_count = ec_.layers;
  }
  /// The window of a layer; 0: it does not slide.
  [[nodiscard]] uint32_t window_of(uint32_t layer) const {
    return layers_.empty() ? 0 : layers_[layer].window;
  }

  Numbers random_;
  keyhole_engine_config ec_;
  std::vector<float> sinks_;
  std::vector<keyhole_layer_config> layers_;
  bool can_refuse_truncation_ = false;
  keyhole_session_config sc_;
  uint32_t longest_prompt_ = 150;

  // The following functions differ with the index. Here specs have efforts that cover every key, whatever is indexed,
  // and budgets read every key.
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
  /// Compares an answer with the truth.
  virtual void compare(const Answer& a, const std::vector<double>& o,
                       const std::vector<double>& lse) const {
    expect_near(a, o, lse);
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
      case 8: ASSERT_OK(keyhole_session_build(session, nullptr, nullptr)); return;
      case 9:
      case 10: {
        const uint32_t n = random_.below(s.model.tokens(0) + 4);
        const keyhole_status status = keyhole_session_truncate(session, n);
        // A sliding layer that has let go of tokens can refuse it; check() sees that nothing has changed then.
        if (status == KEYHOLE_INVALID_ARGUMENT && can_refuse_truncation_ && n != 0) return;
        ASSERT_OK(status);
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
      case 16: return extend(s, false);
      case 17:
      case 18: return extend(s, true);
      case 19: return extend_batch();
      case 20: return states(s);
      case 21: return queries(s);
      case 22:
      case 23: return remove(s);
      default: return break_a_rule(s);
    }
  }

  /// Calls the functions for engines with attention of their own.
  void states(Sequence& s) {
    settle(s);
    const uint32_t layer = random_.below(ec_.layers);
    const Model model = s.model.without_sinks();
    if (window_of(layer) == 0) {
      expect_tokens_exact(s.session.get(), model, ec_, layer, random_);
      const uint32_t top_k = 1 + random_.below(60);
      if (!s.turned) expect_search_sound(s.session.get(), model, ec_, layer, top_k, random_);
    }
    const auto q = random_.many(shape().q(1));
    Answer a{std::vector<float>(shape().o(1)), std::vector<float>(ec_.q_heads)};
    const keyhole_tensor tq = tensor(q, {ec_.q_heads, ec_.head_dim}),
                         out = tensor(a.o, {ec_.q_heads, shape().dv});
    const keyhole_status status =
        keyhole_session_attend_offloaded(s.session.get(), layer, &tq, &out, a.lse.data());
    if (window_of(layer) != 0) {
      ASSERT_EQ(status, KEYHOLE_UNSUPPORTED);
    }
    if (status == KEYHOLE_UNSUPPORTED) return;  // codes on the device, too
    std::vector<double> lse;
    const auto o = offloaded_truth(s.session.get(), model, layer, q, lse);
    compare(a, o, lse);
    heads_checked_ += ec_.q_heads;
  }

  /// Queries that are answered by what is stored, and not appended.
  void queries(Sequence& s) {
    settle(s);
    const uint32_t layer = random_.below(ec_.layers), n = 1 + random_.below(9);
    const auto q = random_.many(shape().q(n));
    std::vector<float> o(shape().o(n)), lse(size_t{n} * ec_.q_heads);
    const RandomTensor gq(q, n, ec_.q_heads, ec_.head_dim, random_, false);
    const keyhole_tensor out = tensor(o, {n, ec_.q_heads, shape().dv});
    const keyhole_status status =
        keyhole_session_attend_queries(s.session.get(), layer, &gq.tensor, &out, lse.data());
    if (s.model.tokens(layer) == 0) {
      ASSERT_EQ(status, KEYHOLE_INVALID_ARGUMENT);
      return;
    }
    ASSERT_OK(status);
    for (uint32_t i = 0; i < n; ++i) {
      SCOPED_TRACE("query " + std::to_string(i) + " of " + std::to_string(n));
      expect_truth(s, layer, slice(q, shape().q(i), shape().q(i + 1)),
                   {slice(o, shape().o(i), shape().o(i + 1)),
                    slice(lse, size_t{i} * ec_.q_heads, size_t{i + 1} * ec_.q_heads)});
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  /// Takes tokens out of the middle, perhaps turning keys behind them; of those the model takes over what is stored.
  void remove(Sequence& s) {
    settle(s);
    keyhole_session* const session = s.session.get();
    const uint32_t tokens = s.model.tokens(0);
    const uint32_t first = random_.below(tokens + 2), count = random_.below(1 + random_.below(60));
    // Of a sliding layer nobody tells how many tokens it still has.
    bool slides = false;
    for (uint32_t l = 0; l < ec_.layers; ++l) slides = slides || window_of(l) != 0;
    const bool turns = random_.below(3) == 0 && !slides;
    const int32_t shift = turns ? static_cast<int32_t>(random_.below(200)) - 100 : 0;
    const keyhole_status status = keyhole_session_remove(session, first, count, shift);
    if (status == KEYHOLE_UNSUPPORTED) return;  // a device
    if (status == KEYHOLE_INVALID_ARGUMENT &&
        (can_refuse_truncation_ || (shift != 0 && ec_.values_in_keys != 0))) {
      return;  // check() sees that nothing has changed
    }
    ASSERT_OK(status);
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      s.model.remove(l, first, count);
      if (shift == 0 || s.model.tokens(l) <= first) continue;
      const uint32_t n = s.model.tokens(l) - first;
      std::vector<float> rows(shape().kv(n));
      const keyhole_tensor k = tensor(rows, {n, ec_.kv_heads, ec_.head_dim});
      ASSERT_OK(keyhole_session_get_rows(session, l, first, &k, nullptr));
      std::copy(rows.begin(), rows.end(),
                s.model.keys(l).begin() + static_cast<std::ptrdiff_t>(shape().kv(first)));
      s.turned = true;
    }
  }

  void copy(Sequence& s, bool in_memory) {
    keyhole_session* made = nullptr;
    if (in_memory) {
      ASSERT_OK(keyhole_session_fork(s.session.get(), &made));
    } else {
      const std::string path = folder_ / "session";
      ASSERT_OK(keyhole_session_save(s.session.get(), path.c_str()));
      ASSERT_OK(keyhole_session_load(engine_, path.c_str(), nullptr, &made));
    }
    Sequence other{{}, s.model, SessionPtr(made), s.turned};
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
  const auto v = random_.many(shape().v(static_cast<uint32_t>(n))), q = random_.many(shape().q(1));
  keyhole_tensor tk = tensor(k, {n, ec_.kv_heads, ec_.head_dim}),
                 tv = tensor(v, {n, ec_.kv_heads, shape().dv}),
                 tq = tensor(q, {ec_.q_heads, ec_.head_dim});
  const keyhole_tensor* const given = shape().given(tv);
  std::vector<float> o(shape().o(1));
  const keyhole_tensor out = tensor(o, {ec_.q_heads, shape().dv});
  keyhole_status status = KEYHOLE_OK;
  switch (random_.below(10)) {
    case 0: status = keyhole_session_append(session, ec_.layers, &tk, given, nullptr); break;
    case 1:
      tk.shape[1] += 1;
      status = keyhole_session_append(session, 0, &tk, given, nullptr);
      break;
    case 2:
      tv.shape[0] -= 1;
      status = keyhole_session_append(session, 0, &tk, &tv, nullptr);
      break;
    case 3:
      k[random_.below(static_cast<uint32_t>(k.size()))] = random_.below(2) == 0 ? NAN : INFINITY;
      status = keyhole_session_append(session, 0, &tk, given, nullptr);
      EXPECT_EQ(status, KEYHOLE_NOT_FINITE);
      break;
    case 4:
      tq.shape[1] /= 2;
      status = keyhole_session_attend(session, 0, &tq, nullptr, nullptr, &out, nullptr);
      break;
    case 5: status = keyhole_session_attend_end(session, &out, nullptr); break;
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
      tk = tensor(all, {many, ec_.kv_heads, ec_.head_dim});
      tv = tensor(all, {many, ec_.kv_heads, shape().dv});
      status = keyhole_session_append(session, 0, &tk, given, nullptr);
    }
  }
  EXPECT_NE(status, KEYHOLE_OK);
  EXPECT_NE(status, KEYHOLE_INTERNAL) << keyhole_last_error();
}

/// Calls `run(seed)`, which returns the number of heads that it has checked, for as many seeds as the environment
/// says, or `seeds`. Returns the sum; ends with the first seed that fails.
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
