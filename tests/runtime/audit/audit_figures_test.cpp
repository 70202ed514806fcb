// Figures and schedule of audits by themselves: quantiles against sorted values, merging, and who is chosen.
#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/audit/audit_figures.h"
#include "runtime/audit/audit_schedule.h"
#include "runtime/step/audit_record.h"

namespace keyhole::runtime {
namespace {

double nearest_rank(std::vector<double> v, double share) {
  std::sort(v.begin(), v.end());
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(v.size())));
  return v[std::max<size_t>(rank, 1) - 1];
}

TEST(AuditFigures, QuantilesAreWithin4Percent) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    std::lognormal_distribution<double> errors(-4.0 * (round % 4), 0.1 + 0.02 * round);
    LogHistogram<-8, 2> histogram;
    std::vector<double> values;
    const int n = 1 + round * 7;
    for (int i = 0; i < n; ++i) {
      values.push_back(errors(random));
      histogram.add(values.back());
    }
    for (const double share : {0.0, 0.05, 0.5, 0.95, 1.0}) {
      const double truth = nearest_rank(values, share);
      if (truth < 1e-8 || truth > 1e2) continue;
      EXPECT_NEAR(histogram.quantile(share), truth, 0.0182 * truth)
          << "round " << round << ", share " << share;
    }
    EXPECT_EQ(*std::max_element(values.begin(), values.end()), histogram.most());
  }
}

TEST(AuditFigures, ExtremesAndNothing) {
  LogHistogram<-8, 2> h;
  EXPECT_EQ(0.0, h.quantile(0.5));
  EXPECT_EQ(0.0, h.most());
  h.add(0.0);
  EXPECT_EQ(0.0, h.quantile(0.5));
  h.add(std::numeric_limits<double>::infinity());
  h.add(1e30);
  EXPECT_EQ(0.0, h.quantile(0.3));
  EXPECT_TRUE(std::isinf(h.quantile(1.0)));
  // Both ends of the scale, and a value that rounds to the next step.
  LogHistogram<-8, 2> ends;
  for (const double v : {1e-8, 1e2, std::nextafter(1e2, 0.0), std::nextafter(1e-8, 0.0)})
    ends.add(v);
  EXPECT_NEAR(1e2, ends.quantile(0.75), 2.0);
  EXPECT_NEAR(1e-8, ends.quantile(0.5), 2e-10);
}

AuditResult random_result(std::mt19937_64& random, uint32_t group) {
  std::uniform_real_distribution<float> unit(0.0F, 1.0F);
  AuditResult r;
  for (uint32_t h = 0; h < group; ++h) {
    r.error[h] = std::pow(10.0F, -5.0F * unit(random));
    r.missing[h] = std::pow(10.0F, -7.0F * unit(random));
    r.mass[h] = 1.0F - r.missing[h];
    r.recall[h] = unit(random);
  }
  r.has_recall = random() % 4 != 0;
  return r;
}

