// What keyhole_prompt on an engine on the host attends, against choices and attention in double precision: blocks by
// groups of queries, columns and diagonals; and the choice of blocks by itself.
#include <numeric>

#include "runtime/prefill/block_choice.h"
#include "tests/list_truth.h"
#include "tests/normal.h"
#include "tests/runtime/prefill/host_prompt_fixture.h"
#include "tests/sanitized.h"

namespace keyhole::test {
namespace {

/// What groups of queries of a call choose, from its definition: of the newest `queries` tokens, groups of kGroup at a
/// time.
struct GroupChoice {
  static constexpr uint32_t kGroup = 64;

  const Tokens& t;
  uint32_t queries;
  size_t unit = 1;  ///< blocks that are chosen together

  [[nodiscard]] uint32_t first() const { return t.n - queries; }
  /// Weights of the blocks that the group with the given first query sees.
  [[nodiscard]] std::vector<double> weights(uint32_t query, uint32_t head) const {
    const uint32_t end = std::min(query + kGroup, queries);
    std::vector<double> w;
    for (uint32_t row = 0; row < first() + end; row += kPromptRows) {
      double x = 0;
      const uint32_t to = std::min(row + kPromptRows, t.n);
      for (uint32_t i = query; i < end; ++i) {
        for (uint32_t j = row; j < to; ++j) x += t.logit(first() + i, head, j);
      }
      w.push_back(std::exp(x / ((end - query) * (to - row))));
    }
    return w;
  }
  /// Shares of a tile's groups, on average.
  [[nodiscard]] std::vector<double> shares(uint32_t tile, uint32_t head) const {
    const uint32_t from = tile * kPromptQueries, to = std::min(from + kPromptQueries, queries);
    std::vector<double> share((first() + to - 1) / kPromptRows + 1);
    const uint32_t groups = (to - from + kGroup - 1) / kGroup;
    for (uint32_t query = from; query < to; query += kGroup) {
      const std::vector<double> w = weights(query, head);
      const double sum = std::accumulate(w.begin(), w.end(), 0.0);
      for (size_t b = 0; b < w.size(); ++b) share[b] += w[b] / sum / groups;
    }
    return share;
  }
  /// The tile's blocks beside the first and those from one before its first query's on: so many of the heaviest, or, by
  /// bins of an eighth of an octave, those that hold the mass.
  [[nodiscard]] std::vector<bool> chosen(uint32_t tile, uint32_t head, size_t most,
                                         double mass) const {
    const std::vector<double> of_blocks = shares(tile, head);
    std::vector<double> share((of_blocks.size() + unit - 1) / unit);
    for (size_t b = 0; b < of_blocks.size(); ++b) share[b / unit] += of_blocks[b];
    const size_t own = (first() + tile * kPromptQueries) / kPromptRows;
    std::vector<bool> in(share.size());  // units
    std::vector<size_t> others;
    double held = 0;
    for (size_t b = 0; b < share.size(); ++b) {
      in[b] = b == 0 || (b + 1) * unit >= own;
      if (in[b])
        held += share[b];
      else
        others.push_back(b);
    }
    std::sort(others.begin(), others.end(),
              [&](size_t a, size_t b) { return share[a] > share[b]; });
    const auto bin = [&](size_t b) { return std::floor(-std::log2(share[b]) * 8); };
    for (size_t i = 0; i < others.size(); ++i) {
      const bool is_wanted = most != 0 ? i < most
                                       : held < mass || (i > 0 && in[others[i - 1]] &&
                                                         bin(others[i]) == bin(others[i - 1]));
      if (!is_wanted) break;
      in[others[i]] = true;
      held += share[others[i]];
    }
    std::vector<bool> of_all(of_blocks.size());
    for (size_t b = 0; b < of_all.size(); ++b) of_all[b] = in[b / unit];
    return of_all;
  }
};

TEST(HostPromptChoice, GroupsOfQueriesChooseBlocks) {
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(unless_sanitized(1500, 900), 13);
  constexpr uint32_t kQueries = 333;
  struct Case {
    const char* pattern;
    uint32_t most;
    double mass;
    size_t unit = 1;
  };
  for (const Case& c : {Case{"pooled:blocks=3,first=64,near=64,from=0", 3, 0},
                        Case{"pooled:mass=600,first=64,near=64,from=0", 0, 0.6},
                        Case{"pooled:blocks=2,block=128,first=64,near=64,from=0", 2, 0, 2}}) {
    SCOPED_TRACE(c.pattern);
    const GroupChoice choice{tokens, kQueries, c.unit};
    const Prompt prompt(engine.get(), c.pattern);
    const Output out = attend(prompt.p, tokens, kQueries, kQueries);
    uint64_t attended = 0, wanted = 0, seen = 0, expected_seen = 0;
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t tile = 0; tile * kPromptQueries < kQueries; ++tile) {
        const std::vector<bool> in = choice.chosen(tile, head, c.most, c.mass);
        wanted += static_cast<uint64_t>(std::count(in.begin(), in.end(), true));
        expected_seen += in.size();
        for (uint32_t i = 5; i < kPromptQueries; i += 50) {
          const uint32_t query = tile * kPromptQueries + i;
          if (query >= kQueries) break;
          expect_truth(tokens, out, kQueries, query, head, -INFINITY,
                       [&](uint32_t row) { return in[row / kPromptRows]; });
          if (HasFatalFailure()) return;
        }
      }
    }
    ASSERT_OK(keyhole_prompt_get_blocks(prompt.p, &attended, &seen));
    EXPECT_EQ(attended, wanted);
    EXPECT_EQ(seen, expected_seen);
    EXPECT_LT(attended, seen);
  }
}

