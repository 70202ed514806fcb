// Every public function of a session, with the n-th allocation, mapping of memory or thread start failing, for every n
// until none fails. A call that fails says OUT_OF_MEMORY and changes nothing: tokens, settings, answers and files are
// what they were, and the same call succeeds as soon as there is memory.
//   KEYHOLE_FAULT_ALL=1   every n; otherwise the first 40, then every tenth more than the last (under sanitizers fewer)
#include "keyhole/attention.h"
#include "keyhole/batch.h"
#include "keyhole/prefill.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "tests/runtime/faults/planted_faults.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kPrompt = 300;

/// Every n at first, and fewer the larger they are. Under sanitizers the fewest: they make a round take 5 to 20 times
/// as long, and the release build tries more.
int64_t after(int64_t n) {
  static const bool all = std::getenv("KEYHOLE_FAULT_ALL") != nullptr;
  constexpr int64_t kEach = kSanitized ? 4 : 16;
  constexpr int64_t kShare = kSanitized ? 1 : 3;
  return all || n < kEach ? n + 1 : n + std::max<int64_t>(2, n / kShare);
}

std::string settings_of(const keyhole_session* s, const keyhole_engine_config& ec) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  EXPECT_OK(keyhole_session_get_config(s, &c));
  std::string text = std::string(c.index) + " mode " + std::to_string(c.mode) + " k " +
                     std::to_string(c.budget.top_k) + " attend " + std::to_string(c.budget.attend);
  for (uint32_t l = 0; l < ec.layers; ++l) {
    for (uint32_t h = 0; h < ec.kv_heads; ++h) {
      keyhole_budget b;
      keyhole_budget_init(&b);
      EXPECT_OK(keyhole_session_get_budget(s, l, h, &b));
      text += "; " + std::to_string(b.top_k) + " " + std::to_string(b.attend) + " " +
              std::to_string(b.min_weight) + " " + std::to_string(b.tail) + " " +
              std::to_string(b.min_keys) + " " + std::to_string(b.max_keys);
    }
  }
  return text;
}

/// Calls of `f` meet no planted fault, and it counts none of them.
template <class F>
void without_faults(const F& f) {
  const int64_t left = Planted::left.exchange(-1);
  f();
  Planted::left = left;
}

