// Ranks over NCCL in a test: processes, each with a GPU of its own, or several with one where the environment has
// NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and newer). One GPU is enough for one rank.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <keyhole/nccl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "tests/runtime/device_vector.h"
#include "tests/runtime/parallel/thread_ranks.h"

namespace keyhole::test {

/// Runs f in a process of its own, which may use CUDA (this one never does, so that it can fork), and returns its
/// exit code.
inline int in_process(const std::function<int()>& f) {
  (void)std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const int code = f();
    (void)std::fflush(nullptr);
    _exit(code);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline uint32_t gpus() {
  static const int count = in_process([] {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
  });
  return static_cast<uint32_t>(std::max(count, 0));
}

inline bool ranks_share_gpus() {
  const char* const value = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return value != nullptr && std::string(value) == "1" && gpus() != 0;
}

inline int device_of(uint32_t rank) { return static_cast<int>(rank % gpus()); }

#define KEYHOLE_NEEDS_GPUS(n)                                                 \
  if (gpus() < (n) && !ranks_share_gpus()) {                                  \
    GTEST_SKIP() << "needs " << (n) << " CUDA devices, there are " << gpus(); \
  }                                                                           \
  static_assert(true, "")

/// Memory that the processes of all ranks share.
struct Shared {
  ncclUniqueId id{};
  std::atomic<bool> has_id = false;
  std::atomic<bool> flag = false;  ///< for the test

  void raise() { flag = true; }
  void await() const {
    while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

/// Runs f(rank, its NCCL communicator, one of Keyhole's over it) in a process for each rank. Threads that share a GPU
/// would wait for each other, because cudaFree waits for NCCL's kernels of all ranks of the process.
using Part = std::function<void(uint32_t, ncclComm_t, keyhole_communicator*, Shared&)>;
inline void run_rank(uint32_t rank, uint32_t size, const Part& f, uint32_t timeout_ms,
                     Shared& shared) {
  ASSERT_CUDA(cudaSetDevice(device_of(rank)));
  if (rank == 0) {
    ASSERT_EQ(ncclGetUniqueId(&shared.id), ncclSuccess);
    shared.has_id = true;
  }
  while (!shared.has_id) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ncclComm_t comm = nullptr;
  ASSERT_EQ(ncclCommInitRank(&comm, static_cast<int>(size), shared.id, static_cast<int>(rank)),
            ncclSuccess);
  keyhole_communicator_config config;
  keyhole_communicator_config_init(&config);
  config.timeout_ms = timeout_ms;
  config.long_timeout_ms = 60000;
  keyhole_communicator* c = nullptr;
  ASSERT_EQ(keyhole_communicator_from_nccl(&comm, &config, &c), KEYHOLE_OK) << keyhole_last_error();
  const CommunicatorPtr owner(c);
  EXPECT_EQ(keyhole_communicator_get_rank(c), rank);
  EXPECT_EQ(keyhole_communicator_get_size(c), size);
  f(rank, comm, c, shared);
  int device = -1;
  EXPECT_EQ(cudaSuccess, cudaGetDevice(&device));
  EXPECT_EQ(device, device_of(rank));
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}
inline void run_ranks(uint32_t size, const Part& f, uint32_t timeout_ms = 60000) {
  (void)gpus();  // known before there are processes
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const shared = new (memory) Shared;
  ThreadRanks(size).run([&](uint32_t rank) {
    EXPECT_EQ(0, in_process([&] {
                run_rank(rank, size, f, timeout_ms, *shared);
                return testing::Test::HasFailure() ? 1 : 0;
              }))
        << "rank " << rank;
  });
  shared->~Shared();
  EXPECT_EQ(munmap(memory, sizeof(Shared)), 0);
}

}  // namespace keyhole::test
