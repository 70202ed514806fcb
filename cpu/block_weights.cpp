#include "cpu/block_weights.h"

#include <algorithm>

namespace keyhole::cpu {
namespace {

// Queries of one product: their scores are 16 KiB.
constexpr uint32_t kQueries = 64;

}  // namespace

void BlockWeights::compute(const PromptPiece& piece, const SampledQueries& samples,
                           std::span<const uint32_t> heads, float* weights) {
  const uint32_t d = piece.head_dim, count = samples.count();
  queries_.resize(std::max(queries_.size(), heads.size() * count * d));
  while (scratch_.size() < pool_->threads()) scratch_.emplace_back(*kernels_);
  for (Scratch& s : scratch_) {
    s.keys.resize(size_t{kPromptRows} * d);
    s.x.resize(size_t{kQueries} * kPromptRows);
  }
  const auto convert = kernels_->to_f32[static_cast<size_t>(piece.q.dtype)];
  pool_->run(static_cast<uint32_t>(heads.size()), [&](uint32_t h, uint32_t) {
    for (uint32_t i = 0; i < count; ++i) {
      convert(piece.q.row(samples.query(i), heads[h]),
              queries_.data() + (size_t{h} * count + i) * d, d);
    }
  });

  // Heads that share K lie side by side.
  std::vector<uint32_t> firsts;
  for (size_t h = 0; h < heads.size(); ++h) {
    if (h == 0 || heads[h] / piece.group() != heads[h - 1] / piece.group()) {
      firsts.push_back(static_cast<uint32_t>(h));
    }
  }
  const auto groups = static_cast<uint32_t>(firsts.size());
  pool_->run(piece.blocks() * groups, [&](uint32_t task, uint32_t worker) {
    weigh_block(piece, samples, heads, firsts[task % groups], task / groups, weights,
                scratch_[worker]);
  });
}

void BlockWeights::weigh_block(const PromptPiece& piece, const SampledQueries& samples,
                               std::span<const uint32_t> heads, size_t first_head, uint32_t block,
                               float* weights, Scratch& s) const {
  const uint32_t d = piece.head_dim, count = samples.count(), blocks = piece.blocks();
  const uint32_t begin = block * kPromptRows, rows = std::min(kPromptRows, piece.rows - begin);
  const uint32_t kv_head = heads[first_head] / piece.group();
  const uint32_t past = piece.rows - piece.n;
  // Samples before this one see nothing of the block.
  const uint32_t first = begin <= past ? 0 : std::min(count, samples.from(begin - past));
  s.unpacker.transpose(piece.k, kv_head, begin, rows, d, s.keys.data());
  for (size_t h = first_head; h < heads.size() && heads[h] / piece.group() == kv_head; ++h) {
    float* const out = weights + h * count * blocks + block;
    for (uint32_t i = 0; i < first; ++i) out[size_t{i} * blocks] = kMinusInf;
    for (uint32_t i0 = first; i0 < count; i0 += kQueries) {
      const uint32_t m = std::min(kQueries, count - i0);
      kernels_->product(
          scores_of_rows(queries_.data() + (h * count + i0) * d, m, d, s.keys.data(), s.x.data()));
      for (uint32_t i = 0; i < m; ++i) {
        const uint32_t position = past + samples.query(i0 + i);
        out[size_t{i0 + i} * blocks] =
            kernels_->log_sum_exp(s.x.data() + size_t{i} * kPromptRows,
                                  std::min(kPromptRows, position + 1 - begin), piece.logits);
      }
    }
  }
}

}  // namespace keyhole::cpu
