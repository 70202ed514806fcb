// Where parts begin in one allocation of device memory.
#pragma once

#include <cstddef>

namespace keyhole::gpu {

inline constexpr size_t kPartAlignment = 256;

}  // namespace keyhole::gpu
