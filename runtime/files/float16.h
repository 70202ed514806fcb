// The 16-bit floating-point types for parts that may not include cpu/: one implementation for all.
#pragma once

#include "cpu/half.h"

namespace keyhole {

using cpu::bf16_to_f32;
using cpu::f16_to_f32;
using cpu::f32_to_bf16;
using cpu::f32_to_f16;

}  // namespace keyhole
