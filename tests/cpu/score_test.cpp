// Inner products of keys with a group: fp32, fp16, bf16 against double, int8 bit for bit.
#include "tests/cpu/reference.h"

namespace keyhole::cpu::test {
namespace {

/// The rows that a call scores: all in order, or a list with repeats.
struct Selection {
  std::vector<uint32_t> rows;
  bool contiguous;

  Selection(Rng& rng, size_t available) : rows(available), contiguous(rng() % 2 == 0) {
    std::iota(rows.begin(), rows.end(), 0U);
    if (contiguous || available == 0) return;
    rows.resize(rng() % (2 * available + 1));
    for (uint32_t& id : rows) id = static_cast<uint32_t>(rng() % available);
  }
  [[nodiscard]] const uint32_t* ids() const { return contiguous ? nullptr : rows.data(); }
};

class Score : public EveryLevel {
 protected:
  void check(Rng& rng, DType dtype, uint32_t dim, uint32_t group, size_t available) {
    const size_t paddings[] = {0, 1, 6, 64};
    const TestRows keys(available, dim, dtype, paddings[rng() % 4], gaussian(rng));
    const auto queries = random_queries(rng, group, dim);
    const Selection selection(rng, available);
    const size_t count = selection.rows.size();
    const size_t stride = count + rng() % 4;
    const GuardedArray<float> scores(count > 0 ? (group - 1) * stride + count : 0, kCanary);
    kernels.score[index_of(dtype)]({.queries = queries.data(),
                                    .group = group,
                                    .keys = keys.view,
                                    .ids = selection.ids(),
                                    .count = count,
                                    .scores = scores.data(),
                                    .score_stride = stride});
    SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " dim " << dim << " group " << group
                                    << " count " << count);
    for (uint32_t h = 0; h < group; ++h) {
      for (size_t i = 0; i < count; ++i) {
        double exact = 0.0;
        double magnitude = 0.0;
        for (uint32_t j = 0; j < dim; ++j) {
          const double product = queries[h * dim + j] * keys.row(selection.rows[i])[j];
          exact += product;
          magnitude += std::fabs(product);
        }
        ASSERT_NEAR(scores[h * stride + i], exact,
                    kEpsilon * dot_roundings(GetParam(), dim) * magnitude)
            << "head " << h << " key " << i;
      }
      for (size_t i = count; i < stride && h + 1 < group && count > 0; ++i) {
        ASSERT_EQ(scores[h * stride + i], kCanary) << "wrote between heads";
      }
    }
  }
};

TEST_P(Score, EveryShapeAndDType) {
  Rng rng(11);
  for (const DType dtype : kRowDTypes) {
    for (const uint32_t dim : kHeadDims) {
      for (const uint32_t group : keyhole::test::kGroups) {
        if (!keyhole::test::is_tried(dim, group)) continue;
        check(rng, dtype, dim, group, 1 + rng() % 70);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Score, EveryCount) {
  Rng rng(12);
  for (size_t count = 0; count <= 80; ++count) {
    for (const uint32_t group : {1, 2, 3, 4, 5}) {
      check(rng, kRowDTypes[count % 4], some_head_dim(count), group, count);
      if (HasFatalFailure()) return;
    }
  }
}

class ScoreInt8 : public EveryLevel {
 protected:
  void check(Rng& rng, uint32_t dim, uint32_t group, size_t available) {
    const auto element = [&] {
      const auto r = rng();
      if (r % 16 == 0) return static_cast<int8_t>(-127);
      if (r % 16 == 1) return static_cast<int8_t>(127);
      return static_cast<int8_t>(static_cast<int>(r >> 8 & 0xFF) % 255 - 127);
    };
    const size_t key_stride = dim + (rng() % 3) * 7;
    const GuardedArray<int8_t> keys(available > 0 ? (available - 1) * key_stride + dim : 0);
    for (int8_t& x : keys) x = element();
    const GuardedArray<int8_t> queries(size_t{group} * dim);
    for (int8_t& x : queries) x = element();
    if (rng() % 4 == 0) {  // the largest sums there are
      for (int8_t& x : keys) x = 127;
      for (int8_t& x : queries) x = -127;
    }
    std::uniform_real_distribution<float> scale(0.001F, 0.1F);
    const GuardedArray<float> query_scales(group);
    for (float& x : query_scales) x = scale(rng);

    const Selection selection(rng, available);
    const size_t count = selection.rows.size();
    const size_t stride = count + rng() % 4;
    const GuardedArray<float> scores(count > 0 ? (group - 1) * stride + count : 0, kCanary);
    kernels.score_i8({.queries = queries.data(),
                      .query_scales = query_scales.data(),
                      .group = group,
                      .dim = dim,
                      .keys = keys.data(),
                      .key_stride = key_stride,
                      .ids = selection.ids(),
                      .count = count,
                      .scores = scores.data(),
                      .score_stride = stride});
    SCOPED_TRACE(testing::Message() << "dim " << dim << " group " << group << " count " << count);
    for (uint32_t h = 0; h < group; ++h) {
      for (size_t i = 0; i < count; ++i) {
        const size_t id = selection.rows[i];
        int sum = 0;
        for (uint32_t j = 0; j < dim; ++j) sum += queries[h * dim + j] * keys[id * key_stride + j];
        const float exact = static_cast<float>(sum) * query_scales[h];
        ASSERT_EQ(scores[h * stride + i], exact) << "head " << h << " key " << i;
      }
      for (size_t i = count; i < stride && h + 1 < group && count > 0; ++i) {
        ASSERT_EQ(scores[h * stride + i], kCanary) << "wrote between heads";
      }
    }
  }
};

TEST_P(ScoreInt8, EveryShapeBitForBit) {
  Rng rng(13);
  for (const uint32_t dim : kHeadDims) {
    for (const uint32_t group : keyhole::test::kGroups) {
      if (!keyhole::test::is_tried(dim, group)) continue;
      for (int repeat = 0; repeat < 3; ++repeat) {
        check(rng, dim, group, 1 + rng() % 70);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(ScoreInt8, EveryCountBitForBit) {
  Rng rng(14);
  for (size_t count = 0; count <= 80; ++count) {
    for (const uint32_t group : {1, 2, 3, 4, 5}) {
      check(rng, some_head_dim(count), group, count);
      if (HasFatalFailure()) return;
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(Score);
KEYHOLE_FOR_EVERY_LEVEL(ScoreInt8);

}  // namespace
}  // namespace keyhole::cpu::test
