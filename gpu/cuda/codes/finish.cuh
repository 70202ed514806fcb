// What follows the pass over the codes, in one thread block per KV head:
//
//   choose   the log-sum-exp of each head is known now, so the maxima of 32 rows say which of them can hold one of the N
//            heaviest rows of this step: bisection of a threshold until it lets few enough through; then the same among
//            their rows, whose logits are computed again from their codes
//   read     K and V of the N rows, one warp a row, from pinned host memory or the device's
//   merge    splits - N rows by their codes + N rows exactly
//
// A threshold left by the step before would save the choice, and loses 3 to 4 answers of 60: where attention turns from
// diffuse to sharp it lets nothing through, or everything.
#pragma once

#include <cuda_bf16.h>

#include "gpu/cuda/codes/attend.cuh"

namespace keyhole::gpu {
namespace codes {

constexpr int kFinishWarps = 32;
constexpr int kFinishThreads = kFinishWarps * 32;
constexpr uint32_t kMostSplits = 256;
constexpr uint32_t kMostGroups = 32;  // of 32 rows, scored again: one a warp
constexpr uint32_t kMostRows = 64;    // among which the N are chosen one by one

/// Sums over the thread block.
struct BlockSums {
  uint32_t counts[2][3][kFinishWarps];
  float maxima[kFinishWarps];

  /// Of three numbers, in every thread. One barrier: two buffers in turn.
  __device__ void count(uint32_t (&mine)[3], int& turn) {
    auto& sums = counts[turn++ & 1];
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < 3; ++t) {
      const uint32_t sum = __reduce_add_sync(kWholeWarp, mine[t]);
      if (lane == 0) sums[t][threadIdx.x / 32] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 3; ++t) mine[t] = __reduce_add_sync(kWholeWarp, sums[t][lane]);
  }
  __device__ float max(float mine) {
    mine = warp_max(mine);
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = mine;
    __syncthreads();
    return warp_max(maxima[threadIdx.x % 32]);
  }
};
static_assert(kFinishWarps == 32, "a lane sums up for every warp");

/// Items of `values` that are among the `wanted` largest, and at most `most` others with them, in no order. Where more
/// are equal, those with the smaller numbers. Returns how many; `list` and `fill` are shared.
__device__ inline uint32_t choose_some(const float* values, uint32_t n, uint32_t wanted,
                                       uint32_t most, BlockSums& sums, int& turn, uint32_t* list,
                                       uint32_t* fill) {
  if (n <= most) {
    for (uint32_t i = threadIdx.x; i < n; i += kFinishThreads) list[i] = i;
    __syncthreads();
    return n;
  }
  float mine = kMinusInf;
  for (uint32_t i = threadIdx.x; i < n; i += kFinishThreads) mine = fmaxf(mine, values[i]);
  float high = sums.max(mine);
  // Weights below 2^-100 of the largest are 0 beside it.
  float low = high - 100.0F;
  // How many items pass each of three rising thresholds; of equal items, those before number `end`.
  uint32_t counts[3];
  const auto count = [&](float t0, float t1, float t2, uint32_t end) {
    counts[0] = counts[1] = counts[2] = 0;
    for (uint32_t i = threadIdx.x; i < n; i += kFinishThreads) {
      const float x = values[i];
      const bool first = i < end;
      counts[0] += x > t0 || (x == t0 && first) ? 1 : 0;
      counts[1] += x > t1 || (x == t1 && first) ? 1 : 0;
      counts[2] += x > t2 || (x == t2 && first) ? 1 : 0;
    }
    sums.count(counts, turn);
  };
  const auto good = [&](uint32_t c) { return c >= wanted && c <= most; };
  // Fewer than `wanted` items are above `high`, unless they are equal to it, and as many or more from `low` on, unless
  // the others weigh nothing. The interval is quartered until a threshold lets the right number through.
  float threshold = low;
  uint32_t last = n;
  bool found = false;
  while (!found) {
    const float quarter = 0.25F * (high - low);
    const float t[3] = {low + quarter, low + 2.0F * quarter, low + 3.0F * quarter};
    if (!(t[0] > low && t[2] < high)) break;  // neighbours: all that is left is equal
    count(t[0], t[1], t[2], n);
    float next_low = low, next_high = high;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (good(counts[i]) && !found) {
        threshold = t[i];
        found = true;
      }
      if (counts[i] > most) next_low = t[i];
      if (counts[2 - i] < wanted) next_high = t[2 - i];
    }
    low = next_low;
    high = next_high;
  }
  if (!found) {
    // At most a few different values are left between the two: the largest that enough items pass, and of the items
    // that are equal to it the first few.
    count(low, high, high, n);
    threshold = counts[1] >= wanted ? high : low;
    uint32_t begin = 0, end = n;
    while (end - begin > 1) {
      const uint32_t middle = (begin + end) / 2;
      count(threshold, threshold, threshold, middle);
      if (counts[0] > most) {
        end = middle;
      } else {
        begin = middle;
      }
    }
    last = end;
    count(threshold, threshold, threshold, last);
    if (counts[0] > most) last = begin;
  }
  if (threadIdx.x == 0) *fill = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < n; i += kFinishThreads) {
    if (values[i] > threshold || (values[i] == threshold && i < last)) {
      const uint32_t slot = atomicAdd(fill, 1U);
      if (slot < most) list[slot] = i;
    }
  }
  __syncthreads();
  return min(*fill, most);
}

