// Level `avx2` (AVX2 + FMA + F16C): partial attention.
#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS

#include "cpu/simd/attend.h"
#include "cpu/simd/attend_scored.h"
#include "cpu/simd/avx2.h"
#include "cpu/simd/partitions.h"

namespace keyhole::cpu {

void attend_avx2_f32(const AttendArgs& args) { attend<Avx2, DType::f32>(args); }
void attend_avx2_f16(const AttendArgs& args) { attend<Avx2, DType::f16>(args); }
void attend_avx2_bf16(const AttendArgs& args) { attend<Avx2, DType::bf16>(args); }
void attend_avx2_i8(const AttendArgs& args) { attend<Avx2, DType::i8>(args); }

void attend_scored_avx2_f32(const AttendScoredArgs& args) { attend_scored<Avx2, DType::f32>(args); }
void attend_scored_avx2_f16(const AttendScoredArgs& args) { attend_scored<Avx2, DType::f16>(args); }
void attend_scored_avx2_bf16(const AttendScoredArgs& args) {
  attend_scored<Avx2, DType::bf16>(args);
}
void attend_scored_avx2_i8(const AttendScoredArgs& args) { attend_scored<Avx2, DType::i8>(args); }
float log_sum_exp_avx2(const float* scores, size_t count, const LogitParams& logits) {
  return log_sum_exp<Avx2>(scores, count, logits);
}
size_t keep_above_avx2(const KeepArgs& args) { return keep_above<Avx2>(args); }

void weigh_partitions_avx2(const PartitionArgs& args) { weigh_partitions<Avx2>(args); }
void weighted_sum_avx2_f32(const WeightedSumArgs& args) { weighted_sum<Avx2, DType::f32>(args); }
void weighted_sum_avx2_f16(const WeightedSumArgs& args) { weighted_sum<Avx2, DType::f16>(args); }
void weighted_sum_avx2_bf16(const WeightedSumArgs& args) { weighted_sum<Avx2, DType::bf16>(args); }
void weighted_sum_avx2_i8(const WeightedSumArgs& args) { weighted_sum<Avx2, DType::i8>(args); }

}  // namespace keyhole::cpu

#endif
