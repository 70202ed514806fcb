// Level `avx2` (AVX2 + FMA + F16C): scoring, conversions, and the level's table. Attention has its
// own unit, so that the two compile side by side.
#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS

#include "cpu/simd/avx2.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/score.h"
#include "cpu/simd/score_components.h"
#include "cpu/simd/score_i8.h"

namespace keyhole::cpu {

constinit const Kernels kAvx2Kernels = {
    .level = Level::avx2,
    .name = "avx2",
    .score = {score<Avx2, DType::f32>, score<Avx2, DType::f16>, score<Avx2, DType::bf16>,
              score<Avx2, DType::i8>},
    .score_i8 = score_i8<Avx2Int8>,
    .score_components = {score_components<Avx2, DType::f32>, score_components<Avx2, DType::f16>,
                         score_components<Avx2, DType::bf16>, score_components<Avx2, DType::i8>},
    .attend = {attend_avx2_f32, attend_avx2_f16, attend_avx2_bf16, attend_avx2_i8},
    .attend_scored = {attend_scored_avx2_f32, attend_scored_avx2_f16, attend_scored_avx2_bf16,
                      attend_scored_avx2_i8},
    .log_sum_exp = log_sum_exp_avx2,
    .keep_above = keep_above_avx2,
    .weigh_partitions = weigh_partitions_avx2,
    .weighted_sum = {weighted_sum_avx2_f32, weighted_sum_avx2_f16, weighted_sum_avx2_bf16,
                     weighted_sum_avx2_i8},
    .score_codes = score_codes_avx2,
    .sum_codes = sum_codes_avx2,
    .product = product_avx2,
    .weigh_row = weigh_row_avx2,
    .to_f32 = {to_f32<Avx2, DType::f32>, to_f32<Avx2, DType::f16>, to_f32<Avx2, DType::bf16>},
    .i8_to_f32 = i8_to_f32<Avx2>,
    .from_f32 = {from_f32<Avx2, DType::f32>, from_f32<Avx2, DType::f16>,
                 from_f32<Avx2, DType::bf16>},
    .all_finite = {all_finite<Avx2, DType::f32>, all_finite<Avx2, DType::f16>,
                   all_finite<Avx2, DType::bf16>},
};

}  // namespace keyhole::cpu

#endif
