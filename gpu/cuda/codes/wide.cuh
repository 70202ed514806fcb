// The pass over all codes of a layer for many query rows: those of several tokens, up to 48 of a KV head.
//
// In the pass for few rows (gpu/cuda/codes/attend.cuh) a warp does all of a tile, and has the sums of all components of
// all rows in its registers, which are enough for 16 rows of 128 components. Here a thread block takes half a block of
// codes, 128 rows of codes, at once, and its warps divide the work twice:
//
//   weights  a warp has two tiles and half of the query rows: scores, logits, weights as in the other pass, bit by bit;
//            weights times value factors go to shared memory in fp16
//   values   a warp has a quarter of the components and half of the tiles, and all query rows
//
// So values are unpacked once for all query rows and keys twice, and all that a warp keeps are the sums of its
// components. The running maximum of a query row is the whole thread block's. Weights are made with the maximum as it
// is; only where a logit passes it by 2^6 the block agrees on new ones and makes the weights again, so that a chunk
// takes two barriers.
//
// One more product a chunk has the sums of the weights, each in two fp16 numbers of 22 bits together: the mean value of
// a block counts with the sum of its rows' weights, and what the ones in the values' registers add is taken away at
// once. Sums stay small that way: tensor cores cut sums off, and over thousands of rows the ones would cost what values
// leave of them.
//
// HALVES. Of rows with more than 256 components a thread block has no room for two chunks of 4 bits. There keys and
// values of a chunk come one after the other, each to one of three or four places: while it works on one, two are on
// their way. With two places one is on its way, and 8 query rows of 512 components take the 99 KiB of shared memory
// that GPUs for desktops have.
//
// PASSES. Where shared memory is too little for all query rows, thread blocks have some of them (blockIdx.z), and each
// reads all codes.
//
// BANDWIDTH. Shared memory limits it: at 24 query rows of 256 components, a tile of 16 rows takes 48 cycles for the
// queries, 32 for keys, 32 for values, and 24 for weights.
#pragma once

#include "gpu/cuda/codes/combined_rows.cuh"
#include "gpu/cuda/codes/grid_split.cuh"
#include "gpu/cuda/codes/resident_rows.cuh"
#include "gpu/cuda/codes/tile_logits.cuh"
#include "gpu/cuda/codes/tile_ring.cuh"
#include "gpu/cuda/codes/value_sums.cuh"
#include "gpu/cuda/codes/wide_shape.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

template <int kDim, int kBits, int kColumns, bool kHalves>
class WidePass {
 public:
  using Shape = WideShape<kDim, kBits, kColumns, kHalves>;
  using Shared = WideShared<kDim, kBits, kColumns>;
  using Units = OnesUnits<kBits>;

  __device__ WidePass(const WideParams& p, std::byte* memory)
      : p_(p),
        s_(p.step),
        kv_head_(blockIdx.y),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        shared_(*reinterpret_cast<Shared*>(memory)),
        ring_(memory + sizeof(Shared)),
        base_(p.step.blocks + kv_head_ * p.step.head_stride) {}

  __device__ void run() {
    divide();
    prefetch();
    value_scale_ = value_scale_of(s_, kv_head_);
    wait_for_kernels_before();
    let_next_kernel_start();
    divide();
    prepare();
    const uint32_t ahead = places() - 1;
    for (uint32_t i = 0; i < ahead; ++i) take_in_piece(i);
    // The first chunk's mean comes with it.
    wait();
    __syncthreads();
    if (first_ < end_) weigh_mean(first_);
    if constexpr (Shape::kHalves) {
      go_by_halves(ahead);
    } else {
      go_by_chunks(ahead);
    }
    leave();
  }

 private:
  static constexpr int kHeads = Shape::kHeads;
  static constexpr uint32_t kThreads = kWideWarps * 32;
  static constexpr int kQuads = kHeads * kDim / 4;  ///< of a thread block's states
  static constexpr uint32_t kKeyPieces = pieces_of(Shape::kShape.key_words());
  static constexpr uint32_t kValuePieces = pieces_of(Shape::kShape.value_words());
  static constexpr int kKeyWords = static_cast<int>(Shape::kShape.key_words());
  static constexpr int kValueWords = static_cast<int>(Shape::kShape.value_words());

