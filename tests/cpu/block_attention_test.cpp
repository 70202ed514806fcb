// Attention of many queries over lists of blocks, and weights of blocks, against double precision.
#include <deque>
#include <numeric>

#include "cpu/block_weights.h"
#include "cpu/group_weights.h"
#include "tests/cpu/prompt_fixture.h"
#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

using keyhole::test::cases;
using keyhole::test::some_group;

class PromptKernels : public EveryLevel {};
class BlockAttentionTest : public EveryLevel {};

TEST_P(PromptKernels, ProductsAreThoseOfMatrices) {
  Rng rng(testing::UnitTest::GetInstance()->random_seed() + 3);
  for (uint32_t i = 0; i < cases(40); ++i) {
    const uint32_t m = 1 + rng() % 20, k = 1 + rng() % 70, n = 16 * (1 + rng() % 10);
    const size_t a_stride = k + rng() % 3, b_stride = n + rng() % 3, c_stride = n + rng() % 3;
    SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(k) + " x " + std::to_string(n));
    auto value = gaussian(rng);
    GuardedArray<float> a((m - 1) * a_stride + k), b((k - 1) * b_stride + n),
        c((m - 1) * c_stride + n);
    for (auto* x : {&a, &b, &c}) {
      for (float& y : *x) y = static_cast<float>(value());
    }
    const std::vector<float> before(c.begin(), c.end());
    const bool adds = rng() % 2 == 0;
    kernels.product({a.data(), a_stride, b.data(), b_stride, c.data(), c_stride, m, k, n, adds});
    for (uint32_t r = 0; r < m; ++r) {
      for (uint32_t j = 0; j < n; ++j) {
        double sum = adds ? double{before[r * c_stride + j]} : 0.0, size = std::fabs(sum);
        for (uint32_t l = 0; l < k; ++l) {
          const double x = double{a[r * a_stride + l]} * double{b[l * b_stride + j]};
          sum += x;
          size += std::fabs(x);
        }
        ASSERT_NEAR(c[r * c_stride + j], sum, kEpsilon * size * (k + 2)) << r << ", " << j;
      }
      for (size_t j = n; j < c_stride && r + 1 < m; ++j) {  // what lies between rows stays
        ASSERT_EQ(c[r * c_stride + j], before[r * c_stride + j]);
      }
    }
  }
}

TEST_P(PromptKernels, WeightsOfARowAreASoftmaxThatGoesOn) {
  Rng rng(testing::UnitTest::GetInstance()->random_seed() + 4);
  for (uint32_t i = 0; i < cases(40); ++i) {
    constexpr uint32_t kDim = 80, kBlocks = 4;
    const float softcap = rng() % 3 == 0 ? 5.0F : 0.0F;
    GuardedArray<float> x(kPromptRows), o(kDim);
    float largest = kMinusInf, sum = 0.0F;
    std::vector<double> logits;
    double first_weights = 0;  // of the first block, which o stands for
    auto value = gaussian(rng, 4.0);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const auto from = static_cast<uint32_t>(rng() % (kPromptRows + 1));
      const auto to = b == 1 ? from : static_cast<uint32_t>(rng() % (kPromptRows + 1));
      std::vector<double> own(kPromptRows);
      for (uint32_t j = 0; j < kPromptRows; ++j) {
        x[j] = static_cast<float>(value());
        own[j] = double{x[j]};
        if (softcap > 0) own[j] = double{softcap} * std::tanh(own[j] / double{softcap});
        if (j >= from && j < to) logits.push_back(own[j]);
      }
      kernels.weigh_row({x.data(), from, to, softcap, &largest, &sum, o.data(), kDim});
      double truth = 0, top = -INFINITY;
      for (const double y : logits) top = std::max(top, y);
      for (const double y : logits) truth += std::exp(y - top);
      if (logits.empty()) {
        ASSERT_EQ(largest, kMinusInf);
      } else {
        ASSERT_NEAR(largest, top, 1e-5);
      }
      ASSERT_NEAR(sum, truth, 1e-4 * truth);
      for (uint32_t j = 0; j < kPromptRows; ++j) {
        const double weight = j >= from && j < to ? std::exp(own[j] - top) : 0.0;
        ASSERT_NEAR(x[j], weight, 1e-4 * weight) << j << " of " << from << ".." << to;
        if (b == 0) first_weights += weight * std::exp(top);
      }
      if (b == 0) o[0] = o[kDim - 1] = sum;
      const double left = logits.empty() ? 0.0 : first_weights / std::exp(top);
      ASSERT_NEAR(o[0], left, 1e-4 * left);
      ASSERT_NEAR(o[kDim - 1], left, 1e-4 * left);
    }
  }
}

