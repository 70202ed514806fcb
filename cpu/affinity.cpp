#include "cpu/affinity.h"

#include <sched.h>

#include <cerrno>
#include <memory>

namespace keyhole::cpu {
namespace {

struct FreeCpuSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, FreeCpuSet>;

}  // namespace

std::vector<int> allowed_cores() {
  // The kernel refuses a mask smaller than its own with EINVAL: grow until it fits.
  for (int bits = CPU_SETSIZE; bits <= 1 << 16; bits *= 2) {
    const CpuSet set(CPU_ALLOC(bits));
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(bits);
    CPU_ZERO_S(bytes, set.get());
    if (sched_getaffinity(0, bytes, set.get()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    std::vector<int> cores;
    for (int core = 0; core < bits; ++core) {
      if (CPU_ISSET_S(core, bytes, set.get())) cores.push_back(core);
    }
    if (!cores.empty()) return cores;
    break;
  }
  return {0};
}

bool pin_to_core(std::thread& thread, int core) {
  const CpuSet set(CPU_ALLOC(core + 1));
  if (set == nullptr) return false;
  const size_t bytes = CPU_ALLOC_SIZE(core + 1);
  CPU_ZERO_S(bytes, set.get());
  CPU_SET_S(core, bytes, set.get());
  return pthread_setaffinity_np(thread.native_handle(), bytes, set.get()) == 0;
}

}  // namespace keyhole::cpu
