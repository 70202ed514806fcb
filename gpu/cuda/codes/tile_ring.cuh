// Codes on their way from memory to a warp: a ring of pairs of tiles in shared memory, which the warp fills by copies
// that it does not wait for.
//
// WHY. A pass reads each code once, so what limits it is the number of bytes under way: 4 TB/s times a latency of 1
// to 1.5 us under load are 4 to 6 MB, 32 to 48 KB for each of 132 multiprocessors. Registers of 16 warps hold one
// pair ahead, 35 KB at 2 bits and d = 128, which gave 2.6 TB/s; shared memory holds four.
//
// Codes are the first to leave the L2 cache, through which a pass sends more than it holds: instructions, queries,
// resident tokens and what the pass leaves for the kernel behind it stay there.
#pragma once

#include "gpu/cuda/codes/tile_logits.cuh"
#include "gpu/cuda/common/async_copy.cuh"

namespace keyhole::gpu::codes {

/// Two neighbouring tiles, 32 rows, as they lie in their block: keys, values, factors.
template <int kDim, int kBits>
struct TilePair {
  static constexpr CodeShape kShape{kDim, kBits, kBits};
  static constexpr uint32_t kKeyBytes = 2 * kCodeLanes * kShape.key_words() * 4;
  static constexpr uint32_t kValueBytes = 2 * kCodeLanes * kShape.value_words() * 4;
  static constexpr uint32_t kFactorBytes = 2 * kCodeTile * 4;
  static constexpr uint32_t kValuesAt = kKeyBytes;
  static constexpr uint32_t kFactorsAt = kValuesAt + kValueBytes;
  static constexpr uint32_t kBytes = kFactorsAt + kFactorBytes;
};

/// Places pieces of 16 bytes, of which a lane reads `kPieces` neighbours, so that 8 lanes read from different banks.
template <uint32_t kPieces>
__device__ inline uint32_t place_of_piece(uint32_t piece) {
  if constexpr (kPieces == 2 || kPieces == 4 || kPieces == 8) {
    return piece ^ ((piece >> 3U) & (kPieces - 1));
  }
  return piece;
}

/// Reads a lane's words of a tile, whose pieces were placed by place_of_piece<kPieces>(); 0: they do not make pieces,
/// and lie as they came. tile: its number, whose pieces begin at a multiple of 32.
template <uint32_t kPieces, int kWords>
__device__ inline void read_words(const std::byte* from, int tile, int lane,
                                  uint32_t (&words)[kWords]) {
  if constexpr (kPieces != 0) {
    const uint32_t first = static_cast<uint32_t>(tile * 32 + lane) * kPieces;
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      const uint4 x =
          *reinterpret_cast<const uint4*>(from + 16 * place_of_piece<kPieces>(first + i));
      words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
    }
  } else if constexpr (kWords % 2 == 0) {
    const auto* at = reinterpret_cast<const uint2*>(from) + (tile * 32 + lane) * (kWords / 2);
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) words[2 * i] = at[i].x, words[2 * i + 1] = at[i].y;
  } else {
    const auto* at = reinterpret_cast<const uint32_t*>(from) + (tile * 32 + lane) * kWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = at[i];
  }
}

/// Reads neighbouring words, 1, 2 or 4, of a piece.
template <int kWords>
__device__ __forceinline__ void read_of_piece(const std::byte* from, uint32_t* words) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    words[0] = x.x, words[1] = x.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

/// Number of 16-byte pieces that a lane reads of a tile; 0: its words do not make such pieces.
constexpr uint32_t pieces_of(uint32_t words) { return words % 4 == 0 ? words / 4 : 0; }

/// A warp's ring. Between wait() and the next take_in(), all lanes may read the pair that wait() was for; with one
/// stage the next take_in() overwrites it. kOnce: copies tell the L2 cache that codes are read once.
template <int kDim, int kBits, bool kOnce = true>
class TileRing {
 public:
  using Pair = TilePair<kDim, kBits>;

  /// memory: the warp's, Pair::kBytes * stages, aligned to 16; stages: 1 to 3; blocks: those of the KV head.
  __device__ TileRing(std::byte* memory, int stages, const std::byte* blocks, size_t block_stride)
      : memory_(memory),
        end_(static_cast<uint32_t>(stages) * Pair::kBytes),
        block_stride_(block_stride) {
    const uint32_t lane = threadIdx.x % 32;
    from_ = blocks + 16 * lane;
    keys_to_ = shared_address(memory) + 16 * place_of_piece<kKeyPieces>(lane);
    values_to_ = shared_address(memory) + Pair::kValuesAt + 16 * place_of_piece<kValuePieces>(lane);
  }

