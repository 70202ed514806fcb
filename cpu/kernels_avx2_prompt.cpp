// Level `avx2` (AVX2 + FMA + F16C): many queries at once.
#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS

#include "cpu/simd/avx2.h"
#include "cpu/simd/prompt.h"

namespace keyhole::cpu {

void product_avx2(const ProductArgs& args) { product<Avx2>(args); }
void weigh_row_avx2(const WeighRowArgs& args) { weigh_row<Avx2>(args); }

}  // namespace keyhole::cpu

#endif