TEST(AuditFigures, MergedAreThoseOfAll) {
  std::mt19937_64 random(6);
  AuditFigures parts[3], whole;
  std::vector<double> errors, masses, missing, estimates, recalls;
  uint64_t over = 0;
  for (int i = 0; i < 3000; ++i) {
    const AuditResult r = random_result(random, 4);
    for (uint32_t h = 0; h < 4; ++h) {
      const float estimate = static_cast<float>(i % 10) * 0.01F;
      parts[i % 3].add(r, h, estimate, 0.05F);
      whole.add(r, h, estimate, 0.05F);
      errors.push_back(r.error[h]);
      masses.push_back(r.mass[h]);
      missing.push_back(r.missing[h]);
      estimates.push_back(std::abs(estimate - r.missing[h]));
      if (r.has_recall) recalls.push_back(r.recall[h]);
      over += r.error[h] > 0.05F ? 1 : 0;
    }
  }
  const auto mean = [](const std::vector<double>& v) {
    double sum = 0.0;
    for (const double x : v) sum += x;
    return sum / static_cast<double>(v.size());
  };
  parts[0].add_wait();
  whole.add_wait();
  parts[2].add_action();
  whole.add_action();
  AuditFigures merged;
  for (const AuditFigures& p : parts) merged.merge(p);
  for (const keyhole_audit& a : {merged.summary(), whole.summary()}) {
    EXPECT_EQ(12000U, a.audits);
    EXPECT_EQ(over, a.over_bound);
    EXPECT_EQ(1U, a.waits);
    EXPECT_EQ(1U, a.actions);
    EXPECT_NEAR(mean(errors), a.error_mean, 1e-9);
    EXPECT_NEAR(mean(masses), a.mass_mean, 1e-9);
    EXPECT_NEAR(mean(recalls), a.recall, 1e-9);
    EXPECT_NEAR(mean(missing), a.missing_mean, 1e-9);
    EXPECT_NEAR(0.045, a.estimated_missing_mean, 1e-7);
    EXPECT_NEAR(mean(estimates), a.missing_error_mean, 1e-9);
    const double median = nearest_rank(errors, 0.5);
    const double p95 = nearest_rank(errors, 0.95);
    EXPECT_NEAR(median, a.error_median, 0.04 * median);
    EXPECT_NEAR(p95, a.error_p95, 0.04 * p95);
    const double p99 = nearest_rank(errors, 0.99);
    EXPECT_NEAR(p99, a.error_p99, 0.04 * p99);
    EXPECT_EQ(nearest_rank(errors, 1.0), a.error_max);
    const double p05 = nearest_rank(masses, 0.05);
    EXPECT_NEAR(p05, a.mass_p05, 0.04 * std::min(p05, 1.0 - p05));
  }
}

TEST(AuditSchedule, ChoosesTheShareWithoutAPattern) {
  for (const double share : {0.0, 0.001, 0.01, 0.3, 1.0}) {
    const AuditSchedule schedule({32, 8}, share, KEYHOLE_AUDIT_REPORT);
    constexpr uint32_t kSteps = 2000;
    const auto expect_share = [&](uint64_t chosen, double n, const std::string& of) {
      // Six standard deviations of a binomial distribution, one failure in 1e9 honest ones; a few more
      // where the mean is below 1.
      EXPECT_NEAR(static_cast<double>(chosen), share * n,
                  6.0 * std::sqrt(n * share * (1.0 - share)) + (n * share < 1.0 ? 5.0 : 1e-9))
          << of << ", share " << share;
    };
    std::vector<uint64_t> of_layer(32), of_head(8), of_step(kSteps);
    uint64_t all = 0, neighbours = 0;
    for (uint32_t l = 0; l < 32; ++l) {
      for (uint32_t h = 0; h < 8; ++h) {
        bool before = false;
        for (uint32_t s = 0; s < kSteps; ++s) {
          const bool chosen = schedule.chosen(l, h, s);
          if (!chosen) {
            before = false;
            continue;
          }
          ++all;
          ++of_layer[l];
          ++of_head[h];
          ++of_step[s];
          neighbours += before ? 1 : 0;
          before = true;
        }
      }
    }
    expect_share(all, 32.0 * 8 * kSteps, "all");
    for (const uint64_t n : of_layer) expect_share(n, 8.0 * kSteps, "a layer");
    for (const uint64_t n : of_head) expect_share(n, 32.0 * kSteps, "a head");
    for (const uint64_t n : of_step) expect_share(n, 32.0 * 8, "a step");
    const double pairs = 32.0 * 8 * (kSteps - 1) * share * share;
    EXPECT_NEAR(static_cast<double>(neighbours), pairs, 8.0 * std::sqrt(pairs) + 1e-9);
  }
}