PromptCase random_block_case(Rng& rng) {
  PromptCase c{};
  c.kv_heads = 1 + rng() % 3;
  c.group = rng() % 6 == 0 ? some_group(rng()) : 1 + rng() % 5;
  c.dim = some_head_dim(rng());
  if (c.group * c.dim > 1024) c.kv_heads = 1, c.dim = 64;
  const uint32_t lengths[] = {1, 63, 64, 65, 127, 128, 129, 200, 300};
  c.n = c.group > 8 ? 1 + rng() % 70 : lengths[rng() % std::size(lengths)];
  c.rows = c.n + (rng() % 2 == 0 ? 0 : static_cast<uint32_t>(rng() % 300));
  c.window = rng() % 4 == 0 ? 1 + rng() % 200 : 0;
  c.dtype = kDTypes[rng() % 3];
  c.out = kDTypes[rng() % 3];
  c.logits.scale = 1.0F / std::sqrt(static_cast<float>(c.dim));
  c.logits.softcap = rng() % 4 == 0 ? 3.0F : 0.0F;
  return c;
}

std::string text_of_block_case(const PromptCase& c) {
  return std::to_string(c.n) + " of " + std::to_string(c.rows) + " tokens, " +
         std::to_string(c.kv_heads) + " x " + std::to_string(c.group) + " heads of " +
         std::to_string(c.dim) + ", window " + std::to_string(c.window) + ", " +
         dtype_name(c.dtype) + " to " + dtype_name(c.out) + ", softcap " +
         std::to_string(c.logits.softcap);
}

/// Rounding of outputs, beside that of sums in fp32.
double tolerance(DType out) { return out == DType::f32 ? 2e-5 : out == DType::f16 ? 2e-3 : 2e-2; }

/// Random lists, some of them empty, `[heads, tiles, capacity]`.
struct RandomLists {
  RandomLists(Rng& rng, const PromptPiece& p)
      : tiles(p.tiles()),
        counts(size_t{p.q_heads} * tiles),
        blocks(counts.size() * (p.blocks() + 1)),
        lists{counts.data(), blocks.data(), p.blocks() + 1U} {
    for (size_t i = 0; i < counts.size(); ++i) {
      const PromptPiece::Span seen = p.seen(static_cast<uint32_t>(i % tiles));
      const uint64_t share = rng() % 5;
      for (uint32_t b = seen.begin; b < seen.end; ++b) {
        if (rng() % 4 < share) blocks[i * lists.capacity + counts[i]++] = b;
      }
    }
  }
  [[nodiscard]] bool has(uint32_t head, uint32_t query, uint32_t row) const {
    const size_t i = size_t{head} * tiles + query / kPromptQueries;
    const uint32_t* const list = &blocks[i * lists.capacity];
    return std::binary_search(list, list + counts[i], row / kPromptRows);
  }
  uint32_t tiles;
  std::vector<uint32_t> counts, blocks;
  PromptLists lists;
};

TEST_P(BlockAttentionTest, IsExactInsideTheLists) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  Pool pool({.threads = 2});
  BlockAttention attention(kernels, pool);
  for (uint32_t i = 0; i < cases(24); ++i) {
    Rng rng(seed * 1000 + i);
    const PromptCase c = random_block_case(rng);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(i) + ": " +
                 text_of_block_case(c));
    TestPrompt prompt(rng, c);
    std::vector<float> sinks(prompt.piece.q_heads);
    for (float& x : sinks) x = rng() % 3 == 0 ? kMinusInf : static_cast<float>(rng() % 5) - 2.0F;
    const bool has_sinks = rng() % 2 == 0, is_dense = rng() % 3 == 0;
    if (has_sinks) prompt.piece.sinks = sinks.data();
    const RandomLists lists(rng, prompt.piece);
    attention.attend(prompt.piece, is_dense ? PromptLists{} : lists.lists);
    const uint32_t some = c.group > 8 ? 37 : 11;  // of the outputs
    for (uint32_t at = rng() % some; at < c.n * prompt.piece.q_heads; at += some) {
      const uint32_t query = at / prompt.piece.q_heads, head = at % prompt.piece.q_heads;
      const TestPrompt::Truth truth =
          prompt.truth(query, head, has_sinks ? double{sinks[head]} : -INFINITY,
                       [&](uint32_t row) { return is_dense || lists.has(head, query, row); });
      if (truth.lse == -INFINITY) {
        ASSERT_EQ(prompt.lse[at], kMinusInf);
      } else {
        ASSERT_NEAR(prompt.lse[at], truth.lse, 2e-5 * (1 + std::fabs(truth.lse)));
      }
      for (uint32_t j = 0; j < c.dim; ++j) {
        ASSERT_NEAR(prompt.output(query, head, j), truth.o[j],
                    tolerance(c.out) * (1 + std::fabs(truth.o[j])))
            << "query " << query << ", head " << head;
      }
    }
  }
}

