// Audits against an offline computation in double precision; that they, and what they lead to, depend on the
// calls alone; that a session may be changed, copied and destroyed with audits under way.
#include <algorithm>
#include <filesystem>
#include <set>

#include <unistd.h>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/relative_error.h"
#include "tests/runtime/audit/audit_of.h"

namespace keyhole::test {
namespace {

constexpr int kRounds = unless_sanitized(40, 10);
constexpr uint64_t kSeeds = unless_sanitized(6, 2);
constexpr uint32_t kLongContext = unless_sanitized(9000, 3000);

/// One layer of random tokens whose K, V and q the test knows.
class Audited {
 public:
  Audited(const keyhole_engine_config& ec, const keyhole_session_config& sc, uint64_t seed)
      : ec_(ec),
        sc_(sc),
        shape_(ec),
        model_(ec),
        numbers_(seed),
        engine_(make_engine(ec)),
        session_(make_session(engine_.get(), sc)) {}

  [[nodiscard]] keyhole_session* session() const { return session_.get(); }
  [[nodiscard]] uint32_t group() const { return ec_.q_heads / ec_.kv_heads; }

  void prefill(uint32_t n) {
    const auto k = numbers_.many(shape_.kv(n));
    const auto v = numbers_.many(shape_.kv(n));
    const auto tk = tensor(k, {n, shape_.hkv, shape_.d});
    const auto tv = tensor(v, {n, shape_.hkv, shape_.d});
    ASSERT_OK(keyhole_session_append(session(), 0, &tk, &tv, nullptr));
    model_.append(0, k, v);
    keys_.insert(keys_.end(), k.begin(), k.end());
  }

  struct Expected {
    double error = 0.0, error_max = 0.0, mass = 0.0, missing = 0.0, recall = 0.0;
    double estimated = 0.0,
           difference = 0.0;  // of the missing mass: the tail's, and from the true one
  };

  /// Attends once with random queries, and computes what an audit should find of each KV head.
  std::vector<Expected> attend() {
    auto q = numbers_.many(shape_.q(1));
    for (float& x : q) x *= 0.125F;  // still exact; keeps one key from taking all
    const Answer answer = attend_only(session(), shape_, 0, q);
    std::vector<double> lse;
    const auto truth = model_.attend_all(0, q, lse);
    const auto tokens = layer_tokens(session(), 0);
    const uint32_t first = tokens.sink;
    const uint32_t offloaded = tokens.indexed + tokens.pending;
    std::vector<Expected> all(ec_.kv_heads);
    for (uint32_t kv = 0; kv < ec_.kv_heads; ++kv) {
      std::vector<std::vector<double>> dots(group());
      for (uint32_t g = 0; g < group(); ++g) {
        for (uint32_t r = 0; r < offloaded; ++r)
          dots[g].push_back(dot(q, kv * group() + g, first + r));
      }
      const std::set<uint32_t> attended = attended_rows(dots, tokens.indexed, offloaded);
      std::vector<double> read_lse;
      (void)model_.attend(0, q, read_lse, [&](uint32_t t) {
        return t < first || t >= first + offloaded || attended.contains(t - first);
      });
      for (uint32_t g = 0; g < group(); ++g) {
        const uint32_t h = kv * group() + g;
        const size_t begin = size_t{h} * ec_.head_dim;
        const double error = relative_error(&answer.o[begin], &truth[begin], ec_.head_dim);
        const double mass = std::exp(read_lse[h] - lse[h]);
        // The session has read what the test believes: else the test is wrong. With a tail, what its answer's
        // lse holds beyond that is the estimate.
        const double estimated = sc_.budget.tail == KEYHOLE_TAIL_NONE
                                     ? 0.0
                                     : 1.0 - std::exp(read_lse[h] - answer.lse[h]);
        if (sc_.budget.tail == KEYHOLE_TAIL_NONE) {
          EXPECT_NEAR(answer.lse[h], read_lse[h], 1e-4);
        }
        const auto best = top(dots[g], offloaded, sc_.budget.top_k);
        double recall = 0.0;
        for (const uint32_t r : best) recall += attended.contains(r) ? 1.0 : 0.0;
        const double n = group();
        all[kv].error += error / n;
        all[kv].error_max = std::max(all[kv].error_max, error);
        all[kv].mass += mass / n;
        all[kv].missing += (1.0 - mass) / n;
        all[kv].estimated += estimated / n;
        all[kv].difference += std::abs(estimated - (1.0 - mass)) / n;
        all[kv].recall += best.empty() ? 0.0 : recall / static_cast<double>(best.size()) / n;
      }
    }
    return all;
  }

