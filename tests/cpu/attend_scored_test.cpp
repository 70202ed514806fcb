// Attention from given scores, log-sum-exp and the filter by score, against double precision.
//
// Keys with one nonzero element per head make the inner products of the truth equal to the scores, exactly.
#include "tests/cpu/reference.h"
#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

struct Scores {
  Scores(Rng& rng, uint32_t heads, size_t keys, double sigma)
      : group(heads), count(keys), stride(keys + rng() % 5), all(size_t{heads} * stride) {
    auto value = gaussian(rng, sigma);
    for (float& x : all) x = static_cast<float>(value());
  }
  [[nodiscard]] float at(uint32_t h, size_t i) const { return all[h * stride + i]; }

  uint32_t group;
  size_t count, stride;
  GuardedArray<float> all;
};

/// fp32 keys `[rows, dim]` such that head h's unit query has the score of (h, i) with key ids[i].
TestRows keys_of(const Scores& scores, std::span<const uint32_t> ids, size_t rows, uint32_t dim) {
  std::vector<double> element(rows * dim, 0.0);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (uint32_t h = 0; h < scores.group; ++h) element[ids[i] * dim + h] = scores.at(h, i);
  }
  return {rows, dim, DType::f32, 0, [&](size_t i, uint32_t j) { return element[i * dim + j]; }};
}

GuardedArray<float> unit_queries(uint32_t group, uint32_t dim) {
  GuardedArray<float> q(size_t{group} * dim);
  for (uint32_t h = 0; h < group; ++h) q[h * dim + h] = 1.0F;
  return q;
}

double logit_of(double score, const LogitParams& p) {
  const double x = score * p.scale;
  return p.softcap > 0.0F ? p.softcap * std::tanh(x / p.softcap) : x;
}

double true_lse(const Scores& s, uint32_t h, const LogitParams& p) {
  double top = -INFINITY;
  double sum = 0.0;
  for (size_t i = 0; i < s.count; ++i) top = std::max(top, logit_of(s.at(h, i), p));
  for (size_t i = 0; i < s.count; ++i) sum += std::exp(logit_of(s.at(h, i), p) - top);
  return s.count == 0 ? -INFINITY : top + std::log(sum);
}

class AttendScored : public EveryLevel {
 protected:
  void attend(const Scores& s, const RowsView& values, const uint32_t* ids, size_t count,
              const LogitParams& logits, const OutState& out) const {
    kernels.attend_scored[index_of(values.dtype)]({.scores = s.all.data(),
                                                   .score_stride = s.stride,
                                                   .group = s.group,
                                                   .values = values,
                                                   .ids = ids,
                                                   .count = count,
                                                   .logits = logits,
                                                   .o = out.o.data(),
                                                   .lse = out.lse.data()});
  }

  void check_random(Rng& rng, DType dtype, uint32_t dim, uint32_t group, size_t count,
                    const LogitParams& logits, double sigma) {
    const size_t paddings[] = {0, 2, 3, 64, 100};
    const bool contiguous = rng() % 2 == 0;
    const size_t rows = contiguous ? count : count + rng() % 50;
    const TestRows v(rows, dim, dtype, paddings[rng() % 5], gaussian(rng));
    auto ids = random_distinct_ids(rng, rows, count);
    if (contiguous) std::iota(ids.begin(), ids.end(), 0U);
    const Scores scores(rng, group, count, sigma);
    SCOPED_TRACE(testing::Message()
                 << dtype_name(dtype) << " dim " << dim << " group " << group << " count " << count
                 << (contiguous ? " contiguous" : " gathered"));
    const OutState out(group, dim);
    // A guarded copy: prefetches may pass the end of the list, reads may not.
    GuardedArray<uint32_t> list(count);
    std::copy(ids.begin(), ids.end(), list.begin());
    attend(scores, v.view, contiguous ? nullptr : list.data(), count, logits, out);
    const TestRows k = keys_of(scores, ids, rows, dim);
    const auto queries = unit_queries(group, dim);
    expect_state(out, true_state(k, v, ids, queries.data(), group, logits, GetParam()));
    if (dtype != DType::f32 || count == 0) return;
    // What is left of attention when the inner products are exact: the same bits.
    const OutState whole(group, dim);
    attend_ids(kernels, {k.view, v.view}, ids, queries.data(), group, logits, whole.view());
    EXPECT_TRUE(std::equal(out.o.begin(), out.o.end(), whole.o.begin()));
    EXPECT_TRUE(std::equal(out.lse.begin(), out.lse.end(), whole.lse.begin()));
  }
};

