// How a warpgroup of the pass of a turn over codes (coded_attend.cuh) goes through tiles: when which products are
// enqueued, and what is done meanwhile.
//
// Products of queries and keys, and of weights and values of the tile before, are enqueued together, by the two
// warpgroups in turn: one weighs while the other's products run.
#pragma once

#include "gpu/cuda/prefill/coded_consumer.cuh"

namespace keyhole::gpu::coded {

/// What a warpgroup of consumers is given.
template <int kDim, int kBits, bool kIsChosen>
struct Work {
  using S = Shape<kDim, kBits>;
  const CodedParams& a;
  Shared<kDim, kBits>& shared;
  uint32_t kv_head;
  uint32_t begin, tiles;   ///< the thread block's
  const uint32_t* chosen;  ///< see tile_of()
  uint32_t means;          ///< blocks whose means lie in the first tile of keys
  int own;                 ///< of the warpgroups of consumers

  /// Enqueues the products of queries and keys number 0, which are means, or 1 + the number of a tile.
  __device__ void score(typename Consumer<kDim, kBits>::Logits& logits, uint32_t number) const {
    constexpr uint32_t kOwnQueries = 64;
    const auto mine = static_cast<uint32_t>(own) * kOwnQueries;
    const uint32_t stage = number % kStages;
    Consumer<kDim, kBits>::score(
        logits, rows_operand(shared_address(shared.queries) + mine * kPanelColumns * 2),
        rows_operand(shared_address(shared.keys[stage])),
        narrow_operand(shared_address(shared.query_noise) + mine * 16, kQueries * 16),
        narrow_operand(shared_address(shared.key_noise) + stage * S::kKeys * 16, 128));
  }
  /// The number of a tile's first row.
  [[nodiscard]] __device__ uint32_t first_row(uint32_t tile) const {
    return tile_of<S::kTilesOfBlock, kIsChosen>(chosen, begin + tile) * S::kKeys;
  }
  [[nodiscard]] __device__ uint64_t values(uint32_t tile) const {
    return rows_operand(shared_address(shared.values[tile % S::kValueStages]));
  }
  [[nodiscard]] __device__ uint32_t noise(uint32_t tile) const {
    return shared_address(shared.noise[(tile + 1) % kNoiseStages]);
  }
  __device__ void wait_for_keys(uint32_t number) const {
    shared.keys_are_here[number % kStages].wait(number / kStages % 2);
  }
  __device__ void wait_for_values(uint32_t tile) const {
    shared.values_are_here[tile % S::kValueStages].wait(tile / S::kValueStages % 2);
  }
  // By a warp whose products have read them.
  __device__ void let_keys_go(uint32_t number) const {
    arrive(shared.keys_are_used[number % kStages]);
  }
  __device__ void let_values_go(uint32_t tile) const {
    arrive(shared.values_are_used[tile % S::kValueStages]);
  }

 private:
  __device__ static void arrive(CopyBarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }
};

__device__ inline void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ inline void give_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory");
}

template <int kDim, int kBits, bool kIsChosen>
__device__ __forceinline__ void attend_tiles(const Work<kDim, kBits, kIsChosen>& work,
                                             Consumer<kDim, kBits>& c) {
  typename Consumer<kDim, kBits>::Logits logits;
  const bool has_logits = __all_sync(kWholeWarp, c.has_logits()) != 0;
  float shrink[2];
  const auto weigh = [&](uint32_t tile) {
    if (!has_logits) c.take_noise(logits, work.noise(tile));
    return c.exponentiate(
        logits, work.a, work.kv_head, [&] { return work.first_row(tile); }, shrink);
  };
  const auto end_score = [&](uint32_t number) {
    hold(logits);
    work.let_keys_go(number);
  };

  work.shared.queries_are_here.wait(0);
  work.wait_for_keys(0);
  work.score(logits, 0);
  wait_for_products<0>();
  end_score(0);
  c.take_means(logits, static_cast<int>(work.means));
  if (work.tiles == 0) return;
  if (work.own == 1) give_turn(0);
  work.wait_for_keys(1);
  work.score(logits, 1);
  wait_for_products<0>();
  end_score(1);
  (void)weigh(0);
  c.pack_weights(logits);
  for (uint32_t tile = 1; tile < work.tiles; ++tile) {
    work.wait_for_keys(tile + 1);
    wait_for_turn(work.own);
    work.score(logits, tile + 1);
    work.wait_for_values(tile - 1);
    c.sum_up(work.values(tile - 1));
    give_turn(1 - work.own);
    wait_for_products<1>();
    end_score(tile + 1);
    const bool moves = weigh(tile);
    wait_for_products<0>();
    c.hold_sums();
    work.let_values_go(tile - 1);
    if (moves) c.rescale(shrink);
    c.pack_weights(logits);
  }
  if (work.own == 0) wait_for_turn(0);  // the turn that nobody takes
  work.wait_for_values(work.tiles - 1);
  c.sum_up(work.values(work.tiles - 1));
  wait_for_products<0>();
  c.hold_sums();
}

}  // namespace keyhole::gpu::coded
