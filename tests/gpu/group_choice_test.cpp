// Weights of groups of queries beside double precision; then the lists that are made of them, by mass and by number.
#include <algorithm>
#include <string>

#include "gpu/cuda/prefill/group_weights.h"
#include "tests/gpu/prompt_layer.h"
#include "tests/list_truth.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

using Case = PromptCase;

struct Prompt {
  uint32_t n, rows;
};
// A single query, ragged ends of both, whole tiles, more groups than a thread block has.
constexpr Prompt kPrompts[] = {{200, 700}, {1, 300}, {5, 5}, {128, 128}, {384, 2600}, {1300, 3001}};

class GroupChoiceTest : public PromptLayerTest {
 protected:
  [[nodiscard]] static uint32_t blocks_of(uint32_t rows) {
    return (rows + kListRows - 1) / kListRows;
  }
  SampledWeights some_weights() {
    SampledWeights w;
    w.stride = kMeanQueries;
    w.samples = sampled_queries(p_.n, w.stride);
    w.blocks = blocks_of(p_.rows);
    w.weights = upload(std::vector<float>(size_t{heads()} * w.samples * w.blocks, NAN));
    return w;
  }
  Means some_means(const SampledWeights& w) {
    const size_t dim = GetParam().dim;
    return {upload(std::vector<uint16_t>(heads() * w.samples * dim)),
            upload(std::vector<uint16_t>(GetParam().kv_heads * w.blocks * dim))};
  }
  [[nodiscard]] double logit_of(double product) const {
    const double x = product * double{p_.logits.scale}, cap = double{p_.logits.softcap};
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }
  /// The position of the last query of group i.
  [[nodiscard]] uint32_t last_of(uint32_t i) const {
    return p_.first + std::min((i + 1) * kMeanQueries, p_.n) - 1;
  }

  /// The means as the device keeps them, in the dtype.
  [[nodiscard]] std::vector<double> mean(const std::vector<float>& x, uint32_t of_heads,
                                         uint32_t head, uint32_t first, uint32_t end) const {
    const uint32_t dim = GetParam().dim;
    std::vector<double> m(dim);
    for (uint32_t j = 0; j < dim; ++j) {
      for (uint32_t i = first; i < end; ++i)
        m[j] += double{x[(size_t{i} * of_heads + head) * dim + j]} / (end - first);
      m[j] = double{rounded(static_cast<float>(m[j]), GetParam().dtype)};
    }
    return m;
  }
  /// Weights of the blocks for group i.
  [[nodiscard]] std::vector<double> by_means(uint32_t i, uint32_t head) const {
    const Case& c = GetParam();
    const std::vector<double> q =
        mean(q_, heads(), head, i * kMeanQueries, std::min((i + 1) * kMeanQueries, p_.n));
    std::vector<double> w(blocks_of(p_.rows));
    for (uint32_t row = 0; row <= last_of(i); row += kListRows) {
      const std::vector<double> k =
          mean(k_, c.kv_heads, head / c.group, row, std::min(row + kListRows, p_.rows));
      double sum = 0;
      for (uint32_t j = 0; j < c.dim; ++j) sum += q[j] * k[j];
      w[row / kListRows] = std::exp(logit_of(sum));
    }
    return w;
  }

  void compare(const SampledWeights& w, const std::vector<std::vector<double>>& truth) const {
    const std::vector<float> got = download(w.weights, size_t{heads()} * w.samples * w.blocks);
    for (size_t i = 0; i < truth.size(); ++i) {
      for (uint32_t b = 0; b < w.blocks; ++b) {
        const float x = got[i * w.blocks + b];
        const std::string where = "head " + std::to_string(i / w.samples) + " group " +
                                  std::to_string(i % w.samples) + " block " + std::to_string(b);
        if (truth[i][b] == 0.0) {
          ASSERT_EQ(x, -INFINITY) << where;
        } else {
          ASSERT_NEAR(double{x}, std::log2(truth[i][b]), 3e-3) << where;
        }
      }
    }
  }

  /// Lists of w's weights, which change. mass, or so many units of blocks.
  void compare_lists(const SampledWeights& w, const std::vector<std::vector<double>>& truth,
                     float mass, uint32_t most, uint32_t unit) {
    const uint32_t tiles = (p_.n + kListQueries - 1) / kListQueries;
    BlockChoice choice;
    choice.first_blocks = 1;
    choice.near_blocks = 1;
    choice.mass = mass;
    choice.most_blocks = most;
    choice.unit = unit;
    choice.counts = upload(std::vector<uint32_t>(size_t{heads()} * tiles));
    choice.lists = upload(std::vector<uint16_t>(size_t{heads()} * tiles * w.blocks));
    launch_choose_blocks(p_, w, choice, nullptr);
    const auto counts = download(choice.counts, size_t{heads()} * tiles);
    const auto lists = download(choice.lists, counts.size() * w.blocks);
    const uint32_t of_tile = kListQueries / w.stride;
    for (uint32_t h = 0; h < heads(); ++h) {
      for (uint32_t t = 0; t < tiles; ++t) {
        SCOPED_TRACE("head " + std::to_string(h) + " tile " + std::to_string(t));
        const uint32_t last = std::min((t + 1) * kListQueries, p_.n) - 1;
        const uint32_t end = (p_.first + last) / kListRows + 1,
                       own = (p_.first + t * kListQueries) / kListRows;
        const uint32_t from = t * of_tile, to = std::min(from + of_tile, w.samples);
        std::vector<double> share(end);
        for (uint32_t i = from; i < to; ++i) {
          const std::vector<double>& x = truth[size_t{h} * w.samples + i];
          double sum = 0;
          for (const double y : x) sum += y;
          for (uint32_t b = 0; b < end; ++b) share[b] += x[b] / sum / (to - from);
        }
        const size_t at = size_t{h} * tiles + t;
        // Numbers of blocks are exact but for rounding.
        keyhole::test::expect_heaviest(&lists[at * w.blocks], counts[at], share,
                                       {.first = 1,
                                        .near = 1,
                                        .own = own,
                                        .unit = unit,
                                        .most = most,
                                        .mass = double{mass},
                                        .error = 3e-3,
                                        .close = most != 0 ? 1.01 : 1.11});
        if (HasFatalFailure()) return;
      }
    }
  }
};

