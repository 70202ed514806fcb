// Query rows of a warp in the passes of a turn over codes (coded_attend.cuh, coded_general.cuh): 16, of which a lane
// has two, with a part of the logits and sums of each. These lie in its registers as products of 16 rows leave them
// (gpu/cuda/common/tensor_core.cuh): those of eight columns in four.
//
// LISTED ROWS. Where a row's weight is above a share of all weights that a query has seen so far, the query leaves the
// row out and lists it, to be read exactly. The log-sum-exp so far is a lower bound of the final one, so more rows are
// listed than need be, never fewer; it begins with what the queries' states before say, and the means of blocks of
// codes.
#pragma once

#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/prefill/coded_kernels.h"
#include "gpu/cuda/prefill/coded_levels.cuh"
#include "gpu/cuda/prefill/ends.cuh"

namespace keyhole::gpu::coded {

using blocked::power_of_2;
using blocked::quad_max;
using blocked::quad_sum;

__device__ inline float log2_of_sum(float a, float b) {
  const float top = fmaxf(a, b), low = fminf(a, b);
  return low == kMinusInf || top == -kMinusInf ? top : top + log2f(1.0F + exp2f(low - top));
}

/// Powers are relative to a base, in base 2, that stays while no logit is further above it: fp16 has those up to 2^16.
/// It then becomes the largest logit, where that is as much above it as kLeastRise.
constexpr float kMostRise = 14.0F, kLeastRise = 4.0F;
constexpr float kNoBase = -1e30F;

/// Whether no row's noise takes more than kMostNoiseBias from the logits of a query, which have no soft-cap.
__device__ inline bool has_small_noise(const CodedParams& a, uint32_t kv_head,
                                       const CodedQuery& q) {
  const float widest = __uint_as_float(a.rows.figures[kv_head].widest);
  return a.logits.softcap == 0.0F && q.noise * widest < kMostNoiseBias * kLog2E;
}

/// kKeys: rows of a tile; kParts: of the sums, which are of kPart registers each.
template <int kDim, int kKeys, int kParts, int kPart>
struct QueryRows {
  using Logits = float[kKeys / 2];  ///< of a tile's rows

  float sums[kParts][kPart];
  uint32_t weights[kKeys / 16][4];
  float top[2];  ///< the largest logit that was not left out, among a lane's
  float total[2];
  float base[2];      ///< of the powers, in base 2
  uint32_t row[2];    ///< query rows of the KV head
  float unit[2];      ///< as CodedQuery
  float to_base2[2];  ///< of a logit as it lies in `logits`
  float noise[2];  ///< the noise of a row is multiplied by, in units of logits; 0: products have it
  float most_noise[2];
  float seed[2], limit[2];
  float bound[2];  ///< logits above it are left out
  float
      high[2];  ///< logits above it are looked at: the bound, or the most that powers have room for
  float cap;

  /// first: the warp's first row; products_have: says of a query whether products have its noise.
  template <typename ProductsHave>
  __device__ void begin(const CodedParams& a, uint32_t kv_head, uint32_t first,
                        const ProductsHave& products_have) {
    const uint32_t lane = threadIdx.x % 32;
    cap = a.logits.softcap;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = first + lane / 4 + half * 8;
      const CodedQuery q = a.queries[size_t{kv_head} * a.padded + row[half]];
      unit[half] = q.unit;
      to_base2[half] = cap > 0.0F ? kLog2E : q.unit;
      noise[half] = products_have(q) ? 0.0F : q.noise / to_base2[half];
      most_noise[half] = kMostNoiseBias * kLog2E / to_base2[half];
      seed[half] = q.seed;
      limit[half] = q.limit;
      top[half] = kMinusInf;
      total[half] = 0.0F;
      base[half] = kNoBase;
      high[half] = kMinusInf;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (float& x : sums[part]) x = 0.0F;
    }
  }

