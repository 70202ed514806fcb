// Scores the partitions of a layer and chooses the best ones of each KV head, in one launch.
//
// A block scores kFrontTile partitions of one KV head for all heads of its group: mean keys are int8 already, the
// queries become two int8 digits each (16 bits: their rounding is a thousandth of the keys'), and tensor cores
// multiply (m16n8k32: 16 partitions by 4 heads of 2 digits; on CUDA cores the conversions alone would take as
// long as reading the codes). The block that finishes last for a KV head knows the sums of weights, selects by a
// histogram of the merits' leading bits, and publishes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/cuda/front_block.cuh"
#include "gpu/cuda/front_kernels.h"

namespace keyhole::gpu {

namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kRowsPerWarp = kFrontTile / kWarps;
constexpr float kLog2E = 1.44269504F;
constexpr float kHuge = 1e30F;

// Merits are positive and at most the group: their bits order them. 16 bins an octave over 64 octaves; what is
// below 2^-59 is alike.
constexpr uint32_t kLeastMeritBits = (127U - 59U) << 23;
constexpr uint32_t kBinShift = 19;
constexpr uint32_t kBins = 1024;
constexpr float kLeastMerit = 0x1p-59F;
constexpr float kMostMerit = 31.0F;

// 128k keys at 16 each, and what appends leave half full.
constexpr uint32_t kKeysInShared = 8704;
constexpr uint32_t kFactorsInShared = 512;
constexpr uint32_t kCandidates = kThreads;  // of the threshold's bin that are ranked at once

constexpr uint32_t kMaxTiles = kMaxGroup / 4;  // of 4 heads
constexpr uint32_t kMaxSteps = kMaxHeadDim / 32;

struct Scoring {
  uint32_t queries[kMaxTiles * kMaxSteps * 32 * 2];
  float logs[kFrontTile * kMaxGroup];  // log2 w `[partition, padded]`
  float of_warps[kWarps][kMaxGroup];
  float scales[kMaxGroup], centers[kMaxGroup], squares[kMaxGroup];
};

struct Selecting {
  uint32_t keys[kKeysInShared];
  uint32_t bins[kBins];
  uint32_t bits[kKeysInShared / 32];
  float factors[kFactorsInShared];
  union {
    uint64_t candidates[kCandidates];
    alignas(16) uint32_t ids[kMostChosen];
  };
};

union Shared {
  Scoring scoring;
  Selecting selecting;
};

struct Scan {
  uint32_t of_warps[kWarps];
  uint32_t bin, above, candidates;
  float sums[kWarps][kMaxGroup];
};

__device__ float load_element(const DeviceRows& rows, size_t i) {
  switch (rows.dtype) {
    case DType::f16: return __half2float(static_cast<const __half*>(rows.data)[i]);
    case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[i]);
    default: return static_cast<const float*>(rows.data)[i];
  }
}

// ---- Scores ----------------------------------------------------------------------------------------------

// How a row of codes lies in the registers of the four lanes that hold it: 16 bytes after 16 bytes, and where the
// dimension is no multiple of 64, 4 or 8 more. Products of the matrix units sum over pairs of words, in any order
// as long as codes and queries agree.
template <uint32_t D>
struct Row {
  static constexpr uint32_t kVectors = D / 64;              // 16 bytes each
  static constexpr uint32_t kMore = D % 64 / 16;            // words
  static constexpr uint32_t kWords = 4 * kVectors + kMore;  // per lane
  static constexpr uint32_t kSteps = (kWords + 1) / 2;
  static_assert(kMore <= 2 && kSteps <= kMaxSteps);

  uint32_t words[2 * kSteps];

