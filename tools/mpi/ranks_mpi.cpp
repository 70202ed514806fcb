#include <fcntl.h>
#include <keyhole/mpi.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "tools/mpi/nccl_ranks.h"
#include "tools/mpi/ranks.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kTimeoutMs = 30000;  // the library's default

Ranks all;                           // NOLINT: of the process, set once before threads start
int real_error = 2;                  // NOLINT: where a silent rank may still speak
keyhole_communicator_config config;  // NOLINT: of all communicators

/// Over NCCL.
struct DeviceRanks {
  bool is_tried = false;
  keyhole_communicator* communicator = nullptr;
} on_devices;  // NOLINT: likewise

bool asks_for_ranks(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word(argv[i]);
    if (word == "--parallel" || word.starts_with("--parallel=")) return true;
  }
  return false;
}

void check(keyhole_status status) {
  if (status != KEYHOLE_OK) throw std::runtime_error(keyhole_last_error());
}

void be_silent() {
  real_error = dup(2);
  const int nowhere = open("/dev/null", O_WRONLY);
  if (nowhere < 0) return;
  dup2(nowhere, 1);
  dup2(nowhere, 2);
  close(nowhere);
}

/// Ranks of one host that may all use the same cores would each start a thread on every one of them.
void divide_cores(uint32_t local_rank, uint32_t local_size) {
  const std::vector<int> cores = cores_by_node();
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  if (local_size < 2 || cores.empty() || static_cast<long>(cores.size()) < online) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : share_of_cores(cores, local_rank, local_size)) CPU_SET(core, &set);
  (void)sched_setaffinity(0, sizeof set, &set);
}

/// Ranks of one host would all take its first GPU.
void choose_gpu(uint32_t local_rank, uint32_t local_size) {
  if (local_size < 2) return;
  const std::string gpu =
      gpu_of_rank(std::getenv("CUDA_VISIBLE_DEVICES"), gpus_of_host(), local_rank);
  if (!gpu.empty()) (void)setenv("CUDA_VISIBLE_DEVICES", gpu.c_str(), 1);
}

}  // namespace

const Ranks& ranks() { return all; }

keyhole_communicator* device_communicator(bool on_device) {
  if (all.communicator == nullptr || on_devices.is_tried) return on_devices.communicator;
  on_devices.is_tried = true;
  const NcclReadiness own = nccl_readiness(on_device);
  // Weights were read before: ranks may be far apart. A broadcast waits longer than a gather.
  char here = 0;
  check(keyhole_communicator_broadcast(all.communicator, &here, 1, 0));
  std::vector<NcclReadiness> ready(all.size);
  check(keyhole_communicator_gather(all.communicator, &own, ready.data(), sizeof own));
  const std::string why = nccl_obstacle(ready);
  if (why.empty()) {
    on_devices.communicator = make_nccl_ranks(all.communicator, config);
  } else if (all.speaks() &&
             std::any_of(ready.begin(), ready.end(), [](const auto& r) { return r.wants != 0; })) {
    std::fprintf(stderr, "keyhole: ranks over MPI, through host memory, and not over NCCL: %s\n",
                 why.c_str());
  }
  return on_devices.communicator;
}

bool has_mpi() { return true; }

void join_ranks(int argc, char** argv) {
  if (!asks_for_ranks(argc, argv)) return;
  int given = 0, rank = 0;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &given) != MPI_SUCCESS ||
      MPI_Comm_rank(MPI_COMM_WORLD, &rank) != MPI_SUCCESS) {
    throw std::runtime_error("MPI cannot be initialised");
  }
  if (rank != 0) be_silent();
  if (given < MPI_THREAD_SERIALIZED) {
    throw std::runtime_error("this MPI has no MPI_THREAD_SERIALIZED, which --parallel needs");
  }
  uint32_t local_rank = 0, local_size = 1;
  check(keyhole_mpi_local_ranks(nullptr, &local_rank, &local_size));
  divide_cores(local_rank, local_size);
  choose_gpu(local_rank, local_size);
  keyhole_communicator_config_init(&config);
  config.timeout_ms = kTimeoutMs;
  if (const char* text = std::getenv("KEYHOLE_RANK_TIMEOUT_MS"); text != nullptr && *text != 0) {
    const long ms = std::strtol(text, nullptr, 10);
    if (ms < 1 || ms > 86400000) {
      throw std::runtime_error("environment variable KEYHOLE_RANK_TIMEOUT_MS is \"" +
                               std::string(text) + "\", allowed: 1 to 86400000");
    }
    config.timeout_ms = config.long_timeout_ms = static_cast<uint32_t>(ms);
  }
  check(keyhole_communicator_from_mpi(nullptr, &config, &all.communicator));
  all.rank = keyhole_communicator_get_rank(all.communicator);
  all.size = keyhole_communicator_get_size(all.communicator);
  all.timeout_ms = config.timeout_ms;
}

void leave_ranks(int exit_code) {
  if (all.communicator == nullptr) return;
  if (exit_code != 0) {
    std::fflush(nullptr);
    std::_Exit(exit_code);
  }
  keyhole_communicator_destroy(on_devices.communicator);
  keyhole_communicator_destroy(all.communicator);
  on_devices.communicator = all.communicator = nullptr;
  MPI_Finalize();
}

void report_of_rank(const std::string& text) {
  if (all.speaks() || text.starts_with("rank ")) return;  // those of one rank all ranks return
  const std::string line = "keyhole: rank " + std::to_string(all.rank) + ": error: " + text + "\n";
  (void)!write(real_error, line.data(), line.size());
}

}  // namespace keyhole::tools
