// The pass of gpu/cuda/codes/wide.cuh over all codes of a layer for many query rows, by Hopper's warpgroup products:
// compiled for 9.0a alone.
//
// There shared memory limits the pass: each warp reads all queries for its 16 rows of codes. A product of a warpgroup
// takes 64 rows of codes for one read of the queries, and takes the codes from registers, whose layout is that of
// m16n8k32 and m16n8k16. So the codes of keys (64 rows times components) and, transposed, of values (64 components
// times rows) go from a ring in shared memory to registers once, and never back.
//
// A thread block has some warpgroups, and each of these a run of chunks of its own, with its own running maxima and
// sums: what they have in common are the queries. A chunk is 128 rows, half a block; a warpgroup takes half of it at
// once, a turn: the even tiles of 16 rows, then the odd ones, so that a warp has both tiles of a pair, whose largest
// logit it knows alone. A turn:
//
//   scores   warp w has tile w of four; integers, exact, as in the other passes
//   weights  as there, bit by bit; times value factors, in fp16, to shared memory, in two places that take turns
//   values   warp w has a quarter of the components of all four tiles
//
// with one barrier of the warpgroup, between weights and values, which also tells whether weights are more than fp16
// numbers and their sums have room for, some 2^11 times those of the running maxima; then all agree on new maxima and
// take the turn again. As in wide.cuh one more product a chunk has the sums of the weights: it adds the block's mean
// value and takes what the ones in the values' registers added. Sums of weights and largest logits of both turns of a
// chunk are combined over the lanes together, where there are registers for it.
//
// ORDER. What one warp writes and others read lies on two sides of a turn's barrier, and so does what they have read
// and it writes again. Weights have a place for first turns and one for second ones: a warp's products with the first
// have ended before it comes to the second turn's barrier, behind which the next chunk's weights are written. The sums
// of a chunk are written before its second barrier, and again behind the next chunk's first one. What a block's rows
// need of its means is made in the last turn before it, in the place of the block before last; means come to shared
// memory with the copies of a turn, three turns before. Codes of a turn go to the stage of the turn before, behind the
// barrier.
//
// ROOM. The first codes are on their way while queries and resident tokens are prepared: these have the last stage
// meanwhile. The loop's instructions have to fit into the cache for instructions, of 32 KiB or so: caps of logits have
// a loop of their own.
//
// TIME. At 24 query rows of 128 components a turn is some 590 instructions of each warp, and takes a multiprocessor of
// an H100 0.5 us, where memory takes 0.3 for its codes of 4 bits; at 24 rows of 256 components it takes 0.76, as long
// as memory. Six of ten issue slots are taken. What warps wait for else is divided: results of the instruction before,
// shared memory and exponentials, the pipe of integers and comparisons, products and barriers have about a tenth each.
#pragma once

#include <type_traits>

#include "gpu/cuda/codes/combined_rows.cuh"
#include "gpu/cuda/codes/grid_split.cuh"
#include "gpu/cuda/codes/resident_heads.cuh"
#include "gpu/cuda/codes/tile_logits.cuh"
#include "gpu/cuda/codes/value_sums.cuh"
#include "gpu/cuda/codes/warpgroup_ring.cuh"
#include "gpu/cuda/codes/warpgroup_rows.cuh"
#include "gpu/cuda/codes/warpgroup_shape.cuh"
#include "gpu/cuda/codes/wide_shape.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/common/wgmma_held.cuh"

namespace keyhole::gpu::codes {

/// Two weights together pass the running maximum by no more, nor do they times their value factors: so the sums of a
/// chunk are fp16 numbers.
constexpr float kMostWeight = 2048.0F;

template <int kDim, int kBits, int kColumns, int kGroups>
class GroupPass : private GroupRing<kDim, kBits, kColumns, kGroups> {
  using Ring = GroupRing<kDim, kBits, kColumns, kGroups>;
  using Ring::divide, Ring::end_, Ring::find_places_of_copies, Ring::first_, Ring::group_,
      Ring::kept, Ring::kTurns, Ring::kv_head_, Ring::lane_, Ring::means_of, Ring::next, Ring::out_,
      Ring::s_, Ring::stages, Ring::stages_, Ring::start, Ring::take_in, Ring::take_means,
      Ring::warp_;