 private:
  double dot(const std::vector<float>& q, uint32_t head, uint32_t token) const {
    const uint32_t d = ec_.head_dim;
    const float* k = &keys_[(size_t{token} * ec_.kv_heads + head / group()) * d];
    double sum = 0.0;
    for (uint32_t i = 0; i < d; ++i) sum += double{q[size_t{head} * d + i]} * k[i];
    return sum;
  }
  static std::vector<uint32_t> top(const std::vector<double>& dots, uint32_t n, uint32_t k) {
    std::vector<uint32_t> order(n);
    for (uint32_t i = 0; i < n; ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return dots[a] != dots[b] ? dots[a] > dots[b] : a < b;
    });
    order.resize(std::min(n, k));
    return order;
  }
  double logit(double x) const {
    const double scale = ec_.scale > 0 ? ec_.scale : 1.0 / std::sqrt(double{1} * ec_.head_dim);
    return ec_.softcap > 0 ? ec_.softcap * std::tanh(x * scale / ec_.softcap) : x * scale;
  }
  /// What a flat index leads to.
  std::set<uint32_t> attended_rows(const std::vector<std::vector<double>>& dots, uint32_t indexed,
                                   uint32_t offloaded) const {
    std::set<uint32_t> rows;
    if (sc_.mode == KEYHOLE_MODE_RESIDENT) return rows;
    const uint32_t from = sc_.mode == KEYHOLE_MODE_EXACT ? 0 : indexed;
    for (uint32_t r = from; r < offloaded; ++r) rows.insert(r);
    for (const auto& d : dots) {
      if (sc_.budget.attend == KEYHOLE_ATTEND_NONE) break;
      if (sc_.budget.attend == KEYHOLE_ATTEND_TOPK) {
        for (const uint32_t r : top(d, indexed, sc_.budget.top_k)) rows.insert(r);
        continue;
      }
      double sum = 0.0, most = 0.0;
      for (uint32_t r = 0; r < indexed; ++r) {
        const double weight = std::exp(logit(d[r]));
        sum += weight;
        most = std::max(most, weight);
      }
      for (uint32_t r = 0; r < indexed; ++r) {
        const double weight = std::exp(logit(d[r]));
        if (sc_.budget.attend == KEYHOLE_ATTEND_SCORED || weight > sc_.budget.min_weight * sum ||
            weight == most)
          rows.insert(r);
      }
    }
    return rows;
  }

