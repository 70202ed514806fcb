// Level `avx2`: codes of keys and values.
#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS

#include "cpu/simd/avx2_codes.h"

namespace keyhole::cpu {

void score_codes_avx2(const ScoreCodesArgs& args) { score_codes<Avx2Codes>(args); }
void sum_codes_avx2(const SumCodesArgs& args) { sum_codes<Avx2Codes>(args); }

}  // namespace keyhole::cpu

#endif
