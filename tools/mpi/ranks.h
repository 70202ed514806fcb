// The processes that mpirun has started together, where the command line has --parallel: only rank 0 speaks and
// writes results, and the cores of a host are divided among its ranks.
#pragma once

#include <keyhole/parallel.h>

#include <cstdint>
#include <string>
#include <vector>

namespace keyhole::tools {

struct Ranks {
  keyhole_communicator* communicator = nullptr;  ///< null: this process is alone
  uint32_t rank = 0, size = 1;
  uint32_t timeout_ms = 0;  ///< how long ranks wait for each other in a step
  [[nodiscard]] bool speaks() const { return rank == 0; }
};

/// The ranks that join_ranks() has found.
[[nodiscard]] const Ranks& ranks();

/// The same ranks over NCCL, for sessions on CUDA devices. Made at the first call, which all ranks make, whether this
/// one's sessions lie on such a device or not. Null on all of them where NCCL cannot be used, as rank 0 then says on
/// standard error if any rank has a GPU: `communicator` serves such sessions, too, through host memory.
[[nodiscard]] keyhole_communicator* device_communicator(bool on_device);

/// Whether this build has MPI.
[[nodiscard]] bool has_mpi();
/// The text for builds without MPI.
inline constexpr const char* kNoMpi =
    "--parallel needs MPI, which this build has not: install libopenmpi-dev and openmpi-bin "
    "(Debian, Ubuntu), configure and "
    "build again, and start the command by mpirun";

/// Call it at the very beginning, before any thread is started. With --parallel in the command line it joins the
/// others, silences all but rank 0, and moves this process to its share of the host's cores, where the launcher has
/// not done so, and to one of its GPUs. Throws std::runtime_error.
void join_ranks(int argc, char** argv);
/// Call it at the end. After a failure the process ends here, without waiting for others, which may be gone.
void leave_ranks(int exit_code);
/// Says on the real standard error why a silent rank has failed.
void report_of_rank(const std::string& text);

/// The cores of local rank `rank` of `size`: nearly equal parts, in the order given (by node of memory), at least one
/// core.
[[nodiscard]] std::vector<int> share_of_cores(const std::vector<int>& cores, uint32_t rank,
                                              uint32_t size);
/// The value of CUDA_VISIBLE_DEVICES for local rank `rank`, such that the ranks of a host take its GPUs in turn.
/// `visible`: the present value, null where it is not set; `gpus`: how many the host has. "": it stays as it is,
/// because there is one GPU at most.
[[nodiscard]] std::string gpu_of_rank(const char* visible, uint32_t gpus, uint32_t rank);
/// Number of GPUs of this host that NVIDIA's driver knows; 0 without the driver.
[[nodiscard]] uint32_t gpus_of_host();
/// This process's cores, with those of one node of memory next to each other.
[[nodiscard]] std::vector<int> cores_by_node();

}  // namespace keyhole::tools
