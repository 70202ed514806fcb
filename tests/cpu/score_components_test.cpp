// Inner products from some components of keys that lie component by component, against double.
#include "tests/cpu/reference.h"
#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

constexpr DType kElements[] = {DType::f32, DType::f16, DType::bf16, DType::i8};

/// A block `[dim, block_rows]` whose memory ends with its last element, and its values in double.
struct ComponentBlock {
  ComponentBlock(Rng& rng, uint32_t dim, size_t block_rows, DType dtype)
      : bytes(dim * block_rows * dtype_size(dtype)), exact(dim * block_rows) {
    auto value = gaussian(rng);
    for (size_t i = 0; i < exact.size(); ++i) {
      std::byte* element = bytes.data() + i * dtype_size(dtype);
      if (dtype == DType::i8) {
        *element = static_cast<std::byte>(static_cast<int>(rng() % 255) - 127);
        exact[i] = static_cast<int8_t>(*element);
      } else {
        const auto x = static_cast<float>(value());
        kernels_for(Level::scalar)->from_f32[index_of(dtype)](&x, element, 1);
        exact[i] = decode(element, dtype);
      }
    }
  }
  GuardedBytes bytes;
  std::vector<double> exact;
};

class ScoreComponents : public EveryLevel {
 protected:
  void check(Rng& rng, DType dtype, uint32_t dim, uint32_t group, size_t block_rows, size_t first,
             size_t count, uint32_t chosen) {
    SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " dim " << dim << " group " << group
                                    << " block of " << block_rows << " first " << first << " count "
                                    << count << " components " << chosen);
    const ComponentBlock block(rng, dim, block_rows, dtype);
    const ComponentBlock next(rng, dim, block_rows, dtype);
    const std::vector<uint32_t> ids = random_distinct_ids(rng, dim, chosen);
    const GuardedArray<uint32_t> components(chosen);
    std::copy(ids.begin(), ids.end(), components.begin());
    const auto queries = random_queries(rng, group, chosen);
    const size_t stride = count + rng() % 4;
    const GuardedArray<float> scores(count > 0 ? (group - 1) * stride + count : 0, kCanary);
    kernels.score_components[index_of(dtype)]({.queries = queries.data(),
                                               .group = group,
                                               .components = components.data(),
                                               .component_count = chosen,
                                               .block = block.bytes.data(),
                                               .block_rows = block_rows,
                                               .next = rng() % 2 == 0 ? next.bytes.data() : nullptr,
                                               .first = first,
                                               .count = count,
                                               .scores = scores.data(),
                                               .score_stride = stride});
    for (uint32_t h = 0; h < group; ++h) {
      for (size_t i = 0; i < count; ++i) {
        double exact = 0.0;
        double magnitude = 0.0;
        for (uint32_t c = 0; c < chosen; ++c) {
          const double product =
              queries[h * chosen + c] * block.exact[components[c] * block_rows + first + i];
          exact += product;
          magnitude += std::fabs(product);
        }
        ASSERT_NEAR(scores[h * stride + i], exact, kEpsilon * (chosen + 1.0) * magnitude)
            << "head " << h << " row " << i;
      }
      for (size_t i = count; i < stride && h + 1 < group && count > 0; ++i) {
        ASSERT_EQ(scores[h * stride + i], kCanary) << "wrote between heads";
      }
    }
  }
};

TEST_P(ScoreComponents, EveryShapeAndDType) {
  Rng rng(41);
  for (const DType dtype : kElements) {
    for (const uint32_t dim : kHeadDims) {
      for (const uint32_t group : keyhole::test::kGroups) {
        if (!keyhole::test::is_tried(dim, group)) continue;
        if (group % keyhole::test::unless_sanitized(1, 3) != 0) continue;
        const size_t block_rows = 1 + rng() % 700;
        const size_t first = rng() % 2 == 0 ? 0 : rng() % block_rows;
        check(rng, dtype, dim, group, block_rows, first, rng() % (block_rows - first + 1),
              1 + static_cast<uint32_t>(rng() % dim));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(ScoreComponents, EveryCount) {
  Rng rng(42);
  for (size_t count = 0; count <= 140; ++count) {
    for (const uint32_t group : {1, 2, 3, 4, 5}) {
      // Also where the block ends with the rows that are scored: not a byte beyond it is read.
      const size_t first = (group - 1) * 7;
      check(rng, kElements[count % 4], 64, group,
            first + count + (group == 2 || count == 0 ? 1 : 0), first, count,
            1 + static_cast<uint32_t>(rng() % 20));
      if (HasFatalFailure()) return;
    }
  }
}

// Sums are taken component by component: their bits depend on neither the group nor the number of rows.
TEST_P(ScoreComponents, BitsDependOnTheRowAndTheHeadAlone) {
  Rng rng(43);
  const ComponentBlock block(rng, 128, 256, DType::f16);
  const std::vector<uint32_t> components = random_distinct_ids(rng, 128, 32);
  const auto queries = random_queries(rng, 7, 32);
  const auto score = [&](uint32_t head, uint32_t group, size_t count) {
    std::vector<float> scores(group * count);
    kernels.score_components[1]({.queries = queries.data() + head * 32,
                                 .group = group,
                                 .components = components.data(),
                                 .component_count = 32,
                                 .block = block.bytes.data(),
                                 .block_rows = 256,
                                 .next = nullptr,
                                 .first = 0,
                                 .count = count,
                                 .scores = scores.data(),
                                 .score_stride = count});
    return scores;
  };
  const std::vector<float> all = score(0, 7, 256);
  for (const size_t count : {1, 15, 16, 63, 65, 200}) {
    for (uint32_t h = 0; h < 7; ++h) {
      const std::vector<float> one = score(h, 1, count);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(one[i], all[h * 256 + i]);
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(ScoreComponents);

}  // namespace
}  // namespace keyhole::cpu::test
