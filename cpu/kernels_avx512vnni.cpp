// Level `avx512vnni`: what AVX-512 VNNI adds to level `avx512`, which is int8 scoring.
#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS

#include "cpu/simd/avx512vnni.h"
#include "cpu/simd/score_i8.h"

namespace keyhole::cpu {

void score_i8_avx512vnni(const ScoreI8Args& args) { score_i8<Avx512VnniInt8>(args); }

}  // namespace keyhole::cpu

#endif
