// `--parallel`, `--parallel-block`: a command as several processes that mpirun has started.
#pragma once

#include <cstdint>
#include <string>

#include "tools/commands/common/cli_fwd.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

struct ParallelFlags {
  std::string kind;  ///< context, tensor, or empty
  uint32_t block = 0;
};
void add_parallel_options(CLI::App& command, ParallelFlags& flags);
/// Throws UsageError for a later turn of so many tokens, 0: none, which sessions of --parallel context do not take.
void check_turn(uint32_t tokens, const ParallelFlags& flags);
/// Where the ranks gather.
enum class RanksOn : uint8_t {
  any,  ///< on the GPUs where all have one
  host  ///< tensors come through host memory
};
/// Makes the ranks of sessions on this device. Collective, because all ranks find out what the others have. Throws
/// std::runtime_error where the build has no MPI.
[[nodiscard]] CacheRanks cache_ranks(const ParallelFlags& flags, keyhole_device device,
                                     RanksOn place = RanksOn::any);

}  // namespace keyhole::tools
