// Partial attention against double precision: shapes, dtypes, counts, gathers, extreme logits.
#include "tests/cpu/reference.h"
#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

class Attend : public EveryLevel {
 protected:
  /// Attends rows `ids` (or all, where `contiguous`) and compares with the truth.
  void check(const TestRows& k, const TestRows& v, std::span<const uint32_t> ids, bool contiguous,
             const GuardedArray<float>& queries, uint32_t group, const LogitParams& logits) {
    const OutState out(group, k.view.dim);
    const KvView kv{k.view, v.view};
    if (contiguous) {
      attend_range(kernels, kv, queries.data(), group, logits, out.view());
    } else {
      attend_ids(kernels, kv, ids, queries.data(), group, logits, out.view());
    }
    expect_state(out, true_state(k, v, ids, queries.data(), group, logits, GetParam()));
  }

  void check_random(Rng& rng, DType dtype, uint32_t dim, uint32_t group, size_t count,
                    const LogitParams& logits, double query_sigma = 1.0) {
    const size_t paddings[] = {0, 2, 3, 64, 100};
    const TestRows k(count, dim, dtype, paddings[rng() % 5], gaussian(rng));
    const TestRows v(count, dim, dtype, paddings[rng() % 5], gaussian(rng));
    const auto queries = random_queries(rng, group, dim, query_sigma);
    const bool contiguous = rng() % 2 == 0;
    auto ids = random_distinct_ids(rng, count, contiguous ? count : rng() % (count + 1));
    if (contiguous) std::iota(ids.begin(), ids.end(), 0U);
    SCOPED_TRACE(testing::Message()
                 << dtype_name(dtype) << " dim " << dim << " group " << group << " count "
                 << ids.size() << " of " << count << (contiguous ? " contiguous" : " gathered"));
    check(k, v, ids, contiguous, queries, group, logits);
  }
};

LogitParams usual(uint32_t dim) { return {1.0F / std::sqrt(static_cast<float>(dim)), 0.0F}; }

