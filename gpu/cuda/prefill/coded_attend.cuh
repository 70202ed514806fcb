// The pass of a turn over codes, for compute capability 9.0a: FlashAttention-3's scheme (gpu/cuda/prefill/hopper_kernel.cuh) over
// codes. A thread block keeps 128 query rows of a KV head, those of several tokens and of all its query heads; two warpgroups have
// 64 each, and a third makes tiles of keys and values from codes, one ahead of the products.
//
// FLOOR. 4 d operations for a query row and a token, and the bytes of the codes once for every 128 query rows of a KV head, from
// L2 but for the first: 512 tokens of 32 query heads of 128 components behind 131,072 take 1.1 ms at 990 TFLOP/s. Decoding takes
// 3.3 instructions a number, 860 a warp and tile of 128 rows: in the shadow of the two warpgroups that multiply and exponentiate, and
// no faster with a fourth warpgroup, of keys and of values one each.
#pragma once

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/prefill/coded_consumer.cuh"

namespace keyhole::gpu::coded {

/// Writes this thread block's queries. By the warpgroup that decodes.
template <int kDim, int kBits>
__device__ inline void put_queries(const CodedParams& a, uint32_t kv_head, uint32_t first,
                                   Shared<kDim, kBits>& shared) {
  using S = Shape<kDim, kBits>;
  constexpr int kPieces = S::kColumns / 8;
  const __half* const from = a.q + (size_t{kv_head} * a.padded + first) * S::kColumns;
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * kPieces; i += kGroupThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    *reinterpret_cast<uint4*>(shared.queries + piece / 8 * S::kQueryPanel + row * kPanelColumns +
                              ((piece % 8) ^ (row % 8)) * 8) =
        *reinterpret_cast<const uint4*>(from + size_t(row) * S::kColumns + 8 * piece);
  }
}

/// Which tile of rows comes i-th: of all, or of the blocks that were chosen.
template <int kDim, int kBits, bool kIsChosen>
__device__ inline uint32_t tile_of(const uint32_t* chosen, uint32_t i) {
  if constexpr (!kIsChosen) return i;
  constexpr uint32_t kTiles = Shape<kDim, kBits>::kTilesOfBlock;
  return __ldg(chosen + i / kTiles) * kTiles + i % kTiles;
}

