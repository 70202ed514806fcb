#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>

#include "tools/mpi/ranks.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

/// The node of memory of a core, as the system's folder of it names one; 0 where it says nothing.
int node_of(int core) {
  std::error_code ignored;
  const fs::path folder = "/sys/devices/system/cpu/cpu" + std::to_string(core);
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("node")) return std::atoi(name.c_str() + 4);
  }
  return 0;
}

}  // namespace

std::vector<int> share_of_cores(const std::vector<int>& cores, uint32_t rank, uint32_t size) {
  if (cores.size() < size) return {cores[rank % cores.size()]};
  const size_t begin = cores.size() * rank / size, end = cores.size() * (rank + 1) / size;
  return {cores.begin() + static_cast<std::ptrdiff_t>(begin),
          cores.begin() + static_cast<std::ptrdiff_t>(end)};
}

std::string gpu_of_rank(const char* visible, uint32_t gpus, uint32_t rank) {
  if (visible == nullptr) return gpus < 2 ? "" : std::to_string(rank % gpus);
  std::vector<std::string> names;
  std::istringstream list(visible);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names.size() < 2 ? "" : names[rank % names.size()];
}

uint32_t gpus_of_host() {
  std::error_code none;
  const fs::directory_iterator gpus("/proc/driver/nvidia/gpus", none), end;
  return none ? 0 : static_cast<uint32_t>(std::distance(gpus, end));
}

std::vector<int> cores_by_node() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  std::stable_sort(cores.begin(), cores.end(),
                   [](int a, int b) { return node_of(a) < node_of(b); });
  return cores;
}

}  // namespace keyhole::tools
