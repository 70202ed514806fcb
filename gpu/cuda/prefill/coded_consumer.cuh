// The part of a warpgroup in the pass of a turn over codes by Hopper's instructions (coded_attend.cuh): products of 64
// query rows, of which each of its warps has 16 (coded_query_rows.cuh).
#pragma once

#include "gpu/cuda/prefill/coded_query_rows.cuh"
#include "gpu/cuda/prefill/coded_tiles.cuh"

namespace keyhole::gpu::coded {

template <int kDim, int kBits>
constexpr int kSumParts = Shape<kDim, kBits>::kColumns <= 128 ? 1 : 2;

template <int kDim, int kBits>
using RowsOfWarp = QueryRows<kDim, Shape<kDim, kBits>::kKeys, kSumParts<kDim, kBits>,
                             Shape<kDim, kBits>::kColumns / kSumParts<kDim, kBits> / 2>;

template <int kDim, int kBits>
struct Consumer : RowsOfWarp<kDim, kBits> {
  using S = Shape<kDim, kBits>;
  using Rows = RowsOfWarp<kDim, kBits>;
  using Rows::sums, Rows::weights;
  using typename Rows::Logits;
  static constexpr int kKeys = S::kKeys, kParts = kSumParts<kDim, kBits>;

  /// first: the warpgroup's first row.
  __device__ void begin(const CodedParams& a, uint32_t kv_head, uint32_t first) {
    const uint32_t warp = threadIdx.x % kGroupThreads / 32;
    Rows::begin(a, kv_head, first + 16 * warp,
                [&](const CodedQuery& q) { return noise_share(a, kv_head, q) > 0.0F; });
  }

  /// Enqueues the logits: queries times keys. queries, keys: rows_operand() of the queries and of the tile, and
  /// narrow_operand() of their columns for noise.
  __device__ static void score(Logits& logits, uint64_t queries, uint64_t keys,
                               uint64_t query_noise, uint64_t key_noise) {
    hold(logits);
    start_products();
#pragma unroll
    for (int step = 0; step < S::kColumns / 16; ++step) {
      const uint32_t panel = step / 4, along = step % 4 * 32;
      multiply_rows<__half>(logits, moved_operand(queries, panel * S::kQueryPanel * 2 + along),
                            moved_operand(keys, panel * S::kKeyPanel * 2 + along), step != 0);
    }
    multiply_rows<__half>(logits, query_noise, key_noise, true);
    commit_products();
  }
  /// Enqueues sums += weights times values. values: rows_operand() of the tile.
  __device__ void sum_up(uint64_t values) {
    hold_sums();
    start_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        multiply_held_rows(
            sums[part], weights[step],
            moved_operand(values, step / 4 * S::kValuePanel * 2 + part * 128 * kPanelColumns * 2 +
                                      step % 4 * 32));
      }
    }
    commit_products();
  }
  __device__ void hold_sums() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) hold(sums[part]);
  }
};

}  // namespace keyhole::gpu::coded