  __device__ __forceinline__ void go_by_chunks(uint32_t ahead) {
    for (uint32_t chunk = first_; chunk < end_; ++chunk) {
      wait();
      __syncthreads();
      take_in_piece(chunk - first_ + ahead);
      const std::byte* const stage = place_of(chunk - first_);
      while (weigh(chunk, stage)) move();
      add_values(chunk, stage);
      if (chunk + 1 < end_ && (chunk + 1) % 2 == 0) weigh_mean(chunk + 1);
    }
  }
  __device__ __forceinline__ void go_by_halves(uint32_t ahead) {
    uint32_t piece = 0;
    for (uint32_t chunk = first_; chunk < end_; ++chunk) {
      wait();
      __syncthreads();
      take_in_piece(piece + ahead);
      while (weigh(chunk, place_of(piece))) move();
      ++piece;
      wait();
      __syncthreads();
      take_in_piece(piece + ahead);
      add_values(chunk, place_of(piece));
      ++piece;
      if (chunk + 1 < end_ && (chunk + 1) % 2 == 0) weigh_mean(chunk + 1);
    }
  }

  /// The first query row of the step that the thread block has.
  __device__ static uint32_t first_row() { return blockIdx.z * kHeads; }

  /// The chunks of this thread block: halves of blocks.
  __device__ void divide() {
    const uint64_t chunks = uint64_t{__ldcv(s_.block_count)} * 2;
    first_ = static_cast<uint32_t>(blockIdx.x * chunks / gridDim.x);
    end_ = static_cast<uint32_t>((blockIdx.x + 1) * chunks / gridDim.x);
  }
  __device__ const std::byte* block_of(uint32_t chunk) const {
    return base_ + chunk / 2 * s_.block_stride;
  }
  /// Asks for the first chunk, to L2: what it will be copied to is in use until queries are there.
  __device__ void prefetch() const {
    if (first_ >= end_) return;
    const std::byte* const block = block_of(first_);
    const uint32_t half = first_ % 2;
    const auto ask = [&](size_t at, size_t bytes) {
      for (size_t i = threadIdx.x * size_t{128}; i < bytes; i += kThreads * size_t{128}) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(block + at + i));
      }
    };
    ask(half * Shape::kKeyBytes, Shape::kKeyBytes);
    ask(Shape::kShape.values_at() + half * Shape::kValueBytes, Shape::kValueBytes);
    ask(Shape::kShape.factors_at(), kCodeBlock * 4 + Shape::kMeanBytes);
  }

  /// Prepares the queries, and attends the block's share of the resident tokens, whose state waits in its place among
  /// the states that are merged.
  __device__ void prepare() {
    using Share = ResidentShare<kDim, Shape::kTiles, kWideWarps>;
    auto& resident = *reinterpret_cast<ResidentShared<kDim, kHeads>*>(ring_);
    const StepHeads heads{s_, first_row()};
    RawQueries<kDim, kHeads, Shape::kWarps, 1> raw;  // one at a time, as in finish()
    raw.load(heads, kv_head_);
    const auto take_queries = [&] {
      prepare_queries<kDim, kBits>(heads, raw, shared_.rows, shared_.constants, resident.rows,
                                   [&](int h, int part, int quad, uint32_t word) {
                                     const int at = 128 * quad + 4 * lane_;
                                     const int column = 2 * (h % 4) + part;
                                     uint2& to =
                                         shared_.fragments[h / 4][at / 32][4 * column + lane_ % 4];
                                     (lane_ % 8 < 4 ? to.x : to.y) = word;
                                   });
    };
    const int row = static_cast<int>(threadIdx.x);
    if (row < kHeads) shared_.top[row] = kMinusInf;
    if (!s_.has_resident) {
      take_queries();
      __syncthreads();
      return;
    }
    Share share(s_, kv_head_, first_row(), GridSplit{}, resident);
    take_queries();
    share.attend(value_scale_);
    __syncthreads();
#pragma unroll 2
    for (int i = row; i < kQuads; i += static_cast<int>(kThreads)) {
      const auto h = static_cast<uint32_t>(i / (kDim / 4));
      if (first_row() + h >= s_.group) break;
      const int at = i % (kDim / 4) * 4;
      *reinterpret_cast<float4*>(state_of(h) + at) =
          *reinterpret_cast<const float4*>(&resident.rows[h][at]);
    }
    if (row < kHeads) {
      shared_.resident_top[row] = resident.top[row];
      shared_.resident_sum[row] = resident.sum[row];
    }
    __syncthreads();
  }

  /// The place of this thread block's state of a row among those of the row's part.
  __device__ size_t slot_of(const WideParams::Place& at) const {
    const CodesParams& part = p_.parts[at.part];
    return (size_t{kv_head_} * part.splits + blockIdx.x) * part.group + at.row;
  }
  /// row: the thread block's.
  __device__ float* state_of(uint32_t row) const {
    const WideParams::Place at = p_.place(first_row() + row);
    return p_.parts[at.part].part_o + slot_of(at) * kDim;
  }

  /// Copies pieces of a part of a block to shared memory, by all threads.
  template <uint32_t kBytes, uint32_t kPieces>
  __device__ static void copy(std::byte* to, const std::byte* from) {
    static_assert(kBytes % 16 == 0);
#pragma unroll
    for (uint32_t i = 0; i < kBytes / 16; i += kThreads) {
      const uint32_t piece = i + threadIdx.x;
      if (kBytes / 16 - i < kThreads && piece >= kBytes / 16) break;
      copy_async(shared_address(to) + 16 * place_of_piece<kPieces>(piece), from + 16 * piece, true);
    }
  }
  /// Number of places for pieces, which are chunks or halves of them, and come in turn.
  __device__ uint32_t places() const {
    return static_cast<uint32_t>(s_.stages) + (Shape::kHalves ? 1 : 0);
  }
  __device__ std::byte* place_of(uint32_t piece) const {
    return ring_ + piece % places() * Shape::kStage;
  }
  /// Waits until the oldest piece is there; one less than there are places for is under way.
  __device__ void wait() const {
    const uint32_t count = places();
    if (count == 2)
      wait_for_copies<0>();
    else if (count == 3)
      wait_for_copies<1>();
    else
      wait_for_copies<2>();
  }
  /// Asks for piece number `number`, and with keys for the means of the chunk behind theirs; for none behind the end.
  /// Every call is one group of copies.
  __device__ void take_in_piece(uint32_t number) {
    const uint32_t chunk = first_ + (Shape::kHalves ? number / 2 : number);
    const bool has_keys = !Shape::kHalves || number % 2 == 0;
    const bool has_values = !Shape::kHalves || number % 2 == 1;
    if (chunk < end_) {
      const std::byte* const block = block_of(chunk);
      const uint32_t half = chunk % 2;
      std::byte* const to = place_of(number);
      if (has_keys) copy<Shape::kKeyBytes, kKeyPieces>(to, block + half * Shape::kKeyBytes);
      if (has_values) {
        copy<Shape::kValueBytes, kValuePieces>(
            to + Shape::kValuesAt, block + Shape::kShape.values_at() + half * Shape::kValueBytes);
      }
      if (has_keys) {
        copy<Shape::kFactorBytes, 0>(to + Shape::kFactorsAt, block + Shape::kShape.factors_at() +
                                                                 half * Shape::kFactorBytes);
      }
    }
    if (number == 0 && chunk < end_) take_means(chunk);
    if (has_keys && chunk + 1 < end_) take_means(chunk + 1);
    commit_copies();
  }
  __device__ std::byte* means_of(uint32_t chunk) const {
    return ring_ + places() * Shape::kStage +
           (chunk - first_) % mean_places(static_cast<uint32_t>(s_.stages)) * Shape::kMeanBytes;
  }
  __device__ void take_means(uint32_t chunk) const {
    copy<Shape::kMeanBytes, 0>(means_of(chunk), block_of(chunk) + Shape::kShape.key_mean_at());
  }

  /// The logits of the mean key of the chunk's block.
  __device__ void weigh_mean(uint32_t chunk) {
    const auto* const mean = reinterpret_cast<const __half*>(means_of(chunk));
    float* const middle = shared_.middle[chunk / 2 % 2];
    for (int t = warp_; t < Shape::kTiles; t += Shape::kWarps) {
      const float logit = mean_logit<kDim>(&shared_.rows[4 * t], mean, lane_);
      if (lane_ < 4) middle[4 * t + lane_] = logit;
    }
  }

  /// Makes the weights of a chunk; true if they are too large for the running maxima, so that these have to move.
  __device__ __forceinline__ bool weigh(uint32_t chunk, const std::byte* stage) {
    const int pair = warp_ / 2, first_tile = warp_ % 2 * kColumns;
    struct Tile {
      __half2 factors[2];
    } tiles[2];
    const auto* const factors =
        reinterpret_cast<const __half2*>(stage + Shape::kFactorsAt) + 2 * kCodeTile * pair;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tiles[i].factors[0] = factors[i * static_cast<int>(kCodeTile) + lane_ / 4];
      tiles[i].factors[1] = factors[i * static_cast<int>(kCodeTile) + lane_ / 4 + 8];
    }
    int scores[2][kColumns][4] = {};
    {
      uint32_t keys[2][kKeyWords];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        read_words<kKeyPieces>(stage, 2 * pair + i, lane_, keys[i]);
      }
