// The types of numbers in a KV cache's arrays in device memory.
#pragma once

#include "runtime/files/safetensors.h"

namespace keyhole::tools::cuda {

enum class KvNumbers { f32, f16, bf16 };

[[nodiscard]] inline KvNumbers numbers_of(ElementType type) {
  if (type == ElementType::f32) return KvNumbers::f32;
  return type == ElementType::f16 ? KvNumbers::f16 : KvNumbers::bf16;
}

}  // namespace keyhole::tools::cuda