/// The `most` heaviest of [first, end); how much less than the last of them the next one weighs is far more than
/// rounding.
std::vector<uint32_t> heaviest(const std::vector<double>& weights, uint32_t first, uint32_t end,
                               uint32_t most) {
  std::vector<uint32_t> order;
  for (uint32_t i = first; i < end; ++i) order.push_back(i);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return weights[a] > weights[b]; });
  if (most < order.size()) {
    if (most > 0) {
      EXPECT_GT(weights[order[most - 1]], weights[order[most]] * 1.0001) << "too close to call";
    }
    order.resize(most);
  }
  return order;
}

TEST(HostPromptChoice, ColumnsAndDiagonalsAreThoseOfTheLastQueries) {
  const EnginePtr engine = make_engine(small_engine());
  struct Case {
    uint32_t tokens, queries;  // and of a call
    uint32_t columns, slashes, of, first, near;
  };
  constexpr Case kCases[] = {
      {700, 200, 20, 3, 64, 1, 1},      // two tiles, ragged, behind other rows
      {300, 1, 5, 2, 64, 0, 0},         // a single query
      {40, 40, 300, 300, 64, 0, 0},     // fewer queries than wanted, fewer rows than lines
      {900, 300, 100, 0, 33, 1, 2},     // no diagonals, some of the queries
      {900, 257, 0, 5, 64, 0, 1},       // no columns
      {1500, 333, 80, 2, 17, 2, 3},     // more rows than attention takes at once
      {1500, 333, 16384, 0, 64, 0, 0},  // every row
  };
  for (const Case& c : kCases) {
    Tokens tokens(c.tokens, 14);
    // Queries like the key 200 rows back.
    for (uint32_t i = 200; i < tokens.n; ++i) {
      for (uint32_t j = 0; j < kHeads * kDim; ++j) {
        tokens.q[size_t{i} * kHeads * kDim + j] +=
            0.3F * tokens.k[(size_t{i - 200} * kKvHeads + j / kDim / 2) * kDim + j % kDim];
      }
    }
    const std::string pattern =
        "vertical-slash:from=0,columns=" + std::to_string(c.columns) +
        ",slashes=" + std::to_string(c.slashes) + ",queries=" + std::to_string(c.of) +
        ",first=" + std::to_string(c.first * 64) + ",near=" + std::to_string(c.near * 64);
    SCOPED_TRACE(pattern + " of " + std::to_string(c.tokens));
    const Prompt prompt(engine.get(), pattern.c_str());
    const Output out = attend(prompt.p, tokens, c.queries, c.queries);
    const uint32_t before = c.tokens - c.queries, tiles = (c.queries + 127) / 128;
    uint64_t wanted_blocks = 0, wanted_seen = 0;
    for (uint32_t head = 0; head < kHeads; ++head) {
      std::vector<double> columns(c.tokens), slashes(c.tokens);
      for (uint32_t i = c.queries - std::min(c.of, c.queries); i < c.queries; ++i) {
        const uint32_t position = before + i;
        std::vector<double> w(position + 1);
        double sum = 0;
        for (uint32_t row = 0; row <= position; ++row) {
          sum += w[row] = std::exp(tokens.logit(position, head, row));
        }
        for (uint32_t row = 0; row <= position; ++row) {
          columns[row] += w[row] / sum;
          slashes[position - row] += w[row] / sum;
        }
      }
      const uint32_t own = (before + (tiles - 1) * kPromptQueries) / kPromptRows;
      const uint32_t near = own > c.near ? own - c.near : 0;
      const std::vector<uint32_t> rows = heaviest(columns, c.first * kPromptRows,
                                                  near * kPromptRows, c.columns),
                                  distances = heaviest(slashes, c.near * kPromptRows + 1, c.tokens,
                                                       c.slashes);
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const uint32_t first = before + tile * kPromptQueries;
        const uint32_t last = before + std::min((tile + 1) * kPromptQueries, c.queries) - 1;
        std::vector<bool> listed(last / kPromptRows + 1), single(c.tokens);
        for (uint32_t b = 0; b < listed.size(); ++b) {
          listed[b] = b < c.first || b + c.near >= first / kPromptRows;
        }
        for (const uint32_t distance : distances) {
          for (uint32_t q = std::max(first, distance); q <= last; ++q) {
            listed[(q - distance) / kPromptRows] = true;
          }
        }
        uint32_t beside = 0;
        for (const uint32_t row : rows) {
          if (row >= first || listed[row / kPromptRows]) continue;
          single[row] = true;
          ++beside;
        }
        wanted_blocks += static_cast<uint64_t>(std::count(listed.begin(), listed.end(), true)) +
                         (beside + kPromptRows - 1) / kPromptRows;
        wanted_seen += listed.size();
        for (uint32_t position = first; position <= last; position += 50) {
          expect_truth(tokens, out, c.queries, position - before, head, -INFINITY,
                       [&](uint32_t row) { return listed[row / kPromptRows] || single[row]; });
          if (HasFatalFailure()) return;
        }
      }
    }
    uint64_t attended = 0, seen = 0;
    ASSERT_OK(keyhole_prompt_get_blocks(prompt.p, &attended, &seen));
    EXPECT_EQ(attended, wanted_blocks);
    EXPECT_EQ(seen, wanted_seen);
  }
}