  /// An operand that begins `bytes` further.
  __device__ static uint64_t further(uint64_t operand, uint32_t bytes) {
    return operand & 0xFFFFFFFF00000000ULL | (static_cast<uint32_t>(operand) + bytes / 16);
  }

 public:
  using Shape = GroupShape<kDim, kBits, kColumns, kGroups>;
  using Shared = GroupShared<kDim, kBits, kColumns, kGroups>;
  using Units = OnesUnits<kBits>;

  __device__ GroupPass(const WideParams& p, std::byte* memory)
      : Ring(p, memory + sizeof(Shared)),
        p_(p),
        shared_(*reinterpret_cast<Shared*>(memory)),
        states_(p, kv_head_) {}

  __device__ void run() {
    const uint32_t ahead = stages() - 1;
    // A warp's lanes read it together; other warps may see another number until the kernels before have ended.
    const uint32_t count = __shfl_sync(kWholeWarp, __ldcv(s_.block_count), 0);
    divide(count);
    find_places();
    start(ahead);
    find_maxima();
    value_scale_ = value_scale_of(s_, kv_head_);
    wait_for_kernels_before();
    let_next_kernel_start();
    // The number comes behind the codes that have been asked for, and one lane takes it, so that none waits for it yet.
    uint32_t count_now = count;
    if (lane_ == 0) count_now = __ldcv(s_.block_count);
    prepare(stages_ + ahead * Shape::kStep);
    if (__syncthreads_or(count_now != count ? 1 : 0) != 0) {
      divide(__ldcv(s_.block_count));
      start(ahead);
      wait_for_copies<0>();
      __syncthreads();
    }
    if (first_ < end_) weigh_means(first_);
    wait_for_group(group_);
    if (s_.logits.softcap == 0.0F) {
      take_all<false>(ahead);
    } else {
      take_all<true>(ahead);
    }
    leave();
  }

 private:
  static constexpr int kHeads = Shape::kHeads, kTiles = Shape::kTiles, kParts = Shape::kParts;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr uint32_t kPairs = kWideRows / kMaximumRows;  ///< of tiles in a chunk

