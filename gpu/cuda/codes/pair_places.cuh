// Where the codes of 32 rows lie that a step reads together, and which rows these are. Without lists pair `i` of a KV
// head is pair i of its blocks; with lists it is entry i of the table that the choice has written
// (gpu/cuda/codes/list_choice.cuh), if that has not come to all blocks. So a row's place, 32 times its pair's number
// and its own among the 32, is its number where there is no table.
#pragma once

#include "gpu/cuda/codes/tile_ring.cuh"

namespace keyhole::gpu::codes {

__device__ inline const ListedPair* listed_pairs(const CodesParams& s, uint32_t kv_head) {
  return s.list_pairs + size_t{kv_head} * most_groups(s);
}

__device__ inline bool is_of_block(const ListedPair& p) {
  return (p.owner & ListedPair::kOfBlock) != 0;
}
/// The number of the list or of the block.
__device__ inline uint32_t owner_of(const ListedPair& p) {
  return p.owner & ((1U << ListedPair::kRowsAt) - 1);
}
__device__ inline uint32_t rows_of(const ListedPair& p) {
  return (p.owner >> ListedPair::kRowsAt & (kPairRows - 1)) + 1;
}

/// The entry of a whole pair of a KV head's blocks.
__device__ inline ListedPair pair_of_block(uint32_t pair) {
  return {pair,
          ListedPair::kOfBlock | (kPairRows - 1) << ListedPair::kRowsAt | pair / kBlockMaxima};
}

/// How many pairs of tiles of a KV head the step has read. Valid once the choice among lists has ended.
__device__ inline uint32_t pairs_of(const CodesParams& s, uint32_t kv_head) {
  return s.lists.list_capacity == 0 ? *s.block_count * kBlockMaxima
                                    : __ldcg(&s.list_ends[kv_head].pairs);
}

/// Whether pairs are those of the table, and not of the blocks. Valid once the choice among lists has ended.
__device__ inline bool reads_by_table(const CodesParams& s, uint32_t kv_head) {
  return s.lists.list_capacity != 0 && __ldcg(&s.list_ends[kv_head].reads_all) == 0;
}

/// The number of the row in a place. by_table: reads_by_table().
__device__ inline uint32_t row_in(const CodesParams& s, uint32_t kv_head, uint32_t place,
                                  bool by_table) {
  if (!by_table) return place;
  const ListedPair p = listed_pairs(s, kv_head)[place / kPairRows];
  const uint32_t at = p.pair * kPairRows + place % kPairRows;
  return is_of_block(p) ? at
                        : s.lists.ids[size_t{kv_head} * s.lists.pair_capacity * kPairRows + at];
}

/// Where the parts of a pair lie. Means and noise are those of its block or list.
template <int kDim, int kBits>
struct PairPlace {
  using Pair = TilePair<kDim, kBits>;
  static constexpr CodeShape kShape{kDim, kBits, kBits};

  const std::byte *keys, *values, *factors;
  const __half* key_mean;
  const __half* value_mean;
  float noise;
  uint32_t rows = kPairRows;  ///< the others have no row
  const float* scores =
      nullptr;  ///< `[padded heads]` products with the mean key, base 2, of a list; else null

  /// heads: padded heads of the group; by_table: reads_by_table().
  __device__ PairPlace(const CodesParams& s, uint32_t kv_head, uint32_t number, uint32_t heads,
                       bool by_table) {
    if (!by_table) {
      find_in_block(s, kv_head, number);
    } else {
      find(s, kv_head, listed_pairs(s, kv_head)[number], heads);
    }
  }
  /// Of an entry of the table.
  __device__ PairPlace(const CodesParams& s, uint32_t kv_head, const ListedPair& p,
                       uint32_t heads) {
    find(s, kv_head, p, heads);
  }

 private:
  __device__ void find(const CodesParams& s, uint32_t kv_head, const ListedPair& p,
                       uint32_t heads) {
    if (is_of_block(p)) {
      find_in_block(s, kv_head, p.pair);
    } else {
      find_in_list(s, kv_head, p, heads);
    }
  }
  __device__ void find_in_block(const CodesParams& s, uint32_t kv_head, uint32_t pair) {
    const std::byte* const block =
        s.blocks + kv_head * s.head_stride + pair / kBlockMaxima * s.block_stride;
    const uint32_t of_block = pair % kBlockMaxima;
    keys = block + of_block * Pair::kKeyBytes;
    values = block + kShape.values_at() + of_block * Pair::kValueBytes;
    factors = block + kShape.factors_at() + of_block * Pair::kFactorBytes;
    key_mean = reinterpret_cast<const __half*>(block + kShape.key_mean_at());
    value_mean = reinterpret_cast<const __half*>(block + kShape.value_mean_at());
    noise = *reinterpret_cast<const float*>(block + kShape.noise_at());
  }
  __device__ void find_in_list(const CodesParams& s, uint32_t kv_head, const ListedPair& p,
                               uint32_t heads) {
    const size_t list = size_t{kv_head} * s.lists.list_capacity + owner_of(p);
    keys = s.lists.pairs + (size_t{kv_head} * s.lists.pair_capacity + p.pair) * Pair::kBytes;
    values = keys + Pair::kValuesAt;
    factors = keys + Pair::kFactorsAt;
    key_mean = nullptr;
    value_mean = reinterpret_cast<const __half*>(s.lists.value_means) + list * kDim;
    noise = s.lists.figures[list].noise;
    rows = rows_of(p);
    scores = s.list_scores + list * heads;
  }
};

}  // namespace keyhole::gpu::codes
