// The choice of blocks beside double precision: weights of sampled queries, and lists that hold the wanted mass with no
// block that they could do without; then whole stretches of prompts, whose attention is dense where the choice takes
// everything.
#include <algorithm>
#include <string>

#include "gpu/cuda/common/kernel_generation.h"
#include "tests/gpu/prompt_layer.h"
#include "tests/list_truth.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

using Case = PromptCase;
class BlockChoiceTest : public PromptLayerTest {};

TEST_P(BlockChoiceTest, WeightsAndListsAreThoseOfSampledQueries) {
  const Case& c = GetParam();
  struct Prompt {
    uint32_t n, rows, stride;
    float mass;
  };
  std::vector<std::pair<Prompt, bool>> cases;
  for (const Prompt& prompt :
       {Prompt{200, 700, 16, 0.8F}, Prompt{1, 300, 8, 0.5F}, Prompt{128, 128, 128, 0.9F},
        Prompt{384, 2600, 7, 0.95F}, Prompt{1100, 3000, 61, 0.9F}}) {
    cases.emplace_back(prompt, false);
    if (hopper_kernels_run_on(0)) cases.emplace_back(prompt, true);
  }
  for (const auto& [prompt, hopper] : cases) {
    SCOPED_TRACE(std::string(hopper ? "Hopper's, " : "") + std::to_string(prompt.n) + " of " +
                 std::to_string(prompt.rows) + ", every " + std::to_string(prompt.stride));
    fill(prompt.n, prompt.rows);
    SampledWeights w;
    w.stride = prompt.stride;
    w.samples = sampled_queries(prompt.n, prompt.stride);
    w.blocks = (prompt.rows + kListRows - 1) / kListRows;
    const size_t count = size_t{heads()} * w.samples * w.blocks;
    w.weights = upload(std::vector<float>(count, NAN));
    launch_sample_weights(p_, w, c.dtype, c.dim, hopper, nullptr);
    const auto got = download(w.weights, count);
    for (uint32_t h = 0; h < heads(); ++h) {
      for (uint32_t i = 0; i < w.samples; ++i) {
        const std::vector<double> truth = weights_of(w.query(prompt.n, i), h);
        for (uint32_t b = 0; b < w.blocks; ++b) {
          const float x = got[(size_t{h} * w.samples + i) * w.blocks + b];
          if (truth[b] == 0.0) {
            ASSERT_EQ(x, -INFINITY) << h << " " << i << " " << b;
          } else {
            ASSERT_NEAR(x, std::log2(truth[b]), 2e-3) << h << " " << i << " " << b;
          }
        }
      }
    }

    const uint32_t tiles = (prompt.n + kListQueries - 1) / kListQueries;
    BlockChoice choice;
    choice.first_blocks = 1;
    choice.near_blocks = 2;
    choice.mass = prompt.mass;
    choice.counts = upload(std::vector<uint32_t>(size_t{heads()} * tiles));
    choice.lists = upload(std::vector<uint16_t>(size_t{heads()} * tiles * w.blocks));
    choice.totals = upload(std::vector<unsigned long long>(2));
    launch_choose_blocks(p_, w, choice, nullptr);
    const auto counts = download(choice.counts, size_t{heads()} * tiles);
    const auto lists = download(choice.lists, counts.size() * w.blocks);
    const auto totals = download(choice.totals, 2);
    unsigned long long all = 0, seen = 0;
    for (uint32_t h = 0; h < heads(); ++h) {
      for (uint32_t t = 0; t < tiles; ++t) {
        const uint32_t first = t * kListQueries,
                       last = std::min(first + kListQueries, prompt.n) - 1;
        const uint32_t end = (p_.first + last) / kListRows + 1,
                       own = (p_.first + first) / kListRows;
        std::vector<double> share(end);
        uint32_t samples = 0;
        for (uint32_t i = 0; i < w.samples; ++i) {
          const uint32_t query = w.query(prompt.n, i);
          if (query < first || query > last) continue;
          ++samples;
          const std::vector<double> truth = weights_of(query, h);
          double sum = 0;
          for (const double x : truth) sum += x;
          for (uint32_t b = 0; b < end; ++b) share[b] += truth[b] / sum;
        }
        ASSERT_GT(samples, 0U);
        const size_t at = size_t{h} * tiles + t;
        for (double& x : share) x /= samples;
        keyhole::test::expect_heaviest(&lists[at * w.blocks], counts[at], share,
                                       {.first = 1,
                                        .near = 2,
                                        .own = own,
                                        .mass = double{prompt.mass},
                                        .error = 2e-3,
                                        .close = 1.11});
        if (HasFatalFailure()) return;
        all += counts[at];
        seen += end;
      }
    }
    EXPECT_EQ(totals[0], all);
    EXPECT_EQ(totals[1], seen);
  }
}