  __device__ void load(const int8_t* row, uint32_t lane_of_four) {
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(row + 64 * v + 16 * lane_of_four));
      words[4 * v] = x.x;
      words[4 * v + 1] = x.y;
      words[4 * v + 2] = x.z;
      words[4 * v + 3] = x.w;
    }
    const int8_t* more = row + 64 * kVectors + 4 * kMore * lane_of_four;
    if constexpr (kMore == 1) {
      words[kWords - 1] = __ldcs(reinterpret_cast<const uint32_t*>(more));
      words[kWords] = 0;
    } else if constexpr (kMore == 2) {
      const uint2 x = __ldcs(reinterpret_cast<const uint2*>(more));
      words[kWords - 2] = x.x;
      words[kWords - 1] = x.y;
    }
  }

  /// Word i of a whole row: the lane that holds it, and which of its words it is.
  __device__ static uint2 place(uint32_t i) {
    const uint32_t more = i - 16 * kVectors;
    if (kMore == 0 || i < 16 * kVectors) return {i % 16 / 4, i / 16 * 4 + i % 4};
    constexpr uint32_t n = kMore == 0 ? 1 : kMore;
    return {more / n, 4 * kVectors + more % n};
  }
};

__device__ void multiply(int (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                         uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

/// Takes in the query of head `head` of the group: a warp's work.
template <uint32_t D>
__device__ void encode_query(Scoring& s, const DeviceRows& q, uint32_t q_head, uint32_t head,
                             const float* scales, const float* centers, uint32_t lane) {
  constexpr uint32_t kPerLane = (D / 4 + 31) / 32;
  float x[kPerLane][4];
  float square = 0.0F;
  float center = 0.0F;
  float largest = 0.0F;
#pragma unroll
  for (uint32_t k = 0; k < kPerLane; ++k) {
    const uint32_t word = lane + 32 * k;
    if (word >= D / 4) break;
    const float4 scale = reinterpret_cast<const float4*>(scales)[word];
    const float4 mean = reinterpret_cast<const float4*>(centers)[word];
    const float by[4] = {scale.x, scale.y, scale.z, scale.w};
    const float of[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float e = load_element(q, q_head * q.head_stride + 4 * word + i);
      square += e * e;
      center += e * of[i];
      x[k][i] = e * by[i];
      largest = fmaxf(largest, fabsf(x[k][i]));
    }
  }
  square = warp_sum(square);
  center = warp_sum(center);
  largest = warp_max(largest);
  // 127 * 256: the high digit stays within int8 when the low one rounds it up.
  constexpr float kMost = 32512.0F;
  const bool is_number = largest > 1e-30F && largest < kHuge;
  const float inverse = is_number ? kMost / largest : 0.0F;
  if (lane == 0) {
    s.scales[head] = is_number ? largest / kMost : largest;
    s.centers[head] = center;
    s.squares[head] = fminf(square, kHuge);
  }
  const uint32_t column = head % 4 * 2;
#pragma unroll
  for (uint32_t k = 0; k < kPerLane; ++k) {
    const uint32_t word = lane + 32 * k;
    if (word >= D / 4) break;
    uint32_t high = 0;
    uint32_t low = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const int v = __float2int_rn(x[k][i] * inverse);
      const int upper = (v + 128) >> 8;
      high |= static_cast<uint32_t>(upper & 255) << (8 * i);
      low |= static_cast<uint32_t>((v - upper * 256) & 255) << (8 * i);
    }
    const uint2 place = Row<D>::place(word);
    const uint32_t at =
        ((head / 4 * Row<D>::kSteps + place.y / 2) * 32 + column * 4 + place.x) * 2 + place.y % 2;
    s.queries[at] = high;
    s.queries[at + 8] = low;  // the next column
  }
}

struct Partition {
  float size = 1.0F, variance = 0.0F;
};

/// log2 of a partition's weight, see gpu/cuda/front_kernels.h.
__device__ float log_weight(float score, float square, Partition p, const LogitParams& logits,
                            bool is_second) {
  float mean = fminf(fmaxf(score * logits.scale, -kHuge), kHuge);
  float slope = logits.scale;
  if (logits.softcap > 0.0F) {
    const float share = tanhf(mean / logits.softcap);
    mean = logits.softcap * share;
    slope *= 1.0F - share * share;
  }
  float expected = 0.0F;
  const float keys = __logf(p.size);
  if (is_second) {
    const float t = fminf(slope * slope * square * p.variance, kHuge);
    expected = t <= 2.0F * keys ? 0.5F * t : sqrtf(2.0F * t * keys) - keys;
  }
  return (mean + expected + keys) * kLog2E;
}

/// Weights of a tile, and their sums.
template <uint32_t D>
__device__ void score_tile(Scoring& s, const FrontLayer& l, const DeviceRows& q, uint32_t kv_head,
                           uint32_t tile, const FrontHead& head) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t padded = l.padded;
  constexpr uint32_t kTilesAtOnce = D > 128 ? 1 : 2;  // of 16 rows
  constexpr uint32_t kRounds = kRowsPerWarp / 16 / kTilesAtOnce;
  const uint32_t first = tile * kFrontTile + warp * kRowsPerWarp;
  const size_t base = size_t{kv_head} * l.capacity;

#pragma unroll
  for (uint32_t round = 0; round < kRounds; ++round) {
    Row<D> rows[kTilesAtOnce][2];
    Partition partitions[kTilesAtOnce][2];
#pragma unroll
    for (uint32_t t = 0; t < kTilesAtOnce; ++t) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = first + (round * kTilesAtOnce + t) * 16 + half * 8 + lane / 4;
        const size_t at = base + min(row, head.count - 1);
        rows[t][half].load(l.codes + at * D, lane % 4);
        partitions[t][half] = {l.sizes[at], l.variances[at]};
      }
    }
    if (round == 0) {
      if (warp < l.group) {
        encode_query<D>(s, q, kv_head * l.group + warp, warp, l.scales + size_t{kv_head} * D,
                        l.centers + size_t{kv_head} * D, lane);
      }
      __syncthreads();
    }
    for (uint32_t n = 0; n < (l.padded + 3) / 4; ++n) {
      int sums[kTilesAtOnce][4] = {};
#pragma unroll
      for (uint32_t step = 0; step < Row<D>::kSteps; ++step) {
        const uint2 b =
            reinterpret_cast<const uint2*>(s.queries)[(n * Row<D>::kSteps + step) * 32 + lane];
#pragma unroll
        for (uint32_t t = 0; t < kTilesAtOnce; ++t) {
          multiply(sums[t], rows[t][0].words[2 * step], rows[t][1].words[2 * step],
                   rows[t][0].words[2 * step + 1], rows[t][1].words[2 * step + 1], b);
        }
      }
      const uint32_t h = 4 * n + lane % 4;
      const bool is_head = h < l.group;
      float largest = kMinusInf;
#pragma unroll
      for (uint32_t t = 0; t < kTilesAtOnce; ++t) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t in_tile =
              warp * kRowsPerWarp + (round * kTilesAtOnce + t) * 16 + half * 8 + lane / 4;
          float weight = kMinusInf;
          if (is_head && tile * kFrontTile + in_tile < head.count) {
            const float product =
                static_cast<float>(sums[t][2 * half] * 256 + sums[t][2 * half + 1]);
            weight =
                log_weight(product * s.scales[h] + s.centers[h], s.squares[h], partitions[t][half],
                           l.logits, head.tail != static_cast<uint32_t>(FrontTail::centroid));
          }
          if (h < padded) s.logs[in_tile * padded + h] = weight;
          largest = fmaxf(largest, weight);
        }
      }
      for (uint32_t offset = 16; offset >= 4; offset /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, offset));
      }
      if (lane < 4) {
        s.of_warps[warp][h] = round == 0 ? largest : fmaxf(largest, s.of_warps[warp][h]);
      }
    }
  }
  __syncthreads();

  // From here on a thread belongs to one head: kThreads is a multiple of `padded`.
  const uint32_t h = threadIdx.x % padded;
  float shift = kMinusInf;
  for (uint32_t w = 0; w < kWarps; ++w) shift = fmaxf(shift, s.of_warps[w][h]);
  __syncthreads();  // of_warps is used again
  const float by = shift == kMinusInf ? 0.0F : shift;
  float* weights = l.weights + (base + size_t{tile} * kFrontTile) * padded;
  float sum = 0.0F;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < kFrontTile * padded; i += kThreads) {
    const float weight = exp2f(s.logs[i] - by);
    weights[i] = weight;
    sum += weight;
  }
  for (uint32_t offset = 16; offset >= padded && offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAll, sum, offset);
  }
  if (lane < padded) s.of_warps[warp][lane] = sum;
  __syncthreads();
  if (threadIdx.x < padded) {
    sum = 0.0F;
    for (uint32_t w = 0; w < kWarps; ++w) sum += s.of_warps[w][threadIdx.x];
    const size_t at = (size_t{kv_head} * (l.capacity / kFrontTile) + tile) * padded + threadIdx.x;
    l.tile_sums[at] = make_float2(shift, sum);
  }
}

