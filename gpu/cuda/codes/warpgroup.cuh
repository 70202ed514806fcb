// The pass of gpu/cuda/codes/wide.cuh over all codes of a layer for many query rows, by Hopper's warpgroup products: compiled for
// 9.0a alone.
//
// There shared memory limits the pass: each warp reads all queries for its 16 rows of codes. A product of a warpgroup takes 64 rows
// of codes for one read of the queries, and takes the codes from registers, whose layout is that of m16n8k32 and m16n8k16. So the
// codes of keys (64 rows times components) and, transposed, of values (64 components times rows) go from a ring in shared memory
// to registers once, and never back.
//
// A thread block has some warpgroups, and each of these a run of chunks of its own, with its own running maxima and sums: what
// they have in common are the queries. A chunk is 128 rows, half a block; a warpgroup takes half of it at once, a turn: the even tiles
// of 16 rows, then the odd ones, so that a warp has both tiles of a pair, whose largest logit it knows alone. A turn:
//
//   scores   warp w has tile w of four; integers, exact, as in the other passes
//   weights  as there, bit by bit; times value factors, in fp16, to shared memory, in two places that take turns
//   values   warp w has a quarter of the components of all four tiles
//
// with one barrier of the warpgroup, between weights and values, which also tells whether a logit passes a running maximum by 2^6;
// then all agree on new maxima and take the turn again. As in wide.cuh one more product a chunk has the sums of the weights:
// it adds the block's mean value and takes what the ones in the values' registers added.
//
// ROOM. The first codes are on their way while queries and resident tokens are prepared: these have the last stage meanwhile.
//
// TIME. At 24 query rows of 128 components a turn is some 690 instructions of each warp. It takes a multiprocessor of an H200 0.6 us, and
// of 256 components 1.0: twice what memory takes for its codes of 4 bits, and with 2 bits a sixth less. Neither memory nor the number
// of warpgroups limits it: at 256 components three take as long as four.
#pragma once

#include "gpu/cuda/codes/warpgroup_shape.cuh"
#include "gpu/cuda/codes/wide.cuh"
#include "gpu/cuda/common/wgmma_held.cuh"

namespace keyhole::gpu::codes {

/// Two weights together pass the running maximum by no more.
constexpr float kMostWeight = 64.0F;

template <int kDim, int kBits, int kColumns, int kGroups>
class GroupPass {
  /// An operand that begins `bytes` further.
  __device__ static uint64_t further(uint64_t operand, uint32_t bytes) {
    return operand & 0xFFFFFFFF00000000ULL | (static_cast<uint32_t>(operand) + bytes / 16);
  }

 public:
  using Shape = GroupShape<kDim, kBits, kColumns, kGroups>;
  using Shared = GroupShared<kDim, kBits, kColumns, kGroups>;
  using Units = OnesUnits<kBits>;

