// Weights of partitions by their means, and weighted sums of rows, against double precision.
#include "tests/cpu/reference.h"
#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

/// Arguments of weigh_partitions() in guarded memory, outputs poisoned and with a gap between heads.
struct Partitions {
  Partitions(Rng& rng, uint32_t heads, size_t n, double sigma, double variance)
      : group(heads),
        count(n),
        score_stride(n + rng() % 5),
        out_stride(n + rng() % 5),
        scores(size_t{heads} * score_stride),
        sizes(n),
        variances(n),
        square_norms(heads),
        caps(heads),
        margins(heads),
        shifts(heads),
        weights(size_t{heads} * out_stride, kPoison),
        uncertainties(size_t{heads} * out_stride, kPoison),
        has_margins(rng() % 2 == 0) {
    auto normal = gaussian(rng);
    for (float& x : scores) x = static_cast<float>(sigma * normal());
    for (float& x : sizes) x = rng() % 6 == 0 ? 0.0F : static_cast<float>(1 + rng() % 300);
    for (float& x : variances) {
      x = rng() % 8 == 0 ? 0.0F : static_cast<float>(variance * std::exp(normal()));
    }
    for (uint32_t h = 0; h < heads; ++h) {
      square_norms[h] = static_cast<float>(10.0 * std::exp(normal()));
      shifts[h] = static_cast<float>(sigma * normal());
      caps[h] = rng() % 3 == 0 ? shifts[h] : shifts[h] - static_cast<float>(std::fabs(normal()));
      if (rng() % 7 == 0) caps[h] = kMinusInf;
      margins[h] = rng() % 4 == 0 ? 0.0F : static_cast<float>(std::fabs(normal()));
    }
  }
  [[nodiscard]] PartitionArgs args(const LogitParams& logits) const {
    return {.scores = scores.data(),
            .score_stride = score_stride,
            .group = group,
            .count = count,
            .sizes = sizes.data(),
            .variances = variances.data(),
            .square_norms = square_norms.data(),
            .logits = logits,
            .caps = caps.data(),
            .margins = has_margins ? margins.data() : nullptr,
            .shifts = shifts.data(),
            .weights = weights.data(),
            .uncertainties = uncertainties.data(),
            .out_stride = out_stride};
  }

  static constexpr float kPoison = -7.0F;
  uint32_t group;
  size_t count, score_stride, out_stride;
  GuardedArray<float> scores, sizes, variances, square_norms, caps, margins, shifts, weights,
      uncertainties;
  bool has_margins;
};

/// What fp32 may make of a weight and its uncertainty.
struct Interval {
  double weight_low, weight_high, uncertainty_low, uncertainty_high;
};