/// Shared memory of the kernel beside an array of floats, one for every 32 rows.
template <int kDim, int kKeyBits, int kValueBits, int kHeadTiles>
struct FinishShared {
  static constexpr int kHeads = 4 * kHeadTiles;
  SharedQueries<kDim, kKeyBits, kHeadTiles> queries;
  float q[kHeads][kDim];  ///< as they came, times scale log2(e)
  float o[kHeads][kDim];
  float split_weights[kHeads][kMostSplits];
  float top[kHeads], total[kHeads], lse[kHeads];  ///< base 2
  BlockSums sums;
  uint32_t groups[kMostGroups];
  float row_values[kMostGroups * 32];
  float row_logits[kMostGroups * 32][kHeads];
  uint32_t rows[kMostRows];
  uint32_t row_count;
  uint32_t chosen[kMostExactRows];  ///< numbers in row_values
  float exact_logits[kMostExactRows][kHeads];
  float exact_values[kMostExactRows][kDim];
  float coded_values[kMostExactRows][kDim];
  uint32_t fill;
};

/// log-sum-exp of every head over the splits, and what each split weighs.
template <class Shared>
__device__ void weigh_splits(const CodesStep& s, uint32_t kv_head, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (uint32_t h = threadIdx.x / 32; h < s.group; h += kFinishWarps) {
    const float2* parts = s.part_sum + size_t{kv_head} * s.splits * s.group + h;
    float top = kMinusInf;
    for (uint32_t i = lane; i < s.splits; i += 32) top = fmaxf(top, parts[i * s.group].x);
    top = warp_max(top);
    float total = 0.0F;
    for (uint32_t i = lane; i < s.splits; i += 32) {
      const float2 part = parts[i * s.group];
      const float keep = part.x == kMinusInf ? 0.0F : exp2_fast(part.x - top);
      shared.split_weights[h][i] = keep;
      total = fmaf(keep, part.y, total);
    }
    total = warp_sum(total);
    if (lane == 0) {
      shared.top[h] = top;
      shared.total[h] = total;
      shared.lse[h] = top + log2f(total);
    }
  }
}