  keyhole_engine_config ec_;
  keyhole_session_config sc_;
  Shape shape_;
  Model model_;
  Numbers numbers_;
  EnginePtr engine_;
  SessionPtr session_;
  std::vector<float> keys_;
};

void expect_found(const Audited::Expected& expected, const keyhole_audit& seen, uint32_t heads,
                  bool offloaded) {
  EXPECT_EQ(heads, seen.audits);
  EXPECT_TRUE(std::isfinite(expected.error));  // limits below grow with it
  EXPECT_NEAR(expected.error, seen.error_mean, 2e-5 + 1e-3 * expected.error);
  EXPECT_NEAR(expected.error_max, seen.error_max, 2e-5 + 1e-3 * expected.error_max);
  EXPECT_LE(seen.error_median, seen.error_max);
  EXPECT_NEAR(expected.mass, seen.mass_mean, 2e-5);
  EXPECT_NEAR(expected.missing, seen.missing_mean, 2e-5);
  EXPECT_NEAR(offloaded ? expected.recall : 0.0, seen.recall, 1e-6);
  EXPECT_NEAR(expected.estimated, seen.estimated_missing_mean, 2e-5);
  EXPECT_NEAR(expected.difference, seen.missing_error_mean, 4e-5);
  EXPECT_GT(seen.seconds, 0.0);
}

TEST(Audit, FiguresEqualAnOfflineComputation) {
  const keyhole_dtype dtypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
  const uint32_t groups[] = {1, 2, 4, 5, 16, 24, 71};
  Numbers choice(31);
  int missed = 0;
  for (int round = 0; round < kRounds; ++round) {
    auto ec = small_engine(1 + static_cast<uint32_t>(round) % 3);
    ec.layers = 1;
    ec.kv_heads = 1 + choice.below(3);
    ec.q_heads = ec.kv_heads * groups[choice.below(7)];
    ec.head_dim = some_head_dim(choice.below(1000));
    ec.kv_dtype = dtypes[choice.below(3)];
    ec.softcap = choice.below(3) == 0 ? 2.0F : 0.0F;
    auto sc = small_session();
    sc.audit_share = 1.0;
    sc.audit_bound = 0.03F;
    sc.budget.top_k = 1 + choice.below(40);
    sc.budget.tail = static_cast<keyhole_tail_mode>(choice.below(2) * choice.below(4));
    const bool has_tail = sc.budget.tail != KEYHOLE_TAIL_NONE;
    sc.budget.attend = static_cast<keyhole_attend_mode>(choice.below(has_tail ? 4 : 3));
    sc.budget.min_weight = 0.005F;
    sc.mode = round % 8 == 0   ? KEYHOLE_MODE_RESIDENT
              : round % 8 == 1 ? KEYHOLE_MODE_EXACT
                               : KEYHOLE_MODE_INDEXED;
    Audited one(ec, sc, 100 + static_cast<uint64_t>(round));
    SCOPED_TRACE("round " + std::to_string(round) + ": " + std::to_string(ec.kv_heads) + " x " +
                 std::to_string(one.group()) + " heads of " + std::to_string(ec.head_dim) +
                 ", attend " + std::to_string(sc.budget.attend) + ", tail " +
                 std::to_string(sc.budget.tail) + ", k " + std::to_string(sc.budget.top_k));
    one.prefill(round % 5 == 4 ? 1 + choice.below(20) : 200 + choice.below(1500));
    ASSERT_OK(keyhole_session_build(one.session(), nullptr, nullptr));
    if (choice.below(2) == 0) one.prefill(1 + choice.below(60));
    for (int i = 0; i < 3; ++i) {
      ASSERT_OK(keyhole_session_reset_statistics(one.session()));
      const auto expected = one.attend();
      const auto tokens = layer_tokens(one.session(), 0);
      uint64_t over = 0;
      for (uint32_t h = 0; h < ec.kv_heads; ++h) {
        const auto seen = audit_of(one.session(), 0, h);
        expect_found(expected[h], seen, one.group(), tokens.indexed + tokens.pending != 0);
        if (sc.mode == KEYHOLE_MODE_EXACT) {
          EXPECT_LT(seen.error_max, 1e-5);
        }
        over += seen.over_bound;
        missed += seen.recall < 1.0 ? 1 : 0;
        // Not just at the bound, where rounding decides.
        if (std::abs(seen.error_max - 0.03) > 1e-4) {
          EXPECT_EQ(seen.error_max > 0.03, seen.over_bound > 0);
        }
      }
      const auto all = audit_of(one.session());
      EXPECT_EQ(ec.q_heads, all.audits);
      EXPECT_EQ(over, all.over_bound);
      EXPECT_EQ(audit_of(one.session(), 0).audits, all.audits);
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(missed, kRounds / 2);  // else recall would not have been tested
}

// A target decides what is read: the answer's lse tells how much it was.
TEST(Audit, FiguresOfStepsWithATarget) {
  for (const keyhole_attend_mode attend : {KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_NONE}) {
    auto ec = small_engine(2);
    ec.layers = 1;
    auto sc = small_session();
    sc.audit_share = 1.0;
    sc.budget.top_k = 5;
    sc.budget.attend = attend;
    sc.budget.mass_target = 0.8F;
    sc.budget.max_keys = 4096;
    const EnginePtr engine = make_engine(ec);
    const SessionPtr s = make_session(engine.get(), sc);
    Numbers numbers(8);
    Model model(ec);
    const Shape shape(ec);
    prefill_both(s.get(), model, shape, 0, 1200, numbers);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    for (const uint32_t pending : {0U, 60U}) {
      if (pending != 0) prefill_both(s.get(), model, shape, 0, pending, numbers);
      for (int i = 0; i < 10; ++i) {
        ASSERT_OK(keyhole_session_reset_statistics(s.get()));
        auto q = numbers.many(shape.q(1));
        for (float& x : q) x *= 0.0625F;
        const Answer answer = attend_only(s.get(), shape, 0, q);
        std::vector<double> lse;
        const auto o = model.attend_all(0, q, lse);
        double mass = 0.0;
        for (uint32_t h = 0; h < ec.q_heads; ++h)
          mass += std::exp(answer.lse[h] - lse[h]) / ec.q_heads;
        const auto a = audit_of(s.get());
        EXPECT_NEAR(mass, a.mass_mean, 1e-4);
        EXPECT_GT(a.mass_mean, 0.7);
        EXPECT_GT(a.recall, 0.3);  // opened keys count
        // Honest estimates of noise are good ones.
        EXPECT_NEAR(a.missing_mean, a.estimated_missing_mean, 0.1);
        EXPECT_LE(a.estimated_missing_mean, 0.2001);
        EXPECT_LT(a.missing_error_mean, 0.15);
      }
    }
  }
}

TEST(Audit, OutliersAreNoTrouble) {
  auto ec = small_engine(2);
  ec.layers = 1;
  ec.kv_dtype = KEYHOLE_F32;
  auto sc = small_session();
  sc.audit_share = 1.0;
  sc.budget.top_k = 3;
  for (const float size : {1e4F, 1e12F, 1e19F, 3e19F}) {  // inner products beyond fp32 from 1e19 on
    const EnginePtr engine = make_engine(ec);
    const SessionPtr s = make_session(engine.get(), sc);
    const Shape shape(ec);
    Numbers numbers(3);
    auto k = numbers.many(shape.kv(300));
    for (size_t i = 0; i < k.size(); i += 7) k[i] *= size;
    const auto v = numbers.many(shape.kv(300));
    const auto tk = tensor(k, {300, shape.hkv, shape.d});
    const auto tv = tensor(v, {300, shape.hkv, shape.d});
    ASSERT_OK(keyhole_session_append(s.get(), 0, &tk, &tv, nullptr));
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    auto q = numbers.many(shape.q(1));
    for (float& x : q) x *= size;
    (void)attend_only(s.get(), shape, 0, q);
    const auto a = audit_of(s.get());
    EXPECT_EQ(ec.q_heads, a.audits);
    EXPECT_TRUE(std::isfinite(a.error_max)) << size;
    EXPECT_GE(a.mass_mean, 0.0);
    EXPECT_LE(a.mass_mean, 1.0);
  }
}

/// Sessions that are told the same; keeps all their answers.
class Told {
 public:
  Told(keyhole_engine* engine, const keyhole_engine_config& ec, const keyhole_session_config& sc,
       uint64_t seed)
      : shape_(ec), layers_(ec.layers), numbers_(seed), session_(make_session(engine, sc)) {}

  [[nodiscard]] keyhole_session* session() const { return session_.get(); }
  void replace(keyhole_session* other) { session_.reset(other); }

  void prefill(uint32_t n) {
    const auto k = numbers_.many(shape_.kv(n));
    const auto tk = tensor(k, {n, shape_.hkv, shape_.d});
    for (uint32_t l = 0; l < layers_; ++l)
      ASSERT_OK(keyhole_session_append(session(), l, &tk, &tk, nullptr));
    ASSERT_OK(keyhole_session_build(session(), nullptr, nullptr));
  }
  void step() {
    const auto k = numbers_.many(shape_.kv(1));
    auto q = numbers_.many(shape_.q(1));
    for (float& x : q) x *= 0.125F;
    const auto tk = tensor(k, {shape_.hkv, shape_.d});
    const auto tq = tensor(q, {shape_.hq, shape_.d});
    for (uint32_t l = 0; l < layers_; ++l) {
      std::vector<float> o(shape_.q(1));
      const auto out = tensor(o, {shape_.hq, shape_.d});
      ASSERT_OK(keyhole_session_attend(session(), l, &tq, &tk, &tk, &out, nullptr));
      answers.push_back(std::move(o));
    }
  }
  void steps(int n) {
    for (int i = 0; i < n; ++i) step();
  }

  std::vector<std::vector<float>> answers;

 private:
  Shape shape_;
  uint32_t layers_;
  Numbers numbers_;
  SessionPtr session_;
};

void expect_same_figures(const keyhole_audit& a, const keyhole_audit& b) {
  EXPECT_EQ(a.audits, b.audits);
  EXPECT_EQ(a.over_bound, b.over_bound);
  EXPECT_EQ(a.actions, b.actions);
  EXPECT_EQ(a.error_mean, b.error_mean);
  EXPECT_EQ(a.error_p95, b.error_p95);
  EXPECT_EQ(a.mass_mean, b.mass_mean);
  EXPECT_EQ(a.mass_p05, b.mass_p05);
  EXPECT_EQ(a.recall, b.recall);
  EXPECT_EQ(a.missing_error_mean, b.missing_error_mean);
}

keyhole_session_config audited_session(double share, keyhole_audit_action action) {
  auto sc = small_session();
  sc.index = "ivf:C=16,probe=2,segment=64,iters=2";
  sc.budget.top_k = 2;
  sc.append_block = 24;
  sc.audit_share = share;
  sc.audit_action = action;
  sc.audit_bound = 0.05F;
  return sc;
}

TEST(Audit, TheShareIsAuditedAndNoAnswerChanges) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  constexpr int kSteps = 500;
  Told none(engine.get(), ec, audited_session(0.0, KEYHOLE_AUDIT_REPORT), 3);
  none.prefill(400);
  none.steps(kSteps);
  EXPECT_EQ(0U, audit_of(none.session()).audits);
  for (const double share : {0.02, 0.5, 1.0}) {
    Told some(engine.get(), ec, audited_session(share, KEYHOLE_AUDIT_REPORT), 3);
    some.prefill(400);
    some.steps(kSteps);
    EXPECT_EQ(none.answers, some.answers);
    const auto a = audit_of(some.session());
    const double n = double{kSteps} * ec.layers * ec.kv_heads;
    const uint32_t group = ec.q_heads / ec.kv_heads;
    ASSERT_EQ(0U, a.audits % group);
    EXPECT_NEAR(static_cast<double>(a.audits / group), share * n,
                6.0 * std::sqrt(n * share * (1 - share)));
    uint64_t sum = 0;
    for (uint32_t l = 0; l < ec.layers; ++l) {
      for (uint32_t h = 0; h < ec.kv_heads; ++h) sum += audit_of(some.session(), l, h).audits;
      EXPECT_EQ(audit_of(some.session(), l).audits,
                audit_of(some.session(), l, 0).audits + audit_of(some.session(), l, 1).audits);
    }
    EXPECT_EQ(sum, a.audits);
    EXPECT_EQ(0U, a.actions);
    EXPECT_GT(a.error_mean, 0.0);
    EXPECT_GE(a.mass_mean, a.mass_p05);
  }
}

// Random calls; with one thread and with several everything must be the same, figures and answers, whatever
// audits and actions do meanwhile. Under ThreadSanitizer this is the test of everything that runs at once.
TEST(Audit, NothingDependsOnThreadsOrTime) {
  const std::string path =
      ::testing::TempDir() + "keyhole_audit_" + std::to_string(::getpid()) + ".bin";
  uint64_t actions = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    for (const keyhole_audit_action action :
         {KEYHOLE_AUDIT_REPORT, KEYHOLE_AUDIT_WIDEN, KEYHOLE_AUDIT_EXACT}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", action " + std::to_string(action));
      std::vector<std::vector<std::vector<float>>> answers;
      std::vector<keyhole_audit> figures;
      for (const uint32_t threads : {1U, 4U}) {
        const auto ec = small_engine(threads);
        const EnginePtr engine = make_engine(ec);
        auto sc = audited_session(seed % 2 == 0 ? 0.1 : 0.7, action);
        sc.budget.attend = static_cast<keyhole_attend_mode>(seed % 3);
        sc.budget.min_weight = 0.02F;
        sc.audit_bound = 0.3F;
        Told told(engine.get(), ec, sc, seed);
        Numbers choice(seed);
        told.prefill(300);
        for (int i = 0; i < 25 && !HasFatalFailure(); ++i) {
          told.steps(static_cast<int>(choice.below(16)));
          const uint32_t operation = choice.below(8);
          keyhole_session* copy = nullptr;
          if (operation == 0) {
            ASSERT_OK(keyhole_session_fork(told.session(), &copy));
            told.replace(copy);
          } else if (operation == 1) {
            ASSERT_OK(keyhole_session_save(told.session(), path.c_str()));
            ASSERT_OK(keyhole_session_load(engine.get(), path.c_str(), nullptr, &copy));
            told.replace(copy);
          } else if (operation == 2) {
            const uint32_t n = layer_tokens(told.session(), 0).total;
            ASSERT_OK(keyhole_session_truncate(told.session(), n - choice.below(100)));
          } else if (operation == 3) {
            figures.push_back(audit_of(told.session(), choice.below(2), KEYHOLE_ALL));
          } else if (operation == 4 && i % 3 == 0) {
            ASSERT_OK(keyhole_session_set_index(told.session(), sc.index));
            ASSERT_OK(keyhole_session_build(told.session(), nullptr, nullptr));
          } else if (operation == 5 && i % 3 == 0) {
            ASSERT_OK(keyhole_session_set_mode(told.session(), KEYHOLE_MODE_INDEXED,
                                               2 + choice.below(3)));
          }
        }
        figures.push_back(audit_of(told.session()));
        actions += figures.back().actions;
        answers.push_back(std::move(told.answers));
      }
      EXPECT_EQ(answers[0], answers[1]);
      ASSERT_EQ(0U, figures.size() % 2);
      for (size_t i = 0; i < figures.size() / 2; ++i)
        expect_same_figures(figures[i], figures[figures.size() / 2 + i]);
    }
  }
  EXPECT_GT(actions, 5U);
  std::filesystem::remove(path);
}