#pragma unroll
      for (int step = 0; step < Shape::kSteps; ++step) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            a[i][r] = key_register<kBits>(keys[i], 2 * step + r / 2, r % 2);
          }
        }
#pragma unroll
        for (int t = 0; t < kColumns; ++t) {
          const uint2 q = shared_.fragments[first_tile + t][step][lane_];
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply_add_bytes(scores[i][t], a[i], q.x, q.y);
        }
      }
    }
    const float noise = *reinterpret_cast<const float*>(means_of(chunk) + Shape::kMeanBytes - 16);
    const float cap = s_.logits.softcap * kLog2E;
    HeadConstants head[kColumns];
    float middle[kColumns], top[kColumns], largest[kColumns];
#pragma unroll
    for (int t = 0; t < kColumns; ++t) {
      const int h = 4 * (first_tile + t) + lane_ % 4;
      head[t] = shared_.constants[h];
      middle[t] = shared_.middle[chunk / 2 % 2][h];
      top[t] = shared_.top[h];
    }
    float2 logits[2][kColumns];
    weigh_scores<kColumns>(tiles, scores, head, noise, cap, middle, logits);
    // 32 weights times factors are a number of fp16; weights of new maxima, at most 1, are taken with any factors.
    constexpr float kMostScaled = 2047.0F;
    static_assert(32.0F * kMostScaled <= 65504.0F && kMostScaled >= kMostValueFactor);
    float room[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float g = __high2float(tiles[i].factors[r]);
        room[i][r] = g > 0.0F ? fmaxf(__fdividef(kMostScaled, g), 1.0F) : HUGE_VALF;
      }
    }
    bool moves = false;
    float sums[kColumns], scaled[kColumns];