// ---- Selection -------------------------------------------------------------------------------------------

/// Sum over the block's threads before this one; `all`: over all of them.
__device__ uint32_t sum_before(Scan& scan, uint32_t x, uint32_t& all) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t sum = x;
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();
  if (lane == 31) scan.of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  uint32_t before = 0;
  all = 0;
  for (uint32_t w = 0; w < kWarps; ++w) {
    const uint32_t of_warp = scan.of_warps[w];
    before += w < threadIdx.x / 32 ? of_warp : 0;
    all += of_warp;
  }
  return before + sum - x;
}

/// Sums of weights of all heads, and the factors that make shares of weights.
__device__ void normalise(const FrontLayer& l, uint32_t kv_head, uint32_t tiles, float* factors) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t h = threadIdx.x / 32;
  if (h >= l.padded) return;
  const size_t base = size_t{kv_head} * (l.capacity / kFrontTile) * l.padded + h;
  float shift = kMinusInf;
  float sum = 0.0F;  // in units of 2^shift, of this lane
  for (uint32_t t = lane; t < tiles; t += 32) {
    const float2 x = __ldcg(l.tile_sums + base + t * l.padded);
    if (x.x > shift) {
      sum *= exp2f(shift - x.x);
      shift = x.x;
    }
    if (x.x > kMinusInf) sum += x.y * exp2f(x.x - shift);
  }
  const float all = warp_max(shift);
  sum = warp_sum(shift > kMinusInf ? sum * exp2f(shift - all) : 0.0F);
  const float inverse = sum > 0.0F ? 1.0F / sum : 0.0F;
  for (uint32_t t = lane; t < tiles; t += 32) {
    // Of the first 32 tiles the compiler keeps nothing: they are in the cache.
    const float log = __ldcg(l.tile_sums + base + t * l.padded).x;
    const float factor = sum > 0.0F ? exp2f(log - all) * inverse : 0.0F;
    factors[t * l.padded + h] = factor;
    l.factors[base + t * l.padded] = factor;
  }
  if (lane == 0 && h < l.group) {
    l.log_sums[kv_head * l.group + h] = sum > 0.0F ? all + log2f(sum) : kMinusInf;
  }
}