TEST(AuditSchedule, AnActionTakesEffect16StepsLaterAndOnce) {
  AuditSchedule s({2, 3}, 1.0, KEYHOLE_AUDIT_WIDEN);
  s.found_over_bound(1, 2, 5, 1, 0);
  s.found_over_bound(1, 2, 9, 1, 0);  // the same budget: nothing new
  for (uint64_t step = 6; step < 21; ++step) EXPECT_FALSE(s.act(1, 2, step)) << step;
  EXPECT_TRUE(s.act(1, 2, 21));
  EXPECT_EQ(2U, s.widening(1, 2).factor);
  s.found_over_bound(1, 2, 10, 1, 0);  // of the budget of old
  EXPECT_FALSE(s.act(1, 2, 40));
  for (uint32_t factor = 2; factor < 16; factor *= 2) {
    s.found_over_bound(1, 2, 100 * factor, factor, 0);
    EXPECT_TRUE(s.act(1, 2, 100 * factor + 16));
  }
  EXPECT_EQ(16U, s.widening(1, 2).factor);
  s.found_over_bound(1, 2, 5000, 16, 0);  // no further
  EXPECT_FALSE(s.act(1, 2, 6000));
  EXPECT_EQ(1U, s.widening(1, 1).factor);
  s.reset_widening(5);
  EXPECT_EQ(1U, s.widening(1, 2).factor);
  s.found_over_bound(1, 2, 7000, 1, 0);
  EXPECT_FALSE(s.act(1, 2, 8000));
  s.found_over_bound(1, 2, 8000, 1, 1);
  EXPECT_TRUE(s.act(1, 2, 8016));
  s.found_over_bound(1, 1, 8000, 1, 0);  // others are what they were
  EXPECT_TRUE(s.act(1, 1, 8016));
}

TEST(AuditSchedule, RestoresOnlyWhatASessionCanHave) {
  using Widening = AuditSchedule::Widening;
  const auto restores = [](keyhole_audit_action action, Widening widening, uint64_t now = 100) {
    AuditSchedule s({1, 2}, 0.5, action);
    return s.restore({now}, {widening, {}});
  };
  EXPECT_TRUE(restores(KEYHOLE_AUDIT_WIDEN, {8, false, 115}));
  EXPECT_TRUE(restores(KEYHOLE_AUDIT_WIDEN, {16, false, AuditSchedule::kNever}));
  EXPECT_TRUE(restores(KEYHOLE_AUDIT_EXACT, {1, true, AuditSchedule::kNever}));
  EXPECT_TRUE(restores(KEYHOLE_AUDIT_EXACT, {1, false, 100}));
  EXPECT_TRUE(restores(KEYHOLE_AUDIT_REPORT, {}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_WIDEN, {0, false, AuditSchedule::kNever}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_WIDEN, {3, false, AuditSchedule::kNever}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_WIDEN, {32, false, AuditSchedule::kNever}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_WIDEN, {16, false, 110}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_WIDEN, {2, true, AuditSchedule::kNever}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_WIDEN, {2, false, 99}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_WIDEN, {2, false, 116}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_EXACT, {2, false, AuditSchedule::kNever}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_EXACT, {1, true, 101}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_REPORT, {1, false, 101}));
  EXPECT_FALSE(restores(KEYHOLE_AUDIT_REPORT, {2, false, AuditSchedule::kNever}));
  AuditSchedule s({1, 2}, 0.5, KEYHOLE_AUDIT_WIDEN);
  EXPECT_FALSE(s.restore({1, 2}, {{}, {}}));
  EXPECT_FALSE(s.restore({1}, {{}}));
}

TEST(RowSet, HoldsWhatWasAddedSinceItWasCleared) {
  std::mt19937_64 random(7);
  RowSet set(5000);
  for (int round = 0; round < 50; ++round) {
    const auto rows = static_cast<uint32_t>(random() % 5001);
    set.clear(rows);
    std::set<uint32_t> truth;
    std::vector<uint32_t> added;
    for (uint32_t i = 0; i < rows / 3; ++i) {
      added.push_back(static_cast<uint32_t>(random() % rows));
      truth.insert(added.back());
    }
    set.add(added);
    for (uint32_t r = 0; r < rows; ++r) ASSERT_EQ(truth.contains(r), set.contains(r));
  }
}

}  // namespace
}  // namespace keyhole::runtime
