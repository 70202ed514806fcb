// The pass of a turn over codes, for compute capability 9.0a: FlashAttention-3's scheme
// (gpu/cuda/prefill/hopper_kernel.cuh) over codes. A thread block keeps 128 query rows of a KV head, those of several
// tokens and of all its query heads; two warpgroups have 64 each, and a third makes tiles of keys and values from
// codes, one ahead of the products.
//
// FLOOR. 4 d operations for a query row and a token, and the bytes of the codes once for every 128 query rows of a KV
// head, from L2 but for the first: 512 tokens of 32 query heads of 128 components behind 131,072 take 1.1 ms at 990
// TFLOP/s. Of a tile of 128 rows a warp that decodes has 890 instructions, one that multiplies and exponentiates 440:
// bench/RESULTS.md, "Several new tokens", has what was tried.
#pragma once

#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/prefill/coded_launch.cuh"
#include "gpu/cuda/prefill/coded_loops.cuh"

namespace keyhole::gpu::coded {

/// Asks for this thread block's queries. By the warpgroup that decodes.
template <int kDim, int kBits>
__device__ inline void ask_queries(const CodedParams& a, uint32_t kv_head, uint32_t first,
                                   Shared<kDim, kBits>& shared) {
  using S = Shape<kDim, kBits>;
  constexpr int kPieces = S::kColumns / 8;
  const __half* const from = a.q + (size_t{kv_head} * a.padded + first) * S::kColumns;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * kPieces; i += kGroupThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    copy_async(shared_address(shared.queries + piece / 8 * S::kQueryPanel + row * kPanelColumns +
                              ((piece % 8) ^ (row % 8)) * 8),
               from + size_t(row) * S::kColumns + 8 * piece, true);
  }
}

/// Writes the columns of noise that queries have, and zeros to those of keys. By the warpgroup that decodes, of which a
/// thread has a query.
template <int kDim, int kBits>
__device__ inline void put_noise(const CodedParams& a, uint32_t kv_head, uint32_t first,
                                 Shared<kDim, kBits>& shared) {
  static_assert(kQueries == kGroupThreads);
  const float share =
      noise_share(a, kv_head, a.queries[size_t{kv_head} * a.padded + first + threadIdx.x]);
  const __half high = __float2half_rn(-share);
  const __half low = __float2half_rn(-share - __half2float(high));
  auto* const to = reinterpret_cast<uint4*>(shared.query_noise) + threadIdx.x;
  to[0] = {word_of(__half2half2(high)), word_of(__halves2half2(low, __ushort_as_half(0))), 0, 0};
  to[kQueries] = {};
  constexpr int kPieces = static_cast<int>(sizeof shared.key_noise / 16);
  for (int i = static_cast<int>(threadIdx.x); i < kPieces; i += kGroupThreads)
    reinterpret_cast<uint4*>(shared.key_noise)[i] = uint4{};
}

