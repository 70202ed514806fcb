// The pass of a turn over codes on devices of compute capability 8.0 and newer: FlashAttention-2's scheme
// (gpu/cuda/prefill/blocked_kernel.cuh) over codes, in the 99 KiB of shared memory that all of them have. A thread
// block keeps 128 query rows of a KV head, a warp 16 of them. Its warps make tiles of keys and values from codes
// together and multiply them each with its own rows, while others make parts of what is next: of the next tile where
// there is room for two, else of the other half of the same.
//
// FLOOR. As coded_attend.cuh has it: 4 d operations for a query row and a token. Of a tile of 64 rows of 128 components
// all warps together have 1,024 products, for which tensor cores take 2,048 cycles on 8.0 and 8,192 on GPUs for
// desktops; reading keys and values for them from shared memory takes 2,048 everywhere.
#pragma once

#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/prefill/coded_fragments.cuh"
#include "gpu/cuda/prefill/coded_launch.cuh"
#include "gpu/cuda/prefill/coded_query_rows.cuh"

namespace keyhole::gpu::coded {

/// Of so many blocks, evenly apart, means are taken for a lower bound of what all rows weigh.
template <int kDim>
constexpr uint32_t kMeans = kDim <= 128 ? 128 : 64;

template <int kDim, int kBits>
struct WarpRows : QueryRows<kDim, FragmentShape<kDim, kBits>::kKeys, 1, kDim / 2> {
  using S = FragmentShape<kDim, kBits>;
  using Rows = QueryRows<kDim, S::kKeys, 1, kDim / 2>;
  using Memory = FragmentShared<kDim, kBits>;
  using Tile = FragmentTile<kDim, kBits>;
  using Rows::sums, Rows::weights;
  using typename Rows::Logits;

  /// Loads the warp's queries, from row `first` of the KV head on.
  __device__ void load(const CodedParams& a, uint32_t kv_head, uint32_t first, Memory& shared) {
    constexpr int kColumns = static_cast<int>(coded_columns(kDim));
    const uint32_t lane = threadIdx.x % 32;
    const auto* const from = reinterpret_cast<const uint2*>(
                                 a.q + (size_t{kv_head} * a.padded + first + lane / 4) * kColumns) +
                             lane % 4;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      // Components in the order of keys': see coded_fragments.cuh.
      const uint2 x = from[4 * step], y = from[2 * kColumns + 4 * step];
      put(step, make_uint4(x.x, y.x, x.y, y.y), shared);
    }
    bool is_small = true;
    Rows::begin(a, kv_head, first, [&](const CodedQuery& q) {
      is_small = is_small && has_small_noise(a, kv_head, q);
      return false;
    });
    has_small_noise_ = __all_sync(kWholeWarp, is_small) != 0;
  }

  __device__ __forceinline__ void score(Logits& logits, const Tile& tile,
                                        const Memory& shared) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (float& x : logits) x = 0.0F;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      const uint4 q = get(step, shared);
      const uint32_t rows[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < S::kCodeTiles; ++i) {
        const uint4 k = tile.keys[i][step][lane];
        multiply_add<__half>(four(logits, 2 * i), rows, k.x, k.y);
        multiply_add<__half>(four(logits, 2 * i + 1), rows, k.z, k.w);
      }
    }
  }
  /// Makes logits of products.
  __device__ __forceinline__ void take_noise(Logits& logits, const Tile& tile) const {
    // Beyond 128 components there are no registers left for another way.
    Rows::take_noise(logits, shared_address(tile.noise), S::kHoldsQueries && has_small_noise_);
  }
  __device__ __forceinline__ void sum_up(const Tile& tile) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::kCodeTiles; ++i) {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const uint4 v = tile.values[i][step][lane];
        multiply_add<__half>(four(sums[0], 2 * step), weights[i], v.x, v.y);
        multiply_add<__half>(four(sums[0], 2 * step + 1), weights[i], v.z, v.w);
      }
    }
  }

 private:
  /// A lane's part of the i-th product.
  template <int n>
  __device__ static float (&four(float (&x)[n], int i))[4] {
    return reinterpret_cast<float(&)[4]>(x[4 * i]);
  }
  __device__ void put(int step, uint4 q, Memory& shared) {
    if constexpr (S::kHoldsQueries) {
      queries_[step] = q;
    } else {
      shared.queries[own(step)][threadIdx.x % 32] = q;
    }
  }
  __device__ uint4 get(int step, const Memory& shared) const {
    if constexpr (S::kHoldsQueries) {
      return queries_[step];
    } else {
      return shared.queries[own(step)][threadIdx.x % 32];
    }
  }
  __device__ static int own(int step) {
    return static_cast<int>(threadIdx.x) / 32 * S::kSteps + step;
  }

  uint4 queries_[S::kHoldsQueries ? S::kSteps : 1];
  bool has_small_noise_;
};