  template <class T>
  [[nodiscard]] __device__ static T read_shared(uint32_t address) {
    return *reinterpret_cast<const T*>(__cvta_shared_to_generic(address));
  }
  /// Finds the lane's places in shared memory.
  __device__ void find_places() {
    const auto warp = static_cast<uint32_t>(warp_), lane = static_cast<uint32_t>(lane_);
    const uint32_t own = find_places_of_copies();
    const uint32_t own_bytes = 4 * static_cast<uint32_t>(Shape::kWords);
    const auto words =
        static_cast<uint32_t>(warp_ * Shape::kOwn * kBits / 4);  // of the warp's values in a lane's
    uint32_t keys = lane * own_bytes, values = keys + 4 * words;
    if constexpr (Shape::kPieces != 0) {
      keys = 16 * place_of_piece<Shape::kPieces>(lane * Shape::kPieces);
      values =
          16 * place_of_piece<Shape::kPieces>(lane * Shape::kPieces + words / 4) + words % 4 * 4;
    }
    keys_ = kept(own + warp * Shape::kTileBytes + keys);
    values_ = kept(own + Shape::kValuesAt + values);
    factors_ = kept(own + Shape::kFactorsAt + warp * Shape::kFactorBytes + lane / 4 * 4);
    heads_ = kept(shared_address(&shared_.heads[group_][0][Rows::row_at(0, lane_)]));
    tops_ = kept(shared_address(&shared_.top[group_][Rows::row_at(0, lane_)]));
    // A lane says where a row of 8 weights goes: of query row lane % 8 of 8, and of the rows of codes that are a piece.
    weights_ = kept(shared_address(shared_.weights[group_][0]) + (lane / 16 * 8 + lane % 8) * 128 +
                    ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16);
  }
  template <bool kCapped>
  __device__ __forceinline__ void take_all(uint32_t ahead) {
    for (uint32_t turn = first_; turn < end_; turn += 2) {
      take<false, kCapped>(turn, ahead);
      take<true, kCapped>(turn + 1, ahead);
    }
  }
  /// Takes a turn, the first or the second of its chunk.
  template <bool kSecond, bool kCapped>
  __device__ __forceinline__ void take(uint32_t turn, uint32_t ahead) {
    if (ahead == 1) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<1>();
    }
    __syncwarp();
    // They have been here since the turn before, and all threads have passed a barrier since.
    if (kSecond && turn % kTurns == kTurns - 1 && turn + 1 < end_) weigh_means(turn + 1);
    const uint32_t stage = out_;
    out_ = next(out_);
    weigh<kSecond, kCapped>(turn, stage);
    // What the block before has left is no longer in use.
    if (!kSecond && turn % kTurns == 0 && turn != first_ && turn + kTurns < end_) {
      take_means(turn + kTurns);
    }
    take_in(turn + ahead);
    add_values<kSecond>(turn, stage);
  }
  /// Prepares the queries, and attends the block's share of the resident tokens, whose state waits in its place among
  /// the states that are merged. memory: for Shape::Resident, which no turn has been asked for to.
  __device__ void prepare(std::byte* memory) {
    auto& resident = *reinterpret_cast<typename Shape::Resident*>(memory);
    const StepHeads heads{s_};
    RawQueries<kDim, kHeads, Shape::kWarps, 1> raw;  // one at a time, as in finish()
    raw.load(heads, kv_head_);
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < kGroups * kHeads; i += kThreads) {
      (&shared_.top[0][0])[i] = kMinusInf;
      (&shared_.largest[0][0])[i] = ordered(kMinusInf);
    }
    ResidentHeads<kDim, kHeads, Shape::kWarps, Shape::kResidentRowBytes> share(s_, kv_head_,
                                                                               resident);
    if (s_.has_resident) share.begin(GridSplit{});
    prepare_queries<kDim, kBits>(
        heads, raw, shared_.rows, shared_.constants, resident.rows,
        [&](int h, int part, int quad, uint32_t word) {
          const int column = 2 * Rows::place_of(h) + part;
          *reinterpret_cast<uint32_t*>(shared_.queries + quad * Shape::kQueryPanel + column * 128 +
                                       (lane_ / 4 ^ column % 8) * 16 + lane_ % 4 * 4) = word;
        });
    show_operands();
    if (s_.has_resident) {
      share.attend(value_scale_,
                   [&](int h, const float(&x)[kLaneParts<kDim>], float top, float sum) {
                     states_.put(h, x);
                     if (lane_ != 0) return;
                     shared_.residents.top[h] = top;
                     shared_.residents.sum[h] = sum;
                   });
    }
    wait_for_copies<0>();
  }

  /// Takes the logits of the mean key of the turn's block, and what else its rows' logits need of the query rows.
  __device__ void weigh_means(uint32_t turn) {
    const std::byte* const means = means_of(turn);
    const float noise = *reinterpret_cast<const float*>(means + Shape::kMeanBytes - 16);
#pragma unroll 1
    for (int t = warp_; t < kTiles; t += 4) {
      const float logit =
          mean_logit<kDim>(&shared_.rows[4 * t], reinterpret_cast<const __half*>(means), lane_);
      if (lane_ < 4) {
        const HeadConstants& c = shared_.constants[4 * t + lane_];
        heads_of(turn)[4 * t + lane_] = {c.slope, c.offset, c.noise * noise, logit};
      }
    }
  }
  [[nodiscard]] __device__ float4* heads_of(uint32_t turn) const {
    return shared_.heads[group_][turn / kTurns % 2];
  }

  /// The scores of the warp's tile: in element 4 t + 2 r + p those of row lane / 4 + 8 r with part p of query row 4 t +
  /// lane % 4.
  __device__ __forceinline__ void score(uint32_t stage, int (&scores)[4 * kTiles]) const {
    constexpr int kBatch = Shape::kBatch;
    constexpr int kBatchWords = Shape::kWords * kBatch / Shape::kSteps;
    const uint64_t queries = rows_operand(shared_address(shared_.queries));
    uint32_t keys[kBatchWords];
    read_keys(stage, 0, keys);
#pragma unroll
    for (int first = 0; first < Shape::kSteps; first += kBatch) {
      uint32_t a[kBatch][4];
#pragma unroll
      for (int step = 0; step < kBatch; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[step][r] = key_register<kBits>(keys, 2 * step + r / 2, r % 2);
      }
      start_products();
#pragma unroll
      for (int step = 0; step < kBatch; ++step) {
        const int s = first + step;
        add_held_bytes(scores, a[step], further(queries, s / 4 * Shape::kQueryPanel + s % 4 * 32),
                       s != 0);
      }
      commit_products();
      if (first + kBatch < Shape::kSteps) read_keys(stage, first / kBatch + 1, keys);
      wait_for_products<0>();
      hold(scores);
    }
  }
  /// Reads part number `part` of the lane's words of the warp's tile.
  template <int kCount>
  __device__ void read_keys(uint32_t stage, int part, uint32_t (&words)[kCount]) const {
    const uint32_t from = keys_ + stage;
    if constexpr (Shape::kPieces != 0) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        // Pieces of a lane change places among themselves.
        const uint4 x =
            read_shared<uint4>(from ^ static_cast<uint32_t>(16 * (part * kCount + i) / 4));
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
      }
    } else {
      static_assert(kCount == 2 && Shape::kWords == 2);
      const auto x = read_shared<uint2>(from);
      words[0] = x.x, words[1] = x.y;
    }
  }

  using Rows = GroupRows<Shape>;
  using LaneRows = typename Rows::LaneRows;
  using WarpRows = typename Rows::WarpRows;
  static constexpr bool kKeepsLanes = kTiles <= 6;

  /// Makes the weights of a turn, and makes them again when they are too large for the running maxima, so that these
  /// have to move.
  template <bool kSecond, bool kCapped>
  __device__ __forceinline__ void weigh(uint32_t turn, uint32_t stage) {
    LaneRows rows;
    WarpRows of_warp;
    while (make_weights<kSecond, kCapped>(turn, stage, rows, of_warp)) move<kSecond>();
    if constexpr (kSecond) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        total_[part] += of_warp.sums[part];
        if (maxima_[part] != nullptr) {
          maxima_[part][(turn / 2 * kPairs + static_cast<uint32_t>(warp_)) *
                        p_.parts[0].padded_heads] = of_warp.largest[part];
        }
      }
    } else if constexpr (kKeepsLanes) {
      even_ = rows;
    } else {
      even_ = of_warp;
    }
  }
  /// Whether the running maxima have to move. rows: gets what the lane has; of_warp: what the warp has, of a second
  /// turn with what the first one had.
  template <bool kSecond, bool kCapped>
  __device__ __forceinline__ bool make_weights(uint32_t turn, uint32_t stage, LaneRows& rows,
                                               WarpRows& of_warp) {
    struct Tile {
      __half2 factors[2];
    } tiles[1];
    tiles[0].factors[0] = read_shared<__half2>(factors_ + stage);
    tiles[0].factors[1] = read_shared<__half2>(factors_ + stage + 32);
    int raw[4 * kTiles];
    score(stage, raw);
    const float g0 = __high2float(tiles[0].factors[0]), g1 = __high2float(tiles[0].factors[1]);
    // At least 4, so that weights of new maxima, which are at most 1, are taken with any factors.
    const float most = fmaxf(__fdividef(kMostWeight, fmaxf(fmaxf(g0, g1), 1.0F)), 4.0F);
    int scores[1][kTiles][4];
    HeadConstants head[kTiles];
    float middle[kTiles], top[kTiles];
    const uint32_t heads = heads_ + turn / kTurns % 2 * (kHeads * sizeof(float4));
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      // Ahead of stores, which might be to the same place.
      const auto row = static_cast<uint32_t>(Rows::row_at(t, 0));
      top[t] = read_shared<float>(tops_ + row * sizeof(float));
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[0][t][i] = raw[4 * t + i];
      const auto x = read_shared<float4>(heads + row * sizeof(float4));
      head[t] = {x.x, x.y, x.z};
      middle[t] = x.w;
    }
    float2 logits[1][kTiles];
    const float cap = kCapped ? s_.logits.softcap * kLog2E : 0.0F;
    weigh_scores<kTiles>(tiles, scores, head, 1.0F, cap, middle, logits);
    bool moves = false;
    // Of query rows 8 k + 2 (lane % 4) and the next, for each of the lane's two rows of codes.
    uint32_t weights[kColumns][2];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      float p[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = 2 * k + i;
        rows.largest[t] = fmaxf(logits[0][t].x, logits[0][t].y);
        p[i][0] = exp2_fast(logits[0][t].x - top[t]);
        p[i][1] = exp2_fast(logits[0][t].y - top[t]);
        rows.sums[t] = p[i][0] + p[i][1];
        moves = moves || rows.sums[t] > most;
      }
      const __half2 w0 = __floats2half2_rn(p[0][0] * g0, p[1][0] * g0);
      const __half2 w1 = __floats2half2_rn(p[0][1] * g1, p[1][1] * g1);
      rows.scaled[2 * k] = __low2float(w0) + __low2float(w1);
      rows.scaled[2 * k + 1] = __high2float(w0) + __high2float(w1);
      weights[k][0] = *reinterpret_cast<const uint32_t*>(&w0);
      weights[k][1] = *reinterpret_cast<const uint32_t*>(&w1);
    }
    const uint32_t to = weights_ + (kSecond ? Shape::kWeightPanel : 0);
