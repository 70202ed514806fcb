// Chooses the level: what the machine has, what the build has, what KEYHOLE_CPU asks for.
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/levels.h"

#ifdef KEYHOLE_X86_LEVELS
#include <cpuid.h>
#endif

namespace keyhole::cpu {
namespace {

constexpr std::array kAllLevels = {Level::scalar, Level::avx2, Level::avx512, Level::avx512vnni};

#ifdef KEYHOLE_X86_LEVELS
// __builtin_cpu_supports also asks whether the operating system saves the registers (XGETBV).
bool machine_has_avx2() {
  // clang 14 has no name for f16c. Its registers are AVX's. Asked once: in a virtual machine cpuid takes 30 us.
  static const bool has_f16c = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  }();
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#ifdef KEYHOLE_AVX512_LEVELS
bool machine_has_avx512() {
  return machine_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

bool machine_has_avx512vnni() {
  return machine_has_avx512() && __builtin_cpu_supports("avx512vnni");
}

// VNNI pays for int8 and codes only. AVX512_BF16 does not pay: its dot product takes 2.2 cycles for 32 products on
// Sapphire Rapids, where two FMAs take 1.1; the conversion that it saves is shared by the group; and it
// would round the queries to 8 bits and take subnormals for zero.
const Kernels& avx512vnni_kernels() {
  static const Kernels kernels = [] {
    Kernels k = kAvx512Kernels;
    k.level = Level::avx512vnni;
    k.name = "avx512vnni";
    k.score_i8 = score_i8_avx512vnni;
    k.score_codes = score_codes_avx512vnni;
    k.sum_codes = sum_codes_avx512vnni;
    return k;
  }();
  return kernels;
}
#endif
#endif

std::string names_of(std::span<const Level> levels) {
  std::string names;
  for (const Level level : levels) {
    if (!names.empty()) names += ", ";
    names += level_name(level);
  }
  return names;
}

}  // namespace

const char* level_name(Level level) {
  switch (level) {
    case Level::scalar: return "scalar";
    case Level::avx2: return "avx2";
    case Level::avx512: return "avx512";
    case Level::avx512vnni: return "avx512vnni";
  }
  return "unknown";
}

const Kernels* kernels_for(Level level) {
  switch (level) {
    case Level::scalar: return &kScalarKernels;
#ifdef KEYHOLE_X86_LEVELS
    case Level::avx2: return machine_has_avx2() ? &kAvx2Kernels : nullptr;
#endif
#ifdef KEYHOLE_AVX512_LEVELS
    case Level::avx512: return machine_has_avx512() ? &kAvx512Kernels : nullptr;
    case Level::avx512vnni: return machine_has_avx512vnni() ? &avx512vnni_kernels() : nullptr;
#endif
    default: return nullptr;
  }
}

std::span<const Level> available_levels() {
  static const std::vector<Level> available = [] {
    std::vector<Level> levels;
    for (const Level level : kAllLevels) {
      if (kernels_for(level) != nullptr) levels.push_back(level);
    }
    return levels;
  }();
  return available;
}

const Kernels& select_kernels(const char* forced) {
  const char* origin = "CPU level";
  if (forced == nullptr || *forced == '\0') {
    forced = std::getenv("KEYHOLE_CPU");
    origin = "KEYHOLE_CPU";
  }
  const auto available = available_levels();
  if (forced == nullptr || *forced == '\0') return *kernels_for(available.back());

  for (const Level level : kAllLevels) {
    if (std::string_view(forced) != level_name(level)) continue;
    if (const Kernels* kernels = kernels_for(level)) return *kernels;
    throw Error(Status::unsupported, std::string(origin) + ": this machine lacks '" + forced +
                                         "'; it has " + names_of(available));
  }
  throw Error(Status::invalid_argument, std::string(origin) + ": unknown level '" + forced +
                                            "'; this machine has " + names_of(available));
}

}  // namespace keyhole::cpu