__device__ uint32_t merit_key(float merit) {
  if (!(merit >= kLeastMerit)) return 0;  // a NaN, too
  const uint32_t key = __float_as_uint(fminf(merit, kMostMerit)) - kLeastMeritBits;
  return key >> kBinShift == 0 ? 0 : key;
}

/// Weights of a few partitions per thread, of all heads.
template <uint32_t P>
struct WeightBatch {
  static constexpr uint32_t kAtOnce = P > 4 ? 24 / P : 6;
  float w[kAtOnce][P];

  __device__ void load(const float* weights, uint32_t begin, uint32_t count) {
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = begin + k * kThreads + threadIdx.x;
      const float* at = weights + size_t{min(i, count - 1)} * P;
      if constexpr (P == 1) {
        w[k][0] = __ldcg(at);
      } else if constexpr (P == 2) {
        const float2 x = __ldcg(reinterpret_cast<const float2*>(at));
        w[k][0] = x.x;
        w[k][1] = x.y;
      } else {
#pragma unroll
        for (uint32_t v = 0; v < P; v += 4) {
          const float4 x = __ldcg(reinterpret_cast<const float4*>(at + v));
          w[k][v] = x.x;
          w[k][v + 1] = x.y;
          w[k][v + 2] = x.z;
          w[k][v + 3] = x.w;
        }
      }
    }
  }
};

