// FlashAttention-3's scheme over one piece of rows, for compute capability 9.0a. A thread block keeps 128 queries of
// one head; two warpgroups have 64 each, and a third has the copy engine bring tiles of 128 keys and values (of 256
// components: 64) two ahead. While the tensor cores multiply one warpgroup's weights of a tile with its values, and
// its queries with the next keys, the other warpgroup exponentiates; a barrier gives it the tensor cores' turn.
//
// ROWS are all rows of the piece, or the blocks of 64 that a list names, from the last to the first: blocks that some
// query sees only in part come first, and the rest needs no look at positions.
//
// FLOOR. 4 d operations for a query and a key: 17 us for 1024 queries, 131,072 keys and 32 heads of 128 at 990
// TFLOP/s, the rate of the data sheet; exponentials take half as long (16 a cycle), beside products.
#pragma once

#include <type_traits>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/copy_engine.cuh"
#include "gpu/cuda/common/tensor_map.h"
#include "gpu/cuda/common/wgmma.cuh"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/hopper_consumer.cuh"

namespace keyhole::gpu::hopper {

/// The tensors that the copy engine reads.
struct Maps {
  CUtensorMap q, k, v;
};

/// selective: rows are chosen one by one, or blocks are passed over (BlockedParams::chosen, skip).
template <class T, int columns, bool fine, bool selective>
__global__ void __launch_bounds__(kThreads, 1)
    attend_kernel(const __grid_constant__ Maps maps, const __grid_constant__ BlockedParams a,
                  uint32_t dim) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = Tiles<columns>;
  constexpr int kPanels = Shared::kPanels, kBlocks = Shared::kBlocks;
  extern __shared__ unsigned char memory[];
  auto& shared =
      *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);

  const uint32_t head = blockIdx.x, kv_head = head / (a.q_heads / a.kv_heads);
  // The last queries have the most rows before them: beginning with them evens out the blocks' ends.
  const uint32_t tile_of_queries = gridDim.y - 1 - blockIdx.y;
  const uint32_t first = tile_of_queries * kQueries;
  const BlockRange range(a, head, tile_of_queries);
  const uint32_t tiles = (range.count + kBlocks - 1) / kBlocks;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;

  if (threadIdx.x == 0) {
    shared.queries_are_here.init(1);
    for (int i = 0; i < kStages; ++i) {
      shared.keys_are_here[i].init(1);
      shared.values_are_here[i].init(1);
      shared.keys_are_used[i].init(kConsumers * kGroupThreads / 32);
      shared.values_are_used[i].init(kConsumers * kGroupThreads / 32);
    }
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      shared.queries_are_here.expect(sizeof shared.queries);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy_box(shared.queries + panel * Shared::kQueryPanel + half * 64 * kPanelColumns,
                   &maps.q, panel * kPanelColumns, head, first + half * 64,
                   shared.queries_are_here);
        }
      }
      const auto bring = [&](const CUtensorMap& map, uint16_t* to, const uint32_t(&block)[kBlocks],
                             CopyBarrier& here) {
        here.expect(Shared::kTileBytes);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            copy_box(to + panel * Shared::kKeyPanel + i * kBlockRows * kPanelColumns, &map,
                     panel * kPanelColumns, block[i] * kBlockRows, kv_head, here);
          }
        }
      };
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const uint32_t stage = tile % kStages, before = (tile / kStages + 1) % 2;
        uint32_t block[kBlocks];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
          block[kBlocks - 1 - i] = range.from_end(tile * kBlocks + i);
        shared.keys_are_used[stage].wait(before);
        bring(maps.k, shared.keys[stage], block, shared.keys_are_here[stage]);
        shared.values_are_used[stage].wait(before);
        bring(maps.v, shared.values[stage], block, shared.values_are_here[stage]);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int own = group - 1;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const float cap = a.logits.softcap;
    const float to_base2 = cap > 0.0F ? kLog2E : a.logits.scale * kLog2E;
    Consumer<T, columns, fine> c;
    c.begin(a, head, first + own * 64, dim);
    const uint32_t queries = shared_address(shared.queries) + own * 64 * kPanelColumns * 2;
    const auto keys = [&](uint32_t tile) { return shared_address(shared.keys[tile % kStages]); };
    const auto values = [&](uint32_t tile) {
      return shared_address(shared.values[tile % kStages]);
    };
    const auto used = [&](CopyBarrier& barrier) {
      if (is_first_lane) barrier.arrive();
    };
    // All queries of the warpgroup see what its first query sees, except for windows.
    const uint32_t all_see = Seen::by(a, first + own * 64).to;
    bool looks = true;
    float shrink[2];
    const uint32_t* const chosen = selective ? chosen_rows(a, head, tile_of_queries) : nullptr;
    const float limit = selective ? skip_of(a, head) : 0.0F;
    uint32_t heavy = 0;  // a bit for each block of the tile
    const auto weigh = [&](uint32_t tile) {
      if (cap > 0.0F) c.cap_logits(a.logits);
      if (looks || tile + 1 == tiles || (selective && chosen != nullptr)) {
        uint32_t block[kBlocks];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
          block[kBlocks - 1 - i] = range.from_end(tile * kBlocks + i);
        looks = a.window != 0 || (block[kBlocks - 1] + 1) * kBlockRows > all_see;
        c.hide(block);
        if constexpr (selective) {
          if (chosen != nullptr) c.hide_unchosen(chosen, block);
        }
      }
      if constexpr (selective) {
        heavy = c.exponentiate_heavy(a, own, limit, to_base2, shrink);
      } else {
        c.exponentiate(to_base2, shrink);
      }
    };

    shared.queries_are_here.wait(0);
    if (tiles != 0) {
      if (own == 1) give_turn(0);
      shared.keys_are_here[0].wait(0);
      c.score(queries, keys(0));
      wait_for_products<0>();
      hold(c.logits);
      used(shared.keys_are_used[0]);
      weigh(0);
      c.rescale(shrink);
      c.pack_weights();
      for (uint32_t tile = 1; tile < tiles; ++tile) {
        shared.keys_are_here[tile % kStages].wait(tile / kStages % 2);
        wait_for_turn(own);
        c.score(queries, keys(tile));
        shared.values_are_here[(tile - 1) % kStages].wait((tile - 1) / kStages % 2);
        c.template sum_up<selective>(values(tile - 1), heavy);
        give_turn(1 - own);
        wait_for_products<1>();
        hold(c.logits);
        used(shared.keys_are_used[tile % kStages]);
        weigh(tile);
        wait_for_products<0>();
        c.hold_sums();
        used(shared.values_are_used[(tile - 1) % kStages]);
        c.rescale(shrink);
        c.pack_weights();
      }
      if (own == 0) wait_for_turn(0);  // the turn that nobody takes
      shared.values_are_here[(tiles - 1) % kStages].wait((tiles - 1) / kStages % 2);
      c.template sum_up<selective>(values(tiles - 1), heavy);
      wait_for_products<0>();
      c.hold_sums();
    }
    c.end(a, head, dim);
  }
