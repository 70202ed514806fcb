// Level `avx512` (AVX-512 F, BW, DQ, VL): many queries at once.
#include "cpu/levels.h"

#ifdef KEYHOLE_AVX512_LEVELS

#include "cpu/simd/avx512.h"
#include "cpu/simd/prompt.h"

namespace keyhole::cpu {

void product_avx512(const ProductArgs& args) { product<Avx512>(args); }
void weigh_row_avx512(const WeighRowArgs& args) { weigh_row<Avx512>(args); }

}  // namespace keyhole::cpu

#endif
