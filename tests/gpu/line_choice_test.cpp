// Columns and diagonals beside double precision: their weights, the heaviest of them, their rows, the lists of tiles;
// then a stretch's attention over exactly the rows that these name, each once.
#include <algorithm>
#include <set>
#include <string>

#include "gpu/cuda/prefill/line_choice.h"
#include "tests/gpu/prompt_layer.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

using Case = PromptCase;

struct Prompt {
  uint32_t n, rows;
  uint32_t columns, slashes, queries, first, near;  ///< the last two in blocks
};
constexpr Prompt kPrompts[] = {
    {200, 700, 20, 3, 64, 1, 1},    // two tiles, ragged, behind other rows
    {1, 300, 5, 2, 64, 0, 0},       // a single query
    {40, 40, 300, 300, 64, 0, 0},   // fewer queries than wanted, fewer rows than lines
    {300, 2600, 100, 0, 33, 1, 2},  // no diagonals, some of the queries
    {257, 2500, 0, 5, 64, 0, 1},    // no columns
    {129, 5000, 700, 9, 17, 2, 3},  // three runs of rows
};

class LineChoiceTest : public PromptLayerTest {
 protected:
  [[nodiscard]] uint32_t tiles() const { return (p_.n + kListQueries - 1) / kListQueries; }

  /// Keys that all queries like, and such that one distance likes.
  void fill_lines(const Prompt& prompt) {
    fill(prompt.n, prompt.rows, 1.0F);
    const Case& c = GetParam();
    for (uint32_t i = 0; i < prompt.n; ++i) {
      for (uint32_t h = 0; h < heads(); ++h) {
        float* const q = &q_[(size_t{i} * heads() + h) * c.dim];
        q[0] = rounded(3.0F, c.dtype);
        // The key 200 rows back, and the one 461 back.
        for (const uint32_t distance : {200U, 461U}) {
          if (p_.first + i < distance) continue;
          const float* const k =
              &k_[(size_t{p_.first + i - distance} * c.kv_heads + h / c.group) * c.dim];
          for (uint32_t j = 1; j < c.dim; ++j) q[j] = rounded(q[j] + 0.3F * k[j], c.dtype);
        }
      }
    }
    for (uint32_t i = 5; i < prompt.rows; i += 43) {
      for (uint32_t h = 0; h < c.kv_heads; ++h)
        k_[(size_t{i} * c.kv_heads + h) * c.dim] =
            rounded(0.5F * static_cast<float>(i % 17), c.dtype);
    }
    p_.q = upload(as_bytes(q_, c.dtype));
    p_.keys = upload(as_bytes(k_, c.dtype));
  }

  LineWeights weights_of(const Prompt& prompt, uint32_t first_head, uint32_t count) {
    LineWeights w;
    w.queries = std::min(prompt.queries, prompt.n);
    w.first_head = first_head;
    w.heads = count;
    // NaN wherever nothing is written.
    const size_t bytes = LineWeights::bytes_of_head(prompt.rows) * count;
    w.place(reinterpret_cast<std::byte*>(upload(std::vector<float>(bytes / sizeof(float), NAN))),
            prompt.rows);
    launch_line_weights(p_, w, GetParam().dtype, GetParam().dim, nullptr);
    return w;
  }
  Lines lines_of(const Prompt& prompt) {
    Lines l;
    l.columns = prompt.columns;
    l.slashes = prompt.slashes;
    l.first_blocks = prompt.first;
    l.near_blocks = prompt.near;
    l.last_tile = (prompt.n - 1) / kListQueries * kListQueries;
    l.capacity = std::max(1U, (prompt.columns + kListRows - 1) / kListRows) * kListRows;
    l.slash_capacity = std::max(1U, prompt.slashes);
    l.counts = upload(std::vector<uint32_t>(2 * heads(), 99999));
    l.rows = upload(std::vector<uint32_t>(size_t{heads()} * l.capacity, 99999));
    l.distances = upload(std::vector<uint32_t>(size_t{heads()} * l.slash_capacity, 99999));
    const size_t halves = size_t{heads()} * l.capacity * GetParam().dim;
    l.keys = upload(std::vector<uint16_t>(halves, 0xFFFF));  // NaN
    l.values = upload(std::vector<uint16_t>(halves, 0xFFFF));
    return l;
  }
  /// The lines found for each head: rows of columns, and distances.
  struct Found {
    std::vector<uint32_t> rows, distances;
  };
  std::vector<Found> found(const Lines& l) const {
    const auto counts = download(l.counts, 2 * heads());
    const auto rows = download(l.rows, size_t{heads()} * l.capacity);
    const auto distances = download(l.distances, size_t{heads()} * l.slash_capacity);
    std::vector<Found> all(heads());
    for (uint32_t h = 0; h < heads(); ++h) {
      const uint32_t *const r = &rows[size_t{h} * l.capacity],
                            *const d = &distances[size_t{h} * l.slash_capacity];
      EXPECT_LE(counts[2 * h], l.columns) << "head " << h;
      EXPECT_LE(counts[2 * h + 1], l.slashes) << "head " << h;
      all[h].rows.assign(r, r + std::min(counts[2 * h], l.capacity));
      all[h].distances.assign(d, d + std::min(counts[2 * h + 1], l.slash_capacity));
    }
    return all;
  }

