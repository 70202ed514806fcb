// Weights of columns and diagonals for the last queries, and attention of single rows beside blocks, against double
// precision.
#include "cpu/line_weights.h"

#include <set>

#include "tests/cpu/prompt_fixture.h"
#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

using keyhole::test::cases;

class LineWeightsTest : public EveryLevel {};

PromptCase random_line_case(Rng& rng) {
  PromptCase c{};
  c.kv_heads = 1 + rng() % 3;
  c.group = 1 + rng() % 3;
  c.dim = some_head_dim(rng());
  if (c.group * c.dim > 1024) c.dim = 80;
  const uint32_t lengths[] = {1, 5, 63, 64, 128, 200, 300};
  c.n = lengths[rng() % std::size(lengths)];
  c.rows = c.n + (rng() % 2 == 0 ? 0 : static_cast<uint32_t>(rng() % 600));
  c.dtype = kDTypes[rng() % 3];
  c.out = DType::f32;
  c.logits.scale = 1.0F / std::sqrt(static_cast<float>(c.dim));
  c.logits.softcap = rng() % 4 == 0 ? 3.0F : 0.0F;
  return c;
}

std::string text_of_line_case(const PromptCase& c) {
  return std::to_string(c.n) + " of " + std::to_string(c.rows) + " tokens, " +
         std::to_string(c.kv_heads) + " x " + std::to_string(c.group) + " heads of " +
         std::to_string(c.dim) + ", softcap " + std::to_string(c.logits.softcap);
}

TEST_P(LineWeightsTest, AreSoftmaxOfTheLastQueries) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  Pool pool({.threads = 2});
  LineWeights weights(kernels, pool);
  for (uint32_t number = 0; number < cases(10); ++number) {
    Rng rng(seed * 1000 + number);
    const PromptCase c = random_line_case(rng);
    const auto queries = static_cast<uint32_t>(1 + rng() % std::min(c.n, kMostLineQueries));
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(number) + ": " +
                 text_of_line_case(c) + ", the last " + std::to_string(queries));
    const TestPrompt prompt(rng, c);
    std::vector<uint32_t> heads;
    for (uint32_t h = 0; h < prompt.piece.q_heads; ++h) {
      if (rng() % 3 != 0 || (heads.empty() && h + 1 == prompt.piece.q_heads)) heads.push_back(h);
    }
    GuardedArray<float> columns(heads.size() * c.rows, NAN), slashes(heads.size() * c.rows, NAN);
    weights.compute(prompt.piece, queries, heads, columns.data(), slashes.data());
    for (size_t h = 0; h < heads.size(); ++h) {
      std::vector<double> by_row(c.rows), by_distance(c.rows);
      for (uint32_t i = c.n - queries; i < c.n; ++i) {
        const uint32_t position = prompt.piece.position(i);
        std::vector<double> w(position + 1);
        double sum = 0;
        for (uint32_t row = 0; row <= position; ++row) {
          sum += w[row] = std::exp(prompt.logit(i, heads[h], row));
        }
        for (uint32_t row = 0; row <= position; ++row) {
          by_row[row] += w[row] / sum;
          by_distance[position - row] += w[row] / sum;
        }
      }
      for (uint32_t i = 0; i < c.rows; ++i) {
        ASSERT_NEAR(columns[h * c.rows + i], by_row[i], 1e-4 * by_row[i] + 1e-12) << "row " << i;
        ASSERT_NEAR(slashes[h * c.rows + i], by_distance[i], 1e-4 * by_distance[i] + 1e-12)
            << "distance " << i;
      }
    }
  }
}

TEST_P(LineWeightsTest, RowsAreAttendedBesideBlocks) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  Pool pool({.threads = 2});
  BlockAttention attention(kernels, pool);
  for (uint32_t number = 0; number < cases(10); ++number) {
    Rng rng(seed * 1000 + number);
    const PromptCase c = random_line_case(rng);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(number) + ": " +
                 text_of_line_case(c));
    TestPrompt prompt(rng, c);
    const PromptPiece& p = prompt.piece;
    // Each tile has some blocks, and some rows of other ones before its first query; some tiles have none of one kind.
    const size_t all = size_t{p.q_heads} * p.tiles(), capacity = p.rows;
    std::vector<uint32_t> counts(all), blocks(all * p.blocks()), row_counts(all),
        rows(all * capacity);
    std::vector<std::set<uint32_t>> in(all);  // rows of a tile
    for (size_t at = 0; at < all; ++at) {
      const auto tile = static_cast<uint32_t>(at % p.tiles());
      const PromptPiece::Span seen = p.seen(tile);
      const uint64_t of_blocks = rng() % 4, of_rows = rng() % 4;
      for (uint32_t b = seen.begin; b < seen.end; ++b) {
        const uint32_t end = std::min((b + 1) * kPromptRows, p.rows);
        const bool is_listed = rng() % 5 < of_blocks;
        if (is_listed) blocks[at * p.blocks() + counts[at]++] = b;
        for (uint32_t row = b * kPromptRows; row < end; ++row) {
          const bool is_row =
              !is_listed && rng() % 4 < of_rows && row < p.position(tile * kPromptQueries);
          if (is_row) rows[at * capacity + row_counts[at]++] = row;
          if (is_row || is_listed) in[at].insert(row);
        }
      }
    }
    attention.attend(
        p, {counts.data(), blocks.data(), p.blocks(), row_counts.data(), rows.data(), capacity});
    for (uint32_t at = rng() % 11; at < c.n * p.q_heads; at += 11) {
      const uint32_t query = at / p.q_heads, head = at % p.q_heads;
      const std::set<uint32_t>& mine = in[size_t{head} * p.tiles() + query / kPromptQueries];
      const TestPrompt::Truth truth =
          prompt.truth(query, head, -INFINITY, [&](uint32_t row) { return mine.contains(row); });
      if (truth.lse == -INFINITY) {
        ASSERT_EQ(prompt.lse[at], kMinusInf);
      } else {
        ASSERT_NEAR(prompt.lse[at], truth.lse, 2e-5 * (1 + std::fabs(truth.lse)));
      }
      for (uint32_t j = 0; j < c.dim; ++j) {
        ASSERT_NEAR(prompt.output(query, head, j), truth.o[j], 2e-5 * (1 + std::fabs(truth.o[j])))
            << "query " << query << ", head " << head;
      }
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(LineWeightsTest);

}  // namespace
}  // namespace keyhole::cpu::test