/// Normalises; then keys of all partitions, and how many fall into each bin; bin 0, which may be most of them, is
/// not counted. The first weights are under way while sums are added up.
template <uint32_t P>
__device__ void make_keys(const FrontLayer& l, uint32_t kv_head, uint32_t count, uint32_t tiles,
                          float* factors, uint32_t* keys, uint32_t* bins) {
  constexpr uint32_t kAtOnce = WeightBatch<P>::kAtOnce;
  const float* weights = l.weights + size_t{kv_head} * l.capacity * P;
  WeightBatch<P> batch;
  batch.load(weights, 0, count);
  normalise(l, kv_head, tiles, factors);
  __syncthreads();
  for (uint32_t begin = 0; begin < count; begin += kThreads * kAtOnce) {
    if (begin != 0) batch.load(weights, begin, count);
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = begin + k * kThreads + threadIdx.x;
      if (i >= count) break;
      float merit = 0.0F;
#pragma unroll
      for (uint32_t h = 0; h < P; ++h) merit += batch.w[k][h] * factors[i / kFrontTile * P + h];
      const uint32_t key = merit_key(merit);
      keys[i] = key;
      if (key != 0) atomicAdd(bins + (key >> kBinShift), 1);
    }
  }
  __syncthreads();
}

/// Where a bin holds more candidates than can be ranked at once: the least key that is chosen, and then the
/// first ids with it, by bisection. Rare (thousands of equal merits), and slow: some tens of passes.
__device__ void select_among_equals(Scan& scan, const uint32_t* keys, uint32_t count, uint32_t bin,
                                    uint32_t wanted, uint32_t* bits) {
  const auto number_of = [&](auto is_in) {
    uint32_t n = 0;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) n += is_in(i) ? 1 : 0;
    uint32_t all = 0;
    (void)sum_before(scan, n, all);
    return all;
  };
  const uint32_t end = (bin + 1) << kBinShift;
  uint32_t least = bin << kBinShift;  // at least `wanted` keys of the bin are >= this
  for (uint32_t bit = 1U << (kBinShift - 1); bit > 0; bit /= 2) {
    const uint32_t n =
        number_of([&](uint32_t i) { return keys[i] >= (least | bit) && keys[i] < end; });
    if (n >= wanted) least |= bit;
  }
  const uint32_t equals =
      wanted - number_of([&](uint32_t i) { return keys[i] > least && keys[i] < end; });
  uint32_t low = 0;
  uint32_t high = count;  // ids below it with that key are enough
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    const uint32_t n = number_of([&](uint32_t i) { return keys[i] == least && i < middle; });
    if (n >= equals) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    if ((keys[i] > least && keys[i] < end) || (keys[i] == least && i < low)) {
      atomicOr(bits + i / 32, 1U << (i % 32));
    }
  }
  __syncthreads();
}

