#include "tools/commands/common/parallel.h"

#include <stdexcept>

#include "tools/mpi/ranks.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

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

void check_turn(uint32_t tokens, const ParallelFlags& flags) {
  if (tokens == 0 || flags.kind != "context") return;
  throw UsageError(
      "--turn with --parallel context, whose sessions take no turns; allowed: "
      "--parallel tensor, or one process");
}

CacheRanks cache_ranks(const ParallelFlags& flags, keyhole_device device, RanksOn place) {
  if (flags.kind.empty()) return {};
  if (!has_mpi()) throw std::runtime_error(kNoMpi);
  CacheRanks cache;
  cache.communicator = ranks().communicator;
  cache.by_heads = flags.kind == "tensor";
  cache.block = flags.block;
  cache.timeout_ms = ranks().timeout_ms;
  if (place == RanksOn::host) return cache;
  const bool on_device = device == KEYHOLE_DEVICE_CUDA;
  if (keyhole_communicator* const over_nccl = device_communicator(on_device)) {
    cache.communicator = over_nccl;
    cache.on_device = true;
  }
  return cache;
}

}  // namespace keyhole::tools