#pragma unroll
    for (int t = 0; t < kColumns; ++t) {
      largest[t] =
          fmaxf(fmaxf(logits[0][t].x, logits[0][t].y), fmaxf(logits[1][t].x, logits[1][t].y));
      moves = moves || largest[t] > top[t] + kHeadroom;
      sums[t] = 0.0F;
      scaled[t] = 0.0F;
      __half* const row = shared_.weights[4 * (first_tile + t) + lane_ % 4] +
                          2 * static_cast<int>(kCodeTile) * pair + lane_ / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float p0 = exp2_fast(logits[i][t].x - top[t]);
        const float p1 = exp2_fast(logits[i][t].y - top[t]);
        moves = moves || p0 > room[i][0] || p1 > room[i][1];
        const __half w0 = __float2half_rn(p0 * __high2float(tiles[i].factors[0]));
        const __half w1 = __float2half_rn(p1 * __high2float(tiles[i].factors[1]));
        sums[t] += p0 + p1;
        scaled[t] += __half2float(w0) + __half2float(w1);
        row[16 * i] = w0;
        row[16 * i + 8] = w1;
      }
    }
    const float most = combined_rows(largest, [](float a, float b) { return fmaxf(a, b); });
    const float sum = combined_rows(sums, [](float a, float b) { return a + b; });
    const float scaled_sum = combined_rows(scaled, [](float a, float b) { return a + b; });
    const int local = combined_row<kColumns>(lane_), row = 4 * first_tile + local;
    if (local < 4 * kColumns) {
      shared_.largest[pair][row] = most;
      split(shared_.sums[row], pair, sum);
      split(shared_.scaled[row], pair, scaled_sum);
      const uint32_t of_step = first_row() + static_cast<uint32_t>(row);
      if (of_step < s_.group && s_.exact_rows != 0) {
        const WideParams::Place at = p_.place(of_step);
        const CodesParams& part = p_.parts[at.part];
        const size_t pairs =
            size_t{kv_head_} * part.block_capacity * kBlockMaxima + chunk * Shape::kPairs + pair;
        part.maxima[pairs * part.padded_heads + at.row] = most;
      }
    }
    return __syncthreads_or(moves ? 1 : 0) != 0;
  }
  /// A sum of a pair of tiles in two parts.
  __device__ static void split(__half (&to)[8], int pair, float sum) {
    const __half high = __float2half_rn(sum);
    to[pair] = high;
    to[pair + 4] = __float2half_rn(sum - __half2float(high));
  }

  /// Moves the running maxima to those of the chunk.
  __device__ void move() {
    const int row = static_cast<int>(threadIdx.x);
    if (row < kHeads) {
      const float before = shared_.top[row];
      float now = before;
#pragma unroll
      for (int i = 0; i < Shape::kPairs; ++i) now = fmaxf(now, shared_.largest[i][row]);
      const float keep = exp2_fast(before - finite_base(now));
      shared_.top[row] = now;
      shared_.keep[row] = keep;
      total_ *= keep;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float2 keep = *reinterpret_cast<const float2*>(&shared_.keep[8 * c + 2 * (lane_ % 4)]);
#pragma unroll
      for (int m = 0; m < Shape::kOwn; ++m) {
        acc_[m][c][0] *= keep.x, acc_[m][c][1] *= keep.y;
        acc_[m][c][2] *= keep.x, acc_[m][c][3] *= keep.y;
      }
    }
  }

  /// The first of the warp's products of 16 components.
  __device__ int first_product() const { return Shape::kOwn * (warp_ / 2); }

  /// Adds a chunk's weighted values.
  __device__ __forceinline__ void add_values(uint32_t chunk, const std::byte* stage) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < kHeads) {
      const uint4 raw = *reinterpret_cast<const uint4*>(shared_.sums[row]);
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        sum += x.x + x.y;
      }
      total_ += sum;
    }
    // Two fp16 ones. The compiler must not know the value, because masking and joining a constant would take two
    // instructions instead of one; a group is never as large as 2^16.
    const uint32_t ones = 0x3C003C00U + (s_.group >> 16U);
    constexpr int kTilesOfHalf = Shape::kPairs;  // 8 tiles for two halves of the warps
    const int first_tile = warp_ % 2 * kTilesOfHalf;
    const uint32_t weights =
        shared_address(&shared_.weights[lane_ % 8][16 * first_tile + lane_ / 8 * 8]);
    if (first_product() < Shape::kProducts) {
#pragma unroll
      for (int pair = 0; pair < kTilesOfHalf / 2; ++pair) {
        uint32_t b[kColumns][4];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          load_matrices(
              b[c], weights + 2U * static_cast<uint32_t>(8 * c * Shape::kWeightRow + 32 * pair));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t words[kOwnWords];
          read_values(stage + Shape::kValuesAt, first_tile + 2 * pair + i, words);
#pragma unroll
          for (int m = 0; m < Shape::kOwn; ++m) {
            uint32_t a[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) a[r] = value_register<kBits>(words, 4 * m + r, ones);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              multiply_add<__half>(acc_[m][c], a, b[c][2 * i], b[c][2 * i + 1]);
            }
          }
        }
      }
      add_sums(chunk);
    }
  }

  /// Words of a lane's values of a tile that the warp's products are in.
  static constexpr int kOwnWords = (4 * Shape::kOwn * kBits + 15) / 16;
  __device__ void read_values(const std::byte* values, int tile,
                              uint32_t (&words)[kOwnWords]) const {
    // Products lie one after the other, 16 / (4 * kBits) in a word.
    const int slice = warp_ / 2;
    constexpr int kPerWord = 4 / kBits;
    const int first = Shape::kOwn * slice / kPerWord;
    if constexpr (kValuePieces != 0) {
      const auto piece = static_cast<uint32_t>(tile * 32 + lane_) * kValuePieces +
                         static_cast<uint32_t>(first) / 4;
      constexpr int kAtOnce = kOwnWords < 4 ? kOwnWords : 4;
#pragma unroll
      for (int i = 0; i < kOwnWords / kAtOnce; ++i) {
        const uint32_t place = place_of_piece<kValuePieces>(piece + static_cast<uint32_t>(i));
        read_of_piece<kAtOnce>(values + 16 * place + first % 4 * 4, words + kAtOnce * i);
      }
    } else {
      const auto* const from =
          reinterpret_cast<const uint32_t*>(values) + (tile * 32 + lane_) * kValueWords + first;
#pragma unroll
      for (int i = 0; i < kOwnWords; ++i) words[i] = first + i < kValueWords ? from[i] : 0;
    }
    if constexpr (Shape::kOwn % kPerWord != 0) {
      static_assert(Shape::kOwn == 1 && kPerWord == 2);
      words[0] >>= 8 * (slice % 2);  // its product is the second of the word
    }
  }

  /// The mean value of the block counts with all that the warp's tiles weigh, and the ones with all of it times
  /// factors.
  __device__ void add_sums(uint32_t chunk) {
    const auto* const mean = reinterpret_cast<const __half*>(means_of(chunk)) + kDim;
    // Rows 0 to 7 of b are the parts of sums, rows 8 to 15 those of scaled sums; the other warps' pairs of tiles are
    // theirs.
    const bool is_own = lane_ % 2 == warp_ % 2;
    uint32_t b[kColumns][2];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = 8 * c + lane_ / 4, part = lane_ % 4 * 2;
      const uint32_t sums = *reinterpret_cast<const uint32_t*>(&shared_.sums[row][part]);
      const uint32_t scaled = *reinterpret_cast<const uint32_t*>(&shared_.scaled[row][part]);
      b[c][0] = is_own ? sums : 0;
      b[c][1] = is_own ? scaled : 0;
    }
    constexpr float kLevels = static_cast<float>((1 << kBits) - 1);
    const __half2 even_ones = __float2half2_rn(-1.0F - 0.5F * kLevels / Units::kEven);
    const __half2 odd_ones = __float2half2_rn(-1.0F - 0.5F * kLevels / Units::kOdd);
