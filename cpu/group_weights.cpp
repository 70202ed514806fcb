#include "cpu/group_weights.h"

#include <algorithm>

namespace keyhole::cpu {
namespace {

// Groups of queries of one product: their scores are 16 KiB.
constexpr uint32_t kQueryGroups = 64;
constexpr uint32_t kBlocks = kPromptRows;  // of one product, as RowUnpacker has rows

uint32_t parts_of(uint32_t n, uint32_t part) { return n / part + (n % part != 0 ? 1 : 0); }

}  // namespace

void GroupWeights::means(const PromptPiece& piece, std::span<const uint32_t> heads,
                         float* weights) {
  const uint32_t d = piece.head_dim, groups = parts_of(piece.n, kMeanQueries);
  const uint32_t blocks = piece.blocks();
  query_means_.resize(std::max(query_means_.size(), heads.size() * groups * d));
  row_means_.resize(std::max(row_means_.size(), size_t{piece.kv_heads} * blocks * d));
  const RowRuns queries = RowsView{piece.q};
  // All groups of queries, then all blocks.
  pool_->run(groups + blocks, [&](uint32_t task, uint32_t) {
    if (task < groups) {
      const uint32_t first = task * kMeanQueries, count = std::min(kMeanQueries, piece.n - first);
      for (size_t h = 0; h < heads.size(); ++h) {
        average(queries, heads[h], first, count, d, query_means_.data() + (h * groups + task) * d);
      }
      return;
    }
    const uint32_t block = task - groups, first = block * kPromptRows;
    const uint32_t count = std::min(kPromptRows, piece.rows - first);
    // Heads that share K lie side by side.
    for (size_t h = 0; h < heads.size(); ++h) {
      const uint32_t kv_head = heads[h] / piece.group();
      if (h > 0 && heads[h - 1] / piece.group() == kv_head) continue;
      average(piece.k, kv_head, first, count, d,
              row_means_.data() + (size_t{block} * piece.kv_heads + kv_head) * d);
    }
  });

  while (scratch_.size() < pool_->threads()) scratch_.emplace_back(*kernels_);
  for (Scratch& s : scratch_) {
    s.keys.resize(std::max(s.keys.size(), size_t{kBlocks} * d));
    s.x.resize(size_t{kQueryGroups} * kBlocks);
  }
  std::vector<uint32_t> firsts;  // of the heads that share K
  for (size_t h = 0; h < heads.size(); ++h) {
    if (h == 0 || heads[h] / piece.group() != heads[h - 1] / piece.group()) {
      firsts.push_back(static_cast<uint32_t>(h));
    }
  }
  const auto shared = static_cast<uint32_t>(firsts.size());
  pool_->run(parts_of(blocks, kBlocks) * shared, [&](uint32_t task, uint32_t worker) {
    weigh_tile(piece, heads, firsts[task % shared], task / shared, weights, scratch_[worker]);
  });
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

void GroupWeights::weigh_tile(const PromptPiece& piece, std::span<const uint32_t> heads,
                              size_t first_head, uint32_t tile, float* weights, Scratch& s) {
  const uint32_t d = piece.head_dim, blocks = piece.blocks();
  const uint32_t count = parts_of(piece.n, kMeanQueries);  // groups of queries
  const uint32_t kv_head = heads[first_head] / piece.group();
  const uint32_t first_block = tile * kBlocks;
  const uint32_t end_block = std::min(first_block + kBlocks, blocks);
  const RowsView row_means{dense_tensor(reinterpret_cast<const std::byte*>(row_means_.data()),
                                        blocks, piece.kv_heads, d, DType::f32)};
  s.unpacker.transpose(row_means, kv_head, first_block, end_block - first_block, d, s.keys.data());

  for (size_t h = first_head; h < heads.size() && heads[h] / piece.group() == kv_head; ++h) {
    for (uint32_t i0 = 0; i0 < count; i0 += kQueryGroups) {
      const uint32_t m = std::min(kQueryGroups, count - i0);
      // Blocks that begin at or before the last query of a group of queries.
      const auto seen_by = [&](uint32_t i) {
        return piece.position(std::min((i + 1) * kMeanQueries, piece.n) - 1) / kPromptRows + 1;
      };
      if (seen_by(i0 + m - 1) > first_block) {
        kernels_->product(scores_of_rows(query_means_.data() + (h * count + i0) * d, m, d,
                                         s.keys.data(), s.x.data()));
      }
      for (uint32_t i = 0; i < m; ++i) {
        const uint32_t seen = seen_by(i0 + i);
        float* const out = weights + (h * count + i0 + i) * blocks;
        for (uint32_t block = first_block; block < end_block; ++block) {
          out[block] = block < seen ? kernels_->log_sum_exp(
                                          s.x.data() + size_t{i} * kBlocks + block - first_block, 1,
                                          piece.logits)
                                    : kMinusInf;
        }
      }
    }
  }
}

}  // namespace keyhole::cpu
