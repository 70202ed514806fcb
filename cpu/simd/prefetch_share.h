// Asking for memory that a kernel will read next, a share at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::cpu {
namespace {

/// Prefetches share `part` of `parts` of the memory that will be read next.
[[gnu::always_inline]] inline void prefetch_share(const std::byte* ahead, size_t bytes,
                                                  uint32_t part, uint32_t parts) {
  if (ahead == nullptr) return;
  const size_t lines = (bytes + 63) / 64;
  for (size_t i = lines * part / parts; i < lines * (part + 1) / parts; ++i) {
    __builtin_prefetch(ahead + i * 64);
  }
}

}  // namespace
}  // namespace keyhole::cpu