#pragma unroll
    for (int m = 0; m < Shape::kOwn; ++m) {
      const int j = 16 * (first_product() + m) + lane_ / 4;
      if (16 * (first_product() + m) >= kDim) break;
      const __half2 even = __half2half2(mean[j]), odd = __half2half2(mean[j + 8]);
      // In units of the accumulators.
      const __half2 x = __hmul2(even, __float2half2_rn(0.5F / Units::kEven));
      const __half2 y = __hmul2(odd, __float2half2_rn(0.5F / Units::kOdd));
      const uint32_t a[4] = {*reinterpret_cast<const uint32_t*>(&x),
                             *reinterpret_cast<const uint32_t*>(&y),
                             *reinterpret_cast<const uint32_t*>(&even_ones),
                             *reinterpret_cast<const uint32_t*>(&odd_ones)};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) multiply_add<__half>(acc_[m][c], a, b[c][0], b[c][1]);
    }
  }

  /// Leaves the thread block's states.
  __device__ void leave() {
    wait_for_copies<0>();
    __syncthreads();  // nobody reads the ring any more
    float* const states = reinterpret_cast<float*>(ring_);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kHeads) shared_.total[thread] = total_;
    // The resident tokens' states are asked for all at once.
    constexpr int kEach = (kQuads + static_cast<int>(kThreads) - 1) / static_cast<int>(kThreads);
    float4 residents[kEach] = {};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = thread + e * static_cast<int>(kThreads);
      const auto row = static_cast<uint32_t>(i / (kDim / 4));
      if (!s_.has_resident || i >= kQuads || first_row() + row >= s_.group) break;
      residents[e] = __ldcg(reinterpret_cast<const float4*>(state_of(row)) + i % (kDim / 4));
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (warp_ % 2 == half) {
#pragma unroll
        for (int m = 0; m < Shape::kOwn; ++m) {
          const int j = 16 * (first_product() + m) + lane_ / 4;
          if (16 * (first_product() + m) >= kDim) break;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& to = states[(8 * c + 2 * (lane_ % 4) + i % 2) * Shape::kStateRow + j +
                                 (i < 2 ? 0 : 8)];
              to = half == 0 ? acc_[m][c][i] : to + acc_[m][c][i];
            }
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = thread + e * static_cast<int>(kThreads);
      const int row = i / (kDim / 4), j = i % (kDim / 4) * 4;
      const uint32_t of_step = first_row() + static_cast<uint32_t>(row);
      if (i >= kQuads || of_step >= s_.group) break;
      const WideParams::Place at = p_.place(of_step);
      const CodesParams& part = p_.parts[at.part];
      const size_t slot = slot_of(at);
      const float unit = j % 16 < 8 ? Units::kEven : Units::kOdd;
      const float top = shared_.top[row];
      const float overall = s_.has_resident ? fmaxf(top, shared_.resident_top[row]) : top;
      const float base = finite_base(overall), keep = exp2_fast(top - base);
      const float of_resident =
          s_.has_resident ? exp2_fast(shared_.resident_top[row] - base) : 0.0F;
      const float4 sum = *reinterpret_cast<const float4*>(&states[row * Shape::kStateRow + j]);
      const auto state = [&](float x, float r) {
        return fmaf(of_resident, r, keep * 2.0F * unit * x);
      };
      *reinterpret_cast<float4*>(part.part_o + slot * kDim + j) = {
          state(sum.x, residents[e].x), state(sum.y, residents[e].y), state(sum.z, residents[e].z),
          state(sum.w, residents[e].w)};
      if (j != 0) continue;
      float total = keep * shared_.total[row];
      if (s_.has_resident) total = fmaf(of_resident, shared_.resident_sum[row], total);
      part.part_lse[slot] = top + log2f(shared_.total[row]);
      part.part_sum[slot] = make_float2(overall, total);
    }
  }

  const WideParams& p_;
  const CodesParams& s_;
  const uint32_t kv_head_;
  const int warp_, lane_;
  Shared& shared_;
  std::byte* const ring_;
  const std::byte* const base_;  ///< the KV head's first block
  uint32_t first_, end_;         ///< of the block's chunks
  float value_scale_;
  float acc_[Shape::kOwn][kColumns][4] = {};
  float total_ = 0.0F;  ///< of the row whose number the thread has
};

template <int kDim, int kBits, int kColumns, bool kHalves = (kDim > 256)>
__global__ void __launch_bounds__(kWideWarps * 32, wide_occupancy<kDim, kBits, kColumns>())
    attend_wide_kernel(const __grid_constant__ WideParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  WidePass<kDim, kBits, kColumns, kHalves>(p, reinterpret_cast<std::byte*>(memory)).run();
}

}  // namespace keyhole::gpu::codes
