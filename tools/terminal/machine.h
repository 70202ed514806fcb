// The machine that a figure was measured on.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

struct Machine {
  std::string cpu;            ///< e.g. "Intel(R) Xeon(R) Platinum 8480+"
  uint32_t cores = 0;         ///< logical cores that this process may use
  uint64_t memory_bytes = 0;  ///< of the machine
  std::string simd;           ///< the library's kernel level, e.g. "avx512vnni"; "" where not asked
  std::string system;         ///< kernel name and release
  std::string keyhole;        ///< the library's version
};

[[nodiscard]] Machine describe_machine(const std::string& simd_level);

[[nodiscard]] nlohmann::ordered_json to_json(const Machine& machine);
/// The machine in one line for a terminal.
[[nodiscard]] std::string to_text(const Machine& machine);

}  // namespace keyhole::tools
