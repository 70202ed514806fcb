// Level `avx512vnni`: what AVX-512 VNNI adds to level `avx512`: int8 scoring, and sums over codes.
#include "cpu/levels.h"

#ifdef KEYHOLE_AVX512_LEVELS

#include "cpu/simd/avx512_codes.h"
#include "cpu/simd/avx512vnni.h"
#include "cpu/simd/score_i8.h"

namespace keyhole::cpu {

void score_i8_avx512vnni(const ScoreI8Args& args) { score_i8<Avx512VnniInt8>(args); }
void score_codes_avx512vnni(const ScoreCodesArgs& args) { score_codes<Avx512VnniCodes>(args); }
void sum_codes_avx512vnni(const SumCodesArgs& args) { sum_codes<Avx512VnniCodes>(args); }

}  // namespace keyhole::cpu

#endif