  __device__ GroupPass(const WideParams& p, std::byte* memory)
      : p_(p),
        s_(p.step),
        kv_head_(blockIdx.y),
        group_(static_cast<int>(threadIdx.x) / 128),
        warp_(static_cast<int>(threadIdx.x) % 128 / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        shared_(*reinterpret_cast<Shared*>(memory)),
        means_(memory + sizeof(Shared)),
        stages_(means_ + Shape::kMeans),
        base_(p.step.blocks + kv_head_ * p.step.head_stride),
        states_(p, kv_head_) {}

  __device__ void run() {
    const uint32_t ahead = stages() - 1;
    divide();
    start(ahead);
    find_maxima();
    value_scale_ = value_scale_of(s_, kv_head_);
    wait_for_kernels_before();
    let_next_kernel_start();
    if (const uint32_t first = first_, end = end_; divide(), first != first_ || end != end_) {
      wait_for_copies<0>();
      start(ahead);
    }
    prepare(stages_ + ahead * Shape::kStep);
    for (uint32_t turn = first_; turn < end_; ++turn) {
      if (ahead == 1) {
        wait_for_copies<0>();
      } else {
        wait_for_copies<1>();
      }
      if (turn == first_ || turn % kTurns == 0) {
        weigh_means(turn);
      } else {
        __syncwarp();
      }
      const std::byte* const stage = own_stage(out_);
      out_ = next(out_);
      while (weigh(turn, stage)) move();
      take_in(turn + ahead);
      add_values(turn, stage);
    }
    leave();
  }

 private:
  static constexpr int kHeads = Shape::kHeads, kTiles = Shape::kTiles, kParts = Shape::kParts;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr uint32_t kTurns = kCodeBlock / 64;           ///< of a block
  static constexpr uint32_t kPairs = kWideRows / kMaximumRows;  ///< of tiles in a chunk

  [[nodiscard]] __device__ uint32_t stages() const { return static_cast<uint32_t>(s_.stages); }
  /// The warpgroup's part of the stage that begins `at` bytes from the first.
  [[nodiscard]] __device__ std::byte* own_stage(uint32_t at) const {
    return stages_ + at + static_cast<uint32_t>(group_) * Shape::kStage;
  }
  /// Asks for the first turns.
  __device__ void start(uint32_t ahead) {
    const auto warp = static_cast<uint32_t>(warp_), lane = static_cast<uint32_t>(lane_);
    const uint32_t own = shared_address(own_stage(0));
    own_place_ = own + warp * Shape::kTileBytes + 16 * place_of_piece<Shape::kPieces>(lane);
    factors_place_ = own + Shape::kFactorsAt + warp * Shape::kFactorBytes + 16 * lane;
    in_ = 0;
    find(first_);
    if (first_ < end_) take_means(first_);
    for (uint32_t i = 0; i < ahead; ++i) take_in(first_ + i);
  }
  /// The turns of this warpgroup.
  __device__ void divide() {
    const uint64_t chunks = uint64_t{__ldcv(s_.block_count)} * 2;
    const uint32_t runs = gridDim.x * kGroups;
    const uint32_t run = blockIdx.x * kGroups + static_cast<uint32_t>(group_);
    first_ = 2 * static_cast<uint32_t>(run * chunks / runs);
    end_ = 2 * static_cast<uint32_t>((run + 1) * chunks / runs);
  }
  __device__ const std::byte* block_of(uint32_t turn) const {
    return base_ + turn / kTurns * s_.block_stride;
  }

  /// Prepares the queries, and attends the block's share of the resident tokens, whose state waits in its place among the
  /// states that are merged. memory: of ResidentShared, which no turn has been asked for to.
  __device__ void prepare(std::byte* memory) {
    using Share = ResidentShare<kDim, kTiles, Shape::kWarps>;
    auto& resident = *reinterpret_cast<ResidentShared<kDim, kHeads>*>(memory);
    const StepHeads heads{s_};
    RawQueries<kDim, kHeads, Shape::kWarps, 1> raw;  // one at a time, as in finish()
    raw.load(heads, kv_head_);
    const auto take_queries = [&] {
      prepare_queries<kDim, kBits>(
          heads, raw, shared_.rows, shared_.constants, resident.rows,
          [&](int h, int part, int quad, uint32_t word) {
            const int column = 2 * h + part;
            *reinterpret_cast<uint32_t*>(shared_.queries + quad * Shape::kQueryPanel +
                                         column * 128 + (lane_ / 4 ^ column % 8) * 16 +
                                         lane_ % 4 * 4) = word;
          });
      show_operands();
    };
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < kGroups * kHeads; i += kThreads) {
      (&shared_.top[0][0])[i] = kMinusInf;
    }
    if (!s_.has_resident) {
      take_queries();
      __syncthreads();
      return;
    }
    Share share(s_, kv_head_, 0, GridSplit{}, resident);
    take_queries();
    share.attend(value_scale_);
    __syncthreads();
    states_.put(resident, shared_.residents);
    __syncthreads();
  }