/// Sets the bits of the `wanted` partitions with the largest keys, of equal ones those with the smallest ids.
__device__ void select(Selecting& s, Scan& scan, const uint32_t* keys, uint32_t count,
                       uint32_t wanted, uint32_t* bits) {
  // Two bins a thread, from the top.
  const uint32_t top = kBins - 1 - 2 * threadIdx.x;
  const uint32_t first = s.bins[top];
  const uint32_t second = s.bins[top - 1];
  if (threadIdx.x == 0) {
    scan.bin = 0;
    scan.candidates = 0;
  }
  uint32_t counted = 0;
  const uint32_t before = sum_before(scan, first + second, counted);
  if (before < wanted && before + first + second >= wanted) {
    const bool is_first = before + first >= wanted;
    scan.bin = is_first ? top : top - 1;
    scan.above = is_first ? before : before + first;
  }
  if (threadIdx.x == 0 && counted < wanted) scan.above = counted;
  __syncthreads();
  const uint32_t bin = scan.bin;
  const uint32_t left = wanted - scan.above;
  for (uint32_t begin = 0; begin < count; begin += kThreads) {
    const uint32_t i = begin + threadIdx.x;
    const uint32_t key = i < count ? keys[i] : 0;
    const uint32_t of = key >> kBinShift;
    const uint32_t chosen = __ballot_sync(kAll, i < count && of > bin);
    if (threadIdx.x % 32 == 0 && i < count) bits[i / 32] = chosen;
    if (i < count && of == bin) {
      const uint32_t slot = atomicAdd(&scan.candidates, 1);
      if (slot < kCandidates) s.candidates[slot] = uint64_t{key} << 32 | uint32_t(~i);
    }
  }
  __syncthreads();
  const uint32_t n = scan.candidates;
  if (n > kCandidates) {
    select_among_equals(scan, keys, count, bin, left, bits);
    return;
  }
  if (threadIdx.x < n) {
    const uint64_t mine = s.candidates[threadIdx.x];
    uint32_t rank = 0;
    for (uint32_t j = 0; j < n; ++j) rank += s.candidates[j] > mine ? 1 : 0;
    const uint32_t i = ~static_cast<uint32_t>(mine);
    if (rank < left) atomicOr(bits + i / 32, 1U << (i % 32));
  }
  __syncthreads();
}

__device__ void publish(const FrontLayer& l, uint32_t kv_head, const uint32_t* ids, uint32_t count,
                        uint32_t sequence) {
  // One warp, so that one fence covers all of it.
  if (threadIdx.x >= 32) return;
  auto* to = reinterpret_cast<uint4*>(l.ids + size_t{kv_head} * l.most_chosen);
  for (uint32_t i = threadIdx.x; i < (count + 3) / 4; i += 32) {
    to[i] = reinterpret_cast<const uint4*>(ids)[i];
  }
  FrontFlag* flag = l.flags + kv_head;
  if (threadIdx.x == 0) flag->count = count;
  __syncwarp();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&flag->sequence), "r"(sequence)
               : "memory");
}

/// For each head what a share must be for the partition's value to be read: see kLeastOfMean.
__device__ void set_least_shares(const FrontLayer& l, Scan& scan, uint32_t kv_head, uint32_t count,
                                 const float* factors, const uint32_t* ids, uint32_t chosen) {
  const float* weights = l.weights + size_t{kv_head} * l.capacity * l.padded;
  const uint32_t h = threadIdx.x % l.padded;
  float sum = 0.0F;
#pragma unroll 2
  for (uint32_t i = threadIdx.x / l.padded; i < chosen; i += kThreads / l.padded) {
    const uint32_t id = ids[i];
    sum += __ldcg(weights + size_t{id} * l.padded + h) * factors[id / kFrontTile * l.padded + h];
  }
  for (uint32_t offset = 16; offset >= l.padded; offset /= 2) {
    sum += __shfl_xor_sync(kAll, sum, offset);
  }
  if (threadIdx.x % 32 < l.padded) scan.sums[threadIdx.x / 32][h] = sum;
  __syncthreads();
  if (threadIdx.x >= l.group) return;
  sum = 0.0F;
  for (uint32_t w = 0; w < kWarps; ++w) sum += scan.sums[w][threadIdx.x];
  // Where next to nothing is left, the difference is rounding.
  constexpr float kNothing = 1e-4F;
  const float left = 1.0F - sum;
  const auto others = static_cast<float>(max(count - chosen, 1U));
  l.least_shares[kv_head * l.group + threadIdx.x] =
      left > kNothing ? kLeastOfMean * left / others : 0.0F;
}