TEST(Audit, ASessionMayEndOrChangeAtAnyMoment) {
  for (uint64_t seed = 0; seed < 2 * kSeeds; ++seed) {
    const auto ec = small_engine(2);
    const EnginePtr engine = make_engine(ec);
    auto sc = audited_session(1.0, KEYHOLE_AUDIT_REPORT);
    sc.max_tokens = 16384;
    Told told(engine.get(), ec, sc, seed);
    told.prefill(kLongContext);
    told.steps(3 + static_cast<int>(seed % 3));
    if (seed % 4 == 0) continue;
    if (seed % 4 == 1) {
      keyhole_session* copy = nullptr;
      ASSERT_OK(keyhole_session_fork(told.session(), &copy));
      keyhole_session_destroy(copy);
      told.steps(2);
    } else if (seed % 4 == 2) {
      ASSERT_OK(keyhole_session_truncate(told.session(), 200));
      told.prefill(5000);
      told.steps(2);
    } else {
      // With a step that has begun.
      const Shape shape(ec);
      Numbers numbers(seed);
      const auto q = numbers.many(shape.q(1));
      const auto tq = tensor(q, {shape.hq, shape.d});
      ASSERT_OK(keyhole_session_attend_begin(told.session(), 0, &tq, nullptr, nullptr));
      keyhole_audit a;
      keyhole_audit_init(&a);
      EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_get_audit(told.session(), 0, 0, &a));
    }
  }
}

