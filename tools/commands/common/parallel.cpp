#include "tools/commands/common/parallel.h"

#include <CLI/CLI.hpp>
#include <stdexcept>

#include "tools/mpi/ranks.h"

namespace keyhole::tools {

void add_parallel_options(CLI::App& command, ParallelFlags& flags) {
  command
      .add_option(
          "--parallel", flags.kind,
          "What the processes that mpirun has started share: context (each holds some of the "
          "tokens), or tensor (some of the heads)")
      ->check(CLI::IsMember({"context", "tensor"}));
  command
      .add_option("--parallel-block", flags.block,
                  "Of --parallel context: tokens that stay together on a process; 0: 4096")
      ->check(CLI::Range(0U, 1U << 30));
}

CacheRanks cache_ranks(const ParallelFlags& flags) {
  if (flags.kind.empty()) return {};
  if (!has_mpi()) throw std::runtime_error(kNoMpi);
  return {ranks().communicator, flags.kind == "tensor", flags.block};
}

}  // namespace keyhole::tools