/// Grid (tiles of queries, KV heads, splits).
template <int kDim, int kBits, bool kIsChosen>
__global__ void __launch_bounds__(FragmentShape<kDim, kBits>::kThreads, 1)
    attend_general(const __grid_constant__ CodedParams a) {
  using S = FragmentShape<kDim, kBits>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<FragmentShared<kDim, kBits>*>(memory);
  const uint32_t kv_head = blockIdx.y;
  const uint32_t first = blockIdx.x * S::kQueries + threadIdx.x / 32 * 16;
  const uint32_t all = (kIsChosen ? a.chosen_blocks : a.rows.blocks) * S::kTilesOfBlock;
  const uint32_t* const chosen =
      kIsChosen ? a.chosen + (size_t{kv_head} * gridDim.x + blockIdx.x) * a.chosen_blocks : nullptr;
  const auto begin = static_cast<uint32_t>(uint64_t{blockIdx.z} * all / gridDim.z);
  const auto end = static_cast<uint32_t>((uint64_t{blockIdx.z} + 1) * all / gridDim.z);
  const auto at = [&](uint32_t i) { return tile_of<S::kTilesOfBlock, kIsChosen>(chosen, i); };

  wait_for_kernels_before();
  if (__ldcg(&a.status->flags) != 0) return;  // the same for all threads
  FragmentDecoder<kDim, kBits> decoder(a.rows, kv_head);
  if (begin < end) {
    decoder.ask_keys(at(begin));
    decoder.ask_values(at(begin));
  }
  WarpRows<kDim, kBits> rows;
  rows.load(a, kv_head, first, shared);

  typename WarpRows<kDim, kBits>::Logits logits;
  const uint32_t apart = (a.rows.blocks + kMeans<kDim> - 1) / kMeans<kDim>;
  const uint32_t means = (a.rows.blocks + apart - 1) / apart;
  for (uint32_t i = 0; i < means; i += S::kKeys) {
    const uint32_t count = min(means - i, uint32_t{S::kKeys});
    decoder.put_means(shared.tiles[0], i, count, apart);
    __syncthreads();
    rows.score(logits, shared.tiles[0], shared);
    rows.take_means(logits, static_cast<int>(count));
    __syncthreads();
  }

  // Turns logits into weights.
  const auto weigh = [&](uint32_t i, const FragmentTile<kDim, kBits>& tile) {
    rows.take_noise(logits, tile);
    float shrink[2];
    const bool moves = rows.exponentiate(
        logits, a, kv_head, [&] { return at(i) * S::kKeys; }, shrink);
    if (moves) rows.rescale(shrink);
    rows.pack_weights(logits);
  };
  if (begin < end) decoder.put_keys(shared.tiles[0]);
  if constexpr (S::kStages == 2) {
    if (begin < end) decoder.put_values(shared.tiles[0]);
    const auto ask = [&](uint32_t i) {
      if (i >= end) return;
      decoder.ask_keys(at(i));
      decoder.ask_values(at(i));
    };
    ask(begin + 1);
    // Of the two warps of a quarter of a multiprocessor one makes its part of the next tile before its products and one
    // behind them, so that one multiplies while the other does not: 266 in place of 209 TFLOP/s with 128 components on
    // an H200.
    const bool is_late = threadIdx.x >= S::kThreads / 2;
    for (uint32_t i = begin; i < end; ++i) {
      __syncthreads();  // the tile is here, and all warps are done with the one before
      const auto make_next = [&] {
        if (i + 1 < end) {
          auto& next = shared.tiles[(i + 1 - begin) % 2];
          decoder.put_keys(next);
          decoder.put_values(next);
        }
        ask(i + 2);
      };
      if (!is_late) make_next();
      const auto& tile = shared.tiles[(i - begin) % 2];
      rows.score(logits, tile, shared);
      weigh(i, tile);
      rows.sum_up(tile);
      if (is_late) make_next();
    }
  } else {
    auto& tile = shared.tiles[0];
    for (uint32_t i = begin; i < end; ++i) {
      __syncthreads();  // keys are here, and all warps are done with the values before
      const bool has_more = i + 1 < end;
      if (has_more) decoder.ask_keys(at(i + 1));
      decoder.put_values(tile);
      rows.score(logits, tile, shared);
      weigh(i, tile);
      __syncthreads();  // values are here, and all warps are done with the keys
      if (has_more) {
        decoder.ask_values(at(i + 1));
        decoder.put_keys(tile);
      }
      rows.sum_up(tile);
    }
  }
  rows.end(a, kv_head, blockIdx.z);
}

template <int kBits>
struct GeneralPass {
  template <int kDim, bool kIsChosen>
  [[nodiscard]] static PassKernel of() {
    constexpr size_t kBytes = sizeof(FragmentShared<kDim, kBits>);
    static_assert(kBytes <= size_t{99} << 10U);
    return {reinterpret_cast<const void*>(&attend_general<kDim, kBits, kIsChosen>),
            FragmentShape<kDim, kBits>::kThreads, kBytes};
  }
};

}  // namespace keyhole::gpu::coded
