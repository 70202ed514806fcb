// Level `avx2` (AVX2 + FMA + F16C): partial attention.
#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS

#include "cpu/simd/attend.h"
#include "cpu/simd/avx2.h"

namespace keyhole::cpu {

void attend_avx2_f32(const AttendArgs& args) { attend<Avx2, DType::f32>(args); }
void attend_avx2_f16(const AttendArgs& args) { attend<Avx2, DType::f16>(args); }
void attend_avx2_bf16(const AttendArgs& args) { attend<Avx2, DType::bf16>(args); }

}  // namespace keyhole::cpu

#endif