#pragma unroll
    for (int k = 0; k + 1 < kColumns; k += 2) {
      store_transposed(to + 1024 * k,
                       {weights[k][0], weights[k][1], weights[k + 1][0], weights[k + 1][1]});
    }
    if constexpr (kColumns % 2 == 1) {
      store_transposed(to + 1024 * (kColumns - 1),
                       {weights[kColumns - 1][0], weights[kColumns - 1][1]});
    }
    // The two turns of a chunk are joined before the lanes combine what they have, where there are registers for it.
    if constexpr (!kKeepsLanes) {
      of_warp = Rows::combined(rows);
      if (kSecond) of_warp.join(even_);
    } else if constexpr (kSecond) {
      rows.join(even_);
      of_warp = Rows::combined(rows);
    }
    if constexpr (kSecond) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!has_row()) continue;
        split(row_of(part), 0, of_warp.sums[part]);
        split(row_of(part), 1, of_warp.scaled[part]);
      }
    }
    show_operands();
    if (any_of_group(group_, moves)) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        // NaN is no number that others could be compared with: as an integer it would be above all of them, the maximum
        // would stay where it is, and the turn would be taken for ever.
        atomicMax(&shared_.largest[group_][own_row(t)], ordered(fmaxf(rows.largest[t], kMinusInf)));
      }
      return true;
    }
    return false;
  }
  /// Finds where the largest logits of this lane's rows go.
  __device__ void find_maxima() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto row = static_cast<uint32_t>(row_of(part));
      maxima_[part] = nullptr;
      if (!has_row() || row >= s_.group || s_.exact_rows == 0) continue;
      const WideParams::Place at = p_.place(row);
      const CodesParams& own = p_.parts[at.part];
      maxima_[part] = own.maxima + at.row +
                      size_t{kv_head_} * own.block_capacity * kBlockMaxima * own.padded_heads;
    }
  }
  [[nodiscard]] __device__ int own_row(int t) const { return Rows::row_at(t, lane_); }
  /// Whether combined_rows() leaves a row's value in this lane, and the number of that row.
  [[nodiscard]] __device__ bool has_row() const {
    return combined_row<Shape::kPartTiles>(lane_) < 4 * Shape::kPartTiles;
  }
  [[nodiscard]] __device__ int row_of(int part) const {
    const int place = combined_row<Shape::kPartTiles>(lane_);
    return Rows::row_at(Shape::kPartTiles * part + place / 4, place);
  }
  /// Keeps a sum of the warp's pair of tiles in two parts. which: 0 of weights, 1 of weights times value factors.
  __device__ void split(int row, int which, float sum) {
    auto* const to =
        reinterpret_cast<__half*>(shared_.sums + row * 128 + ((2 * group_ + which) ^ row % 8) * 16);
    const __half high = __float2half_rn(sum);
    to[warp_] = high;
    to[warp_ + 4] = __float2half_rn(sum - __half2float(high));
  }

  /// Moves the running maxima to those of the turn.
  template <bool kSecond>
  __device__ void move() {
    wait_for_group(group_);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if (thread < kHeads) {
      const float before = shared_.top[group_][thread];
      const float now = fmaxf(before, from_ordered(shared_.largest[group_][thread]));
      shared_.top[group_][thread] = now;
      shared_.keep[group_][thread] = exp2_fast(before - finite_base(now));
    }
    wait_for_group(group_);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float keep = has_row() ? shared_.keep[group_][row_of(part)] : 0.0F;
      total_[part] *= keep;
      if constexpr (kSecond && !kKeepsLanes) {
        even_.sums[part] *= keep;
        even_.scaled[part] *= keep;
      }
    }
    if constexpr (kSecond && kKeepsLanes) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float keep = shared_.keep[group_][own_row(t)];
        even_.sums[t] *= keep;
        even_.scaled[t] *= keep;
      }
    }
    scale_sums(shared_.keep[group_]);
  }
  __device__ void scale_sums(const float (&by)[kHeads]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float2 keep = *reinterpret_cast<const float2*>(&by[8 * c + 2 * (lane_ % 4)]);
#pragma unroll
      for (int m = 0; m < Shape::kOwn; ++m) {
        acc_[m][4 * c] *= keep.x, acc_[m][4 * c + 1] *= keep.y;
        acc_[m][4 * c + 2] *= keep.x, acc_[m][4 * c + 3] *= keep.y;
      }
    }
  }

  /// Adds a turn's weighted values.
  template <bool kSecond>
  __device__ __forceinline__ void add_values(uint32_t turn, uint32_t stage) {
    // Two fp16 ones. The compiler must not know the value, because masking and joining a constant would take two
    // instructions instead of one; a group is never as large as 2^16.
    const uint32_t ones = 0x3C003C00U + (s_.group >> 16U);
    const uint64_t weights = rows_operand(shared_address(shared_.weights[group_][kSecond ? 1 : 0]));
    uint32_t a[2][Shape::kOwn][4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      uint32_t words[kOwnWords];
      read_values(values_ + stage + static_cast<uint32_t>(tile) * Shape::kTileBytes, words);
      if (tile >= 2) wait_for_products<1>();  // those of two tiles before no longer read a
#pragma unroll
      for (int m = 0; m < Shape::kOwn; ++m) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[tile % 2][m][r] = value_register<kBits>(words, 4 * m + r, ones);
        }
      }
      start_products();