  /// Weights in double: of each row, and of each distance.
  struct Truth {
    std::vector<double> columns, slashes;
  };
  [[nodiscard]] Truth truth_of(uint32_t head, uint32_t queries) const {
    Truth t{std::vector<double>(p_.rows), std::vector<double>(p_.rows)};
    for (uint32_t i = p_.n - queries; i < p_.n; ++i) {
      const uint32_t position = p_.first + i;
      std::vector<double> w(position + 1);
      double sum = 0, top = -INFINITY;
      for (uint32_t j = 0; j <= position; ++j) top = std::max(top, w[j] = logit(i, head, j));
      for (double& x : w) sum += x = std::exp(x - top);
      for (uint32_t j = 0; j <= position; ++j) {
        t.columns[j] += w[j] / sum;
        t.slashes[position - j] += w[j] / sum;
      }
    }
    return t;
  }
  /// The chosen ones of [first, end) are the `wanted` heaviest, but for those that are alike within rounding; rising.
  static void compare_choice(const std::vector<uint32_t>& chosen, const std::vector<double>& truth,
                             uint32_t first, uint32_t end, uint32_t wanted) {
    ASSERT_EQ(chosen.size(), std::min<size_t>(wanted, end > first ? end - first : 0));
    std::vector<bool> in(truth.size());
    double least = INFINITY, most_left = 0;
    for (size_t i = 0; i < chosen.size(); ++i) {
      ASSERT_GE(chosen[i], first);
      ASSERT_LT(chosen[i], end);
      if (i > 0) {
        ASSERT_GT(chosen[i], chosen[i - 1]) << "number " << i;
      }
      in[chosen[i]] = true;
      least = std::min(least, truth[chosen[i]]);
    }
    for (uint32_t i = first; i < end; ++i) {
      if (!in[i]) most_left = std::max(most_left, truth[i]);
    }
    ASSERT_GE(least, most_left * 0.99) << "a heavier line is left out";
  }
};

