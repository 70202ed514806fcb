// Codes on their way from memory to a warp: a ring of pairs of tiles in shared memory, which the warp fills by copies that
// it does not wait for.
//
// WHY. A pass reads each code once, so what limits it is the number of bytes under way: 4 TB/s times a latency of 1 to 1.5 us
// under load are 4 to 6 MB, 32 to 48 KB for each of 132 multiprocessors. Registers of 16 warps hold one pair ahead, 35 KB
// at 2 bits and d = 128, which gave 2.6 TB/s; shared memory holds four.
#pragma once

#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/common/async_copy.cuh"

namespace keyhole::gpu::codes {

/// Two neighbouring tiles, 32 rows, as they lie in their block: keys, values, factors.
template <int kDim, int kKeyBits, int kValueBits>
struct TilePair {
  static constexpr CodeShape kShape{kDim, kKeyBits, kValueBits};
  static constexpr uint32_t kKeyBytes = 2 * kCodeLanes * kShape.key_words() * 4;
  static constexpr uint32_t kValueBytes = 2 * kCodeLanes * kShape.value_words() * 4;
  static constexpr uint32_t kFactorBytes = 2 * kCodeTile * 4;
  static constexpr uint32_t kValuesAt = kKeyBytes;
  static constexpr uint32_t kFactorsAt = kValuesAt + kValueBytes;
  static constexpr uint32_t kBytes = kFactorsAt + kFactorBytes;
};

/// Pieces of 16 bytes of which a lane reads `kPieces` neighbours lie so that 8 lanes find theirs in all banks.
template <uint32_t kPieces>
__device__ inline uint32_t place_of_piece(uint32_t piece) {
  if constexpr (kPieces == 2 || kPieces == 4) return piece ^ ((piece >> 3U) & (kPieces - 1));
  return piece;
}

/// A warp's ring. Between wait() and the next take_in(), all lanes may read the pair that wait() was for.
template <int kDim, int kKeyBits, int kValueBits>
class TileRing {
 public:
  using Pair = TilePair<kDim, kKeyBits, kValueBits>;

  /// memory: the warp's, Pair::kBytes * stages, aligned to 16.
  __device__ TileRing(std::byte* memory, int stages) : memory_(memory), stages_(stages) {}

  /// Asks for pair `pair` (0..7) of a block; block null: for none. Every call counts as one.
  __device__ void take_in(const std::byte* block, uint32_t pair) {
    if (block != nullptr) {
      std::byte* to = memory_ + in_ * Pair::kBytes;
      copy<kKeyPieces, Pair::kKeyBytes>(to, block + pair * Pair::kKeyBytes);
      if constexpr (kValueBits != 0) {
        copy<kValuePieces, Pair::kValueBytes>(
            to + Pair::kValuesAt, block + Pair::kShape.values_at() + pair * Pair::kValueBytes);
      }
      copy<1, Pair::kFactorBytes>(to + Pair::kFactorsAt,
                                  block + Pair::kShape.factors_at() + pair * Pair::kFactorBytes);
    }
    commit_copies();
    in_ = in_ + 1 == stages_ ? 0 : in_ + 1;
  }
  /// Waits for the oldest pair but for those that wait() was called for; stages - 1 are under way.
  __device__ const std::byte* wait() {
    wait_for_copies(stages_ - 2);
    __syncwarp();
    const std::byte* at = memory_ + out_ * Pair::kBytes;
    out_ = out_ + 1 == stages_ ? 0 : out_ + 1;
    return at;
  }
  /// Forgets all that it was asked for.
  __device__ void restart() {
    wait_for_copies<0>();
    __syncwarp();
    in_ = out_ = 0;
  }
  /// Tile 0 or 1 of a pair that is here.
  __device__ static void read(const std::byte* pair, int tile, int lane,
                              CodeTile<kDim, kKeyBits, kValueBits>& to) {
    read_words<kKeyPieces>(pair, tile, lane, to.keys);
    if constexpr (kValueBits != 0) {
      read_words<kValuePieces>(pair + Pair::kValuesAt, tile, lane, to.values);
    }
    const auto* factors = reinterpret_cast<const __half2*>(pair + Pair::kFactorsAt);
    to.factors[0] = factors[tile * static_cast<int>(kCodeTile) + lane / 4];
    to.factors[1] = factors[tile * static_cast<int>(kCodeTile) + lane / 4 + 8];
  }

 private:
  static constexpr uint32_t pieces(uint32_t words) { return words % 4 == 0 ? words / 4 : 0; }
  /// Of 16 bytes, that a lane reads of a tile; 0: its words are no such pieces.
  static constexpr uint32_t kKeyPieces = pieces(Pair::kShape.key_words());
  static constexpr uint32_t kValuePieces = pieces(Pair::kShape.value_words());

  template <uint32_t kPieces, uint32_t kBytes>
  __device__ static void copy(std::byte* to, const std::byte* from) {
    static_assert(kBytes % 16 == 0);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t base = shared_address(to);
#pragma unroll
    for (uint32_t i = 0; i < kBytes / 16; i += 32) {
      const uint32_t piece = i + lane;
      if (kBytes / 16 - i >= 32 || piece < kBytes / 16) {
        copy_async(base + 16 * place_of_piece<kPieces>(piece), from + size_t{16} * piece, true);
      }
    }
  }

  template <uint32_t kPieces, int kWords>
  __device__ static void read_words(const std::byte* from, int tile, int lane,
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

  std::byte* memory_;
  int stages_;
  int in_ = 0, out_ = 0;
};

}  // namespace keyhole::gpu::codes