  /// Asks for pair `pair` of the KV head, or for none where `is_one` is false. Every call counts as one stage.
  __device__ void take_in(bool is_one, uint32_t pair) {
    if (is_one) {
      constexpr CodeShape kShape = Pair::kShape;
      const auto of_block = static_cast<int>(pair % kPairs);
      const std::byte* from = from_ + pair / kPairs * block_stride_ + of_block * kKeyStep;
      copy<Pair::kKeyBytes, kKeyPieces>(keys_to_ + in_, from);
      copy<Pair::kValueBytes, kValuePieces>(
          values_to_ + in_, from + kShape.values_at() + of_block * (kValueStep - kKeyStep));
      const uint32_t lane = threadIdx.x % 32;
      static_assert(Pair::kFactorBytes <= 512);
      if (lane < Pair::kFactorBytes / 16) {
        copy_piece(shared_address(memory_) + Pair::kFactorsAt + 16 * lane + in_,
                   from + kShape.factors_at() + of_block * (kFactorStep - kKeyStep));
      }
    }
    commit_copies();
    in_ = next(in_);
  }
  /// Asks the L2 cache for pair `pair`, by a warp. Does nothing on GPUs older than 9.0.
  __device__ void prefetch(uint32_t pair) const {
    constexpr CodeShape kShape = Pair::kShape;
    const auto of_block = static_cast<int>(pair % kPairs);
    const uint32_t lane = threadIdx.x % 32;
    const std::byte* const block = from_ - 16 * lane + pair / kPairs * block_stride_;
    if (lane == 0) prefetch_bulk(block + of_block * kKeyStep, Pair::kKeyBytes);
    if (lane == 1) {
      prefetch_bulk(block + kShape.values_at() + of_block * kValueStep, Pair::kValueBytes);
    }
    if (lane == 2) {
      prefetch_bulk(block + kShape.factors_at() + of_block * kFactorStep, Pair::kFactorBytes);
    }
  }
  /// take_in() of a pair that lies in one piece, at `pair`.
  __device__ void take_in_whole(const std::byte* pair) {
    const uint32_t lane = threadIdx.x % 32;
    const std::byte* from = pair + 16 * lane;
    copy<Pair::kKeyBytes, kKeyPieces>(keys_to_ + in_, from);
    copy<Pair::kValueBytes, kValuePieces>(values_to_ + in_, from + Pair::kValuesAt);
    if (lane < Pair::kFactorBytes / 16) {
      copy_piece(shared_address(memory_) + Pair::kFactorsAt + 16 * lane + in_,
                 from + Pair::kFactorsAt);
    }
    commit_copies();
    in_ = next(in_);
  }
  /// Waits for the oldest pair that wait() has not returned yet; stages - 1 pairs are under way, or one.
  __device__ const std::byte* wait() {
    if (end_ <= 2 * Pair::kBytes)
      wait_for_copies<0>();
    else
      wait_for_copies<1>();
    __syncwarp();
    const std::byte* at = memory_ + out_;
    out_ = next(out_);
    return at;
  }
  /// Forgets all pairs that it was asked for.
  __device__ void restart() {
    wait_for_copies<0>();
    __syncwarp();
    in_ = out_ = 0;
  }
  /// Tile 0 or 1 of a pair that is here.
  __device__ static void read(const std::byte* pair, int tile, int lane,
                              CodeTile<kDim, kBits>& to) {
    read_words<kKeyPieces>(pair, tile, lane, to.keys);
    read_words<kValuePieces>(pair + Pair::kValuesAt, tile, lane, to.values);
    const auto* factors = reinterpret_cast<const __half2*>(pair + Pair::kFactorsAt);
    to.factors[0] = factors[tile * static_cast<int>(kCodeTile) + lane / 4];
    to.factors[1] = factors[tile * static_cast<int>(kCodeTile) + lane / 4 + 8];
  }

 private:
  static constexpr uint32_t kKeyPieces = pieces_of(Pair::kShape.key_words());
  static constexpr uint32_t kValuePieces = pieces_of(Pair::kShape.value_words());

  static constexpr uint32_t kPairs = kCodeBlock / (2 * kCodeTile);  ///< of a block
  static constexpr bool kHints = kOnce && kCopiesTakeHints;
  static constexpr int kKeyStep = Pair::kKeyBytes, kValueStep = Pair::kValueBytes,
                       kFactorStep = Pair::kFactorBytes;  ///< from pair to pair

  /// Copies 16 bytes of codes.
  __device__ void copy_piece(uint32_t to, const std::byte* from) const {
    if constexpr (kHints) {
      copy_async_once(to, from, policy_);
    } else {
      copy_async(to, from, true);
    }
  }
  /// Copies the lane's pieces of kBytes: every 32nd piece. Their places in shared memory are as far apart, or with 8
  /// pieces of a lane, which change places within 64, by 4 more or less in turn.
  template <uint32_t kBytes, uint32_t kPieces>
  __device__ void copy(uint32_t to, const std::byte* from) const {
    static_assert(kBytes % 16 == 0);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t turn = kPieces != 8 ? 0 : (place_of_piece<8>(lane) & 4U) != 0 ? 0U - 64U : 64U;
#pragma unroll
    for (uint32_t i = 0; i < kBytes / 16; i += 32) {
      if (kBytes / 16 - i >= 32 || lane < kBytes / 16 - i) {
        copy_piece(to + 16 * i + (i % 64 == 0 ? 0 : turn), from + 16 * i);
      }
    }
  }
  [[nodiscard]] __device__ uint32_t next(uint32_t at) const {
    return at + Pair::kBytes == end_ ? 0 : at + Pair::kBytes;
  }

  uint64_t policy_ = kHints ? read_once() : 0;  ///< of the codes, in the L2 cache
  std::byte* memory_;
  uint32_t end_;                  ///< bytes of the ring
  size_t block_stride_;           ///< bytes
  uint32_t in_ = 0, out_ = 0;     ///< bytes from its beginning
  const std::byte* from_;         ///< the lane's first piece of the KV head's first block
  uint32_t keys_to_, values_to_;  ///< its place of a pair's first pieces, in the ring's first pair
};

/// Prefetches the means and the noise of a block into L2, by a warp. Every lane loads a part of them, and the next
/// pair needs them at once: coming from memory they would stop the warp for half a microsecond, twice for every 8
/// pairs.
template <size_t kBegin, size_t kEnd>
__device__ inline void prefetch_means(const std::byte* block, int lane) {
  constexpr size_t kLine = 128;
  const size_t at = kBegin / kLine * kLine + kLine * static_cast<size_t>(lane);
  if (at < kEnd) asm volatile("prefetch.global.L2 [%0];" ::"l"(block + at));
}

}  // namespace keyhole::gpu::codes