TEST_P(LineChoiceTest, WeightsAreSoftmaxOfTheLastQueries) {
  for (const Prompt& prompt : kPrompts) {
    SCOPED_TRACE(std::to_string(prompt.n) + " of " + std::to_string(prompt.rows));
    fill_lines(prompt);
    // Heads in two parts.
    const uint32_t half = (heads() + 1) / 2;
    const Lines lines = lines_of(prompt);
    for (uint32_t first = 0; first < heads(); first += half) {
      const uint32_t count = std::min(half, heads() - first);
      const LineWeights w = weights_of(prompt, first, count);
      launch_choose_lines(p_, w, lines, nullptr);
      const auto columns = download(w.columns, size_t{count} * prompt.rows);
      const auto slashes = download(w.slashes, size_t{2} * count * prompt.rows);
      for (uint32_t h = 0; h < count; ++h) {
        const Truth t = truth_of(first + h, w.queries);
        for (uint32_t i = 0; i < prompt.rows; ++i) {
          const size_t at = size_t{h} * prompt.rows + i;
          ASSERT_NEAR(columns[at], t.columns[i], 2e-3 * t.columns[i] + 1e-7)
              << "head " << first + h << " row " << i;
          ASSERT_NEAR(slashes[at] + slashes[size_t{count} * prompt.rows + at], t.slashes[i],
                      2e-3 * t.slashes[i] + 1e-7)
              << "head " << first + h << " distance " << i;
        }
      }
    }
    const std::vector<Found> got = found(lines);
    const uint32_t own = (p_.first + lines.last_tile) / kListRows;
    const uint32_t near = own > prompt.near ? own - prompt.near : 0;
    for (uint32_t h = 0; h < heads(); ++h) {
      SCOPED_TRACE("head " + std::to_string(h));
      const Truth t = truth_of(h, std::min(prompt.queries, prompt.n));
      compare_choice(got[h].rows, t.columns, prompt.first * kListRows, near * kListRows,
                     prompt.columns);
      if (HasFatalFailure()) return;
      compare_choice(got[h].distances, t.slashes, prompt.near * kListRows + 1, prompt.rows,
                     prompt.slashes);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(LineChoiceTest, OfEqualColumnsTheFirstAreChosen) {
  const Prompt prompt{200, 2000, 1100, 0, 64, 1, 1};
  fill(prompt.n, prompt.rows);
  for (size_t i = 0; i < k_.size(); ++i) k_[i] = k_[i % (GetParam().kv_heads * GetParam().dim)];
  p_.keys = upload(as_bytes(k_, GetParam().dtype));
  const Lines lines = lines_of(prompt);
  launch_choose_lines(p_, weights_of(prompt, 0, heads()), lines, nullptr);
  std::vector<uint32_t> first(prompt.columns);
  for (uint32_t i = 0; i < prompt.columns; ++i) first[i] = kListRows + i;
  for (const Found& head : found(lines)) EXPECT_EQ(head.rows, first);
}

TEST_P(LineChoiceTest, TilesAttendDiagonalsAsBlocksAndOtherColumnsByBits) {
  const Case& c = GetParam();
  for (const Prompt& prompt : kPrompts) {
    SCOPED_TRACE(std::to_string(prompt.n) + " of " + std::to_string(prompt.rows));
    fill_lines(prompt);
    const Lines lines = lines_of(prompt);
    launch_choose_lines(p_, weights_of(prompt, 0, heads()), lines, nullptr);
    launch_gather_columns(p_, lines, c.dtype, c.dim, nullptr);
    const std::vector<Found> got = found(lines);
    const uint32_t blocks = (prompt.rows + kListRows - 1) / kListRows;
    const size_t all = size_t{heads()} * tiles();
    BlockChoice choice;
    choice.first_blocks = prompt.first;
    choice.near_blocks = prompt.near;
    choice.counts = upload(std::vector<uint32_t>(all, 99999));
    choice.lists = upload(std::vector<uint16_t>(all * blocks));
    choice.totals = upload(std::vector<unsigned long long>(2));
    const uint32_t words = lines.capacity / 32, column_blocks = lines.capacity / kListRows;
    const ColumnLists columns{upload(std::vector<uint32_t>(all)),
                              upload(std::vector<uint16_t>(all * column_blocks)),
                              upload(std::vector<uint32_t>(all * words))};
    launch_line_lists(p_, lines, columns, choice, blocks, nullptr);

    // Rows, bit by bit.
    const size_t halves = size_t{heads()} * lines.capacity * c.dim;
    const auto keys = download(static_cast<const uint16_t*>(lines.keys), halves),
               values = download(static_cast<const uint16_t*>(lines.values), halves);
    const auto k = as_bytes(k_, c.dtype), v = as_bytes(v_, c.dtype);
    for (uint32_t h = 0; h < heads(); ++h) {
      const size_t count = got[h].rows.size();
      for (size_t i = 0; i < (count + kListRows - 1) / kListRows * kListRows; ++i) {
        for (uint32_t j = 0; j < c.dim; ++j) {
          const size_t at = (size_t{h} * lines.capacity + i) * c.dim + j;
          uint16_t wanted[2] = {};
          if (i < count) {
            const size_t from = (size_t{got[h].rows[i]} * c.kv_heads + h / c.group) * c.dim + j;
            std::memcpy(&wanted[0], &k[2 * from], 2);
            std::memcpy(&wanted[1], &v[2 * from], 2);
          }
          ASSERT_EQ(keys[at], wanted[0]) << "head " << h << " column " << i;
          ASSERT_EQ(values[at], wanted[1]) << "head " << h << " column " << i;
        }
      }
    }

    const auto counts = download(choice.counts, all), column_counts = download(columns.counts, all);
    const auto lists = download(choice.lists, all * blocks);
    const auto column_lists = download(columns.blocks, all * column_blocks);
    const auto chosen = download(columns.chosen, all * words);
    unsigned long long attended = 0, seen = 0;
    for (uint32_t h = 0; h < heads(); ++h) {
      for (uint32_t t = 0; t < tiles(); ++t) {
        SCOPED_TRACE("head " + std::to_string(h) + " tile " + std::to_string(t));
        const uint32_t first = p_.first + t * kListQueries;
        const uint32_t last = p_.first + std::min((t + 1) * kListQueries, p_.n) - 1;
        const uint32_t own = first / kListRows, end = last / kListRows + 1;
        std::set<uint32_t> wanted;
        for (uint32_t b = 0; b < end; ++b) {
          if (b < prompt.first || b + prompt.near >= own) wanted.insert(b);
        }
        for (const uint32_t distance : got[h].distances) {
          for (uint32_t q = first; q <= last; ++q) {
            if (q >= distance) wanted.insert((q - distance) / kListRows);
          }
        }
        const size_t at = size_t{h} * tiles() + t;
        const std::vector<uint32_t> list(&lists[at * blocks],
                                         &lists[at * blocks] + std::min(counts[at], blocks));
        ASSERT_EQ(list, std::vector<uint32_t>(wanted.begin(), wanted.end()));
        std::set<uint32_t> wanted_blocks;
        for (uint32_t i = 0; i < got[h].rows.size(); ++i) {
          const uint32_t block = got[h].rows[i] / kListRows;
          const bool is_in = block < own && !wanted.contains(block);
          if (is_in) wanted_blocks.insert(i / kListRows);
          ASSERT_EQ((chosen[at * words + i / 32] >> i % 32 & 1U) != 0, is_in) << "column " << i;
        }
        // No bit stands for what pads the last block.
        for (auto i = static_cast<uint32_t>(got[h].rows.size()); i % kListRows != 0; ++i)
          ASSERT_EQ(chosen[at * words + i / 32] >> i % 32 & 1U, 0U) << "column " << i;
        ASSERT_LE(column_counts[at], column_blocks);
        const uint16_t* const of_columns = &column_lists[at * column_blocks];
        ASSERT_EQ(std::vector<uint32_t>(of_columns, of_columns + column_counts[at]),
                  std::vector<uint32_t>(wanted_blocks.begin(), wanted_blocks.end()));
        attended += wanted.size() + wanted_blocks.size();
        seen += end;
      }
    }
    const auto totals = download(choice.totals, 2);
    EXPECT_EQ(totals[0], attended);
    EXPECT_EQ(totals[1], seen);
  }
}

TEST_P(LineChoiceTest, AStretchAttendsEachOfItsRowsOnce) {
  const Case& c = GetParam();
  const auto prompt_attention = make_cuda_prompt(0, {heads(), c.kv_heads, c.dim});
  for (const Prompt& prompt : kPrompts) {
    SCOPED_TRACE(std::to_string(prompt.n) + " of " + std::to_string(prompt.rows));
    fill_lines(prompt);
    const Lines lines = lines_of(prompt);
    launch_choose_lines(p_, weights_of(prompt, 0, heads()), lines, nullptr);
    const std::vector<Found> got = found(lines);
    PromptPattern pattern;
    pattern.dense = false;
    pattern.choice = PromptChoice::vertical_slash;
    pattern.first_rows = prompt.first * kListRows;
    pattern.near_rows = prompt.near * kListRows;
    pattern.columns = prompt.columns;
    pattern.slashes = prompt.slashes;
    pattern.queries = prompt.queries;
    const std::vector<float> out = attend(*prompt_attention, pattern, prompt.n);
    for (uint32_t t = 0; t < prompt.n; t += 23) {
      for (uint32_t h = 0; h < heads(); ++h) {
        const uint32_t tile = t / kListQueries, position = p_.first + t;
        const uint32_t first = p_.first + tile * kListQueries;
        const uint32_t last = p_.first + std::min((tile + 1) * kListQueries, p_.n) - 1;
        std::vector<bool> in(prompt.rows);
        const auto take = [&](uint32_t block) {
          for (uint32_t i = block * kListRows; i < std::min(prompt.rows, (block + 1) * kListRows);
               ++i)
            in[i] = true;
        };
        for (uint32_t b = 0; b * kListRows < prompt.rows; ++b) {
          if (b < prompt.first || b + prompt.near >= first / kListRows) take(b);
        }
        for (const uint32_t distance : got[h].distances) {
          for (uint32_t q = first; q <= last; ++q) {
            if (q >= distance) take((q - distance) / kListRows);
          }
        }
        for (const uint32_t row : got[h].rows) in[row] = true;
        std::vector<double> o(c.dim);
        double sum = 0;
        for (uint32_t i = 0; i <= position; ++i) {
          if (!in[i]) continue;
          const double w = std::exp(logit(t, h, i));
          sum += w;
          for (uint32_t j = 0; j < c.dim; ++j)
            o[j] += w * double{v_[(size_t{i} * c.kv_heads + h / c.group) * c.dim + j]};
        }
        double difference = 0, norm = 0;
        for (uint32_t j = 0; j < c.dim; ++j) {
          const double y = o[j] / sum;
          const double x = double{out[(size_t{t} * heads() + h) * c.dim + j]} - y;
          difference += x * x;
          norm += y * y;
        }
        ASSERT_LT(std::sqrt(difference / norm), 2e-3) << "token " << t << " head " << h;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LineChoiceTest,
                         testing::Values(Case{64, 2, 2, DType::f16}, Case{128, 1, 3, DType::bf16},
                                         Case{80, 2, 1, DType::f16}, Case{96, 1, 2, DType::bf16},
                                         Case{128, 2, 2, DType::f16, 15.0F},
                                         Case{256, 1, 2, DType::bf16}),
                         name_of);

}  // namespace
}  // namespace keyhole::gpu
