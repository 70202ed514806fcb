// Level `avx512`: codes of keys and values.
#include "cpu/levels.h"

#ifdef KEYHOLE_AVX512_LEVELS

#include "cpu/simd/avx512_codes.h"

namespace keyhole::cpu {

void score_codes_avx512(const ScoreCodesArgs& args) { score_codes<Avx512Codes>(args); }
void sum_codes_avx512(const SumCodesArgs& args) { sum_codes<Avx512Codes>(args); }

}  // namespace keyhole::cpu

#endif