TEST_P(BlockAttentionTest, ChunksGiveTheBitsOfOnePiece) {
  Rng rng(testing::UnitTest::GetInstance()->random_seed() + 5);
  const PromptCase c{300, 420, 2, 3, 64, 0, DType::f16, DType::f32, {0.125F, 0.0F}};
  TestPrompt whole(rng, c);
  Pool pool({.threads = 2});
  BlockAttention attention(kernels, pool);
  attention.attend(whole.piece, {});
  const TestTokens out(c.n, 6, c.dim, DType::f32, [](auto...) { return 1.0; });
  std::vector<float> lse(size_t{c.n} * 6);
  for (const uint32_t chunk : {1U, 100U, 128U}) {
    for (uint32_t first = 0; first < c.n; first += chunk) {
      if (chunk == 1 && first % 50 != 0) continue;
      PromptPiece piece = whole.piece;
      piece.n = std::min(chunk, c.n - first);
      piece.rows = c.rows - c.n + first + piece.n;
      piece.q = whole.q.from(first);
      piece.out = out.from(first);
      piece.lse = lse.data() + size_t{first} * 6;
      attention.attend(piece, {});
      for (uint32_t i = first * 6; i < (first + piece.n) * 6; ++i) {
        ASSERT_EQ(lse[i], whole.lse[i]) << chunk << ", " << i;
        ASSERT_EQ(std::memcmp(out.rows.row(i / 6, i % 6), whole.out.rows.row(i / 6, i % 6),
                              c.dim * sizeof(float)),
                  0);
      }
    }
  }
}

/// Copies of rows in as many places as there are borders, which rise.
struct ScatteredRows {
  ScatteredRows(const TestTokens& from, uint32_t heads, uint32_t dim,
                const std::vector<uint32_t>& borders) {
    for (size_t i = 0; i + 1 < borders.size(); ++i) {
      const uint32_t begin = borders[i];
      places.emplace_back(
          borders[i + 1] - begin, heads, dim, from.rows.dtype,
          [&](uint32_t t, uint32_t h, uint32_t j) { return from.row(begin + t, h)[j]; });
      runs.add(places.back().view());
    }
  }
  std::deque<TestTokens> places;
  RowRuns runs;
};

// What a session's tokens are: some in front, offloaded ones, some behind, none of whole blocks.
TEST_P(BlockAttentionTest, RowsInSeveralPlacesGiveTheBitsOfOne) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  Pool pool({.threads = 2});
  BlockAttention attention(kernels, pool);
  BlockWeights sampled(kernels, pool);
  GroupWeights groups(kernels, pool);
  for (uint32_t i = 0; i < cases(8); ++i) {
    Rng rng(seed * 1000 + i);
    PromptCase c = random_block_case(rng);
    c.window = 0;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(i) + ": " +
                 text_of_block_case(c));
    TestPrompt prompt(rng, c);
    std::vector<uint32_t> borders = {0, c.rows};
    for (uint32_t j = 0; j + 1 < RowRuns::kMostRuns; ++j)
      borders.push_back(static_cast<uint32_t>(rng() % (c.rows + 1)));
    std::sort(borders.begin(), borders.end());
    const ScatteredRows k(prompt.k, c.kv_heads, c.dim, borders),
        v(prompt.v, c.kv_heads, c.dim, borders);
    std::vector<uint32_t> heads(prompt.piece.q_heads);
    std::iota(heads.begin(), heads.end(), 0U);
    const RandomLists lists(rng, prompt.piece);
    struct Results {
      std::vector<float> lse, o, samples, means;
      bool operator==(const Results&) const = default;
    };
    const auto results = [&](const PromptPiece& piece) {
      Results r;
      attention.attend(piece, lists.lists);
      r.lse.assign(prompt.lse.begin(), prompt.lse.end());
      for (uint32_t at = 0; at < c.n * piece.q_heads; ++at) {
        for (uint32_t j = 0; j < c.dim; ++j) {
          r.o.push_back(
              static_cast<float>(prompt.output(at / piece.q_heads, at % piece.q_heads, j)));
        }
      }
      const auto of = [&](uint32_t stride) {
        return std::vector<float>(heads.size() * SampledQueries{c.n, stride}.count() *
                                  piece.blocks());
      };
      r.samples = of(16);
      sampled.compute(piece, {c.n, 16}, heads, r.samples.data());
      r.means = of(kMeanQueries);
      groups.means(piece, heads, r.means.data());
      return r;
    };
    const Results one = results(prompt.piece);
    PromptPiece piece = prompt.piece;
    piece.k = k.runs;
    piece.v = v.runs;
    EXPECT_TRUE(results(piece) == one);
  }
}