TEST(HostBlockChoice, TakesSoManyOfTheHeaviest) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  for (uint32_t i = 0; i < cases(100); ++i) {
    std::mt19937_64 rng(seed * 1000 + i);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(i));
    cpu::PromptPiece piece;
    piece.n = 1 + rng() % 200;
    piece.rows = piece.n + rng() % 4000;
    const cpu::PromptPiece::Span seen = piece.seen(0);
    const auto most = static_cast<uint32_t>(1 + rng() % 20);
    const auto unit = static_cast<uint32_t>(1 + rng() % 2);
    const runtime::BlockRule rule{static_cast<uint32_t>(rng() % 3),
                                  static_cast<uint32_t>(rng() % 4), 0.5F, most, unit};
    // Of few values, so that many are equal; some blocks have no weight.
    std::vector<float> weights(seen.end);
    for (float& x : weights) x = rng() % 5 == 0 ? kMinusInf : static_cast<float>(rng() % 4);
    weights[0] = 0.0F;
    const uint32_t own = piece.position(0) / kPromptRows;
    std::vector<std::pair<double, uint32_t>> others;
    std::vector<uint32_t> wanted;
    const auto take = [&](uint32_t first) {
      for (uint32_t b = first; b < std::min(first + unit, seen.end); ++b) wanted.push_back(b);
    };
    for (uint32_t first = 0; first < seen.end; first += unit) {
      const double weight =
          std::exp(double{weights[first]}) +
          (unit == 2 && first + 1 < seen.end ? std::exp(double{weights[first + 1]}) : 0.0);
      if (first < rule.first_blocks || first + unit - 1 + rule.near_blocks >= own)
        take(first);
      else if (weight > 0)
        others.emplace_back(-weight, first);
    }
    std::sort(others.begin(), others.end());
    for (size_t j = 0; j < std::min<size_t>(most, others.size()); ++j) take(others[j].second);
    std::sort(wanted.begin(), wanted.end());
    std::vector<uint32_t> list(piece.blocks());
    const runtime::TileChoice choice =
        runtime::choose_blocks(piece, 0, rule, {weights.data(), 1, weights.size()}, list.data());
    list.resize(choice.count);
    EXPECT_EQ(list, wanted);
  }
}