/// What the last block of a KV head does. Not inlined: one copy for all dimensions.
__device__ __noinline__ void choose_best(Shared& shared, Scan& scan, const FrontLayer& l,
                                         uint32_t kv_head, const FrontHead& head,
                                         const uint32_t* sequence) {
  Selecting& s = shared.selecting;
  const uint32_t count = head.count;
  const uint32_t tiles = (count + kFrontTile - 1) / kFrontTile;
  const size_t base = size_t{kv_head} * l.capacity;
  const bool is_small = count <= kKeysInShared;
  uint32_t* keys = is_small ? s.keys : l.keys + base;
  uint32_t* kept_bits = l.chosen_bits + base / 32;
  uint32_t* bits = is_small ? s.bits : kept_bits;
  float* factors =
      tiles * l.padded <= kFactorsInShared ? s.factors : l.factors + base / kFrontTile * l.padded;
  const uint32_t wanted = min(min(head.chosen, count), l.most_chosen);
  const uint32_t words = (count + 31) / 32;
  for (uint32_t i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
  if (wanted == count || wanted == 0) {
    normalise(l, kv_head, tiles, factors);
    for (uint32_t i = threadIdx.x; i < words; i += kThreads) {
      const uint32_t in_word = min(count - 32 * i, 32U);
      bits[i] = wanted == 0 ? 0 : kAll >> (32 - in_word);
    }
    __syncthreads();
  } else {
    switch (l.padded) {
      case 1: make_keys<1>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      case 2: make_keys<2>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      case 4: make_keys<4>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      case 8: make_keys<8>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      default: make_keys<16>(l, kv_head, count, tiles, factors, keys, s.bins); break;
    }
    select(s, scan, keys, count, wanted, bits);
  }
  // Numbers in rising order, in the place of the candidates.
  uint32_t found = 0;
  for (uint32_t begin = 0; begin < words; begin += kThreads) {
    const uint32_t word = begin + threadIdx.x;
    uint32_t left = word < words ? bits[word] : 0;
    uint32_t all = 0;
    uint32_t at = found + sum_before(scan, __popc(left), all);
    for (; left != 0; left &= left - 1) s.ids[at++] = 32 * word + __ffs(left) - 1;
    found += all;
  }
  __syncthreads();
  publish(l, kv_head, s.ids, wanted, *sequence + 1);
  set_least_shares(l, scan, kv_head, count, factors, s.ids, wanted);
  if (!is_small) return;
  for (uint32_t i = threadIdx.x; i < words; i += kThreads) kept_bits[i] = bits[i];
}

template <uint32_t D>
__global__ void __launch_bounds__(kThreads, 2)
    choose_kernel(const __grid_constant__ FrontLayer l, const __grid_constant__ DeviceRows q,
                  const uint32_t* sequence) {
  __shared__ alignas(16) Shared shared;
  __shared__ Scan scan;
  __shared__ bool is_last;
  const uint32_t kv_head = blockIdx.y;
  const FrontHead head = l.heads[kv_head];
  const uint32_t tiles = max((head.count + kFrontTile - 1) / kFrontTile, 1);
  if (blockIdx.x >= tiles) return;
  if (head.count != 0) score_tile<D>(shared.scoring, l, q, kv_head, blockIdx.x, head);
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = arrive(l.arrivals + kv_head) == tiles - 1;
    if (is_last) l.arrivals[kv_head] = 0;
  }
  __syncthreads();
  if (is_last) choose_best(shared, scan, l, kv_head, head, sequence);
}

}  // namespace

namespace {

using Kernel = void (*)(FrontLayer, DeviceRows, const uint32_t*);

Kernel kernel_for(uint32_t dim) {
  switch (dim) {
    case 64: return choose_kernel<64>;
    case 80: return choose_kernel<80>;
    case 96: return choose_kernel<96>;
    case 128: return choose_kernel<128>;
    default: return choose_kernel<256>;
  }
}

}  // namespace

cudaError_t load_front_choose(const FrontLayer& layer) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel_for(layer.dim));
}

void launch_front_choose(const FrontLayer& layer, const DeviceRows& q, const uint32_t* sequence,
                         cudaStream_t stream) {
  const dim3 grid(layer.capacity / kFrontTile, layer.kv_heads);
  kernel_for(layer.dim)<<<grid, kThreads, 0, stream>>>(layer, q, sequence);
}

}  // namespace keyhole::gpu