template <int kDim, int kKeyBits, int kValueBits, int kHeadTiles>
__global__ void __launch_bounds__(kFinishThreads, 1) finish_kernel(const CodesStep s) {
  using Shared = FinishShared<kDim, kKeyBits, kValueBits, kHeadTiles>;
  constexpr CodeShape kShape{kDim, kKeyBits, kValueBits};
  constexpr int kHeads = 4 * kHeadTiles;
  constexpr int kSteps = static_cast<int>(kShape.key_steps()) / 2;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* const group_values = reinterpret_cast<float*>(memory + sizeof(Shared));

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t kv_head = blockIdx.x;
  const std::byte* const base = s.blocks + kv_head * s.head_stride;
  const uint32_t group_count = s.block_count * (kCodeBlock / kMaximumRows);
  int turn = 0;

  weigh_splits(s, kv_head, shared);
  shared.queries.template prepare<kFinishWarps>(s, kv_head);
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * kDim; i += kFinishThreads) {
    const int h = i / kDim;
    shared.q[h][i % kDim] =
        h < static_cast<int>(s.group)
            ? s.q[size_t{kv_head} * s.group * kDim + i] * (s.logit_scale * kLog2E)
            : 0.0F;
  }
  __syncthreads();

  // ---- choose
  // Eight loads at a time: a trip to memory takes half a microsecond.
  constexpr uint32_t kBatch = 8;
  const float* const maxima = s.maxima + size_t{kv_head} * group_count * kHeads;
  for (uint32_t begin = threadIdx.x; begin < group_count; begin += kBatch * kFinishThreads) {
    float values[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) values[b] = kMinusInf;
#pragma unroll
    for (int h = 0; h < kHeads; h += 4) {
      float4 x[kBatch];
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const uint32_t i = min(begin + b * kFinishThreads, group_count - 1);
        x[b] = *reinterpret_cast<const float4*>(maxima + size_t{i} * kHeads + h);
      }
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const float of[4] = {x[b].x, x[b].y, x[b].z, x[b].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (h + j < static_cast<int>(s.group)) {
            values[b] = fmaxf(values[b], of[j] - shared.lse[h + j]);
          }
        }
      }
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t i = begin + b * kFinishThreads;
      if (i < group_count) group_values[i] = values[b];
    }
  }
  // The splits' sum meanwhile: its loads do not wait for the choice.
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(s.group) * kDim;
       i += kFinishThreads) {
    const float* from = s.part_o + size_t{kv_head} * s.splits * s.group * kDim + i;
    const float* weights = shared.split_weights[i / kDim];
    float o = 0.0F;
    constexpr uint32_t kAhead = 16;
    for (uint32_t begin = 0; begin < s.splits; begin += kAhead) {
      float x[kAhead];
#pragma unroll
      for (uint32_t j = 0; j < kAhead; ++j) {
        x[j] = begin + j < s.splits ? from[size_t{begin + j} * s.group * kDim] : 0.0F;
      }
#pragma unroll
      for (uint32_t j = 0; j < kAhead; ++j) {
        if (begin + j < s.splits) o = fmaf(weights[begin + j], x[j], o);
      }
    }
    shared.o[i / kDim][i % kDim] = o;
  }
  __syncthreads();
  const uint32_t wanted = min(s.exact_rows, s.block_count * kCodeBlock);
  const uint32_t groups = choose_some(group_values, group_count, wanted, kMostGroups, shared.sums,
                                      turn, shared.groups, &shared.fill);

  uint32_t q[kHeadTiles][kSteps][2];
  HeadConstants head[kHeadTiles];
  load_products<kDim, kKeyBits, kHeadTiles>(shared.queries, lane, q, head);
  for (uint32_t g = warp; g < groups; g += kFinishWarps) {
    const uint32_t at = shared.groups[g];
    const std::byte* block = base + size_t{at / 8} * kShape.block_bytes();
    CodeTile<kDim, kKeyBits, 0> tiles[2];  // keys and factors alone
    const int first = static_cast<int>(at % 8) * 2;
    tiles[0].load_of(kShape, block, first, lane);
    tiles[1].load_of(kShape, block, first + 1, lane);
    const auto* key_mean = reinterpret_cast<const __half*>(block + kShape.key_mean_at());
    const float noise = *reinterpret_cast<const float*>(block + kShape.noise_at());
    float middle[kHeadTiles];
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      middle[t] = mean_logit<kDim>(&shared.queries.rows[4 * t], key_mean, lane);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 logits[kHeadTiles];
      tile_logits<kDim, kKeyBits, kHeadTiles>(tiles[half].keys, __low2float(tiles[half].factors[0]),
                                              __low2float(tiles[half].factors[1]), q, head, noise,
                                              middle, logits);
      const uint32_t row = g * 32 + half * 16 + lane / 4;
      float best0 = kMinusInf, best1 = kMinusInf;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const int h = 4 * t + lane % 4;
        shared.row_logits[row][h] = logits[t].x;
        shared.row_logits[row + 8][h] = logits[t].y;
        if (h < static_cast<int>(s.group)) {
          best0 = fmaxf(best0, logits[t].x - shared.lse[h]);
          best1 = fmaxf(best1, logits[t].y - shared.lse[h]);
        }
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        best0 = fmaxf(best0, __shfl_xor_sync(~0U, best0, step));
        best1 = fmaxf(best1, __shfl_xor_sync(~0U, best1, step));
      }
      if (lane % 4 == 0) {
        shared.row_values[row] = best0;
        shared.row_values[row + 8] = best1;
      }
    }
  }
  __syncthreads();
  const uint32_t some = choose_some(shared.row_values, groups * 32, wanted, kMostRows, shared.sums,
                                    turn, shared.rows, &shared.fill);
  // The N of them by their rank; of equal ones the smaller row.
  if (threadIdx.x < some) {
    const uint32_t mine = shared.rows[threadIdx.x];
    const auto number = [&](uint32_t i) { return shared.groups[i / 32] * 32 + i % 32; };
    uint32_t rank = 0;
    for (uint32_t i = 0; i < some; ++i) {
      const uint32_t other = shared.rows[i];
      const float a = shared.row_values[other], b = shared.row_values[mine];
      rank += a > b || (a == b && number(other) < number(mine)) ? 1 : 0;
    }
    if (rank < wanted) shared.chosen[rank] = mine;
  }
  __syncthreads();

  // ---- read
  for (uint32_t r = warp; r < wanted; r += kFinishWarps) {
    const uint32_t candidate = shared.chosen[r];
    const uint32_t row = shared.groups[candidate / 32] * 32 + candidate % 32;
    if (lane == 0 && s.chosen != nullptr) s.chosen[kv_head * s.exact_rows + r] = row;
    const size_t from = kv_head * s.kv_head_stride + row * s.row_stride;
    constexpr int kPairs = (kDim + 63) / 64;
    uint32_t key[kPairs], value[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int j = 2 * lane + 64 * i;
      key[i] = value[i] = 0;
      if (j < kDim) {
        key[i] = *reinterpret_cast<const uint32_t*>(s.keys + from + size_t(j) * 2);
        value[i] = *reinterpret_cast<const uint32_t*>(s.values + from + size_t(j) * 2);
      }
    }
    // Its value by code, while those are on their way.
    const std::byte* block = base + size_t{row / kCodeBlock} * kShape.block_bytes();
    const uint32_t in_block = row % kCodeBlock;
    const float factor = __half2float(
        reinterpret_cast<const __half*>(block + kShape.factors_at())[2 * in_block + 1]);
    for (int j = lane; j < kDim; j += 32) {
      float x = __half2float(reinterpret_cast<const __half*>(block + kShape.value_mean_at())[j]);
      if constexpr (kValueBits != 0) {
        const CodePlace place = kShape.value_place(in_block % kCodeTile, static_cast<uint32_t>(j));
        const uint32_t word = reinterpret_cast<const uint32_t*>(
            block + kShape.values_at())[in_block / kCodeTile * kCodeLanes * kShape.value_words() +
                                        place.word];
        const auto code = static_cast<int>(word >> place.shift & ((1U << kValueBits) - 1));
        x += factor * static_cast<float>(2 * code - ((1 << kValueBits) - 1));
      }
      shared.coded_values[r][j] = x;
    }
    const auto pair = [&](uint32_t bits) {
      if (s.bfloat) {
        return make_float2(__uint_as_float(bits << 16U), __uint_as_float(bits & 0xFFFF0000U));
      }
      return __half22float2(*reinterpret_cast<const __half2*>(&bits));
    };
    float2 k[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int j = 2 * lane + 64 * i;
      k[i] = pair(key[i]);
      const float2 v = pair(value[i]);
      if (j < kDim) {
        shared.exact_values[r][j] = v.x;
        shared.exact_values[r][j + 1] = v.y;
      }
    }
    for (uint32_t h = 0; h < s.group; ++h) {
      float dot = 0.0F;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int j = 2 * lane + 64 * i;
        if (j < kDim) dot = fmaf(shared.q[h][j], k[i].x, fmaf(shared.q[h][j + 1], k[i].y, dot));
      }
      dot = warp_sum(dot);
      if (lane == 0) shared.exact_logits[r][h] = dot;
    }
  }
  __syncthreads();

  // ---- merge
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(s.group) * kDim;
       i += kFinishThreads) {
    const int h = i / kDim;
    float o = shared.o[h][i % kDim];
    for (uint32_t r = 0; r < wanted; ++r) {
      const float weight = exp2_fast(shared.row_logits[shared.chosen[r]][h] - shared.top[h]);
      o = fmaf(-weight, shared.coded_values[r][i % kDim], o);
    }
    shared.o[h][i % kDim] = o;
  }
  __syncthreads();
  for (uint32_t h = warp; h < s.group; h += kFinishWarps) rotate_in_shared(shared.o[h], kDim, true);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(s.group) * kDim;
       i += kFinishThreads) {
    const int h = i / kDim;
    float top = shared.top[h];
    for (uint32_t r = 0; r < wanted; ++r) top = fmaxf(top, shared.exact_logits[r][h]);
    const float keep = exp2_fast(shared.top[h] - top);
    float total = shared.total[h];
    for (uint32_t r = 0; r < wanted; ++r) {
      total -= exp2_fast(shared.row_logits[shared.chosen[r]][h] - shared.top[h]);
    }
    // What is left of the codes' weights where all rows are exact is rounding.
    const bool none = wanted == s.block_count * kCodeBlock;
    total = none ? 0.0F : fmaxf(total, 0.0F) * keep;
    float o = none ? 0.0F : shared.o[h][i % kDim] * s.value_scale[kv_head] * keep;
    for (uint32_t r = 0; r < wanted; ++r) {
      const float weight = exp2_fast(shared.exact_logits[r][h] - top);
      o = fmaf(weight, shared.exact_values[r][i % kDim], o);
      total += weight;
    }
    const size_t out = size_t{kv_head} * s.group + h;
    s.o[out * kDim + i % kDim] = total > 0.0F ? o / total : 0.0F;
    if (i % kDim == 0) s.lse[out] = total > 0.0F ? (top + log2f(total)) * kLn2 : kMinusInf;
  }
}

}  // namespace codes
}  // namespace keyhole::gpu
