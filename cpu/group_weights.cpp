#include "cpu/group_weights.h"

#include <algorithm>

namespace keyhole::cpu {
namespace {

// Groups of queries of one product: their scores are 16 KiB.
constexpr uint32_t kQueryGroups = 64;
constexpr uint32_t kRowGroups = kPromptRows;  // of one product, as RowUnpacker has them

uint32_t parts_of(uint32_t n, uint32_t part) { return n / part + (n % part != 0 ? 1 : 0); }

TokenRows rows_of(LineVector<float>& x, size_t heads, uint32_t dim) {
  return {reinterpret_cast<std::byte*>(x.data()), heads * dim * sizeof(float), dim * sizeof(float),
          DType::f32};
}

}  // namespace

void GroupWeights::antidiagonals(const PromptPiece& piece, uint32_t stride,
                                 std::span<const uint32_t> heads, float* weights) {
  Groups g;
  g.q = piece.q;
  g.k = piece.k;
  g.queries = piece.n;
  g.rows = piece.rows;
  g.slices = g.group_queries = g.group_rows = stride;
  weigh(piece, g, heads, weights);
}

void GroupWeights::means(const PromptPiece& piece, std::span<const uint32_t> heads,
                         float* weights) {
  const uint32_t d = piece.head_dim;
  Groups g;
  g.queries = parts_of(piece.n, kMeanQueries);
  g.rows = piece.blocks();
  g.group_queries = kMeanQueries;
  g.group_rows = kPromptRows;
  g.q_by_place = true;
  query_means_.resize(std::max(query_means_.size(), heads.size() * g.queries * d));
  row_means_.resize(std::max(row_means_.size(), size_t{piece.kv_heads} * g.rows * d));
  g.q = rows_of(query_means_, heads.size(), d);
  const TokenRows row_means = rows_of(row_means_, piece.kv_heads, d);
  g.k = row_means;
  const RowRuns queries = piece.q;
  // All groups of queries, then all blocks.
  pool_->run(g.queries + g.rows, [&](uint32_t task, uint32_t) {
    const bool is_query = task < g.queries;
    const uint32_t i = is_query ? task : task - g.queries;
    const uint32_t of = is_query ? piece.n : piece.rows;
    const uint32_t length = is_query ? kMeanQueries : kPromptRows;
    const uint32_t first = i * length, count = std::min(length, of - first);
    if (is_query) {
      for (size_t h = 0; h < heads.size(); ++h) {
        average(queries, heads[h], first, count, d, reinterpret_cast<float*>(g.q.row(i, h)));
      }
      return;
    }
    // Heads that share K lie side by side.
    for (size_t h = 0; h < heads.size(); ++h) {
      const uint32_t kv_head = heads[h] / piece.group();
      if (h > 0 && heads[h - 1] / piece.group() == kv_head) continue;
      average(piece.k, kv_head, first, count, d,
              reinterpret_cast<float*>(row_means.row(i, kv_head)));
    }
  });
  weigh(piece, g, heads, weights);
}

void GroupWeights::average(const RowRuns& rows, size_t head, uint32_t first, uint32_t count,
                           uint32_t dim, float* out) const {
  constexpr uint32_t kAtOnce = 64;  // components; any multiple of 16, by which dimensions go
  const float share = 1.0F / static_cast<float>(count);
  for (uint32_t j0 = 0; j0 < dim; j0 += kAtOnce) {
    const uint32_t width = std::min(kAtOnce, dim - j0);
    float sum[kAtOnce] = {}, row[kAtOnce] = {};
    for (uint32_t i = 0; i < count; ++i) {
      rows.read(*kernels_, size_t{first} + i, head, j0, width, row);
      for (uint32_t j = 0; j < kAtOnce; ++j) sum[j] += row[j];
    }
    for (uint32_t j = 0; j < width; ++j) out[j0 + j] = sum[j] * share;
  }
}

void GroupWeights::weigh(const PromptPiece& piece, const Groups& g, std::span<const uint32_t> heads,
                         float* weights) {
  const size_t width = size_t{g.slices} * piece.head_dim;
  while (scratch_.size() < pool_->threads()) scratch_.emplace_back(*kernels_);
  for (Scratch& s : scratch_) {
    s.queries.resize(std::max(s.queries.size(), kQueryGroups * width));
    s.keys.resize(std::max(s.keys.size(), kRowGroups * width));
    s.x.resize(size_t{kQueryGroups} * kRowGroups);
  }
  std::vector<uint32_t> firsts;  // of the heads that share K
  for (size_t h = 0; h < heads.size(); ++h) {
    if (h == 0 || heads[h] / piece.group() != heads[h - 1] / piece.group()) {
      firsts.push_back(static_cast<uint32_t>(h));
    }
  }
  const auto shared = static_cast<uint32_t>(firsts.size());
  const uint32_t tiles = parts_of(parts_of(piece.rows, g.group_rows), kRowGroups);
  pool_->run(tiles * shared, [&](uint32_t task, uint32_t worker) {
    weigh_tile(piece, g, heads, firsts[task % shared], task / shared, weights, scratch_[worker]);
  });
}

/// Groups as rows of slices, of queries from their last one back.
void GroupWeights::unpack_queries(const Groups& g, size_t head, uint32_t first, uint32_t count,
                                  uint32_t dim, float* out) const {
  const auto convert = kernels_->to_f32[static_cast<size_t>(g.q.dtype)];
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t slice = 0; slice < g.slices; ++slice, out += dim) {
      const size_t query = size_t{first + i} * g.slices + (g.slices - 1 - slice);
      if (query < g.queries) {
        convert(g.q.row(query, head), out, dim);
      } else {
        std::fill_n(out, dim, 0.0F);
      }
    }
  }
}