Interval true_weight(const Partitions& p, const PartitionArgs& a, uint32_t h, size_t i) {
  const double x = double{p.scores[h * p.score_stride + i]} * a.logits.scale;
  double mean = x;
  double slope = a.logits.scale;
  double slope_off = kEpsilon * std::fabs(slope);
  double mean_off = 3.0 * kEpsilon * std::fabs(x);
  if (a.logits.softcap > 0.0F) {
    const double share = std::tanh(x / a.logits.softcap);
    mean = a.logits.softcap * share;
    slope *= 1.0 - share * share;
    slope_off = 12.0 * kEpsilon * std::fabs(a.logits.scale);  // 1 - share^2 cancels
    mean_off = 12.0 * kEpsilon * std::fabs(mean);
  }
  const double product =
      double{p.square_norms[h]} * (a.variances != nullptr ? p.variances[i] : 0.0F);
  const double t = slope * slope * product;
  const double t_off =
      (2.0 * std::fabs(slope) * slope_off + slope_off * slope_off) * product + 6.0 * kEpsilon * t;
  const double t_low = std::max(0.0, t - t_off);
  const double t_high = t + t_off;
  const double cap = p.caps[h];
  const double shift = p.shifts[h];
  const double size = p.sizes[i];
  const double margin_off = kEpsilon * std::fabs(mean);
  const auto weight = [&](double least, double half, double sign) {
    double expected = least + half;
    expected += sign * 2.0 * kEpsilon * std::fabs(expected);
    expected = std::min(expected, cap);
    // The mean alone is a lower bound, as far as it is known. Nothing is above the shift.
    if (a.margins != nullptr) {
      expected = std::max(expected, least - a.margins[h] + sign * margin_off);
    }
    const double below = std::min(expected - shift, 0.0);
    if (below == -INFINITY) return 0.0;  // nothing is believed
    return size * std::exp(below + sign * 2.0 * kEpsilon * std::fabs(below)) *
           (1.0 + sign * 8.0 * kEpsilon);
  };
  Interval r{};
  r.weight_low = weight(mean - mean_off, t_low / 2, -1.0);
  r.weight_high = weight(mean + mean_off, t_high / 2, 1.0);
  // Weights below e^-60 of the shift are dropped.
  if (r.weight_low < size * std::exp(-59.999)) r.weight_low = 0.0;
  const auto spread = [&](double value, double sign) {
    const double e = std::exp(std::min(value, 2.0));
    return std::max(0.0, e - 1.0 + sign * 6.0 * kEpsilon * e);
  };
  const double share = 1.0 / std::max(size, 1.0);
  r.uncertainty_low =
      r.weight_low * r.weight_low * spread(t_low, -1.0) * share * (1.0 - 6.0 * kEpsilon) - 1e-37;
  r.uncertainty_high =
      r.weight_high * r.weight_high * spread(t_high, 1.0) * share * (1.0 + 6.0 * kEpsilon) + 1e-37;
  return r;
}

class WeighPartitions : public EveryLevel {
 protected:
  void check(const Partitions& p, const PartitionArgs& args) const {
    SCOPED_TRACE(testing::Message() << "group " << p.group << " count " << p.count << " softcap "
                                    << args.logits.softcap);
    kernels.weigh_partitions(args);
    for (uint32_t h = 0; h < p.group; ++h) {
      for (size_t i = 0; i < p.out_stride; ++i) {
        const float weight = p.weights[h * p.out_stride + i];
        const float uncertainty = p.uncertainties[h * p.out_stride + i];
        if (i >= p.count) {
          ASSERT_EQ(weight, Partitions::kPoison) << "written past the end";
          ASSERT_EQ(uncertainty, Partitions::kPoison) << "written past the end";
          continue;
        }
        const Interval truth = true_weight(p, args, h, i);
        ASSERT_GE(weight, truth.weight_low) << "head " << h << ", partition " << i;
        ASSERT_LE(weight, truth.weight_high) << "head " << h << ", partition " << i;
        if (args.uncertainties == nullptr) {
          ASSERT_EQ(uncertainty, Partitions::kPoison);
        } else {
          ASSERT_GE(uncertainty, std::max(0.0, truth.uncertainty_low))
              << "head " << h << ", partition " << i;
          ASSERT_LE(uncertainty, truth.uncertainty_high) << "head " << h << ", partition " << i;
        }
      }
    }
  }
};

TEST_P(WeighPartitions, EveryCountAndGroup) {
  Rng rng(31);
  for (size_t count = 0; count <= keyhole::test::unless_sanitized(200, 100); ++count) {
    for (const float cap : {0.0F, 4.0F}) {
      const Partitions p(rng, keyhole::test::some_group(count), count, 4.0, 0.1);
      check(p, p.args({0.5F, cap}));
      if (HasFatalFailure()) return;
    }
  }
  for (const uint32_t group : keyhole::test::kGroups) {
    const Partitions p(rng, group, 1001 + group, 8.0, 0.3);
    check(p, p.args({0.3F, group % 3 == 0 ? 20.0F : 0.0F}));
    if (HasFatalFailure()) return;
  }
}