/// Grid (tiles of queries, KV heads, splits).
template <int kDim, int kBits, bool kIsChosen>
__global__ void __launch_bounds__(kThreads, 1) attend_coded(const __grid_constant__ CodedParams a) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim, kBits>;
  extern __shared__ unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDim, kBits>*>(
      (reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  if (__ldcg(&a.status->flags) != 0)
    return;  // the same for all threads: the kernel before has written it

  const uint32_t kv_head = blockIdx.y, first = blockIdx.x * kQueries;
  const uint32_t all = (kIsChosen ? a.chosen_blocks : a.rows.blocks) * S::kTilesOfBlock;
  const uint32_t* const chosen =
      kIsChosen ? a.chosen + (size_t{kv_head} * gridDim.x + blockIdx.x) * a.chosen_blocks : nullptr;
  const auto at = [&](uint32_t i) { return tile_of<kDim, kBits, kIsChosen>(chosen, i); };
  const auto begin = static_cast<uint32_t>(uint64_t{blockIdx.z} * all / gridDim.z);
  const auto end = static_cast<uint32_t>((uint64_t{blockIdx.z} + 1) * all / gridDim.z);
  const uint32_t tiles = end - begin;
  const uint32_t apart = (a.rows.blocks + S::kKeys - 1) / S::kKeys;
  const uint32_t means = (a.rows.blocks + apart - 1) / apart;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;

  if (threadIdx.x == 0) {
    shared.queries_are_here.init(kWarps);
    for (int i = 0; i < kStages; ++i) {
      shared.keys_are_here[i].init(kWarps);
      shared.values_are_here[i].init(kWarps);
      shared.keys_are_used[i].init(kConsumers * kGroupThreads / 32);
      shared.values_are_used[i].init(kConsumers * kGroupThreads / 32);
    }
    fence_barriers();
  }
  __syncthreads();

  // Keys number 0 are blocks' means, number 1 the first tile.
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    const bool is_first_lane = threadIdx.x % 32 == 0;
    // One lane arrives for its warp, whose writes lie before it by __syncwarp(): compute-sanitizer's racecheck does not know this way,
    // and takes the noise of rows, which alone is read by loads of its own, for a race.
    const auto here = [&](CopyBarrier& barrier) {
      fence_operands();
      __syncwarp();
      if (is_first_lane) barrier.arrive();
    };
    put_queries(a, kv_head, first, shared);
    here(shared.queries_are_here);
    Decoder<kDim, kBits> decoder(a.rows, kv_head, shared_address(shared.sides));
    decoder.ask_side(0, tiles != 0 ? at(begin) : 0, tiles != 0);
    decoder.ask_side(1, tiles > 1 ? at(begin + 1) : 0, tiles > 1);
    if constexpr (kDim != S::kColumns) {
      // Components that no row has are zeros in both stages, of keys and of values.
      constexpr int kPieces = static_cast<int>(sizeof shared.keys / 16);
      for (int i = static_cast<int>(threadIdx.x); i < kPieces; i += kGroupThreads) {
        reinterpret_cast<uint4*>(shared.keys)[i] = uint4{};
        reinterpret_cast<uint4*>(shared.values)[i] = uint4{};
      }
      asm volatile("bar.sync %0, %1;" ::"n"(kDecoderBarrier), "n"(kGroupThreads) : "memory");
    }
    decoder.put_means(shared.keys[0], means, apart);
    here(shared.keys_are_here[0]);
    if (tiles != 0) {
      decoder.ask_keys(at(begin));
      decoder.ask_values(at(begin));
    }
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const uint32_t number = tile + 1, stage = number % kStages;
      decoder.wait_for_side();
      const bool has_more = tile + 2 < tiles;
      decoder.ask_side(tile + 2, has_more ? at(begin + tile + 2) : 0, has_more);
      shared.keys_are_used[stage].wait((number / kStages + 1) % 2);
      decoder.put_keys(tile, shared_address(shared.keys[stage]),
                       shared_address(shared.noise[number % kNoiseStages]));
      here(shared.keys_are_here[stage]);
      if (tile + 1 < tiles) decoder.ask_keys(at(begin + tile + 1));
      shared.values_are_used[tile % kStages].wait((tile / kStages + 1) % 2);
      decoder.put_values(tile, shared_address(shared.values[tile % kStages]));
      here(shared.values_are_here[tile % kStages]);
      if (tile + 1 < tiles) decoder.ask_values(at(begin + tile + 1));
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const int own = group - 1;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const auto used = [&](CopyBarrier& barrier) {
      if (is_first_lane) barrier.arrive();
    };
    Consumer<kDim, kBits> c;
    c.begin(a, kv_head, first + own * 64);
    const uint32_t queries = shared_address(shared.queries) + own * 64 * kPanelColumns * 2;
    const auto keys = [&](uint32_t number) {
      return shared_address(shared.keys[number % kStages]);
    };
    const auto values = [&](uint32_t tile) {
      return shared_address(shared.values[tile % kStages]);
    };
    const bool is_small = __all_sync(kWholeWarp, c.noise_is_small(a, kv_head)) != 0;
    float shrink[2];
    const auto weigh = [&](uint32_t tile) {
      c.take_noise(shared_address(shared.noise[(tile + 1) % kNoiseStages]), is_small);
      c.exponentiate(a, kv_head, at(begin + tile) * S::kKeys, shrink);
    };

    shared.queries_are_here.wait(0);
    shared.keys_are_here[0].wait(0);
    c.score(queries, keys(0));
    wait_for_products<0>();
    hold(c.logits);
    used(shared.keys_are_used[0]);
    c.take_means(means);
    if (tiles != 0) {
      if (own == 1) give_turn(0);
      shared.keys_are_here[1].wait(0);
      c.score(queries, keys(1));
      wait_for_products<0>();
      hold(c.logits);
      used(shared.keys_are_used[1]);
      weigh(0);
      c.rescale(shrink);
      c.pack_weights();
      for (uint32_t tile = 1; tile < tiles; ++tile) {
        const uint32_t number = tile + 1;
        shared.keys_are_here[number % kStages].wait(number / kStages % 2);
        wait_for_turn(own);
        c.score(queries, keys(number));
        shared.values_are_here[(tile - 1) % kStages].wait((tile - 1) / kStages % 2);
        c.sum_up(values(tile - 1));
        give_turn(1 - own);
        wait_for_products<1>();
        hold(c.logits);
        used(shared.keys_are_used[number % kStages]);
        weigh(tile);
        wait_for_products<0>();
        c.hold_sums();
        used(shared.values_are_used[(tile - 1) % kStages]);
        c.rescale(shrink);
        c.pack_weights();
      }
      if (own == 0) wait_for_turn(0);  // the turn that nobody takes
      shared.values_are_here[(tiles - 1) % kStages].wait((tiles - 1) / kStages % 2);
      c.sum_up(values(tiles - 1));
      wait_for_products<0>();
      c.hold_sums();
    }
    c.end(a, kv_head, blockIdx.z);
  }
#endif
}

template <int kDim, int kBits, bool kIsChosen>
void launch_of(const CodedParams& a, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(Shared<kDim, kBits>) + 1024;
  const auto kernel = attend_coded<kDim, kBits, kIsChosen>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kBytes)),
        "shared memory of a turn over codes");
  const dim3 grid(a.padded / kQueries, a.rows.kv_heads, a.splits);
  kernel<<<grid, kThreads, kBytes, stream>>>(a);
  check_launch("a turn over codes");
}
template <int kDim, int kBits>
void launch_of(const CodedParams& a, cudaStream_t stream) {
  if constexpr (has_coded_choice(kDim)) {
    if (a.chosen != nullptr) return launch_of<kDim, kBits, true>(a, stream);
  }
  launch_of<kDim, kBits, false>(a, stream);
}

template <int kBits>
void launch(const CodedParams& a, cudaStream_t stream) {
  switch (a.rows.code.dim) {
    case 64: return launch_of<64, kBits>(a, stream);
    case 80: return launch_of<80, kBits>(a, stream);
    case 96: return launch_of<96, kBits>(a, stream);
    case 128: return launch_of<128, kBits>(a, stream);
    default: return launch_of<256, kBits>(a, stream);
  }
}

}  // namespace keyhole::gpu::coded
