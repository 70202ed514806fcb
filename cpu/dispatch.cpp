// Chooses the level: what the machine has, what the build has, what KEYHOLE_CPU asks for.
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/levels.h"

namespace keyhole::cpu {
namespace {

constexpr std::array kAllLevels = {Level::scalar, Level::avx2, Level::avx512, Level::avx512vnni};

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