  [[nodiscard]] __device__ uint32_t next(uint32_t at) const {
    return at + Shape::kStep == stages() * Shape::kStep ? 0 : at + Shape::kStep;
  }
  [[nodiscard]] __device__ std::byte* means_of(uint32_t turn) const {
    return means_ + (2 * static_cast<uint32_t>(group_) + turn / kTurns % 2) * Shape::kMeanBytes;
  }
  /// Finds this lane's pieces of a turn.
  __device__ void find(uint32_t turn) {
    const std::byte* const block = block_of(turn);
    const uint32_t tile = turn % kTurns / 2 * 8 + turn % 2 + 2 * static_cast<uint32_t>(warp_);
    from_ = block + tile * Shape::kTileBytes + 16 * static_cast<uint32_t>(lane_);
    factors_from_ = block + Shape::kShape.factors_at() + tile * Shape::kFactorBytes +
                    16 * static_cast<uint32_t>(lane_);
  }
  /// Asks for a turn's codes, for nothing behind the end. Every call is one group of copies.
  __device__ __forceinline__ void take_in(uint32_t turn) {
    if (turn < end_) {
      const uint32_t to = own_place_ + in_;
      constexpr uint32_t kCount = Shape::kTileBytes / 16;
      if (kCount >= 32 || lane_ < static_cast<int>(kCount)) {
        // Pieces 32 apart have places as far apart.
#pragma unroll
        for (uint32_t i = 0; i < kCount; i += 32) copy_async(to + 16 * i, from_ + 16 * i, true);
#pragma unroll
        for (uint32_t i = 0; i < kCount; i += 32) {
          copy_async(to + Shape::kValuesAt + 16 * i, from_ + Shape::kShape.values_at() + 16 * i,
                     true);
        }
      }
      if (lane_ < static_cast<int>(Shape::kFactorBytes / 16)) {
        copy_async(factors_place_ + in_, factors_from_, true);
      }
      in_ = next(in_);
      // The odd tiles of a chunk follow its even ones, then those of the next chunk.
      if (turn % kTurns == kTurns - 1) {
        find(turn + 1);
      } else {
        const uint32_t tiles = turn % 2 == 0 ? 1 : 7;
        from_ += tiles * Shape::kTileBytes;
        factors_from_ += tiles * Shape::kFactorBytes;
      }
    }
    commit_copies();
  }

  /// Asks for the means of a turn's block, in the group of the copies that follow.
  __device__ void take_means(uint32_t turn) const {
    constexpr uint32_t kPieces = Shape::kMeanBytes / 16;
    static_assert(kPieces <= 128);
    const uint32_t i = threadIdx.x % 128;
    if (i >= kPieces) return;
    copy_async(shared_address(means_of(turn)) + 16 * i,
               block_of(turn) + Shape::kShape.key_mean_at() + 16 * i, true);
  }

  /// Takes the logits of the mean key of the turn's block, and what else its rows' logits need of the query rows; asks for the means
  /// of the block behind it, which come no later than the codes of this warpgroup's first turn there.
  __device__ void weigh_means(uint32_t turn) {
    wait_for_group(group_);
    // What the block before has left is no longer in use.
    const uint32_t next_block = (turn / kTurns + 1) * kTurns;
    if (next_block < end_) take_means(next_block);
    const std::byte* const means = means_of(turn);
    const float noise = *reinterpret_cast<const float*>(means + Shape::kMeanBytes - 16);
#pragma unroll 1
    for (int t = warp_; t < kTiles; t += 4) {
      const float logit =
          mean_logit<kDim>(&shared_.rows[4 * t], reinterpret_cast<const __half*>(means), lane_);
      if (lane_ < 4) {
        const HeadConstants& c = shared_.constants[4 * t + lane_];
        shared_.heads[group_][4 * t + lane_] = {c.slope, c.offset, c.noise * noise, logit};
      }
    }
    wait_for_group(group_);
  }

  /// The scores of the warp's tile: in element 4 t + 2 r + p those of row lane / 4 + 8 r with part p of query row 4 t + lane % 4.
  __device__ __forceinline__ void score(const std::byte* stage, int (&scores)[4 * kTiles]) const {
    constexpr int kBatch = Shape::kBatch;
    constexpr int kBatchWords = Shape::kWords * kBatch / Shape::kSteps;
    const uint64_t queries = rows_operand(shared_address(shared_.queries));
#pragma unroll
    for (int first = 0; first < Shape::kSteps; first += kBatch) {
      uint32_t keys[kBatchWords];
      read_keys(stage, first / kBatch, keys);
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
      wait_for_products<0>();
      hold(scores);
    }
  }
  /// Reads part number `part` of the lane's words of the warp's tile.
  template <int kCount>
  __device__ void read_keys(const std::byte* stage, int part, uint32_t (&words)[kCount]) const {
    if constexpr (kCount == Shape::kWords) {
      read_words<Shape::kPieces>(stage, warp_, lane_, words);
    } else {
      static_assert(kCount % 4 == 0);
      const std::byte* const tile = stage + static_cast<uint32_t>(warp_) * Shape::kTileBytes;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const auto piece = static_cast<uint32_t>(lane_) * Shape::kPieces +
                           static_cast<uint32_t>((part * kCount + i) / 4);
        const uint4 x =
            *reinterpret_cast<const uint4*>(tile + 16 * place_of_piece<Shape::kPieces>(piece));
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
      }
    }
  }