// A row of int8 is what its scales make of it, wherever its block of scales begins.
TEST_P(BlockAttentionTest, RowsInInt8AreThoseOfTheirScales) {
  Rng rng(testing::UnitTest::GetInstance()->random_seed() + 6);
  constexpr uint32_t kRows = 700, kDim = 80, kHeads = 2, kFront = 37, kFirst = 100;
  const PromptCase c{130, kFront + kRows, kHeads, 2, kDim, 0, DType::f32, DType::f32, {0.1F, 0.0F}};
  GuardedArray<int8_t> numbers(size_t{kHeads} * kRows * kDim);
  for (int8_t& x : numbers) x = static_cast<int8_t>(static_cast<int>(rng() % 255) - 127);
  // `[blocks, heads, dim]` in bf16 of 2^-8..2^-5.
  GuardedArray<uint16_t> scales(size_t{(kFirst + kRows) / kScaleRows + 1} * kHeads * kDim);
  for (uint16_t& x : scales) x = static_cast<uint16_t>(0x3B80U + rng() % 0x180U);
  TestPrompt prompt(rng, c);
  const TestTokens front = TestTokens(kFront, kHeads, kDim, DType::f32, gaussian(rng));
  const auto value = [&](uint32_t t, uint32_t h, uint32_t j) {
    if (t < kFront) return front.row(t, h)[j];
    const uint32_t row = t - kFront;
    const size_t scale = (size_t{(kFirst + row) / kScaleRows} * kHeads + h) * kDim + j;
    return static_cast<double>(numbers[(size_t{h} * kRows + row) * kDim + j]) *
           decode(reinterpret_cast<const std::byte*>(&scales[scale]), DType::bf16);
  };
  const TestTokens whole(c.rows, kHeads, kDim, DType::f32, value);
  Pool pool({.threads = 2});
  BlockAttention attention(kernels, pool);
  prompt.piece.k = prompt.piece.v = whole.view();
  attention.attend(prompt.piece, {});
  const std::vector<float> lse(prompt.lse.begin(), prompt.lse.end());
  RowRuns runs;
  runs.add(front.view());
  runs.add({{.data = reinterpret_cast<const std::byte*>(numbers.data()),
             .token_stride = kDim,
             .head_stride = ptrdiff_t{kRows} * kDim,
             .tokens = kRows,
             .heads = kHeads,
             .dim = kDim,
             .dtype = DType::i8},
            {scales.data(), size_t{kHeads} * kDim, kFirst, kDim}});
  prompt.piece.k = prompt.piece.v = runs;
  attention.attend(prompt.piece, {});
  EXPECT_EQ(std::vector<float>(prompt.lse.begin(), prompt.lse.end()), lse);
}

TEST_P(BlockAttentionTest, WeightsOfBlocksAreThoseOfSampledQueries) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  Pool pool({.threads = 2});
  BlockWeights weights(kernels, pool);
  for (uint32_t i = 0; i < cases(8); ++i) {
    Rng rng(seed * 1000 + i);
    PromptCase c = random_block_case(rng);
    c.window = 0;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(i) + ": " +
                 text_of_block_case(c));
    const TestPrompt prompt(rng, c);
    const SampledQueries samples{c.n, 1 + static_cast<uint32_t>(rng() % 40)};
    // A query is a sample, the last one above all, as often as the stride says.
    ASSERT_EQ(samples.query(samples.count() - 1), c.n - 1);
    std::vector<uint32_t> heads;
    for (uint32_t h = 0; h < prompt.piece.q_heads; ++h) {
      if (rng() % 3 != 0 || (heads.empty() && h + 1 == prompt.piece.q_heads)) heads.push_back(h);
    }
    const uint32_t blocks = prompt.piece.blocks();
    std::vector<float> got(heads.size() * samples.count() * blocks, NAN);
    weights.compute(prompt.piece, samples, heads, got.data());
    for (size_t at = rng() % 3; at < got.size(); at += 3) {
      const auto block = static_cast<uint32_t>(at % blocks);
      const uint32_t query = samples.query(static_cast<uint32_t>(at / blocks % samples.count()));
      const uint32_t head = heads[at / blocks / samples.count()];
      double sum = 0;
      const uint32_t end = std::min((block + 1) * kPromptRows, c.rows);
      for (uint32_t row = block * kPromptRows; row < end; ++row) {
        if (prompt.sees(query, row)) sum += std::exp(prompt.logit(query, head, row));
      }
      if (sum == 0) {
        ASSERT_EQ(got[at], kMinusInf);
      } else {
        ASSERT_NEAR(got[at], std::log(sum), 2e-5 * (1 + std::fabs(std::log(sum))));
      }
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(PromptKernels);
KEYHOLE_FOR_EVERY_LEVEL(BlockAttentionTest);

}  // namespace
}  // namespace keyhole::cpu::test