TEST_P(BlockChoiceTest, HeadsThatLookUpSingleRowsAttendEverything) {
  const Case& c = GetParam();
  constexpr uint32_t kQueries = 256, kTokens = 2048;
  fill(kQueries, kTokens, 1.0F);
  // Every fourth query of head 0 looks for a key of its own, with a logit of about 12.5 where others have 1.
  const auto row_of = [](uint32_t token) { return token * 5 + 100; };
  for (uint32_t t = 3; t < kQueries; t += 4) {
    for (uint32_t j = 0; j < c.dim; ++j) {
      q_[size_t{t} * heads() * c.dim + j] =
          rounded(12.5F / std::sqrt(static_cast<float>(c.dim)) *
                      k_[size_t{row_of(t)} * c.kv_heads * c.dim + j],
                  c.dtype);
    }
  }
  p_.q = upload(as_bytes(q_, c.dtype));
  SampledWeights w;
  w.stride = 16;
  w.samples = sampled_queries(kQueries, w.stride);
  w.blocks = kTokens / kListRows;
  w.weights = upload(std::vector<float>(size_t{heads()} * w.samples * w.blocks));
  constexpr uint32_t kTiles = kQueries / kListQueries;
  BlockChoice choice;
  choice.first_blocks = 1;
  choice.near_blocks = 1;
  choice.mass = 0.5F;
  choice.lookups = 0.5F;
  choice.looked_up = upload(std::vector<unsigned long long>(heads()));
  choice.counts = upload(std::vector<uint32_t>(heads() * kTiles));
  choice.lists = upload(std::vector<uint16_t>(size_t{heads()} * kTiles * w.blocks));
  launch_sample_weights(p_, w, c.dtype, c.dim, false, nullptr);
  launch_choose_blocks(p_, w, choice, nullptr);
  const auto counts = download(choice.counts, size_t{heads()} * kTiles);
  const auto lists = download(choice.lists, counts.size() * w.blocks);
  for (uint32_t t = 0; t < kTiles; ++t) {
    const uint32_t end = (kTokens - kQueries + (t + 1) * kListQueries) / kListRows;
    EXPECT_EQ(counts[t], end) << "tile " << t;
    for (uint32_t b = 0; b < counts[t]; ++b) EXPECT_EQ(lists[t * w.blocks + b], b);
  }
  // Others have some of their own: blocks of about the same weight may all be chosen, but not for this reason.
  constexpr double kUnit = 1099511627776.0;  // 2^40: of one sample's weight
  const std::vector<unsigned long long> looked_up = download(choice.looked_up, heads());
  for (uint32_t h = 0; h < heads(); ++h) {
    const double share = static_cast<double>(looked_up[h]) / kUnit / kTiles;
    EXPECT_EQ(share > 0.5, h == 0) << "head " << h << ": " << share;
  }
}

TEST_P(BlockChoiceTest, APromptIsDenseWhereTheChoiceTakesEverything) {
  const Case& c = GetParam();
  constexpr uint32_t kTokens = 900, kQueries = 512;
  fill(kQueries, kTokens);
  const auto prompt = make_cuda_prompt(0, {heads(), c.kv_heads, c.dim});
  const auto attend = [&](const PromptPattern& pattern, uint32_t chunk) {
    return PromptLayerTest::attend(*prompt, pattern, chunk);
  };
  const std::vector<float> dense = attend({}, kQueries);
  PromptPattern all;
  all.dense = false;
  all.first_rows = kTokens;
  EXPECT_LT(error(attend(all, kQueries), dense), 1e-6);
  EXPECT_EQ(prompt->blocks().attended, prompt->blocks().seen);
  PromptPattern some = all;
  some.first_rows = some.near_rows = 64;
  some.stride = 16;
  some.mass = 0.9F;
  const std::vector<float> chosen = attend(some, kQueries);
  EXPECT_LT(error(chosen, dense), 0.5);
  EXPECT_LT(prompt->blocks().attended, prompt->blocks().seen);
  // Chunks of whole tiles choose alike: their samples are the same queries.
  EXPECT_EQ(attend(some, 128), chosen);
  some.lookups = 0.999F;  // no head looks up single rows with all of its weight
  EXPECT_EQ(attend(some, kQueries), chosen);
  some.dense_rows = kTokens;
  EXPECT_EQ(attend(some, kQueries), dense);
}

INSTANTIATE_TEST_SUITE_P(Shapes, BlockChoiceTest,
                         testing::Values(Case{64, 2, 4, DType::f16}, Case{128, 1, 7, DType::bf16},
                                         Case{80, 3, 1, DType::f16},
                                         Case{128, 2, 16, DType::f16, 15.0F},
                                         Case{256, 1, 3, DType::bf16}),
                         name_of);

}  // namespace
}  // namespace keyhole::gpu