TEST_P(WeighPartitions, VariancesAndUncertaintiesMayBeLeftOut) {
  Rng rng(32);
  for (int round = 0; round < 60; ++round) {
    const Partitions p(rng, keyhole::test::some_group(rng()), rng() % 70, 3.0, 0.2);
    PartitionArgs args = p.args({1.0F, round % 2 == 0 ? 10.0F : 0.0F});
    if (round % 3 != 0) args.variances = nullptr;
    if (round % 3 != 1) args.uncertainties = nullptr;
    check(p, args);
    if (HasFatalFailure()) return;
  }
}

// Wide partitions, sharp heads and soft-caps that saturate: within the truth, and under the cap.
TEST_P(WeighPartitions, HugeVariancesAndScores) {
  Rng rng(33);
  for (const double variance : {1e-30, 1.0, 1e4, 1e18, 1e30}) {
    for (const double sigma : {1e-3, 30.0, 1e4, 1e15}) {
      for (const float cap : {0.0F, 0.5F, 50.0F}) {
        const Partitions p(rng, 3, 77, sigma, variance);
        check(p, p.args({0.1F, cap}));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Two partitions of known keys: the weights by hand.
TEST_P(WeighPartitions, AnExampleByHand) {
  const float scores[] = {2.0F, -1.0F};
  const float sizes[] = {3.0F, 10.0F};
  const float variances[] = {0.0F, 0.25F};
  const float square_norms[] = {8.0F};
  const float caps[] = {0.25F};      // below the first mean, above the second
  const float margins[] = {0.125F};  // so much of the first mean is not believed
  const float shifts[] = {1.0F};
  float weights[2];
  float uncertainties[2];
  kernels.weigh_partitions({.scores = scores,
                            .score_stride = 2,
                            .group = 1,
                            .count = 2,
                            .sizes = sizes,
                            .variances = variances,
                            .square_norms = square_norms,
                            .logits = {0.5F, 0.0F},
                            .caps = caps,
                            .margins = margins,
                            .shifts = shifts,
                            .weights = weights,
                            .uncertainties = uncertainties,
                            .out_stride = 2});
  // Logits 1 and -0.5 + t/2, t = 0.25 * 8 * 0.25 = 0.5.
  EXPECT_NEAR(weights[0], 3.0 * std::exp(-0.125), 1e-5);
  EXPECT_NEAR(weights[1], 10.0 * std::exp(-1.25), 1e-5);
  EXPECT_EQ(uncertainties[0], 0.0F);
  EXPECT_NEAR(uncertainties[1], 10.0 * std::exp(-2.5) * std::expm1(0.5), 1e-5);
}

// Overflow of finite inputs gives scores that are not finite: finite weights all the same, no more than of keys
// at the shift, and those of the cap where the logit is not even a number.
TEST_P(WeighPartitions, BrokenScoresGiveFiniteWeights) {
  Rng rng(34);
  for (const float broken : {INFINITY, -INFINITY, NAN, 3e38F, -3e38F}) {
    for (const double variance : {0.1, 1e30}) {
      for (const float cap : {0.0F, 5.0F}) {
        for (const float scale : {0.1F, 1e10F}) {
          Partitions p(rng, 4, 50, 2.0, variance);
          for (size_t i = 0; i < p.count; i += 3) p.scores[(i % 4) * p.score_stride + i] = broken;
          p.square_norms[2] = 1e30F;
          for (float& x : p.variances) x = rng() % 5 == 0 ? 1e30F : x;
          kernels.weigh_partitions(p.args({scale, cap}));
          for (uint32_t h = 0; h < p.group; ++h) {
            for (size_t i = 0; i < p.count; ++i) {
              const float weight = p.weights[h * p.out_stride + i];
              const float uncertainty = p.uncertainties[h * p.out_stride + i];
              const double most = double{p.sizes[i]} * (1.0 + 1e-6);
              if (std::isnan(p.scores[h * p.score_stride + i])) {
                const double capped = p.sizes[i] * std::exp(double{p.caps[h]} - p.shifts[h]);
                ASSERT_NEAR(weight, capped, 1e-5 * capped);
              }
              ASSERT_GE(weight, 0.0F);  // false for NaN
              ASSERT_LE(weight, most);
              ASSERT_GE(uncertainty, 0.0F);
              ASSERT_LE(uncertainty, most * most * 6.4 / std::max(p.sizes[i], 1.0F) + 1e-37);
            }
          }
        }
      }
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(WeighPartitions);

class WeightedSum : public EveryLevel {
 protected:
  void check_random(Rng& rng, DType dtype, uint32_t dim, uint32_t group, size_t count) const {
    const size_t paddings[] = {0, 2, 3, 64, 100};
    const bool contiguous = rng() % 2 == 0;
    const size_t rows = contiguous ? count : count + rng() % 50;
    SCOPED_TRACE(testing::Message()
                 << dtype_name(dtype) << " dim " << dim << " group " << group << " count " << count
                 << (contiguous ? " contiguous" : " gathered"));
    const TestRows v(rows, dim, dtype, paddings[rng() % 5], gaussian(rng));
    const size_t stride = count + rng() % 4;
    GuardedArray<float> weights(size_t{group} * stride);
    auto normal = gaussian(rng);
    for (float& w : weights) w = static_cast<float>(normal() * std::exp(3.0 * normal()));
    GuardedArray<uint32_t> ids(count);
    for (size_t i = 0; i < count; ++i) {
      ids[i] = static_cast<uint32_t>(contiguous ? i : rng() % rows);  // repeated ones too
    }
    GuardedArray<float> o(size_t{group} * dim);
    for (float& x : o) x = static_cast<float>(10.0 * normal());
    const std::vector<float> before(o.begin(), o.end());
    kernels.weighted_sum[index_of(dtype)]({.weights = weights.data(),
                                           .weight_stride = stride,
                                           .group = group,
                                           .values = v.view,
                                           .ids = contiguous ? nullptr : ids.data(),
                                           .count = count,
                                           .o = o.data()});
    for (uint32_t h = 0; h < group; ++h) {
      for (uint32_t j = 0; j < dim; ++j) {
        double sum = before[h * dim + j];
        double magnitude = std::fabs(sum);
        for (size_t i = 0; i < count; ++i) {
          const double product = double{weights[h * stride + i]} * v.row(ids[i])[j];
          sum += product;
          magnitude += std::fabs(product);
        }
        const double bound = kEpsilon * (static_cast<double>(count) + 2.0) * magnitude;
        ASSERT_NEAR(o[h * dim + j], sum, count == 0 ? 0.0 : bound)
            << "head " << h << ", element " << j;
      }
    }
  }
};

TEST_P(WeightedSum, EveryShapeAndDType) {
  Rng rng(35);
  for (const DType dtype : kRowDTypes) {
    for (const uint32_t dim : kHeadDims) {
      for (const uint32_t group : keyhole::test::kGroups) {
        if (!keyhole::test::is_tried(dim, group)) continue;
        check_random(rng, dtype, dim, group, rng() % 150);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(WeightedSum, EveryRemainderOfTheBlock) {
  Rng rng(36);
  for (const DType dtype : kRowDTypes) {
    for (size_t count = 0; count <= keyhole::test::unless_sanitized(200, 100); ++count) {
      check_random(rng, dtype, some_head_dim(count), 1 + count % 5, count);
      if (HasFatalFailure()) return;
    }
  }
}

// What is taken away again is gone: the residual means of partitions rest on it.
TEST_P(WeightedSum, OppositeWeightsCancel) {
  Rng rng(37);
  const TestRows v(10, 64, DType::f16, 0, gaussian(rng));
  const uint32_t ids[] = {3, 3};
  const float weights[] = {0.7F, -0.7F};
  std::vector<float> o(64, 0.0F);
  kernels.weighted_sum[index_of(DType::f16)]({.weights = weights,
                                              .weight_stride = 2,
                                              .group = 1,
                                              .values = v.view,
                                              .ids = ids,
                                              .count = 2,
                                              .o = o.data()});
  for (const float x : o) EXPECT_NEAR(x, 0.0F, 1e-6);
}

KEYHOLE_FOR_EVERY_LEVEL(WeightedSum);

}  // namespace
}  // namespace keyhole::cpu::test
