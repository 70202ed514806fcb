// Doubt: whether codes could tell which rows of a head weigh. It is asked when the head's chosen rows have been read,
// by the warp that merges them. If one head of a KV head is in doubt, a cluster takes the second look itself
// (gpu/cuda/codes/settle_head.cuh); without clusters the KV head is put on the step's board (gpu/code_doubt.h), from
// where the next kernel takes it up (gpu/cuda/codes/settle.cuh).
#pragma once

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/candidates.cuh"

namespace keyhole::gpu::codes {

/// Nats below the log-sum-exp from which on a row of an unread list would outweigh all others; see
/// index/scan/code_scan_doubt.cpp.
constexpr float kHiddenLight = 0.575F;

/// The parts that a head's state was merged from, base 2: largest logits (top), and sums of weights 2^(logit - top).
struct HeadSums {
  float top, total;  ///< of codes and resident tokens, the sum without the rows that were read
  float coded_sum;   ///< of the rows that were read, by their codes, relative to top
  float exact_top, exact_total;  ///< of the rows that were read
  float codes_lse;               ///< log-sum-exp of all codes
  float resident_lse;            ///< of a state that was merged with, natural; -inf: none
};

/// The weight of a row, from the number that order_of() made.
__device__ inline float weight_of(uint64_t order) {
  const auto rising_bits = static_cast<uint32_t>(order >> 32U);
  return __uint_as_float(rising_bits ^ ((rising_bits >> 31U) != 0 ? 0x80000000U : 0xFFFFFFFFU));
}

/// Notes the rows that the step has chosen for a KV head, by their places; by one thread block of the head.
__device__ inline void note_chosen(const CodesParams& s, uint32_t kv_head, const uint64_t* chosen,
                                   uint32_t count) {
  DoubtRecord& record = s.doubt.records[kv_head];
  if (threadIdx.x < count) {
    record.chosen[threadIdx.x] =
        row_in(s, kv_head, row_of(chosen[threadIdx.x]), reads_by_table(s, kv_head));
  }
  if (threadIdx.x == 0) record.chosen_count = count;
}

/// Saves the queries, because the step may write its output where they are. By threads first, first + step, ..
template <int kDim>
__device__ inline void save_queries(const CodesParams& s, uint32_t kv_head, const float* q,
                                    uint32_t first, uint32_t step) {
  const uint32_t quads = s.group * (kDim / 4);
  auto* to = reinterpret_cast<float4*>(s.doubt.queries) + size_t{kv_head} * quads;
  for (uint32_t i = first; i < quads; i += step) to[i] = reinterpret_cast<const float4*>(q)[i];
}

/// The bound that a row's logit by code plus its possible error passes if the row may weigh: base 2, before a
/// soft-cap. lse: base 2.
__device__ inline float doubt_bound(const CodesParams& s, float lse) {
  return uncapped_logit(lse - doubt_limits(s.shape).light * kLog2E, s.logits.softcap * kLog2E);
}
/// The largest error of a row's logit that is thought possible, before a soft-cap. noise: HeadConstants::noise;
/// of_row: the row's f^2 noise.
__device__ inline float doubt_reach(float noise, float of_row) {
  return kDoubtDeviations * sqrtf(2.0F * kLog2E * noise * of_row);
}
/// The weight by code, base 2, that all rows reach which pass the bound. far: doubt_reach() of the row with the most
/// noise.
__device__ inline float least_weight(const CodesParams& s, float lse, float far) {
  const float deviation = far / kDoubtDeviations;
  const float bias = fminf(deviation * deviation / (2.0F * kLog2E), kMostNoiseBias * kLog2E);
  const float least = capped_logit(doubt_bound(s, lse) - far, s.logits.softcap * kLog2E) - bias;
  return least - 0.01F - 1e-5F * fabsf(least);  // rounding may have taken this from a weight
}

/// The encoder's figures of a KV head's rows. They are older than the pass.
__device__ inline CodeFigures figures_of(const CodesParams& s, uint32_t kv_head) {
  return s.doubt.board == nullptr ? CodeFigures{} : s.doubt.figures[kv_head];
}

/// Whether a head is in doubt, from all that is known of it, base 2: kDoubted, kRounded of DoubtRecord, or neither.
/// noise: HeadConstants::noise. Not inlined: it is not called for most heads, and instructions that run once come
/// from memory.
__device__ __noinline__ inline uint32_t doubts_of(const CodesParams& s, const HeadSums& sums,
                                                  float cut, float noise, uint32_t rows,
                                                  const CodeFigures& figures) {
  const float top = finite_base(sums.top);
  const float base = fmaxf(top, sums.exact_top);
  const float unread_all = fmaxf(sums.total, 0.0F) * exp2f(top - base);
  float lse = base + log2f(fmaf(sums.exact_total, exp2f(sums.exact_top - base), unread_all));
  if (sums.resident_lse != kMinusInf) {
    const float other = sums.resident_lse * kLog2E, largest = fmaxf(lse, other);
    lse = largest + log2f(exp2f(lse - largest) + exp2f(other - largest));
  }
  // The weight of all codes without the rows that were read.
  const float unread =
      exp2f(sums.codes_lse - base) - fmaxf(sums.coded_sum, 0.0F) * exp2f(top - base);
  HeadDoubt head;
  head.lse = lse * kLn2;
  head.unread = unread > 0.0F ? (base + log2f(unread)) * kLn2 : kMinusInf;
  head.heaviest = (sums.codes_lse + cut) * kLn2;
  head.spread = 2.0F * kLn2 * noise;
  head.widest = __uint_as_float(figures.widest);
  head.rows = static_cast<float>(rows);
  head.softcap = s.logits.softcap;
  const auto usual = [&] {
    return static_cast<float>(figures.noise_sum) * kNoiseUnit /
           static_cast<float>(max(figures.blocks, 1U));
  };
  const bool is_known = head.widest < __int_as_float(0x7F800000);
  uint32_t reasons = 0;
  if (!is_known || is_in_doubt(head, doubt_limits(s.shape), usual)) {
    reasons |= DoubtRecord::kDoubted;
  }
  if (sums.codes_lse - lse > -log2f(kLeastKept)) reasons |= DoubtRecord::kRounded;
  return reasons;
}

/// The result of the question about a head, in all lanes.
struct HeadAsked {
  uint32_t reasons;  ///< kDoubted, kRounded of DoubtRecord, or neither
  float lse;         ///< of all rows and resident tokens, base 2
};

/// Asks whether a head is in doubt, by a whole warp, with the sums of its first lane. cut: the weight of the last of
/// the `rows` rows that were read, less codes_lse.
template <int kDim, int kBits>
__device__ inline HeadAsked ask_doubt(const CodesParams& s, const HeadSums& sums, float cut,
                                      float noise, uint32_t rows, const CodeFigures& figures) {
  // Settles most heads at once: those whose variance is known (is_in_doubt()) and small enough; a soft-cap only makes
  // it smaller.
  const DoubtLimits limits = doubt_limits({kDim, kBits, kBits});
  const float top = finite_base(sums.top), base = fmaxf(top, sums.exact_top);
  const float of_top = exp2_fast(top - base), codes = exp2_fast(sums.codes_lse - base);
  const float all =
      fmaf(sums.exact_total, exp2_fast(sums.exact_top - base), fmaxf(sums.total, 0.0F) * of_top) +
      exp2_fast(sums.resident_lse * kLog2E - base);
  const float inverse = __fdividef(1.0F, all);
  const float unread = fmaxf(fmaf(-sums.coded_sum, of_top, codes), 0.0F) * inverse;
  const float heaviest = exp2_fast(sums.codes_lse + cut - base) * inverse;
  const float t = 2.0F * kLn2 * noise * __uint_as_float(figures.widest);
  const float read = 1.0F - unread;
  const float square =
      fmaxf(__fdividef(read * read, static_cast<float>(rows)), heaviest * heaviest);
  const float error =
      (exp2_fast(t * kLog2E) - 1.0F + limits.value_square) * fminf(heaviest, unread) * unread;
  const bool is_quiet = t <= kKnownVariance && kLeastKept * codes * inverse < 0.99F &&
                        (24.0F * heaviest < 0.99F * (unread - 0.15F) ||
                         error < 0.99F * limits.error * limits.error * square);
  // Lane 0 decides, as other lanes may know less of the rows that were read.
  HeadAsked asked{0, __shfl_sync(kWholeWarp, base + __log2f(all), 0)};
  if (__shfl_sync(kWholeWarp, is_quiet ? 1 : 0, 0) != 0) return asked;
  asked.reasons = __shfl_sync(kWholeWarp, doubts_of(s, sums, cut, noise, rows, figures), 0);
  return asked;
}

/// Notes the result for number `h` of a KV head's group, and puts the KV head on the board if that head is in doubt;
/// by a whole warp. q: `[group, dim]` queries as they came, times scale log2(e).
template <int kDim>
__device__ inline void put_on_board(const CodesParams& s, uint32_t kv_head, uint32_t h,
                                    const HeadAsked& asked, const float* q) {
  const uint32_t lane = threadIdx.x % 32;
  DoubtRecord& record = s.doubt.records[kv_head];
  if (lane == 0) record.lse[h] = asked.lse;
  if (asked.reasons == 0) return;
  uint32_t before = 0;
  if (lane == 0) before = atomicOr(&record.reasons, asked.reasons);
  if (__shfl_sync(kWholeWarp, before, 0) != 0) return;
  if (lane == 0) s.doubt.list[atomicAdd(&s.doubt.board->heads, 1U)] = kv_head;
  save_queries<kDim>(s, kv_head, q, lane, 32);
}

}  // namespace keyhole::gpu::codes