/// A session with a prompt, steps and an index, beside the double-precision model of its tokens.
class World {
 public:
  explicit World(const std::string& spec) : spec_(spec) {
    engine_ = make_engine(ec_);
    keyhole_session_config sc = config();
    session_ = make_session(engine_.get(), sc);
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      prefill_both(session_.get(), model_, shape_, l, kPrompt, numbers_);
    }
    EXPECT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
    for (int i = 0; i < 3; ++i) {
      for (uint32_t l = 0; l < ec_.layers; ++l) EXPECT_EQ(step(l), KEYHOLE_OK);
    }
  }

  [[nodiscard]] keyhole_session_config config() const {
    keyhole_session_config sc = small_session();
    sc.index = spec_.c_str();
    sc.append_block = 16;
    sc.audit_share = 0.5;
    return sc;
  }

  /// A step that appends, as one call or as two; the model follows where it has succeeded.
  keyhole_status step(uint32_t layer, bool in_halves = false) {
    const auto k = numbers_.many(shape_.kv(1)), v = numbers_.many(shape_.kv(1)),
               q = numbers_.many(shape_.q(1));
    std::vector<float> o(shape_.q(1)), lse(ec_.q_heads);
    const auto tk = tensor(k, {shape_.hkv, shape_.d}), tv = tensor(v, {shape_.hkv, shape_.d}),
               tq = tensor(q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
    keyhole_session* const s = session_.get();
    const keyhole_status status = under_fault([&] {
      if (!in_halves) return keyhole_session_attend(s, layer, &tq, &tk, &tv, &out, lse.data());
      const keyhole_status begun = keyhole_session_attend_begin(s, layer, &tq, &tk, &tv);
      return begun != KEYHOLE_OK ? begun : keyhole_session_attend_end(s, &out, lse.data());
    });
    if (status == KEYHOLE_OK) model_.append(layer, k, v);
    return status;
  }
  keyhole_status prefill(uint32_t layer, uint32_t n) {
    const auto k = numbers_.many(shape_.kv(n)), v = numbers_.many(shape_.kv(n)),
               q = numbers_.many(shape_.q(n));
    const auto tk = tensor(k, {n, shape_.hkv, shape_.d}), tv = tensor(v, {n, shape_.hkv, shape_.d}),
               tq = tensor(q, {n, shape_.hq, shape_.d});
    const keyhole_status status =
        under_fault([&] { return keyhole_session_append(session_.get(), layer, &tk, &tv, &tq); });
    if (status == KEYHOLE_OK) model_.append(layer, k, v);
    return status;
  }
  keyhole_status truncate(uint32_t n) {
    const keyhole_status status =
        under_fault([&] { return keyhole_session_truncate(session_.get(), n); });
    if (status == KEYHOLE_OK) model_.truncate(n);
    return status;
  }

  keyhole_status remove(uint32_t first, uint32_t count) {
    const keyhole_status status =
        under_fault([&] { return keyhole_session_remove(session_.get(), first, count, 0); });
    for (uint32_t l = 0; status == KEYHOLE_OK && l < ec_.layers; ++l) {
      model_.remove(l, first, count);
    }
    return status;
  }
  keyhole_status queries(uint32_t layer, uint32_t n) {
    const auto q = numbers_.many(shape_.q(n));
    std::vector<float> o(shape_.q(n));
    const auto tq = tensor(q, {n, shape_.hq, shape_.d}), out = tensor(o, {n, shape_.hq, shape_.d});
    return under_fault(
        [&] { return keyhole_session_attend_queries(session_.get(), layer, &tq, &out, nullptr); });
  }
  keyhole_status memory() {
    keyhole_memory_use memory;
    keyhole_memory_use_init(&memory);
    return under_fault([&] { return keyhole_engine_get_memory(engine_.get(), &memory); });
  }

  keyhole_status extend(uint32_t layer, uint32_t n) {
    const auto k = numbers_.many(shape_.kv(n)), v = numbers_.many(shape_.kv(n)),
               q = numbers_.many(shape_.q(n));
    std::vector<float> o(shape_.q(n)), lse(size_t{n} * ec_.q_heads);
    const auto tk = tensor(k, {n, shape_.hkv, shape_.d}), tv = tensor(v, {n, shape_.hkv, shape_.d}),
               tq = tensor(q, {n, shape_.hq, shape_.d}), out = tensor(o, {n, shape_.hq, shape_.d});
    const keyhole_status status = under_fault([&] {
      return keyhole_session_extend(session_.get(), layer, &tq, &tk, &tv, nullptr, &out,
                                    lse.data());
    });
    if (status == KEYHOLE_OK) model_.append(layer, k, v);
    return status;
  }
  /// Extends by a pattern of prompts whose lists are full.
  keyhole_status extend_by_pattern(uint32_t layer, uint32_t n) {
    constexpr const char* kFull = "sampled:mass=1000,first=999999,from=0";
    const keyhole_status set =
        under_fault([&] { return keyhole_session_set_extend_pattern(session_.get(), kFull, n); });
    if (set != KEYHOLE_OK) return set;
    const keyhole_status status = extend(layer, n);
    EXPECT_OK(keyhole_session_set_extend_pattern(session_.get(), nullptr, 0));
    return status;
  }
  /// A batch of this session and a copy of it, of which one alone may fail.
  keyhole_status extend_batch(uint32_t layer, uint32_t n) {
    if (other_ == nullptr || layer_tokens(other_.get(), layer).total > 1500) {
      other_ = fork_of(session_.get());
    }
    keyhole_session* const other = other_.get();
    const uint32_t start[] = {0, n, 2 * n};
    const auto k = numbers_.many(shape_.kv(2 * n)), v = numbers_.many(shape_.kv(2 * n)),
               q = numbers_.many(shape_.q(2 * n));
    std::vector<float> o(shape_.q(2 * n));
    const int64_t all = 2 * n;
    const auto tk = tensor(k, {all, shape_.hkv, shape_.d}),
               tv = tensor(v, {all, shape_.hkv, shape_.d}),
               tq = tensor(q, {all, shape_.hq, shape_.d}),
               out = tensor(o, {all, shape_.hq, shape_.d});
    keyhole_session* const both[] = {session_.get(), other};
    keyhole_status statuses[] = {1, 1};
    const uint32_t before = layer_tokens(other, layer).total;
    const keyhole_status status = under_fault([&] {
      return keyhole_session_extend_batch(both, 2, layer, &tq, &tk, &tv, start, &out, nullptr,
                                          statuses);
    });
    EXPECT_EQ(status, statuses[0] != KEYHOLE_OK ? statuses[0] : statuses[1]);
    EXPECT_EQ(layer_tokens(other, layer).total, before + (statuses[1] == KEYHOLE_OK ? n : 0));
    if (statuses[0] == KEYHOLE_OK) {
      const auto half = static_cast<std::ptrdiff_t>(shape_.kv(n));
      model_.append(layer, {k.begin(), k.begin() + half}, {v.begin(), v.begin() + half});
    }
    return status;
  }
  keyhole_status accept(uint32_t n, const std::vector<uint32_t>& path) {
    const keyhole_status status = under_fault([&] {
      return keyhole_session_accept(session_.get(), static_cast<uint32_t>(path.size()),
                                    path.data());
    });
    if (status != KEYHOLE_OK) return status;
    const size_t token = shape_.kv(1);
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const uint32_t before = model_.tokens(l) - n;
      for (std::vector<float>* rows : {&model_.keys(l), &model_.values(l)}) {
        for (size_t i = 0; i < path.size(); ++i) {
          std::copy_n(rows->data() + (before + path[i]) * token, token,
                      rows->data() + (before + i) * token);
        }
        rows->resize((before + path.size()) * token);
      }
    }
    return status;
  }

  /// The state of the offloaded tokens; that of some of them, and of sink and window; the ids that a search chooses.
  enum class State { offloaded, chosen, search };
  keyhole_status state(State what, uint32_t layer) {
    const auto q = numbers_.many(shape_.q(1));
    std::vector<float> o(shape_.q(1)), lse(ec_.q_heads), scores(size_t{ec_.q_heads} * 40);
    std::vector<uint32_t> ids(scores.size()), counts(ec_.q_heads);
    const auto tq = tensor(q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
    keyhole_session* const s = session_.get();
    std::vector<uint32_t> chosen(200);  // 100 of each KV head
    for (uint32_t i = 0; i < 200; ++i) chosen[i] = i % 100;
    const std::vector<uint32_t> chosen_counts(ec_.kv_heads, 100);
    return under_fault([&] {
      switch (what) {
        case State::offloaded:
          return keyhole_session_attend_offloaded(s, layer, &tq, &out, lse.data());
        case State::chosen:
          return keyhole_session_attend_tokens(s, layer, &tq, chosen.data(), chosen_counts.data(),
                                               1, &out, lse.data());
        default:
          return keyhole_session_search_tokens(s, layer, &tq, 40, ids.data(), scores.data(),
                                               counts.data());
      }
    });
  }
  keyhole_status build() {
    return under_fault([&] { return keyhole_session_build(session_.get(), nullptr, nullptr); });
  }

  /// A copy of the session, which is to stay as it is whatever the session does: check() looks at both.
  void keep_copy() {
    kept_ = fork_of(session_.get());
    kept_model_ = model_;
  }

  /// Tokens, and answers of the session as it attends and exactly.
  void check() {
    check(session_.get());
    if (kept_ != nullptr) check(kept_.get(), kept_model_);
  }
  void check(keyhole_session* s) { check(s, model_); }
  void check(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const keyhole_layer_tokens t = layer_tokens(s, l);
      ASSERT_EQ(t.total, model.tokens(l));
      ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
      const auto q = numbers_.many(shape_.q(1));
      std::vector<double> lse;
      const auto o = model.attend_all(l, q, lse);
      // Codes stand for most keys; the other specs read every key.
      const bool coded = spec_.find("codes") == 0;
      expect_near(attend_only(s, shape_, l, q), o, lse, coded ? 2.0 : 1e-4);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  [[nodiscard]] keyhole_session* session() { return session_.get(); }
  [[nodiscard]] keyhole_engine* engine() { return engine_.get(); }
  [[nodiscard]] const keyhole_engine_config& engine_config() const { return ec_; }
  [[nodiscard]] std::string settings() const { return settings_of(session_.get(), ec_); }
  [[nodiscard]] const TemporaryFolder& folder() const { return folder_; }
  [[nodiscard]] uint32_t tokens() const { return model_.tokens(0); }

 private:
  std::string spec_;
  keyhole_engine_config ec_ = small_engine(2);
  EnginePtr engine_;
  SessionPtr session_, other_, kept_;
  Numbers numbers_{31};
  Model model_{ec_}, kept_model_{ec_};
  Shape shape_{ec_};
  TemporaryFolder folder_;
};

using Call = std::function<keyhole_status(World&)>;

class ApiFault : public ::testing::TestWithParam<const char*> {
 protected:
  /// Lets `call` fail at the n-th fault of each kind, for growing n, until it does not fail any more. `again` puts the
  /// world back where the call can be made once more.
  void try_all(const Call& call, const Call& again = {}) {
    std::vector<Fault> kinds{Fault::allocation};
    if (!kSanitized) kinds = {Fault::allocation, Fault::mapping, Fault::thread};
    for (const Fault kind : kinds) {
      World world(GetParam());
      for (int64_t n = 0;; n = after(n)) {
        SCOPED_TRACE("fault " + std::to_string(static_cast<int>(kind)) + ", " + std::to_string(n) +
                     " calls before");
        const std::string settings = world.settings();
        Planted::plant(kind, n);
        const keyhole_status status = call(world);
        const bool has_struck = Planted::lift();
        if (status != KEYHOLE_OK) {
          ASSERT_TRUE(has_struck) << keyhole_last_error();
          ASSERT_EQ(status, KEYHOLE_OUT_OF_MEMORY) << keyhole_last_error();
          ASSERT_NE(std::strlen(keyhole_last_error()), 0U);
          ASSERT_EQ(world.settings(), settings) << "of a call that failed";
        }
        world.check();
        if (HasFatalFailure()) return;
        if (status == KEYHOLE_OK && !has_struck) break;
        if (status != KEYHOLE_OK) {
          ASSERT_EQ(call(world), KEYHOLE_OK) << keyhole_last_error();
          world.check();
          if (HasFatalFailure()) return;
        }
        if (again) {
          ASSERT_EQ(again(world), KEYHOLE_OK) << keyhole_last_error();
        }
      }
    }
  }
};

TEST_P(ApiFault, Prefill) {
  try_all([](World& w) { return w.prefill(1, 70); },
          [](World& w) { return w.tokens() < 3000 ? KEYHOLE_OK : w.truncate(kPrompt); });
}

TEST_P(ApiFault, Attend) {
  const auto shorter = [](World& w) { return w.tokens() < 600 ? KEYHOLE_OK : w.truncate(kPrompt); };
  try_all([](World& w) { return w.step(0); }, shorter);
  try_all([](World& w) { return w.step(0, true); }, shorter);
}

TEST_P(ApiFault, Extend) {
  const auto shorter = [](World& w) { return w.tokens() < 900 ? KEYHOLE_OK : w.truncate(kPrompt); };
  try_all([](World& w) { return w.extend(0, 6); }, shorter);
  try_all([](World& w) { return w.extend(0, 80); }, shorter);
  try_all([](World& w) { return w.extend_by_pattern(0, 140); }, shorter);
}

TEST_P(ApiFault, ExtendBatch) {
  try_all([](World& w) { return w.extend_batch(0, 5); },
          [](World& w) { return w.tokens() < 900 ? KEYHOLE_OK : w.truncate(kPrompt); });
}

TEST_P(ApiFault, Accept) {
  try_all(
      [extended = false](World& w) mutable -> keyhole_status {
        for (uint32_t l = 0; l < 2 && !extended; ++l) {
          if (w.extend(l, 7) != KEYHOLE_OK && w.extend(l, 7) != KEYHOLE_OK) return KEYHOLE_INTERNAL;
        }
        extended = true;
        const keyhole_status status = w.accept(7, {0, 2, 3, 6});
        extended = status != KEYHOLE_OK;
        return status;
      },
      [](World& w) { return w.tokens() < 900 ? KEYHOLE_OK : w.truncate(kPrompt); });
}

TEST_P(ApiFault, ManySteps) {
  // Blocks leave the window and reach indexes meanwhile.
  try_all(
      [](World& w) -> keyhole_status {
        for (int i = 0; i < 40; ++i) {
          for (uint32_t l = 0; l < 2; ++l) {
            const keyhole_status status = w.step(l);
            if (status != KEYHOLE_OK && w.step(l) != KEYHOLE_OK) return status;
          }
        }
        return KEYHOLE_OK;
      },
      [](World& w) { return w.tokens() < 1500 ? KEYHOLE_OK : w.truncate(kPrompt); });
}

TEST_P(ApiFault, StatesOfTokens) {
  const auto longer = [](World& w) {
    return w.tokens() < 3000 ? w.prefill(0, 40) : w.truncate(kPrompt);
  };
  try_all([](World& w) { return w.state(World::State::offloaded, 0); }, longer);
  try_all([](World& w) { return w.state(World::State::chosen, 0); });
  try_all([](World& w) { return w.state(World::State::search, 0); });
  try_all([](World&) {
    const float o[4] = {}, lse[2] = {};
    float out[4], out_lse[2];
    const float* os[] = {o, o};
    const float* lses[] = {lse, lse};
    return under_fault(
        [&] { return keyhole_merge_states(2, os, lses, 2, 2, KEYHOLE_LSE_LOG2, out, out_lse); });
  });
}

TEST_P(ApiFault, Build) {
  try_all([](World& w) { return w.build(); },
          [calls = 0](World& w) mutable {
            // Alternately builds over all rows, and over a few more than before.
            if (calls++ % 2 != 0) return keyhole_session_set_index(w.session(), w.config().index);
            return w.tokens() < 3000 ? w.prefill(0, 40) : w.truncate(kPrompt);
          });
}

TEST_P(ApiFault, Truncate) {
  try_all([](World& w) { return w.truncate(150); },
          [](World& w) {
            for (uint32_t l = 0; l < 2; ++l) {
              if (const auto s = w.prefill(l, 150)) return s;
            }
            return w.build();
          });
}

TEST_P(ApiFault, Remove) {
  try_all([](World& w) { return w.remove(90, 60); },
          [](World& w) {
            for (uint32_t l = 0; l < 2; ++l) {
              if (const auto s = w.prefill(l, 60)) return s;
            }
            return w.build();
          });
}

TEST_P(ApiFault, QueriesAndMemory) {
  try_all([](World& w) { return w.queries(0, 9); });
  try_all([](World& w) { return w.memory(); });
}

TEST_P(ApiFault, Settings) {
  const auto set_index = [](World& w, const char* spec) {
    return under_fault([&] { return keyhole_session_set_index(w.session(), spec); });
  };
  try_all([&](World& w) { return set_index(w, "ivf:C=8,probe=16777216"); },
          [&](World& w) {
            const auto s = set_index(w, w.config().index);
            return s != KEYHOLE_OK ? s : w.build();
          });
  const auto set_mode = [](keyhole_mode mode, uint32_t k) {
    return [=](World& w) {
      return under_fault([&] { return keyhole_session_set_mode(w.session(), mode, k); });
    };
  };
  try_all(set_mode(KEYHOLE_MODE_EXACT, 4000), set_mode(KEYHOLE_MODE_INDEXED, 4096));
  if (std::string(GetParam()).find("codes") == 0)
    return;  // whose tail goes with no other way to attend
  const auto set_attend = [](keyhole_attend_mode attend) {
    return [=](World& w) {
      return under_fault([&] { return keyhole_session_set_attend(w.session(), attend, 0); });
    };
  };
  try_all(set_attend(KEYHOLE_ATTEND_SCORED), set_attend(KEYHOLE_ATTEND_TOPK));
  const auto set_tail = [](World& w, keyhole_tail_mode tail) {
    keyhole_budget b;
    keyhole_budget_init(&b);
    b.top_k = 4096;
    b.tail = tail;
    return under_fault([&] { return keyhole_session_set_budget(w.session(), KEYHOLE_ALL, 1, &b); });
  };
  try_all([&](World& w) { return set_tail(w, KEYHOLE_TAIL_SECOND); },
          [&](World& w) {
            const auto s = set_tail(w, KEYHOLE_TAIL_NONE);
            return s != KEYHOLE_OK ? s : w.build();
          });
}

TEST_P(ApiFault, Fork) {
  keyhole_session* copy = nullptr;
  try_all([&](World& w) {
    const auto status = under_fault([&] { return keyhole_session_fork(w.session(), &copy); });
    const SessionPtr owner(copy);
    EXPECT_EQ(copy != nullptr, status == KEYHOLE_OK);
    if (copy != nullptr) w.check(copy);
    return status;
  });
}

// A session that changes what it shares first takes a copy of its own; where there is no memory for one, both are
// unchanged.
TEST_P(ApiFault, ChangesOfWhatACopyShares) {
  try_all(
      [](World& w) {
        w.keep_copy();
        return w.build();
      },
      [](World& w) { return w.tokens() < 3000 ? w.prefill(0, 40) : w.truncate(kPrompt); });
  try_all(
      [](World& w) {
        w.keep_copy();
        return w.truncate(150);
      },
      [](World& w) -> keyhole_status {
        for (uint32_t l = 0; l < 2; ++l) {
          if (const keyhole_status status = w.prefill(l, 100)) return status;
        }
        return w.build();
      });
}

// Rows that come in the place of those that a copy reads take other pages: what leaves the window meanwhile stays where
// it is until these are there.
TEST_P(ApiFault, RowsInThePlaceOfThoseOfACopy) {
  const auto cut = [](World& w) {
    w.keep_copy();
    EXPECT_OK(w.truncate(150));
    EXPECT_OK(w.prefill(0, 20));
  };
  using Way = std::function<keyhole_status(World&)>;
  const Way ways[] = {[](World& w) { return w.prefill(0, 40); },
                      [](World& w) { return w.extend(0, 40); },
                      [](World& w) {
                        keyhole_status status = KEYHOLE_OK;
                        for (int i = 0; i < 8 && status == KEYHOLE_OK; ++i) status = w.step(0);
                        return status;
                      }};
  for (const Way& way : ways) {
    try_all([&, is_cut = false](World& w) mutable {
      if (!is_cut) without_faults([&] { cut(w); });
      const keyhole_status status = way(w);
      is_cut = status != KEYHOLE_OK;
      return status;
    });
  }
}

// Of 40 tokens of each layer all but the second are kept, and 22 of these become rows again.
TEST_P(ApiFault, AcceptOfRowsThatACopyShares) {
  std::vector<uint32_t> path(39);
  for (uint32_t i = 0; i < 39; ++i) path[i] = i == 0 ? 0 : i + 1;
  try_all([&, extended = false](World& w) mutable {
    const auto extend = [&] {
      EXPECT_OK(w.tokens() > 900 ? w.truncate(kPrompt) : KEYHOLE_OK);
      for (uint32_t l = 0; l < 2; ++l) EXPECT_OK(w.extend(l, 40));
      w.keep_copy();
    };
    if (!extended) without_faults(extend);
    const keyhole_status status = w.accept(40, path);
    extended = status != KEYHOLE_OK;
    return status;
  });
}

TEST_P(ApiFault, SaveAndLoad) {
  try_all([&](World& w) {
    const std::string path = w.folder() / "session";
    const auto status =
        under_fault([&] { return keyhole_session_save(w.session(), path.c_str()); });
    // The old file or the new one, and nothing beside it.
    if (std::filesystem::exists(path)) {
      EXPECT_EQ(std::distance(std::filesystem::directory_iterator(w.folder().path()), {}), 1);
    } else {
      EXPECT_NE(status, KEYHOLE_OK);
      EXPECT_TRUE(std::filesystem::is_empty(w.folder().path()));
    }
    return status;
  });
  try_all([&](World& w) {
    const std::string path = w.folder() / "session";
    if (!std::filesystem::exists(path)) {
      EXPECT_OK(keyhole_session_save(w.session(), path.c_str()));
    }
    keyhole_session* copy = nullptr;
    const auto status =
        under_fault([&] { return keyhole_session_load(w.engine(), path.c_str(), nullptr, &copy); });
    const SessionPtr owner(copy);
    EXPECT_EQ(copy != nullptr, status == KEYHOLE_OK);
    if (copy != nullptr) w.check(copy);
    return status;
  });
}

// Copies that do what they have in common together; where there is no memory for that, each does all by itself.
TEST(ApiFaultOfCopies, ABatchFailsForNoneButWhomItConcerns) {
  auto ec = small_engine(2);
  ec.layers = 1;
  const EnginePtr engine = make_engine(ec);
  auto sc = small_session();
  sc.mode = KEYHOLE_MODE_EXACT;
  const SessionPtr root = make_session(engine.get(), sc);
  const Shape shape(ec);
  Numbers numbers(37);
  Model model(ec);
  prefill_both(root.get(), model, shape, 0, 2600, numbers);
  bool hit = true;
  for (int64_t n = 0; hit; n = after(n)) {
    SCOPED_TRACE("allocation " + std::to_string(n));
    SessionPtr copies[3];
    keyhole_session* sessions[3];
    for (int i = 0; i < 3; ++i) {
      ASSERT_OK(keyhole_session_fork(root.get(), &sessions[i]));
      copies[i].reset(sessions[i]);
    }
    const auto k = numbers.many(shape.kv(3)), v = numbers.many(shape.kv(3)),
               q = numbers.many(shape.q(3));
    std::vector<float> o(shape.q(3)), lse(size_t{3} * ec.q_heads);
    const auto tk = tensor(k, {3, shape.hkv, shape.d}), tv = tensor(v, {3, shape.hkv, shape.d}),
               tq = tensor(q, {3, shape.hq, shape.d}), out = tensor(o, {3, shape.hq, shape.d});
    const uint32_t start[] = {0, 1, 2, 3};
    keyhole_status statuses[3];
    Planted::plant(Fault::allocation, n);
    const keyhole_status status = under_fault([&] {
      return keyhole_session_extend_batch(sessions, 3, 0, &tq, &tk, &tv, start, &out, lse.data(),
                                          statuses);
    });
    hit = Planted::lift();
    EXPECT_TRUE(status == KEYHOLE_OK || status == KEYHOLE_OUT_OF_MEMORY);
    for (uint32_t i = 0; i < 3; ++i) {
      EXPECT_EQ(layer_tokens(sessions[i], 0).total, 2600 + (statuses[i] == KEYHOLE_OK ? 1 : 0));
      if (statuses[i] != KEYHOLE_OK) continue;
      const auto part = [&](const std::vector<float>& x, size_t width) {
        const auto begin = x.begin() + static_cast<std::ptrdiff_t>(i * width);
        return std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(width));
      };
      Model grown = model;
      grown.append(0, part(k, shape.kv(1)), part(v, shape.kv(1)));
      std::vector<double> true_lse;
      const auto truth = grown.attend_all(0, part(q, shape.q(1)), true_lse);
      expect_near({part(o, shape.q(1)), part(lse, ec.q_heads)}, truth, true_lse);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ApiFault, Identity) {
  std::string model(100, 'm');
  const int32_t tokens[] = {1, 2, 3};
  try_all(
      [&](World& w) {
        return under_fault(
            [&] { return keyhole_session_set_identity(w.session(), model.c_str(), tokens, 3); });
      },
      [&](World&) {
        model += "longer";
        return KEYHOLE_OK;
      });
}

TEST_P(ApiFault, CreateAndRead) {
  try_all([](World& w) {
    keyhole_engine* e = nullptr;
    const auto status = under_fault([&] { return keyhole_engine_create(&w.engine_config(), &e); });
    const EnginePtr owner(e);
    EXPECT_EQ(e != nullptr, status == KEYHOLE_OK);
    return status;
  });
  try_all([](World& w) {
    keyhole_session* s = nullptr;
    const keyhole_session_config sc = w.config();
    const auto status = under_fault([&] { return keyhole_session_create(w.engine(), &sc, &s); });
    const SessionPtr owner(s);
    EXPECT_EQ(s != nullptr, status == KEYHOLE_OK);
    return status;
  });
  try_all([](World& w) {
    keyhole_audit a;
    keyhole_audit_init(&a);
    return under_fault(
        [&] { return keyhole_session_get_audit(w.session(), KEYHOLE_ALL, KEYHOLE_ALL, &a); });
  });
  try_all([](World& w) {
    keyhole_memory_plan p;
    keyhole_memory_plan_init(&p);
    const keyhole_session_config sc = w.config();
    return under_fault([&] { return keyhole_plan(&w.engine_config(), &sc, 4096, 0, 0, &p); });
  });
}

TEST(PromptFault, MakeAndAttend) {
  const EnginePtr engine = make_engine(small_engine(2));
  constexpr uint32_t kTokens = 400;
  Numbers numbers(41);
  std::vector<float> q = numbers.many(kTokens * 4 * 64), k = numbers.many(kTokens * 2 * 64);
  const auto tensor_of = [](std::vector<float>& x, int64_t heads) {
    keyhole_tensor t{};
    t.data = x.data();
    t.dtype = KEYHOLE_F32;
    t.rank = 3;
    t.shape[0] = kTokens, t.shape[1] = heads, t.shape[2] = 64;
    t.strides[0] = heads * 64, t.strides[1] = 64, t.strides[2] = 1;
    return t;
  };
  const auto attend = [&](keyhole_prompt* p, std::vector<float>& out) {
    out.assign(q.size(), NAN);
    const keyhole_tensor tq = tensor_of(q, 4), tk = tensor_of(k, 2), to = tensor_of(out, 4);
    return under_fault(
        [&] { return keyhole_prompt_attend(p, 0, &tq, &tk, &tk, &to, nullptr, nullptr); });
  };
  std::vector<float> truth;
  for (int64_t n = -1;; n = after(n)) {  // once without a fault
    SCOPED_TRACE(std::to_string(n) + " allocations before");
    keyhole_prompt* p = nullptr;
    std::vector<float> out;
    Planted::plant(Fault::allocation, n);
    keyhole_status status = under_fault([&] {
      return keyhole_prompt_create(engine.get(), "sampled:mass=700,first=64,near=64,from=0", &p);
    });
    ASSERT_EQ(p != nullptr, status == KEYHOLE_OK);
    if (p != nullptr) status = attend(p, out);
    const bool has_struck = Planted::lift();
    if (status != KEYHOLE_OK) {
      ASSERT_TRUE(has_struck);
      ASSERT_EQ(status, KEYHOLE_OUT_OF_MEMORY) << keyhole_last_error();
    }
    if (p != nullptr) {
      if (status != KEYHOLE_OK) {
        ASSERT_EQ(attend(p, out), KEYHOLE_OK) << keyhole_last_error();
      }
      uint64_t attended = 0, seen = 0;
      ASSERT_EQ(keyhole_prompt_get_blocks(p, &attended, &seen), KEYHOLE_OK);
      EXPECT_EQ(seen, uint64_t{4} * (2 + 4 + 6 + 7)) << "a call that failed counts for nothing";
      if (truth.empty()) truth = out;
      EXPECT_EQ(out, truth);
    }
    keyhole_prompt_destroy(p);
    if (n >= 0 && !has_struck) break;
  }
}

// Effort that covers every key: whatever is indexed, the answers are exact.
INSTANTIATE_TEST_SUITE_P(Types, ApiFault,
                         ::testing::Values("flat", "ivf:C=8,probe=16777216,segment=64",
                                           "hnsw:M=6,ef=100000,efc=20",
                                           "roargraph:M=8,ef=100000,Nq=10,beam=12", "sparq:r=256",
                                           "codes:k=2,v=2", "codes:k=2,v=2,lists=16"),
                         [](const auto& p) {
                           const std::string spec = p.param;
                           const bool lists = spec.find("lists") != std::string::npos;
                           return spec.substr(0, spec.find(':')) + (lists ? "_in_lists" : "");
                         });

}  // namespace
}  // namespace keyhole::test