TEST(Audit, DenseLayersAreExact) {
  const auto ec = small_engine(2);
  const EnginePtr engine = make_engine(ec);
  auto sc = audited_session(1.0, KEYHOLE_AUDIT_EXACT);
  const uint32_t dense[] = {0};
  sc.dense_layers = dense;
  sc.dense_layer_count = 1;
  Told told(engine.get(), ec, sc, 4);
  told.prefill(500);
  told.steps(20);
  const auto a = audit_of(told.session(), 0);
  EXPECT_EQ(20U * ec.q_heads, a.audits);
  EXPECT_LT(a.error_max, 1e-5);
  EXPECT_EQ(1.0, a.recall);
  EXPECT_EQ(0U, a.actions);
  EXPECT_GT(audit_of(told.session(), 1).error_max, 0.05);
}

TEST(Audit, WhatIsNotAllowedIsRefusedAndDefaultsCanBeReadBack) {
  const auto ec = small_engine(1);
  const EnginePtr engine = make_engine(ec);
  const auto refused = [&](auto change, const char* text) {
    auto sc = small_session();
    change(sc);
    keyhole_session* s = nullptr;
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(engine.get(), &sc, &s));
    expect_error_text(text);
  };
  for (const double share : {-0.1, 1.1, std::nan("")})
    refused([&](auto& c) { c.audit_share = share; }, "audit_share is ");
  refused([](auto& c) { c.audit_action = 3; }, "audit_action is 3");
  for (const float bound : {-0.1F, INFINITY, std::nanf("")})
    refused([&](auto& c) { c.audit_bound = bound; }, "audit_bound is ");

  auto sc = audited_session(0.25, KEYHOLE_AUDIT_WIDEN);
  sc.audit_bound = 0.0F;
  const SessionPtr s = make_session(engine.get(), sc);
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  ASSERT_OK(keyhole_session_get_config(s.get(), &c));
  EXPECT_EQ(0.25, c.audit_share);
  EXPECT_EQ(KEYHOLE_AUDIT_WIDEN, c.audit_action);
  EXPECT_EQ(0.1F, c.audit_bound);
  keyhole_audit a;
  keyhole_audit_init(&a);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_get_audit(s.get(), ec.layers, 0, &a));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_get_audit(s.get(), 0, ec.kv_heads, &a));
  expect_error_text("kv_head is 2");
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_get_audit(s.get(), 0, 0, nullptr));
  keyhole_audit_init(nullptr);
  EXPECT_EQ(0U, audit_of(s.get()).audits);
}

}  // namespace
}  // namespace keyhole::test