#endif
}

template <class T>
CUtensorMap queries_map(const BlockedParams& a, uint32_t dim) {
  constexpr bool is_bf16 = std::is_same_v<T, __nv_bfloat16>;
  return make_tensor_map({a.q,
                          {dim, a.q_heads, a.n},
                          {a.q_head_stride * sizeof(T), a.q_token_stride * sizeof(T)},
                          {kPanelColumns, 1, 64},
                          is_bf16});
}
template <class T>
CUtensorMap rows_map(const BlockedParams& a, const void* rows, uint32_t dim) {
  constexpr bool is_bf16 = std::is_same_v<T, __nv_bfloat16>;
  return make_tensor_map({rows,
                          {dim, a.rows, a.kv_heads},
                          {a.row_stride * sizeof(T), a.head_stride * sizeof(T)},
                          {kPanelColumns, kBlockRows, 1},
                          is_bf16});
}

template <class T, int columns, bool fine, bool selective>
void launch_kernel(const BlockedParams& a, uint32_t dim, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(Tiles<columns>) + 1024;
  check(cudaFuncSetAttribute(attend_kernel<T, columns, fine, selective>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "shared memory of blocked attention");
  const Maps maps{queries_map<T>(a, dim), rows_map<T>(a, a.keys, dim),
                  rows_map<T>(a, a.values, dim)};
  const dim3 grid(a.q_heads, (a.n + kQueries - 1) / kQueries);
  attend_kernel<T, columns, fine, selective><<<grid, kThreads, kBytes, stream>>>(maps, a, dim);
  check_launch("blocked attention");
}

template <class T, int columns, bool fine>
void launch_of(const BlockedParams& a, uint32_t dim, cudaStream_t stream) {
  const bool selective = a.chosen != nullptr || a.skip > 0.0F || a.skips != nullptr;
  selective ? launch_kernel<T, columns, fine, true>(a, dim, stream)
            : launch_kernel<T, columns, fine, false>(a, dim, stream);
}

template <class T, bool fine>
void launch(const BlockedParams& a, uint32_t dim, cudaStream_t stream) {
  if (dim <= 64) return launch_of<T, 64, fine>(a, dim, stream);
  if (dim <= 128) return launch_of<T, 128, fine>(a, dim, stream);
  return launch_of<T, 256, fine>(a, dim, stream);
}

}  // namespace keyhole::gpu::hopper
