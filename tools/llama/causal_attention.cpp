#include "tools/llama/causal_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "tools/llama/blas.h"
#include "tools/llama/vector_math.h"

namespace keyhole::tools {
namespace {

// 256 x 512 scores are 512 KiB: they stay in a 1-2 MiB L2 between the two products, and both products
// are large enough for OpenBLAS to come within 10 % of its rate on large matrices (138 of 150 Gflop/s
// on one Sapphire Rapids core).
constexpr size_t kTileRows = 256;
constexpr size_t kTileKeys = 512;

}  // namespace

size_t causal_cells(size_t tokens, size_t first_query, size_t window) {
  // Rows before `split` hold all keys before them, those from there on a full window.
  const size_t split = window == 0 ? tokens : std::clamp(window, first_query, tokens);
  return (split * (split + 1) - first_query * (first_query + 1)) / 2 + (tokens - split) * window;
}

CausalAttention::CausalAttention(const AttentionShape& shape, Team& team)
    : shape_(shape),
      team_(team),
      tile_tokens_(std::max<size_t>(1, kTileRows / shape.group())),
      scratch_(team.size()) {
  const size_t rows = tile_tokens_ * shape.group();
  for (Scratch& scratch : scratch_) {
    scratch.q.resize(rows * shape.head_dim);
    scratch.out.resize(rows * shape.head_dim);
    scratch.scores.resize(rows * kTileKeys);
    scratch.maxima.resize(rows);
    scratch.sums.resize(rows);
  }
}

void CausalAttention::run(float* q, const float* k, const float* v, size_t tokens,
                          size_t first_query, const std::function<void(size_t)>& on_cells,
                          size_t window) {
  const size_t queries = tokens - first_query;
  const size_t tiles = (queries + tile_tokens_ - 1) / tile_tokens_;
  std::atomic<size_t> cells_x_heads{0};
  size_t told = 0;
  const auto tell = [&] {
    const size_t cells = cells_x_heads.load(std::memory_order_relaxed) / shape_.kv_heads;
    if (on_cells && cells > told) on_cells(cells - told);
    told = std::max(told, cells);
  };
  team_.for_each(tiles * shape_.kv_heads, [&](size_t item, unsigned member) {
    // The last tiles have the most keys before them: starting with them evens out the threads' ends.
    const size_t index = tiles - 1 - item / shape_.kv_heads;
    const auto kv_head = static_cast<uint32_t>(item % shape_.kv_heads);
    const size_t first = first_query + index * tile_tokens_;
    const size_t count = std::min(tile_tokens_, tokens - first);
    tile(q, k, v, first, count, window, kv_head, scratch_[member]);
    cells_x_heads.fetch_add(causal_cells(first + count, first, window), std::memory_order_relaxed);
    if (member == 0) tell();
  });
  tell();
}

void CausalAttention::tile(float* q, const float* k, const float* v, size_t first, size_t count,
                           size_t window, uint32_t kv_head, Scratch& scratch) const {
  const size_t d = shape_.head_dim;
  const size_t group = shape_.group();
  const size_t q_stride = shape_.q_heads * d;
  const size_t kv_stride = shape_.kv_heads * d;
  const size_t rows = count * group;
  float* q_head = q + first * q_stride + kv_head * group * d;

  // The group's query heads become rows of one matrix, so that K and V are read once for all of them.
  // Logits in base 2 save a multiplication per exponential; a soft-cap works in base e.
  constexpr float kLog2e = 1.44269504F;
  const bool capped = shape_.softcap > 0.0;
  const auto softcap = static_cast<float>(shape_.softcap);
  const float logit_scale = shape_.scale > 0.0 ? static_cast<float>(shape_.scale)
                                               : 1.0F / std::sqrt(static_cast<float>(d));
  const float q_scale = capped ? logit_scale : logit_scale * kLog2e;
  for (size_t t = 0; t < count; ++t) {
    float* row = scratch.q.data() + t * group * d;
    std::memcpy(row, q_head + t * q_stride, group * d * sizeof(float));
    scale(q_scale, group * d, row);
  }
  std::fill_n(scratch.out.data(), rows * d, 0.0F);
  std::fill_n(scratch.maxima.data(), rows, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.sums.data(), rows, 0.0F);

  const size_t end = first + count;  // the last query of the tile sees the keys before this
  // The first query of the tile sees the earliest key.
  const size_t begin = window == 0 || first < window ? 0 : first + 1 - window;
  for (size_t key = begin; key < end; key += kTileKeys) {
    const size_t keys = std::min(kTileKeys, end - key);
    gemm_nt(rows, keys, d, scratch.q.data(), d, k + key * kv_stride + kv_head * d, kv_stride, 0.0F,
            scratch.scores.data(), keys);
    if (capped) {
      soft_cap(softcap, rows * keys, scratch.scores.data());
      scale(kLog2e, rows * keys, scratch.scores.data());
    }
    for (size_t row = 0; row < rows; ++row) {
      // A token sees keys up to itself, and not those before its window: a part of the block or nothing of it.
      const size_t token = first + row / group;
      const size_t oldest = window == 0 || token < window ? 0 : token + 1 - window;
      const size_t hidden = oldest > key ? std::min(keys, oldest - key) : 0;
      const size_t visible = token + 1 > key ? std::min(keys, token + 1 - key) : 0;
      float* scores = scratch.scores.data() + row * keys;
      if (visible <= hidden) {
        std::fill_n(scores, keys, 0.0F);
        continue;
      }
      std::fill_n(scores, hidden, 0.0F);
      const float shrink = online_softmax_row(scores + hidden, visible - hidden, keys - hidden,
                                              scratch.maxima[row], scratch.sums[row]);
      if (shrink != 1.0F) scale(shrink, d, scratch.out.data() + row * d);
    }
    gemm_nn(rows, d, keys, scratch.scores.data(), keys, v + key * kv_stride + kv_head * d,
            kv_stride, 1.0F, scratch.out.data(), d);
  }

  for (size_t row = 0; row < rows; ++row) {
    scale(1.0F / scratch.sums[row], d, scratch.out.data() + row * d);
  }
  for (size_t t = 0; t < count; ++t) {
    std::memcpy(q_head + t * q_stride, scratch.out.data() + t * group * d,
                group * d * sizeof(float));
  }
}

}  // namespace keyhole::tools
