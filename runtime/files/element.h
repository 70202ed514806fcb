// Converts arrays of a file's element type to fp32 and back.
#pragma once

#include <cstddef>
#include <span>

#include "runtime/files/safetensors.h"

namespace keyhole {

/// True for f32, f16 and bf16, the types that the two functions below convert.
[[nodiscard]] bool is_floating(ElementType type);

/// out[i] = fp32(element i of `bytes`), which may be unaligned and holds out.size() elements.
/// Throws std::runtime_error for integer types.
void elements_to_f32(ElementType type, std::span<const std::byte> bytes, std::span<float> out);

/// Element i of `out` = type(in[i]), round to nearest even; `out` holds in.size() elements.
/// Throws std::runtime_error for integer types.
void elements_from_f32(ElementType type, std::span<const float> in, std::span<std::byte> out);

}  // namespace keyhole