#pragma unroll
      for (int m = 0; m < Shape::kOwn; ++m) {
        add_held_halves(acc_[m], a[tile % 2][m],
                        further(weights, 32 * static_cast<uint32_t>(tile)));
      }
      commit_products();
    }
    if constexpr (kSecond) add_sums(turn);
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < Shape::kOwn; ++m) hold(acc_[m]);
  }

  /// Words of a lane's values of a tile that the warp's products are in.
  static constexpr int kOwnWords = (4 * Shape::kOwn * kBits + 15) / 16;
  __device__ void read_values(uint32_t from, uint32_t (&words)[kOwnWords]) const {
    if constexpr (kOwnWords == 4) {
      const auto x = read_shared<uint4>(from);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if constexpr (kOwnWords == 2) {
      const auto x = read_shared<uint2>(from);
      words[0] = x.x, words[1] = x.y;
    } else {
      static_assert(kOwnWords == 1);
      words[0] = read_shared<uint32_t>(from);
      // Two words of four products: each word has two.
      if constexpr (Shape::kPieces == 0) words[0] >>= 8 * (warp_ % 2);
    }
  }

  /// The mean value of the block counts with all that the chunk's rows weigh, and the ones with all of it times
  /// factors.
  __device__ void add_sums(uint32_t turn) {
    const auto* const mean = reinterpret_cast<const __half*>(means_of(turn)) + kDim;
    constexpr float kLevels = static_cast<float>((1 << kBits) - 1);
    const __half2 even_ones = __float2half2_rn(-1.0F - 0.5F * kLevels / Units::kEven);
    const __half2 odd_ones = __float2half2_rn(-1.0F - 0.5F * kLevels / Units::kOdd);
    const uint64_t sums =
        rows_operand(shared_address(shared_.sums) + 32U * static_cast<uint32_t>(group_));
    uint32_t a[Shape::kOwn][4];
#pragma unroll
    for (int m = 0; m < Shape::kOwn; ++m) {
      const int j = 16 * (Shape::kOwn * warp_ + m) + lane_ / 4;
      // In units of the accumulators.
      const __half2 x = __hmul2(__half2half2(mean[j]), __float2half2_rn(0.5F / Units::kEven));
      const __half2 y = __hmul2(__half2half2(mean[j + 8]), __float2half2_rn(0.5F / Units::kOdd));
      a[m][0] = *reinterpret_cast<const uint32_t*>(&x);
      a[m][1] = *reinterpret_cast<const uint32_t*>(&y);
      a[m][2] = *reinterpret_cast<const uint32_t*>(&even_ones);
      a[m][3] = *reinterpret_cast<const uint32_t*>(&odd_ones);
    }
    start_products();
#pragma unroll
    for (int m = 0; m < Shape::kOwn; ++m) add_held_halves(acc_[m], a[m], sums);
    commit_products();
  }

  /// Leaves the thread block's states.
  __device__ void leave() {
    const auto residents = states_.load();
    wait_for_copies<0>();
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (has_row()) shared_.total[group_][warp_][row_of(part)] = total_[part];
    }
    __syncthreads();  // nobody reads a ring any more
    if (thread < kHeads) {
      float best = kMinusInf, sum = 0.0F;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) best = fmaxf(best, shared_.top[g][thread]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        // A warpgroup without chunks has a maximum of -inf and a state of zeros.
        const float keep = exp2_fast(shared_.top[g][thread] - finite_base(best));
        float own = 0.0F;
#pragma unroll
        for (int w = 0; w < 4; ++w) own += shared_.total[g][w][thread];
        shared_.keep[g][thread] = keep;
        sum = fmaf(keep, own, sum);
      }
      shared_.codes.top[thread] = best;
      shared_.codes.sum[thread] = sum;
    }
    __syncthreads();
    float* const states = reinterpret_cast<float*>(stages_);
    scale_sums(shared_.keep[group_]);
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g) {
      if (group_ == g) {
#pragma unroll
        for (int m = 0; m < Shape::kOwn; ++m) {
          const int j = 16 * (Shape::kOwn * warp_ + m) + lane_ / 4;
#pragma unroll
          for (int i = 0; i < 4 * kColumns; ++i) {
            float& to = states[(i / 4 * 8 + 2 * (lane_ % 4) + i % 2) * Shape::kStateRow + j +
                               (i % 4 < 2 ? 0 : 8)];
            to = g == 0 ? acc_[m][i] : to + acc_[m][i];
          }
        }
      }
      __syncthreads();
    }
    states_.template leave<kBits, Shape::kStateRow>(states, shared_.codes, residents,
                                                    shared_.residents);
  }

  const WideParams& p_;
  Shared& shared_;
  const GroupStates<kDim, kHeads, kThreads> states_;
  /// Where a lane reads the first stage: the first piece of its keys, its own values of the first tile, factors; and
  /// where it reads what belongs to query row row_at(0), of an even block, and writes weights of a first turn.
  uint32_t keys_, values_, factors_, heads_, tops_, weights_;
  float value_scale_;
  float acc_[Shape::kOwn][4 * kColumns] = {};
  std::conditional_t<kKeepsLanes, LaneRows, WarpRows> even_ = {};  ///< of the chunk's first turn
  // Of the query rows whose values combined_rows() leaves in this lane: the sum of the weights of all chunks, and
  // where the largest logits of pairs of tiles go.
  float total_[kParts] = {};
  float* maxima_[kParts];
};

template <int kDim, int kBits, int kColumns, int kGroups>
__global__ void __launch_bounds__(kGroups * 128, group_occupancy(kDim, kGroups))
    attend_groups_kernel(const __grid_constant__ WideParams p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  const uint32_t off = (1024 - shared_address(memory) % 1024) % 1024;
  GroupPass<kDim, kBits, kColumns, kGroups>(p, reinterpret_cast<std::byte*>(memory) + off).run();
#endif
}

}  // namespace keyhole::gpu::codes