TEST_P(Attend, EveryShapeAndDType) {
  Rng rng(1);
  for (const DType dtype : kRowDTypes) {
    for (const uint32_t dim : kHeadDims) {
      for (const uint32_t group : keyhole::test::kGroups) {
        if (!keyhole::test::is_tried(dim, group)) continue;
        check_random(rng, dtype, dim, group, rng() % 150, usual(dim));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Attend, EveryRemainderOfTheBlock) {
  Rng rng(2);
  for (const DType dtype : kRowDTypes) {
    for (size_t count = 0; count <= keyhole::test::unless_sanitized(130, 66); ++count) {
      check_random(rng, dtype, some_head_dim(count), 1 + count % 5, count, usual(64));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Attend, ThousandsOfTokens) {
  Rng rng(3);
  for (const size_t count : {1000, 2047, 4096}) {
    for (const uint32_t group : {1, 4, 7}) {
      check_random(rng, kRowDTypes[rng() % 4], 128, group, count, usual(128), 3.0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Attend, SoftCap) {
  Rng rng(4);
  for (const float cap : {0.5F, 5.0F, 30.0F, 50.0F}) {
    for (const uint32_t group : {1, 3, 8}) {
      check_random(rng, DType::f16, 96, group, 200, {1.0F, cap}, 2.0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Attend, LogitsOfTenThousand) {
  Rng rng(5);
  for (const DType dtype : kRowDTypes) {
    for (const uint32_t dim : kHeadDims) {
      // |q.k| has a standard deviation of sqrt(dim); the scale takes three of them to 1e4.
      const LogitParams logits{1e4F / (3.0F * std::sqrt(static_cast<float>(dim))), 0.0F};
      check_random(rng, dtype, dim, 4, 200, logits);
      if (HasFatalFailure()) return;
    }
  }
}

// Inner products of one nonzero element are exact, so the bound has no room for a lost digit.
TEST_P(Attend, ExactLogitsOfTenThousand) {
  Rng rng(6);
  for (const DType dtype : kRowDTypes) {
    const uint32_t dim = 64;
    const double big = dtype == DType::bf16 ? 9984.0 : 10000.0;  // representable in the dtype
    const size_t count = 200;
    std::vector<double> logit(count);
    for (double& x : logit) x = rng() % 2 == 0 ? -big : big;
    for (size_t i = 0; i < count; i += 10) logit[i] = static_cast<double>(rng() % 100);
    const TestRows k(count, dim, dtype, 0,
                     [&](size_t i, uint32_t j) { return j == 5 ? logit[i] : 0.0; });
    const TestRows v(count, dim, dtype, 0, gaussian(rng));
    GuardedArray<float> queries(size_t{3} * dim);
    queries[5] = 1.0F;         // logits up to 1e4
    queries[dim + 5] = -1.0F;  // the others win
    queries[2 * dim + 5] = 0.015625F;
    std::vector<uint32_t> ids(count);
    std::iota(ids.begin(), ids.end(), 0U);
    check(k, v, ids, true, queries, 3, {1.0F, 0.0F});
  }
}

TEST_P(Attend, IdenticalKeysGiveTheMeanOfTheValues) {
  Rng rng(7);
  const size_t count = 333;
  const uint32_t dim = 80;
  const TestRows k(count, dim, DType::f32, 0, [](size_t, uint32_t j) { return 0.01 * j - 0.3; });
  const TestRows v(count, dim, DType::f32, 0, gaussian(rng));
  const auto queries = random_queries(rng, 2, dim);
  const OutState out(2, dim);
  attend_range(kernels, {k.view, v.view}, queries.data(), 2, usual(dim), out.view());
  for (uint32_t h = 0; h < 2; ++h) {
    double logit = 0.0;
    for (uint32_t j = 0; j < dim; ++j) logit += queries[h * dim + j] * k.exact[j];
    logit *= usual(dim).scale;
    EXPECT_NEAR(out.lse[h], logit + std::log(333.0), 1e-5);
    for (uint32_t j = 0; j < dim; ++j) {
      double mean = 0.0;
      for (size_t i = 0; i < count; ++i) mean += v.exact[i * dim + j] / count;
      EXPECT_NEAR(out.o[h * dim + j], mean, 1e-5);
    }
  }
}

TEST_P(Attend, NoTokensGiveTheEmptyState) {
  Rng rng(8);
  for (const DType dtype : kRowDTypes) {
    const TestRows k(10, 64, dtype, 0, gaussian(rng));
    const auto queries = random_queries(rng, 5, 64);
    for (const bool contiguous : {true, false}) {
      const OutState out(5, 64);
      const KvView none{k.view.slice(3, 0), k.view.slice(3, 0)};
      if (contiguous) {
        attend_range(kernels, none, queries.data(), 5, {}, out.view());
      } else {
        attend_ids(kernels, {k.view, k.view}, {}, queries.data(), 5, {}, out.view());
      }
      for (const float lse : out.lse) EXPECT_EQ(lse, kMinusInf);
      for (const float o : out.o) EXPECT_EQ(o, 0.0F);
    }
  }
}

TEST_P(Attend, GatheringAllRowsInOrderGivesTheSameBitsAsTheRange) {
  Rng rng(9);
  for (const DType dtype : kRowDTypes) {
    const uint32_t dim = 128;
    const size_t count = 300;
    const TestRows k(count, dim, dtype, 5, gaussian(rng));
    const TestRows v(count, dim, dtype, 0, gaussian(rng));
    const auto queries = random_queries(rng, 6, dim);
    std::vector<uint32_t> ids(count);
    std::iota(ids.begin(), ids.end(), 0U);
    const OutState range(6, dim);
    const OutState gathered(6, dim);
    attend_range(kernels, {k.view, v.view}, queries.data(), 6, usual(dim), range.view());
    attend_ids(kernels, {k.view, v.view}, ids, queries.data(), 6, usual(dim), gathered.view());
    EXPECT_TRUE(std::equal(range.o.begin(), range.o.end(), gathered.o.begin()));
    EXPECT_TRUE(std::equal(range.lse.begin(), range.lse.end(), gathered.lse.begin()));
  }
}

// An int8 number times its scale is exact in fp32, so that nothing else differs from fp32 rows of the same numbers.
TEST_P(Attend, Int8RowsGiveTheBitsOfTheFp32RowsThatTheyStandFor) {
  Rng rng(12);
  for (const uint32_t dim : kHeadDims) {
    const size_t count = 700;
    const TestRows k(count, dim, DType::i8, 3, gaussian(rng));
    const TestRows v(count, dim, DType::i8, 0, gaussian(rng));
    const auto wide = [&](const TestRows& rows) {
      return TestRows(count, dim, DType::f32, 0,
                      [&](size_t i, uint32_t j) { return rows.exact[i * dim + j]; });
    };
    const TestRows wide_k = wide(k), wide_v = wide(v);
    const auto queries = random_queries(rng, 5, dim);
    const auto ids = random_distinct_ids(rng, count, 333);
    const OutState narrow(5, dim), whole(5, dim);
    attend_ids(kernels, {k.view, v.view}, ids, queries.data(), 5, usual(dim), narrow.view());
    attend_ids(kernels, {wide_k.view, wide_v.view}, ids, queries.data(), 5, usual(dim),
               whole.view());
    EXPECT_TRUE(std::equal(narrow.o.begin(), narrow.o.end(), whole.o.begin()));
    EXPECT_TRUE(std::equal(narrow.lse.begin(), narrow.lse.end(), whole.lse.begin()));
    // Slices begin anywhere in a block.
    for (const size_t begin : {1, 255, 256, 400}) {
      const KvView part{k.view.slice(begin, 290), v.view.slice(begin, 290)};
      const KvView wide_part{wide_k.view.slice(begin, 290), wide_v.view.slice(begin, 290)};
      attend_range(kernels, part, queries.data(), 5, usual(dim), narrow.view());
      attend_range(kernels, wide_part, queries.data(), 5, usual(dim), whole.view());
      EXPECT_TRUE(std::equal(narrow.o.begin(), narrow.o.end(), whole.o.begin()));
      EXPECT_TRUE(std::equal(narrow.lse.begin(), narrow.lse.end(), whole.lse.begin()));
    }
  }
}

// One token: lse is the logit itself, which shows the soft-cap's tanh alone.
TEST_P(Attend, TanhOfTheSoftCapIsAccurate) {
  const uint32_t dim = 64;
  const TestRows v(1, dim, DType::f32, 0, [](size_t, uint32_t) { return 1.0; });
  for (double x = -12.0; x <= 12.0; x += 0.0037) {
    const TestRows k(1, dim, DType::f32, 0, [&](size_t, uint32_t j) { return j == 9 ? x : 0.0; });
    GuardedArray<float> query(dim);
    query[9] = 1.0F;
    const OutState out(1, dim);
    attend_range(kernels, {k.view, v.view}, query.data(), 1, {1.0F, 1.0F}, out.view());
    const double exact = std::tanh(k.exact[9]);
    ASSERT_NEAR(out.lse[0], exact, 6.0 * kEpsilon * std::fabs(exact)) << "x " << x;
  }
}

// Two tokens with logits 0 and x and values 0 and 1: o = e^x / (1 + e^x) shows the exponential alone.
TEST_P(Attend, ExponentialIsAccurate) {
  const uint32_t dim = 64;
  const TestRows v(2, dim, DType::f32, 0,
                   [](size_t i, uint32_t) { return static_cast<double>(i); });
  for (double x = -75.0; x <= 0.0; x += 0.0213) {
    const TestRows k(2, dim, DType::f32, 0,
                     [&](size_t i, uint32_t j) { return i == 1 && j == 9 ? x : 0.0; });
    GuardedArray<float> query(dim);
    query[9] = 1.0F;
    const OutState out(1, dim);
    attend_range(kernels, {k.view, v.view}, query.data(), 1, {1.0F, 0.0F}, out.view());
    const double weight = std::exp(k.exact[dim + 9]);
    const double exact = k.exact[dim + 9] < -60.0 ? 0.0 : weight / (1.0 + weight);
    // e^x 2.2 eps, the sum 1, its inverse 1, the product 1; rounded up.
    ASSERT_NEAR(out.o[0], exact, 6.0 * kEpsilon * exact) << "x " << x;
  }
}

// Finite inputs whose inner products or sums pass fp32's range: still finite, still right.
TEST_P(Attend, HugeFiniteInputsStayFinite) {
  Rng rng(10);
  const float max = std::numeric_limits<float>::max();
  for (const DType dtype : {DType::f32, DType::bf16, DType::i8}) {
    const uint32_t dim = 80;
    const size_t count = 150;
    // Keys near 3e38 of both signs: products of both infinities would make NaN in fp32.
    const TestRows k(count, dim, dtype, 0,
                     [&](size_t, uint32_t) { return (rng() % 2 == 0 ? 3e38 : -3e38); });
    const TestRows v(count, dim, dtype, 0, gaussian(rng));
    const auto queries = random_queries(rng, 3, dim, 1e3);
    const OutState out(3, dim);
    attend_range(kernels, {k.view, v.view}, queries.data(), 3, {1.0F, 0.0F}, out.view());
    for (const float x : out.o) ASSERT_TRUE(std::isfinite(x));
    for (const float x : out.lse) ASSERT_TRUE(std::isfinite(x));

    // Values near 3e38: their weighted mean is finite, their sum is not.
    const TestRows small(count, dim, dtype, 0, gaussian(rng, 0.01));
    const TestRows huge(count, dim, dtype, 0, [](size_t, uint32_t) { return 3e38; });
    const OutState mean(3, dim);
    attend_range(kernels, {small.view, huge.view}, queries.data(), 3, {1e-4F, 0.0F}, mean.view());
    for (const float x : mean.o) ASSERT_NEAR(x / huge.exact[0], 1.0, 1e-6);

    const TestRows maximal(count, dim, DType::f32, 0, [&](size_t, uint32_t) { return max; });
    const TestRows keys(count, dim, DType::f32, 0, gaussian(rng, 0.01));
    attend_range(kernels, {keys.view, maximal.view}, queries.data(), 3, {1e-4F, 0.0F}, mean.view());
    for (const float x : mean.o) ASSERT_EQ(x, max);
  }
}

// The largest key wins outright when logits differ by more than fp32 can weigh, wherever it lies.
TEST_P(Attend, ADominantTokenAnywhereTakesAll) {
  const uint32_t dim = 64;
  const size_t count = 200;
  for (size_t winner = 0; winner < count; winner += 7) {
    const TestRows k(count, dim, DType::f16, 0, [&](size_t i, uint32_t j) {
      return j == 0 ? (i == winner ? 500.0 : -500.0) : 0.0;
    });
    const TestRows v(count, dim, DType::f16, 0,
                     [](size_t i, uint32_t j) { return static_cast<double>(i) + j / 64.0; });
    GuardedArray<float> queries(size_t{2} * dim);
    queries[0] = 1.0F;
    queries[dim] = 20.0F;
    const OutState out(2, dim);
    attend_range(kernels, {k.view, v.view}, queries.data(), 2, {1.0F, 0.0F}, out.view());
    EXPECT_EQ(out.lse[0], 500.0F);
    EXPECT_EQ(out.lse[1], 10000.0F);
    for (uint32_t j = 0; j < 2 * dim; ++j) {
      ASSERT_EQ(out.o[j], static_cast<float>(v.row(winner)[j % dim])) << "winner " << winner;
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(Attend);

}  // namespace
}  // namespace keyhole::cpu::test