  /// Makes the weights of a turn; true if they are too large for the running maxima, so that these have to move.
  __device__ __forceinline__ bool weigh(uint32_t turn, const std::byte* stage) {
    int raw[4 * kTiles];
    score(stage, raw);
    struct Tile {
      __half2 factors[2];
    } tiles[1];
    const auto* const factors =
        reinterpret_cast<const __half2*>(stage + Shape::kFactorsAt) + 16 * warp_;
    tiles[0].factors[0] = factors[lane_ / 4];
    tiles[0].factors[1] = factors[lane_ / 4 + 8];
    const float g0 = __high2float(tiles[0].factors[0]), g1 = __high2float(tiles[0].factors[1]);
    int scores[1][kTiles][4];
    HeadConstants head[kTiles];
    float middle[kTiles], top[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      top[t] =
          shared_
              .top[group_][4 * t + lane_ % 4];  // ahead of stores, which might be to the same place
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[0][t][i] = raw[4 * t + i];
      const float4 x = shared_.heads[group_][4 * t + lane_ % 4];
      head[t] = {x.x, x.y, x.z};
      middle[t] = x.w;
    }
    float2 logits[1][kTiles];
    weigh_scores<kTiles>(tiles, scores, head, 1.0F, s_.logits.softcap * kLog2E, middle, logits);
    bool moves = false;
    float largest[kTiles], sums[kTiles], scaled[kTiles];
    // Rows 8 lines apart are a piece apart, and those of the next tile of query rows 512 bytes away, in which pieces are placed
    // as in every other one.
    const int head0 = lane_ % 4, piece = 2 * warp_;
    std::byte* const to = shared_.weights[group_][turn % 2] + head0 * 128 + lane_ / 4 * 2;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      largest[t] = fmaxf(logits[0][t].x, logits[0][t].y);
      const float p0 = exp2_fast(logits[0][t].x - top[t]), p1 = exp2_fast(logits[0][t].y - top[t]);
      const __half w0 = __float2half_rn(p0 * g0), w1 = __float2half_rn(p1 * g1);
      sums[t] = p0 + p1;
      moves = moves || sums[t] > kMostWeight;
      scaled[t] = __half2float(w0) + __half2float(w1);
      const int line = t % 2 * 4 + head0;
      *reinterpret_cast<__half*>(to + 512 * t + (piece ^ line) * 16) = w0;
      *reinterpret_cast<__half*>(to + 512 * t + ((piece + 1) ^ line) * 16) = w1;
    }
    const bool is_second = turn % 2 == 1;
    const auto add = [](float x, float y) { return x + y; };
    float most[kParts], sum[kParts], of_scaled[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      sum[part] = combined_rows(part_of(sums, part).x, 0.0F, add);
      of_scaled[part] = combined_rows(part_of(scaled, part).x, 0.0F, add);
      most[part] = combined_rows(part_of(largest, part).x, kMinusInf,
                                 [](float x, float y) { return fmaxf(x, y); });
      if (is_second && has_row()) {
        split(row_of(part), 0, sum_[part] + sum[part]);
        split(row_of(part), 1, scaled_[part] + of_scaled[part]);
      }
    }
    show_operands();
    if (any_of_group(group_, moves)) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (has_row()) shared_.largest[group_][warp_][row_of(part)] = most[part];
      }
      return true;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      total_[part] += sum[part];
      if (is_second && maxima_[part] != nullptr) {
        maxima_[part][(turn / 2 * kPairs + static_cast<uint32_t>(warp_)) * kPartHeads] =
            fmaxf(most_[part], most[part]);
      }
      most_[part] = most[part];
      sum_[part] = sum[part];
      scaled_[part] = of_scaled[part];
    }
    return false;
  }
  struct Part {
    float x[Shape::kPartTiles];
  };
  __device__ static Part part_of(const float (&x)[kTiles], int part) {
    Part y;
#pragma unroll
    for (int i = 0; i < Shape::kPartTiles; ++i) y.x[i] = x[part * Shape::kPartTiles + i];
    return y;
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
      maxima_[part] =
          own.maxima + at.row + size_t{kv_head_} * own.block_capacity * kBlockMaxima * kPartHeads;
    }
  }
  /// Whether combined_rows() leaves a row's value in this lane, and the number of that row.
  [[nodiscard]] __device__ bool has_row() const {
    return combined_row<Shape::kPartTiles>(lane_) < 4 * Shape::kPartTiles;
  }
  [[nodiscard]] __device__ int row_of(int part) const {
    return 4 * Shape::kPartTiles * part + combined_row<Shape::kPartTiles>(lane_);
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
  __device__ void move() {
    wait_for_group(group_);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if (thread < kHeads) {
      const float before = shared_.top[group_][thread];
      float now = before;
#pragma unroll
      for (int w = 0; w < 4; ++w) now = fmaxf(now, shared_.largest[group_][w][thread]);
      shared_.top[group_][thread] = now;
      shared_.keep[group_][thread] = exp2_fast(before - finite_base(now));
    }
    wait_for_group(group_);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float keep = has_row() ? shared_.keep[group_][row_of(part)] : 0.0F;
      total_[part] *= keep;
      sum_[part] *= keep;
      scaled_[part] *= keep;
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
  __device__ __forceinline__ void add_values(uint32_t turn, const std::byte* stage) {
    // Two fp16 ones. The compiler must not know the value, because masking and joining a constant would take two
    // instructions instead of one; a group is never as large as 2^16.
    const uint32_t ones = 0x3C003C00U + (s_.group >> 16U);
    const uint64_t weights = rows_operand(shared_address(shared_.weights[group_][turn % 2]));
    uint32_t a[2][Shape::kOwn][4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      uint32_t words[kOwnWords];
      read_values(stage + Shape::kValuesAt, tile, words);
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
    if (turn % 2 == 1) add_sums(turn);
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < Shape::kOwn; ++m) hold(acc_[m]);
  }

  /// Words of a lane's values of a tile that the warp's products are in.
  static constexpr int kOwnWords = (4 * Shape::kOwn * kBits + 15) / 16;
  __device__ void read_values(const std::byte* values, int tile,
                              uint32_t (&words)[kOwnWords]) const {
    const int first = warp_ * Shape::kOwn * kBits / 4;
    if constexpr (Shape::kPieces != 0) {
      // The pieces of a tile change places among themselves.
      const auto piece =
          static_cast<uint32_t>(lane_) * Shape::kPieces + static_cast<uint32_t>(first / 4);
      read_of_piece<kOwnWords>(values + 16 * place_of_piece<Shape::kPieces>(piece) + first % 4 * 4 +
                                   static_cast<uint32_t>(tile) * Shape::kTileBytes,
                               words);
    } else {
      // Two words of four products: each word has two.
      static_assert(Shape::kWords == 2 && kOwnWords == 1);
      const auto* const from =
          reinterpret_cast<const uint32_t*>(values) + (tile * 32 + lane_) * Shape::kWords + first;
      words[0] = *from >> (8 * (warp_ % 2));
    }
  }

  /// The mean value of the block counts with all that the chunk's rows weigh, and the ones with all of it times factors.
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
    const auto residents = states_.load();
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
  const CodesParams& s_;
  const uint32_t kv_head_;
  const int group_, warp_, lane_;  ///< the warpgroup, and the warp in it
  Shared& shared_;
  std::byte* const means_;       ///< of two blocks of each warpgroup
  std::byte* const stages_;      ///< each of them has the warpgroups' turns, one after the other
  const std::byte* const base_;  ///< the KV head's first block
  const GroupStates<kDim, kHeads, kThreads> states_;
  uint32_t first_, end_;       ///< of the warpgroup's turns
  uint32_t in_ = 0, out_ = 0;  ///< bytes from the first stage
  /// The lane's pieces of the next turn to be asked for, the first of keys and one of factors, and their places in the first stage.
  const std::byte *from_, *factors_from_;
  uint32_t own_place_, factors_place_;
  float value_scale_;
  float acc_[Shape::kOwn][4 * kColumns] = {};
  // Of the query rows whose values combined_rows() leaves in this lane: the largest logit of the warp's rows of the turn before, sums
  // of their weights, of these times value factors as they are multiplied with, and of the weights of all turns; and where the
  // largest logits of pairs of tiles go.
  float most_[kParts] = {}, sum_[kParts] = {}, scaled_[kParts] = {}, total_[kParts] = {};
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