TEST_P(GroupChoiceTest, MeansMeetMeans) {
  for (const Prompt& prompt : kPrompts) {
    for (const uint32_t most : {0U, 3U, 1000U}) {
      SCOPED_TRACE(std::to_string(prompt.n) + " of " + std::to_string(prompt.rows) + ", most " +
                   std::to_string(most));
      fill(prompt.n, prompt.rows, 6.0F);
      const SampledWeights w = some_weights();
      launch_mean_weights(p_, w, some_means(w), GetParam().dtype, GetParam().dim, nullptr);
      std::vector<std::vector<double>> truth;
      for (uint32_t h = 0; h < heads(); ++h) {
        for (uint32_t i = 0; i < w.samples; ++i) truth.push_back(by_means(i, h));
      }
      compare(w, truth);
      if (HasFatalFailure()) return;
      compare_lists(w, truth, 0.7F, most, most == 3 ? 2 : 1);
      if (HasFatalFailure()) return;
    }
  }
}
TEST_P(GroupChoiceTest, OfEqualBlocksTheFirstAreChosen) {
  // More than a block of the choice's threads.
  constexpr uint32_t kTokens = 300 * kListRows, kMost = 270;
  fill(100, kTokens);
  SampledWeights w = some_weights();
  w.weights = upload(std::vector<float>(size_t{heads()} * w.samples * w.blocks, -3.0F));
  BlockChoice choice;
  choice.first_blocks = choice.near_blocks = 2;
  choice.most_blocks = kMost;
  choice.counts = upload(std::vector<uint32_t>(heads()));
  choice.lists = upload(std::vector<uint16_t>(size_t{heads()} * w.blocks));
  launch_choose_blocks(p_, w, choice, nullptr);
  // The first two, and so many after them; the last tile begins in block 298.
  std::vector<uint16_t> wanted;
  for (uint32_t b = 0; b < w.blocks; ++b) {
    if (b < 2 + kMost || b >= 296) wanted.push_back(static_cast<uint16_t>(b));
  }
  const auto counts = download(choice.counts, heads());
  const auto lists = download(choice.lists, size_t{heads()} * w.blocks);
  for (uint32_t h = 0; h < heads(); ++h) {
    const uint16_t* const list = &lists[size_t{h} * w.blocks];
    EXPECT_EQ(std::vector<uint16_t>(list, list + std::min(counts[h], w.blocks)), wanted) << h;
  }
}
TEST_P(GroupChoiceTest, OnlyTheHeadsThatAreAskedForChange) {
  fill(200, 700);
  SampledWeights w = some_weights();
  BlockChoice choice;
  choice.first_blocks = choice.near_blocks = 1;
  const uint32_t tiles = 2;
  choice.counts = upload(std::vector<uint32_t>(heads() * tiles, 12345));
  choice.lists = upload(std::vector<uint16_t>(size_t{heads()} * tiles * w.blocks));
  choice.skips = upload(std::vector<float>(heads(), -1.0F));
  choice.skip = 7.0F;
  choice.heads.add(heads() - 1);
  w.heads = choice.heads;
  launch_mean_weights(p_, w, some_means(w), GetParam().dtype, GetParam().dim, nullptr);
  launch_choose_blocks(p_, w, choice, nullptr);
  const auto counts = download(choice.counts, heads() * tiles);
  const auto skips = download(choice.skips, heads());
  for (uint32_t h = 0; h < heads(); ++h) {
    const bool mine = h + 1 == heads();
    EXPECT_EQ(skips[h], mine ? 7.0F : -1.0F) << h;
    for (uint32_t t = 0; t < tiles; ++t) {
      EXPECT_EQ(counts[h * tiles + t] == 12345, !mine) << "head " << h << " tile " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GroupChoiceTest,
                         testing::Values(Case{64, 2, 2, DType::f16}, Case{128, 1, 3, DType::bf16},
                                         Case{80, 2, 1, DType::f16}, Case{96, 1, 2, DType::bf16},
                                         Case{128, 2, 2, DType::f16, 15.0F},
                                         Case{256, 1, 2, DType::bf16}),
                         name_of);

}  // namespace
}  // namespace keyhole::gpu