void GroupWeights::weigh_tile(const PromptPiece& piece, const Groups& g,
                              std::span<const uint32_t> heads, size_t first_head, uint32_t tile,
                              float* weights, Scratch& s) const {
  const uint32_t d = piece.head_dim, blocks = piece.blocks();
  const uint32_t width = g.slices * d;
  const uint32_t count = parts_of(piece.n, g.group_queries);  // groups of queries
  const uint32_t kv_head = heads[first_head] / piece.group();
  const uint32_t first_row_group = tile * kRowGroups;
  for (uint32_t slice = 0; slice < g.slices; ++slice) {
    // The slice's row of each group; the last group may lack it.
    const uint32_t with_row = parts_of(g.rows - std::min(g.rows, slice), g.slices);
    const uint32_t n = std::min(kRowGroups, with_row - std::min(with_row, first_row_group));
    uint32_t numbers[kRowGroups];
    for (uint32_t i = 0; i < n; ++i) numbers[i] = (first_row_group + i) * g.slices + slice;
    s.unpacker.transpose(g.k, kv_head, numbers, n, d,
                         s.keys.data() + size_t{slice} * d * kRowGroups);
  }

  const uint32_t in_block = kPromptRows / g.group_rows;
  const uint32_t first_block = first_row_group / in_block;
  const uint32_t end_block = std::min(first_block + kRowGroups / in_block, blocks);
  LogitParams logits = piece.logits;
  logits.scale /= static_cast<float>(g.slices);
  for (size_t h = first_head; h < heads.size() && heads[h] / piece.group() == kv_head; ++h) {
    for (uint32_t i0 = 0; i0 < count; i0 += kQueryGroups) {
      const uint32_t m = std::min(kQueryGroups, count - i0);
      // Groups of rows that begin at or before the last query of a group of queries.
      const auto seen_by = [&](uint32_t i) {
        return piece.position(std::min((i + 1) * g.group_queries, piece.n) - 1) / g.group_rows + 1;
      };
      if (seen_by(i0 + m - 1) > first_row_group) {
        unpack_queries(g, g.q_by_place ? h : heads[h], i0, m, d, s.queries.data());
        kernels_->product(scores_of_rows(s.queries.data(), m, width, s.keys.data(), s.x.data()));
      }
      for (uint32_t i = 0; i < m; ++i) {
        const uint32_t seen = seen_by(i0 + i);
        float* const out = weights + (h * count + i0 + i) * blocks;
        for (uint32_t block = first_block; block < end_block; ++block) {
          const uint32_t begin = block * in_block;
          const uint32_t to = std::min(in_block, seen - std::min(seen, begin));
          out[block] = to == 0 ? kMinusInf
                               : kernels_->log_sum_exp(
                                     s.x.data() + size_t{i} * kRowGroups + begin - first_row_group,
                                     to, logits);
        }
      }
    }
  }
}

}  // namespace keyhole::cpu
