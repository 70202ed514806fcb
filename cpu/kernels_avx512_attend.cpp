// Level `avx512` (AVX-512 F, BW, DQ, VL): partial attention.
#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS

#include "cpu/simd/attend.h"
#include "cpu/simd/avx512.h"

namespace keyhole::cpu {

void attend_avx512_f32(const AttendArgs& args) { attend<Avx512, DType::f32>(args); }
void attend_avx512_f16(const AttendArgs& args) { attend<Avx512, DType::f16>(args); }
void attend_avx512_bf16(const AttendArgs& args) { attend<Avx512, DType::bf16>(args); }

}  // namespace keyhole::cpu

#endif