// Random weights: a list holds the wanted share of the samples' weight, no block of it could be missed, and none that
// is left out weighs more than one that is taken, by more than the eighth of an octave that they are told apart by.
TEST(HostBlockChoice, TakesTheHeaviestBlocksUntilTheMassIsHeld) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  for (uint32_t i = 0; i < cases(200); ++i) {
    std::mt19937_64 rng(seed * 1000 + i);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(i));
    cpu::PromptPiece piece;
    piece.n = 1 + rng() % 400;
    piece.rows = piece.n + rng() % 4000;
    const auto tile = static_cast<uint32_t>(rng() % piece.tiles());
    const cpu::PromptPiece::Span seen = piece.seen(tile);
    const auto samples = static_cast<uint32_t>(1 + rng() % 9);
    const size_t stride = seen.end + rng() % 3;
    const runtime::BlockRule rule{
        static_cast<uint32_t>(rng() % 3), static_cast<uint32_t>(rng() % 4),
        static_cast<float>(rng() % 1001) / 1000.0F, 0, static_cast<uint32_t>(1 + rng() % 2)};
    keyhole::test::Normal<float> normal(0.0F, static_cast<float>(1 + rng() % 4));
    std::vector<float> weights(samples * stride);
    for (float& x : weights) x = rng() % 9 == 0 ? kMinusInf : normal(rng);
    for (uint32_t s = 0; s < samples; ++s)
      weights[s * stride] = 0.0F;  // every sample sees something
    std::vector<double> share(seen.end);
    double looked_up = 0;
    const uint32_t own = piece.position(tile * kPromptQueries) / kPromptRows;
    const ListRule truth{.first = rule.first_blocks,
                         .near = rule.near_blocks,
                         .own = own,
                         .unit = rule.unit,
                         .mass = double{rule.mass},
                         .error = 1e-5,
                         .close = 1.001};
    std::vector<std::vector<double>> each(samples, std::vector<double>(seen.end));
    for (uint32_t s = 0; s < samples; ++s) {
      double sum = 0;
      for (uint32_t b = 0; b < seen.end; ++b) sum += std::exp(double{weights[s * stride + b]});
      for (uint32_t b = 0; b < seen.end; ++b) {
        each[s][b] = std::exp(double{weights[s * stride + b]}) / sum;
        share[b] += each[s][b] / samples;
      }
    }
    for (uint32_t b = 0; b < seen.end && samples > 1; ++b) {
      std::vector<double> x;
      for (const auto& of_sample : each) x.push_back(of_sample[b]);
      std::sort(x.rbegin(), x.rend());
      if (!truth.keeps(b) && x[0] > 8 * x[1]) looked_up += x[0] / samples;
    }
    std::vector<uint32_t> list(piece.blocks());
    const runtime::TileChoice choice =
        runtime::choose_blocks(piece, tile, rule, {weights.data(), samples, stride}, list.data());
    EXPECT_NEAR(static_cast<double>(choice.looked_up) / runtime::kShareUnits, looked_up, 1e-3);
    expect_heaviest(list.data(), choice.count, share, truth);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace keyhole::test
