// Level `avx512` (AVX-512 F, BW, DQ, VL): scoring, conversions, and the level's table. Attention has its
// own unit, so that the two compile side by side.
#include "cpu/levels.h"

#ifdef KEYHOLE_AVX512_LEVELS

#include "cpu/simd/avx512.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/score.h"
#include "cpu/simd/score_components.h"
#include "cpu/simd/score_i8.h"

namespace keyhole::cpu {

constinit const Kernels kAvx512Kernels = {
    .level = Level::avx512,
    .name = "avx512",
    .score = {score<Avx512, DType::f32>, score<Avx512, DType::f16>, score<Avx512, DType::bf16>,
              score<Avx512, DType::i8>},
    .score_i8 = score_i8<Avx512Int8>,
    .score_components = {score_components<Avx512, DType::f32>, score_components<Avx512, DType::f16>,
                         score_components<Avx512, DType::bf16>,
                         score_components<Avx512, DType::i8>},
    .attend = {attend_avx512_f32, attend_avx512_f16, attend_avx512_bf16, attend_avx512_i8},
    .attend_scored = {attend_scored_avx512_f32, attend_scored_avx512_f16, attend_scored_avx512_bf16,
                      attend_scored_avx512_i8},
    .log_sum_exp = log_sum_exp_avx512,
    .keep_above = keep_above_avx512,
    .weigh_partitions = weigh_partitions_avx512,
    .weighted_sum = {weighted_sum_avx512_f32, weighted_sum_avx512_f16, weighted_sum_avx512_bf16,
                     weighted_sum_avx512_i8},
    .score_codes = score_codes_avx512,
    .sum_codes = sum_codes_avx512,
    .product = product_avx512,
    .weigh_row = weigh_row_avx512,
    .to_f32 = {to_f32<Avx512, DType::f32>, to_f32<Avx512, DType::f16>, to_f32<Avx512, DType::bf16>},
    .i8_to_f32 = i8_to_f32<Avx512>,
    .from_f32 = {from_f32<Avx512, DType::f32>, from_f32<Avx512, DType::f16>,
                 from_f32<Avx512, DType::bf16>},
    .all_finite = {all_finite<Avx512, DType::f32>, all_finite<Avx512, DType::f16>,
                   all_finite<Avx512, DType::bf16>},
};

}  // namespace keyhole::cpu

#endif
