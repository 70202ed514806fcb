#include "cpu/line_weights.h"

#include <algorithm>
#include <cmath>

namespace keyhole::cpu {
namespace {

// Distances of a block's rows and all queries.
constexpr uint32_t kMostDiagonals = kMostLineQueries + kPromptRows - 1;

float log_sum(const float* x, uint32_t n) {
  const float top = *std::max_element(x, x + n);
  if (top == kMinusInf) return top;
  float sum = 0.0F;
  for (uint32_t i = 0; i < n; ++i) sum += std::exp(x[i] - top);
  return top + std::log(sum);
}

}  // namespace

void LineWeights::compute(const PromptPiece& piece, uint32_t queries,
                          std::span<const uint32_t> heads, float* columns, float* slashes) {
  PromptPiece last = piece;
  last.n = queries;
  last.q = piece.q.slice(piece.n - queries, queries);
  find_sums(last, heads);
  while (scratch_.size() < pool_->threads()) scratch_.emplace_back(*kernels_);
  for (Scratch& s : scratch_) {
    s.keys.resize(size_t{kPromptRows} * piece.head_dim);
    s.x.resize(size_t{kMostLineQueries} * kPromptRows);
  }
  std::fill_n(slashes, heads.size() * piece.rows, 0.0F);
  std::vector<uint32_t> firsts;  // of the heads that share K
  for (size_t h = 0; h < heads.size(); ++h) {
    if (h == 0 || heads[h] / piece.group() != heads[h - 1] / piece.group()) {
      firsts.push_back(static_cast<uint32_t>(h));
    }
  }
  const auto shared = static_cast<uint32_t>(firsts.size());
  // A block's distances overlap with those of the blocks beside it, and with no others: even blocks, then odd ones.
  for (const uint32_t odd : {0U, 1U}) {
    const uint32_t blocks = (last.blocks() + 1 - odd) / 2;
    pool_->run(blocks * shared, [&](uint32_t task, uint32_t worker) {
      weigh_block(last, heads, firsts[task % shared], task / shared * 2 + odd, columns, slashes,
                  scratch_[worker]);
    });
  }
}

void LineWeights::find_sums(const PromptPiece& last, std::span<const uint32_t> heads) {
  const uint32_t n = last.n, d = last.head_dim, blocks = last.blocks();
  of_blocks_.resize(std::max(of_blocks_.size(), heads.size() * n * blocks));
  blocks_.compute(last, {n, 1}, heads, of_blocks_.data());
  lse_.resize(heads.size() * n);
  queries_.resize(std::max(queries_.size(), heads.size() * n * d));
  const auto convert = kernels_->to_f32[static_cast<size_t>(last.q.dtype)];
  pool_->run(static_cast<uint32_t>(heads.size()), [&](uint32_t h, uint32_t) {
    for (uint32_t i = 0; i < n; ++i) {
      const size_t at = size_t{h} * n + i;
      lse_[at] = log_sum(of_blocks_.data() + at * blocks, blocks);
      float* const q = queries_.data() + at * d;
      convert(last.q.row(i, heads[h]), q, d);
      for (uint32_t j = 0; j < d; ++j) q[j] *= last.logits.scale;
    }
  });
}

void LineWeights::weigh_block(const PromptPiece& last, std::span<const uint32_t> heads,
                              size_t first_head, uint32_t block, float* columns, float* slashes,
                              Scratch& s) const {
  const uint32_t n = last.n, d = last.head_dim;
  const uint32_t begin = block * kPromptRows, rows = std::min(kPromptRows, last.rows - begin);
  const uint32_t kv_head = heads[first_head] / last.group();
  s.unpacker.transpose(last.k, kv_head, begin, rows, d, s.keys.data());
  for (size_t h = first_head; h < heads.size() && heads[h] / last.group() == kv_head; ++h) {
    kernels_->product(scores_of_rows(queries_.data() + h * n * d, n, d, s.keys.data(), s.x.data()));
    // The distance of query i and row c of the block has number c + (n - 1 - i), which falls as the distance rises.
    float across[kPromptRows] = {}, along[kMostDiagonals] = {};
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t position = last.position(i);
      float* const x = s.x.data() + size_t{i} * kPromptRows;
      float largest = lse_[h * n + i], sum = 0.0F;
      WeighRowArgs weigh{};
      weigh.x = x;
      weigh.to = position < begin ? 0 : std::min(kPromptRows, position + 1 - begin);
      weigh.softcap = last.logits.softcap;
      weigh.largest = &largest;
      weigh.sum = &sum;
      kernels_->weigh_row(
          weigh);  // relative to all of its weight; there is no output to go on with
      float* const diagonals = along + (n - 1 - i);
      for (uint32_t c = 0; c < kPromptRows; ++c) {
        across[c] += x[c];
        diagonals[c] += x[c];
      }
    }
    std::copy_n(across, rows, columns + h * last.rows + begin);
    float* const of_head = slashes + h * last.rows;
    // Number c is the distance of the last query to row c of the block, for numbers behind the block, too.
    const uint32_t to_first = last.rows - 1 - begin;
    for (uint32_t number = 0; number < n + kPromptRows - 1; ++number) {
      if (number <= to_first) of_head[to_first - number] += along[number];
    }
  }
}

}  // namespace keyhole::cpu