/// Grid (tiles of queries, KV heads, splits).
template <int kDim, int kBits, bool kIsChosen>
__global__ void __launch_bounds__(kThreads, 1) attend_coded(const __grid_constant__ CodedParams a) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim, kBits>;
  extern __shared__ unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDim, kBits>*>(
      (reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  const uint32_t kv_head = blockIdx.y, first = blockIdx.x * kQueries;
  const uint32_t all = (kIsChosen ? a.chosen_blocks : a.rows.blocks) * S::kTilesOfBlock;
  const uint32_t* const chosen =
      kIsChosen ? a.chosen + (size_t{kv_head} * gridDim.x + blockIdx.x) * a.chosen_blocks : nullptr;
  const auto at = [&](uint32_t i) { return tile_of<S::kTilesOfBlock, kIsChosen>(chosen, i); };
  const auto begin = static_cast<uint32_t>(uint64_t{blockIdx.z} * all / gridDim.z);
  const auto end = static_cast<uint32_t>((uint64_t{blockIdx.z} + 1) * all / gridDim.z);
  const uint32_t tiles = end - begin;
  const uint32_t apart = (a.rows.blocks + S::kKeys - 1) / S::kKeys;
  const uint32_t means = (a.rows.blocks + apart - 1) / apart;
  // The same for a whole warp, as the compiler sees by this.
  const int group = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kGroupThreads, 0);

  if (threadIdx.x == 0) {
    shared.queries_are_here.init(kWarps);
    for (int i = 0; i < kStages; ++i) {
      shared.keys_are_here[i].init(kWarps);
      shared.keys_are_used[i].init(kConsumers * kGroupThreads / 32);
    }
    for (int i = 0; i < S::kValueStages; ++i) {
      shared.values_are_here[i].init(kWarps);
      shared.values_are_used[i].init(kConsumers * kGroupThreads / 32);
    }
    fence_barriers();
  }
  wait_for_kernels_before();
  const uint32_t flags = __ldcg(&a.status->flags);
  __syncthreads();
  if (flags != 0) return;  // the same for all threads: the kernel before has written it

  // Keys number 0 are blocks' means, number 1 the first tile. Codes come to L2 so many tiles ahead.
  constexpr uint32_t kAhead = 3;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    const bool is_first_lane = threadIdx.x % 32 == 0;
    // One lane arrives for its warp, whose writes lie before it by __syncwarp(): compute-sanitizer's racecheck does not
    // know this way, and takes the noise of rows, which alone is read by loads of its own, for a race.
    const auto here = [&](CopyBarrier& barrier) {
      fence_operands();
      __syncwarp();
      if (is_first_lane) barrier.arrive();
    };
    Decoder<kDim, kBits> decoder(a.rows, kv_head, shared_address(shared.sides));
    for (uint32_t tile = 0; tile < kAhead && tile < tiles; ++tile)
      decoder.prefetch(at(begin + tile));
    if (tiles != 0) {
      decoder.ask_keys(at(begin));
      decoder.ask_values(at(begin));
    }
    ask_queries(a, kv_head, first, shared);
    decoder.ask_means(shared_address(shared.keys[0]), means, apart);
    commit_copies();
    decoder.ask_side(0, tiles != 0 ? at(begin) : 0, tiles != 0);
    decoder.ask_side(1, tiles > 1 ? at(begin + 1) : 0, tiles > 1);
    if constexpr (kDim != S::kColumns) {
      // Components that no row has are zeros in all stages, of keys and of values; means come with such zeros.
      const auto clear = [](void* from, size_t bytes) {
        for (size_t i = 16 * threadIdx.x; i < bytes; i += size_t{16} * kGroupThreads)
          *reinterpret_cast<uint4*>(static_cast<std::byte*>(from) + i) = uint4{};
      };
      clear(shared.keys[1], sizeof shared.keys - sizeof shared.keys[0]);
      clear(shared.values, sizeof shared.values);
    }
    put_noise(a, kv_head, first, shared);
    wait_for_copies<2>();
    here(shared.queries_are_here);
    here(shared.keys_are_here[0]);
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const uint32_t number = tile + 1, stage = number % kStages;
      if (tile + kAhead < tiles) decoder.prefetch(at(begin + tile + kAhead));
      decoder.wait_for_side();
      const bool has_more = tile + 2 < tiles;
      decoder.ask_side(tile + 2, has_more ? at(begin + tile + 2) : 0, has_more);
      shared.keys_are_used[stage].wait((number / kStages + 1) % 2);
      decoder.put_keys(tile, shared_address(shared.keys[stage]),
                       shared_address(shared.key_noise[stage * S::kKeys]),
                       shared_address(shared.noise[number % kNoiseStages]));
      here(shared.keys_are_here[stage]);
      if (tile + 1 < tiles) decoder.ask_keys(at(begin + tile + 1));
      const uint32_t place = tile % S::kValueStages;
      shared.values_are_used[place].wait((tile / S::kValueStages + 1) % 2);
      decoder.put_values(tile, shared_address(shared.values[place]));
      here(shared.values_are_here[place]);
      if (tile + 1 < tiles) decoder.ask_values(at(begin + tile + 1));
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const int own = group - 1;
    Consumer<kDim, kBits> c;
    c.begin(a, kv_head, first + own * 64);
    const Work<kDim, kBits, kIsChosen> work{a, shared, kv_head, begin, tiles, chosen, means, own};
    attend_tiles(work, c);
    c.end(a, kv_head, blockIdx.z);
  }
#endif
}

template <int kBits>
struct HopperPass {
  template <int kDim, bool kIsChosen>
  [[nodiscard]] static PassKernel of() {
    return {reinterpret_cast<const void*>(&attend_coded<kDim, kBits, kIsChosen>), kThreads,
            sizeof(Shared<kDim, kBits>) + 1024};
  }
};

}  // namespace keyhole::gpu::coded
