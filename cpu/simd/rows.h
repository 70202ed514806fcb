// Rows to visit, contiguous or gathered, and their prefetch.
//
// Everything in cpu/simd/ is in anonymous namespaces on purpose: each header is compiled once per level
// with that level's instructions, and a shared inline function could be the copy that the linker keeps for
// machines that lack them.
#pragma once

#include "cpu/kernels.h"

namespace keyhole::cpu {
namespace {

struct Rows {
  const std::byte* base;
  size_t stride;
  const uint32_t* ids;  // null: contiguous
  size_t count;

  [[gnu::always_inline]] size_t id(size_t i) const { return ids != nullptr ? ids[i] : i; }
  [[gnu::always_inline]] const std::byte* at(size_t i) const { return base + id(i) * stride; }

  /// Rows begin, begin + 1, ... for a panel of `n`; beyond the end the last row again, so that a kernel
  /// may compute a full panel without reading a byte that it was not given.
  template <size_t n>
  [[gnu::always_inline]] void panel(size_t begin, const std::byte* (&out)[n]) const {
    if (begin + n <= count) {
      for (size_t k = 0; k < n; ++k) out[k] = at(begin + k);
    } else {
      for (size_t k = 0; k < n; ++k) out[k] = at(begin + k < count ? begin + k : count - 1);
    }
  }
};

/// Asks for every cache line of a row.
[[gnu::always_inline]] inline void prefetch_row(const std::byte* row, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(row + offset, 0, 3);
  // A row that does not start on a line reaches into one more.
  if ((reinterpret_cast<uintptr_t>(row) & 63U) != 0) __builtin_prefetch(row + bytes - 1, 0, 3);
}

template <DType T>
constexpr size_t kElementSize = T == DType::f32 ? 4 : 2;

constexpr size_t kNumKernels = 3;  // f32, f16, bf16

}  // namespace
}  // namespace keyhole::cpu