TEST_P(AttendScored, EveryShapeAndDType) {
  Rng rng(21);
  for (const DType dtype : kRowDTypes) {
    for (const uint32_t dim : kHeadDims) {
      for (const uint32_t group : keyhole::test::kGroups) {
        if (!keyhole::test::is_tried(dim, group)) continue;
        // The truth's queries are unit vectors.
        check_random(rng, dtype, dim, std::min(group, dim), rng() % 150, {0.3F, 0.0F}, 8.0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(AttendScored, EveryRemainderOfTheBlock) {
  Rng rng(22);
  for (const DType dtype : kRowDTypes) {
    for (size_t count = 0; count <= keyhole::test::unless_sanitized(130, 66); ++count) {
      check_random(rng, dtype, some_head_dim(count), 1 + count % 5, count, {1.0F, 0.0F}, 2.0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttendScored, ThousandsOfTokensAndSoftCap) {
  Rng rng(23);
  for (const size_t count : {1000, 2047, 4096}) {
    for (const float cap : {0.0F, 0.5F, 30.0F}) {
      check_random(rng, kRowDTypes[rng() % 4], 128, 1 + rng() % 8, count, {0.7F, cap}, 5.0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttendScored, LogitsOfTenThousand) {
  Rng rng(24);
  for (const DType dtype : kRowDTypes) check_random(rng, dtype, 96, 4, 200, {1.0F, 0.0F}, 3e3);
}

TEST_P(AttendScored, NoTokensGiveTheEmptyState) {
  Rng rng(25);
  const TestRows v(3, 64, DType::f16, 0, gaussian(rng));
  const Scores scores(rng, 5, 0, 1.0);
  const OutState out(5, 64);
  attend(scores, v.view, nullptr, 0, {}, out);
  for (const float lse : out.lse) EXPECT_EQ(lse, kMinusInf);
  for (const float o : out.o) EXPECT_EQ(o, 0.0F);
}

TEST_P(AttendScored, SumsOfHugeValuesStayFinite) {
  Rng rng(26);
  const float max = std::numeric_limits<float>::max();
  const TestRows v(150, 80, DType::f32, 0, [&](size_t, uint32_t) { return max; });
  const Scores scores(rng, 3, 150, 0.01);
  const OutState out(3, 80);
  attend(scores, v.view, nullptr, 150, {}, out);
  for (const float x : out.o) ASSERT_EQ(x, max);
  for (const float x : out.lse) ASSERT_TRUE(std::isfinite(x));
}

TEST_P(AttendScored, OverflowedScoresAreTold) {
  Rng rng(27);
  const TestRows v(70, 64, DType::f16, 0, gaussian(rng));
  for (const float broken : {INFINITY, NAN}) {
    for (const size_t at : {0, 5, 63, 64, 69}) {
      Scores scores(rng, 3, 70, 1.0);
      scores.all[scores.stride + at] = broken;
      const OutState out(3, 64);
      attend(scores, v.view, nullptr, 70, {}, out);
      EXPECT_TRUE(std::isfinite(out.lse[0]));
      EXPECT_FALSE(std::isfinite(out.lse[1]));
      EXPECT_TRUE(std::isfinite(out.lse[2]));
      EXPECT_FALSE(std::isfinite(kernels.log_sum_exp(scores.all.data() + scores.stride, 70, {})));
    }
  }
  Scores scores(rng, 1, 70, 1.0);
  std::fill(scores.all.begin(), scores.all.end(), kMinusInf);
  const OutState out(1, 64);
  attend(scores, v.view, nullptr, 70, {}, out);
  EXPECT_FALSE(std::isfinite(out.lse[0]));
}

TEST_P(AttendScored, LogSumExp) {
  Rng rng(28);
  for (size_t count = 0; count < 300; ++count) {
    const LogitParams logits{0.01F * static_cast<float>(1 + rng() % 200),
                             count % 3 == 0 ? 20.0F : 0.0F};
    const Scores s(rng, 1, count, 10.0);
    const double truth = true_lse(s, 0, logits);
    const float got = kernels.log_sum_exp(s.all.data(), count, logits);
    if (count == 0) {
      EXPECT_EQ(got, kMinusInf);
    } else {
      double widest = 0.0;
      for (size_t i = 0; i < count; ++i) {
        widest = std::max(widest, std::fabs(logit_of(s.at(0, i), logits)));
      }
      ASSERT_NEAR(got, truth, kEpsilon * (12.0 * widest + 100.0)) << "count " << count;
    }
  }
}

TEST_P(AttendScored, KeepAboveIsTheFilterInOrder) {
  Rng rng(29);
  for (int round = 0; round < 400; ++round) {
    const uint32_t group = keyhole::test::some_group(rng());
    const size_t count = rng() % 140;
    Scores s(rng, group, count, 1.0);
    // From nothing to everything; some ties with the threshold, which are not above it.
    std::vector<float> thresholds(group);
    auto value = gaussian(rng, 2.0);
    const double shift = static_cast<double>(rng() % 9) - 4.0;
    for (float& t : thresholds) t = static_cast<float>(value() + shift);
    if (count > 0) thresholds[0] = s.at(0, rng() % count);
    if (count > 0 && round % 4 == 0) s.all[rng() % count] = NAN;
    GuardedArray<uint32_t> ids(count);
    for (uint32_t& id : ids) id = static_cast<uint32_t>(rng());

    std::vector<uint32_t> expected_ids;
    std::vector<std::vector<float>> expected(group);
    for (size_t i = 0; i < count; ++i) {
      bool above = false;
      for (uint32_t h = 0; h < group; ++h) above = above || s.at(h, i) > thresholds[h];
      if (!above) continue;
      expected_ids.push_back(ids[i]);
      for (uint32_t h = 0; h < group; ++h) expected[h].push_back(s.at(h, i));
    }
    const size_t kept = kernels.keep_above({.scores = s.all.data(),
                                            .score_stride = s.stride,
                                            .group = group,
                                            .ids = ids.data(),
                                            .count = count,
                                            .thresholds = thresholds.data()});
    ASSERT_EQ(kept, expected_ids.size());
    EXPECT_TRUE(std::equal(expected_ids.begin(), expected_ids.end(), ids.begin()));
    for (uint32_t h = 0; h < group && kept > 0; ++h) {
      // Bits, because a NaN may have been kept for another head's sake.
      EXPECT_EQ(0,
                std::memcmp(expected[h].data(), s.all.data() + h * s.stride, kept * sizeof(float)));
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(AttendScored);

}  // namespace
}  // namespace keyhole::cpu::test
