// Level `avx512` (AVX-512 F, BW, DQ, VL): partial attention.
#include "cpu/levels.h"

#ifdef KEYHOLE_AVX512_LEVELS

#include "cpu/simd/attend.h"
#include "cpu/simd/attend_scored.h"
#include "cpu/simd/avx512.h"
#include "cpu/simd/partitions.h"

namespace keyhole::cpu {

void attend_avx512_f32(const AttendArgs& args) { attend<Avx512, DType::f32>(args); }
void attend_avx512_f16(const AttendArgs& args) { attend<Avx512, DType::f16>(args); }
void attend_avx512_bf16(const AttendArgs& args) { attend<Avx512, DType::bf16>(args); }
void attend_avx512_i8(const AttendArgs& args) { attend<Avx512, DType::i8>(args); }

void attend_scored_avx512_f32(const AttendScoredArgs& args) {
  attend_scored<Avx512, DType::f32>(args);
}
void attend_scored_avx512_f16(const AttendScoredArgs& args) {
  attend_scored<Avx512, DType::f16>(args);
}
void attend_scored_avx512_bf16(const AttendScoredArgs& args) {
  attend_scored<Avx512, DType::bf16>(args);
}
void attend_scored_avx512_i8(const AttendScoredArgs& args) {
  attend_scored<Avx512, DType::i8>(args);
}
float log_sum_exp_avx512(const float* scores, size_t count, const LogitParams& logits) {
  return log_sum_exp<Avx512>(scores, count, logits);
}
size_t keep_above_avx512(const KeepArgs& args) { return keep_above<Avx512>(args); }

void weigh_partitions_avx512(const PartitionArgs& args) { weigh_partitions<Avx512>(args); }
void weighted_sum_avx512_f32(const WeightedSumArgs& args) {
  weighted_sum<Avx512, DType::f32>(args);
}
void weighted_sum_avx512_f16(const WeightedSumArgs& args) {
  weighted_sum<Avx512, DType::f16>(args);
}
void weighted_sum_avx512_bf16(const WeightedSumArgs& args) {
  weighted_sum<Avx512, DType::bf16>(args);
}
void weighted_sum_avx512_i8(const WeightedSumArgs& args) { weighted_sum<Avx512, DType::i8>(args); }

}  // namespace keyhole::cpu

#endif
