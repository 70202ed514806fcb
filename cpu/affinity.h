// The cores that this process may use, and pinning to them.
#pragma once

#include <thread>
#include <vector>

namespace keyhole::cpu {

/// Core numbers in the process's affinity mask, rising; never empty.
[[nodiscard]] std::vector<int> allowed_cores();

/// Pins a thread to one core; false where the system refuses.
[[nodiscard]] bool pin_to_core(std::thread& thread, int core);

}  // namespace keyhole::cpu