  /// Whether products have all of the noise, and are logits.
  [[nodiscard]] __device__ bool has_logits() const {
    return cap == 0.0F && noise[0] == 0.0F && noise[1] == 0.0F;
  }

  /// The capped logit of a product, natural. slope: gets its derivative.
  __device__ float capped(float product, float of_unit, float& slope) const {
    const float e = power_of_2(2.0F * kLog2E * __fdividef(product * of_unit, cap));
    const float t = 1.0F - __fdividef(2.0F, 1.0F + e);
    slope = fmaf(-t, t, 1.0F);
    return cap * t;
  }

  /// Takes the logits of `count` blocks' means as a lower bound of what all rows weigh.
  __device__ void take_means(Logits& logits, int count) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kMinusInf, sum = 0.0F;
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) {
        float& x = logits[j / 2 * 4 + 2 * half + j % 2];
        float slope;
        if (cap > 0.0F) x = capped(x, unit[half], slope);
        x *= to_base2[half];
        if (j / 2 * 8 + j % 2 + column >= count) x = kMinusInf;
        largest = fmaxf(largest, x);
      }
      largest = quad_max(largest);
      const float most = finite_base(largest);
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) {
        sum += power_of_2(logits[j / 2 * 4 + 2 * half + j % 2] - most);
      }
      constexpr float kRows = 8.0F;  // log2 of those of a block
      const float all = kRows + most + log2f(quad_sum(sum));
      if (isnan(limit[half])) {
        bound[half] = seed[half] / to_base2[half];
      } else {
        seed[half] = log2_of_sum(seed[half], all);
        bound[half] = (seed[half] + limit[half]) / to_base2[half];
      }
    }
  }

  /// Makes logits of products that do not have all of the noise. of_rows: an address of shared memory; is_small: of all
  /// of the warp's queries, see has_small_noise().
  __device__ __forceinline__ void take_noise(Logits& logits, uint32_t of_rows,
                                             bool is_small = false) const {
    if (is_small) {
      take_from(logits, of_rows,
                [&](float& x, int half, float own) { x = fmaf(-noise[half], own, x); });
    } else if (cap > 0.0F) {
      take_from(logits, of_rows, [&](float& x, int half, float own) {
        float slope;
        x = capped(x, unit[half], slope);
        x -= fminf(noise[half] * slope * slope * own, most_noise[half]);
      });
    } else {
      take_from(logits, of_rows, [&](float& x, int half, float own) {
        x -= fminf(noise[half] * own, most_noise[half]);
      });
    }
  }

  /// Leaves out and lists the rows of a tile that weigh much. first: its first row.
  __device__ __forceinline__ void list_heavy(Logits& logits, const CodedParams& a, uint32_t kv_head,
                                             uint32_t first) {
    const uint32_t column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = quad_sum(total[half]);
      if (all > 0.0F && !isnan(limit[half])) {
        const float so_far = base[half] + log2f(all);
        bound[half] =
            fmaxf(bound[half], (fmaxf(seed[half], so_far) + limit[half]) / to_base2[half]);
      }
      uint32_t heavy = 0;
      float heaviest = kMinusInf;
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) {
        float& x = logits[j / 2 * 4 + 2 * half + j % 2];
        if (x > bound[half]) {
          heavy |= 1U << j;
          heaviest = fmaxf(heaviest, x);
          x = kMinusInf;
        }
      }
      if (heavy == 0) continue;
      seed[half] = log2_of_sum(seed[half], heaviest * to_base2[half]);
      const size_t at = size_t{kv_head} * a.padded + row[half];
      const uint32_t count = static_cast<uint32_t>(__popc(heavy));
      uint32_t to = atomicAdd(a.list_counts + at, count);
      while (heavy != 0) {
        const auto j = static_cast<uint32_t>(__ffs(static_cast<int>(heavy)) - 1);
        heavy &= heavy - 1;
        const uint32_t key = first + j / 2 * 8 + j % 2 + column;
        if (to < a.list_capacity) a.lists[at * a.list_capacity + to] = key;
        ++to;
        uint32_t* const word = a.found + (size_t{kv_head} * a.rows.blocks * 8 + key / 32);
        const uint32_t bit = 1U << (key % 32);
        if ((__ldcg(word) & bit) == 0) atomicOr(word, bit);
      }
    }
  }

  /// Makes the largest logits that stay the base, where they are far above it. shrink: gets the factor by which sums so
  /// far are to be multiplied.
  __device__ __forceinline__ void raise_base(const float (&largest)[2], float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float now = quad_max(largest[half]) * to_base2[half];
      shrink[half] = 1.0F;
      if (now > base[half] + kLeastRise && now < HUGE_VALF) {
        shrink[half] = power_of_2(base[half] - now);
        total[half] *= shrink[half];
        base[half] = now;
      }
      high[half] = fminf(bound[half], (base[half] + kMostRise) / to_base2[half]);
    }
  }

  /// Turns logits into powers. first: says the tile's first row, which few tiles ask for. true: sums so far are to be
  /// multiplied by `shrink`.
  template <typename First>
  __device__ __forceinline__ bool exponentiate(Logits& logits, const CodedParams& a,
                                               uint32_t kv_head, const First& first,
                                               float (&shrink)[2]) {
    float largest[2];
    const auto find_largest = [&] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = logits[2 * half];
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i)
          x = fmaxf(x, fmaxf(logits[4 * i + 2 * half], logits[4 * i + 2 * half + 1]));
        largest[half] = x;
      }
    };
    find_largest();
    const bool is_high = __any_sync(kWholeWarp, largest[0] > high[0] || largest[1] > high[1]) != 0;
    if (is_high) {
      if (__any_sync(kWholeWarp, largest[0] > bound[0] || largest[1] > bound[1])) {
        list_heavy(logits, a, kv_head, first());
        find_largest();
      }
      raise_base(largest, shrink);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], largest[half]);
      float more = 0.0F;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = logits[4 * i + 2 * half + j];
          x = power_of_2(fmaf(x, to_base2[half], -base[half]));
          more += x;
        }
      }
      total[half] += more;
    }
    return is_high;
  }
  __device__ void rescale(const float (&shrink)[2]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) sums[part][i] *= shrink[i / 2 % 2];
    }
  }
  __device__ void pack_weights(const Logits& logits) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] =
            word_of(__floats2half2_rn(logits[8 * step + 2 * i], logits[8 * step + 2 * i + 1]));
      }
    }
  }

  __device__ void end(const CodedParams& a, uint32_t kv_head, uint32_t split) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = quad_sum(total[half]), largest = quad_max(top[half]) * to_base2[half];
      const float scale = all > 0.0F ? exp2f(base[half] - largest) : 0.0F;
      const size_t at = (size_t{split} * a.rows.kv_heads + kv_head) * a.padded + row[half];
      if (lane % 4 == 0) {
        a.part_sums[at] = make_float2(largest, scale * all);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kPart / 4; ++i) {
          const int column = part * 128 + i * 8 + lane % 4 * 2;
          if (column >= kDim) continue;
          *reinterpret_cast<float2*>(a.part_o + at * kDim + column) = make_float2(
              scale * sums[part][4 * i + 2 * half], scale * sums[part][4 * i + 2 * half + 1]);
        }
      }
    }
  }

 private:
  /// Calls take(logit, half, noise of its row) for all logits.
  template <typename Take>
  __device__ static __forceinline__ void take_from(Logits& logits, uint32_t of_rows,
                                                   const Take& take) {
    of_rows += threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      const uint2 n = load_two(of_rows + 32 * static_cast<uint32_t>(i));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        take(logits[4 * i + 2 * half], half, __uint_as_float(n.x));
        take(logits[4 * i + 2 * half + 1], half, __uint_as_float(n.y));
      }
    }
  }
};

}  // namespace keyhole::gpu::coded
