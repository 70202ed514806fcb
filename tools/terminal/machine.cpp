#include "tools/terminal/machine.h"

#include <keyhole/keyhole.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>

#include "runtime/files/json.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

uint32_t allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    return static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  }
  return static_cast<uint32_t>(CPU_COUNT(&set));
}

}  // namespace

Machine describe_machine(const std::string& simd_level) {
  Machine machine;
  machine.cpu = cpu_model();
  machine.cores = allowed_cores();
  machine.memory_bytes =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  machine.simd = simd_level;
  utsname name{};
  if (uname(&name) == 0) machine.system = std::string(name.sysname) + " " + name.release;
  machine.keyhole = keyhole_version();
  return machine;
}

nlohmann::ordered_json to_json(const Machine& machine) {
  return {
      {"cpu", machine.cpu},   {"cores", machine.cores},   {"memory_bytes", machine.memory_bytes},
      {"simd", machine.simd}, {"system", machine.system}, {"keyhole", machine.keyhole}};
}

std::string to_text(const Machine& machine) {
  return machine.cpu + ", " + std::to_string(machine.cores) +
         (machine.cores == 1 ? " core, " : " cores, ") + format_bytes(machine.memory_bytes) +
         (machine.simd.empty() ? "" : ", " + machine.simd);
}

}  // namespace keyhole::tools
