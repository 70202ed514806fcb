// Internal to cpu/: what the level units define and share. Each is compiled with its level's instructions,
// so it exports only what stands here, and is called only after a look at the machine (dispatch.cpp).
#pragma once

#include "cpu/kernels.h"

#if defined(__x86_64__)
#define KEYHOLE_X86_LEVELS 1
// The build with ThreadSanitizer has none of these: what threads share does not depend on the width of registers.
#ifndef KEYHOLE_WITHOUT_AVX512
#define KEYHOLE_AVX512_LEVELS 1
#endif
#endif

namespace keyhole::cpu {

extern const Kernels kScalarKernels;
void score_codes_scalar(const ScoreCodesArgs& args);
void sum_codes_scalar(const SumCodesArgs& args);

#ifdef KEYHOLE_X86_LEVELS

extern const Kernels kAvx2Kernels;
void attend_avx2_f32(const AttendArgs& args);
void attend_avx2_f16(const AttendArgs& args);
void attend_avx2_bf16(const AttendArgs& args);
void attend_avx2_i8(const AttendArgs& args);
void attend_scored_avx2_f32(const AttendScoredArgs& args);
void attend_scored_avx2_f16(const AttendScoredArgs& args);
void attend_scored_avx2_bf16(const AttendScoredArgs& args);
void attend_scored_avx2_i8(const AttendScoredArgs& args);
float log_sum_exp_avx2(const float* scores, size_t count, const LogitParams& logits);
size_t keep_above_avx2(const KeepArgs& args);
void weigh_partitions_avx2(const PartitionArgs& args);
void weighted_sum_avx2_f32(const WeightedSumArgs& args);
void weighted_sum_avx2_f16(const WeightedSumArgs& args);
void weighted_sum_avx2_bf16(const WeightedSumArgs& args);
void weighted_sum_avx2_i8(const WeightedSumArgs& args);
void score_codes_avx2(const ScoreCodesArgs& args);
void sum_codes_avx2(const SumCodesArgs& args);
void product_avx2(const ProductArgs& args);
void weigh_row_avx2(const WeighRowArgs& args);

extern const Kernels kAvx512Kernels;
void attend_avx512_f32(const AttendArgs& args);
void attend_avx512_f16(const AttendArgs& args);
void attend_avx512_bf16(const AttendArgs& args);
void attend_avx512_i8(const AttendArgs& args);
void attend_scored_avx512_f32(const AttendScoredArgs& args);
void attend_scored_avx512_f16(const AttendScoredArgs& args);
void attend_scored_avx512_bf16(const AttendScoredArgs& args);
void attend_scored_avx512_i8(const AttendScoredArgs& args);
float log_sum_exp_avx512(const float* scores, size_t count, const LogitParams& logits);
size_t keep_above_avx512(const KeepArgs& args);
void weigh_partitions_avx512(const PartitionArgs& args);
void weighted_sum_avx512_f32(const WeightedSumArgs& args);
void weighted_sum_avx512_f16(const WeightedSumArgs& args);
void weighted_sum_avx512_bf16(const WeightedSumArgs& args);
void weighted_sum_avx512_i8(const WeightedSumArgs& args);
void score_codes_avx512(const ScoreCodesArgs& args);
void sum_codes_avx512(const SumCodesArgs& args);
void product_avx512(const ProductArgs& args);
void weigh_row_avx512(const WeighRowArgs& args);

void score_i8_avx512vnni(const ScoreI8Args& args);
void score_codes_avx512vnni(const ScoreCodesArgs& args);
void sum_codes_avx512vnni(const SumCodesArgs& args);

#endif

/// Computes the state of Kernels::attend with all sums in double. Attend kernels fall back to it when their fp32 sums
/// have overflowed (|q.k| or sums of V near 3e38), so that finite inputs never give Inf or NaN.
void attend_in_double(const AttendArgs& args, DType dtype);
void attend_scored_in_double(const AttendScoredArgs& args, DType dtype);

}  // namespace keyhole::cpu
