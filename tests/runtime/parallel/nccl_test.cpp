// The transport over NCCL: ranks are processes, each with a GPU of its own, or several with one where the environment has
// NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and newer). One GPU is enough for one rank.
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
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/runtime/device_vector.h"
#include "tests/runtime/parallel/thread_ranks.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kHeads = 8, kDim = 64;

/// Runs f in a process of its own, which may use CUDA: this one never does, so that it can fork. Its exit code.
int in_process(const std::function<int()>& f) {
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

uint32_t gpus() {
  static const int count = in_process([] {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
  });
  return static_cast<uint32_t>(std::max(count, 0));
}

bool ranks_share_gpus() {
  const char* const value = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return value != nullptr && std::string(value) == "1" && gpus() != 0;
}

int device_of(uint32_t rank) { return static_cast<int>(rank % gpus()); }

#define KEYHOLE_NEEDS_GPUS(n)                                                 \
  if (gpus() < (n) && !ranks_share_gpus()) {                                  \
    GTEST_SKIP() << "needs " << (n) << " CUDA devices, there are " << gpus(); \
  }                                                                           \
  static_assert(true, "")

/// What the processes of all ranks see.
struct Shared {
  ncclUniqueId id{};
  std::atomic<bool> has_id = false;
  std::atomic<bool> flag = false;  ///< for the test

  void raise() { flag = true; }
  void await() const {
    while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

/// Runs f(rank, its NCCL communicator, one of Keyhole's over it) in a process for each rank: threads that share a GPU would wait for
/// each other, as cudaFree waits for NCCL's kernels of all ranks of the process.
using Part = std::function<void(uint32_t, ncclComm_t, keyhole_communicator*, Shared&)>;
void run_rank(uint32_t rank, uint32_t size, const Part& f, uint32_t timeout_ms, Shared& shared) {
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
  EXPECT_EQ(keyhole_communicator_rank(c), rank);
  EXPECT_EQ(keyhole_communicator_size(c), size);
  f(rank, comm, c, shared);
  int device = -1;
  EXPECT_EQ(cudaSuccess, cudaGetDevice(&device));
  EXPECT_EQ(device, device_of(rank));
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}
void run(uint32_t size, const Part& f, uint32_t timeout_ms = 60000) {
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

/// States of a rank: o [heads, dim], then lse [heads]; rank 1 of more has nothing in head 0.
std::vector<float> state_of(uint32_t rank) {
  std::mt19937 random(rank + 1);
  std::normal_distribution<float> normal;
  std::vector<float> state(kHeads * (kDim + 1));
  for (float& x : state) x = normal(random);
  if (rank == 1) state[kHeads * kDim] = -INFINITY;
  return state;
}

std::vector<double> merged(uint32_t size) {
  std::vector<double> out(kHeads * (kDim + 1));
  for (uint32_t h = 0; h < kHeads; ++h) {
    double sum = 0;
    for (uint32_t r = 0; r < size; ++r) {
      const std::vector<float> state = state_of(r);
      const double weight = std::exp(static_cast<double>(state[kHeads * kDim + h]));
      sum += weight;
      for (uint32_t i = 0; i < kDim; ++i) out[h * kDim + i] += weight * state[h * kDim + i];
    }
    for (uint32_t i = 0; i < kDim; ++i) out[h * kDim + i] /= sum;
    out[kHeads * kDim + h] = std::log(sum);
  }
  return out;
}

/// What each rank has after its states and those of the others were gathered and merged on a stream.
std::vector<float> merge_on_stream(keyhole_communicator* c, uint32_t rank, uint32_t size) {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::vector<float> state = state_of(rank);
  DeviceVector own(state.size()), all(state.size() * size), out(state.size());
  own.set(state, stream);
  EXPECT_EQ(keyhole_communicator_gather_on_stream(c, own.tensor({1}).data, all.tensor({1}).data,
                                                  state.size() * 4, stream),
            KEYHOLE_OK)
      << keyhole_last_error();
  std::vector<const void*> o;
  std::vector<const float*> lse;
  for (uint32_t r = 0; r < size; ++r) {
    const float* const its = static_cast<const float*>(all.tensor({1}).data) + r * state.size();
    o.push_back(its);
    lse.push_back(its + kHeads * kDim);
  }
  auto* const to = static_cast<float*>(out.tensor({1}).data);
  EXPECT_EQ(
      keyhole_merge_states_device(size, o.data(), lse.data(), kHeads, kDim, KEYHOLE_F32,
                                  KEYHOLE_LSE_NATURAL, to, KEYHOLE_F32, to + kHeads * kDim, stream),
      KEYHOLE_OK)
      << keyhole_last_error();
  EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(stream));
  EXPECT_EQ(cudaSuccess, cudaStreamDestroy(stream));
  return out.get();
}

/// All calls of a communicator.
void check_all_calls(uint32_t size) {
  run(size, [&](uint32_t rank, ncclComm_t, keyhole_communicator* c, Shared&) {
    // One byte, and more than a piece of 4 MiB.
    for (const size_t bytes : {size_t{1}, (size_t{9} << 20) + 3}) {
      std::vector<char> own(bytes), all(bytes * size);
      for (size_t i = 0; i < bytes; ++i) own[i] = static_cast<char>(i * 7 + rank);
      ASSERT_EQ(keyhole_communicator_gather(c, own.data(), all.data(), bytes), KEYHOLE_OK)
          << keyhole_last_error();
      for (size_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(all[i], static_cast<char>((i % bytes) * 7 + i / bytes)) << i;
      }
    }
    std::vector<float> values(300001, static_cast<float>(rank + 1));
    ASSERT_EQ(keyhole_communicator_sum(c, values.data(), values.size()), KEYHOLE_OK);
    EXPECT_EQ(values.back(), static_cast<float>(size * (size + 1) / 2));
    uint32_t word = 7 * (rank + 1);
    ASSERT_EQ(keyhole_communicator_broadcast(c, &word, sizeof word, size - 1), KEYHOLE_OK);
    EXPECT_EQ(word, 7 * size);
    const std::vector<double> truth = merged(size);
    const std::vector<float> seen = merge_on_stream(c, rank, size);
    for (size_t i = 0; i < truth.size(); ++i) ASSERT_NEAR(seen[i], truth[i], 1e-5) << i;
    // The same bits on all ranks.
    std::vector<float> all(seen.size() * size);
    ASSERT_EQ(keyhole_communicator_gather(c, seen.data(), all.data(), seen.size() * 4), KEYHOLE_OK);
    for (uint32_t r = 0; r < size; ++r) {
      EXPECT_EQ(std::memcmp(all.data() + r * seen.size(), seen.data(), seen.size() * 4), 0);
    }
  });
}

TEST(Nccl, OneRankMakesAllCalls) {
  KEYHOLE_NEEDS_GPUS(1U);
  check_all_calls(1);
}

TEST(Nccl, TwoRanksMakeAllCalls) {
  KEYHOLE_NEEDS_GPUS(2U);
  check_all_calls(2);
}

TEST(Nccl, AnEngineSpreadsItsSessionsOverOneRank) {
  KEYHOLE_NEEDS_GPUS(1U);
  run(1, [&](uint32_t, ncclComm_t, keyhole_communicator* c, Shared&) {
    keyhole_engine_config config;
    keyhole_engine_config_init(&config);
    config.layers = 1;
    config.q_heads = config.kv_heads = 1;
    config.head_dim = kDim;
    config.threads = 1;
    config.device = KEYHOLE_DEVICE_HOST;
    config.communicator = c;
    keyhole_engine* engine = nullptr;
    ASSERT_EQ(keyhole_engine_create(&config, &engine), KEYHOLE_OK) << keyhole_last_error();
    keyhole_session_config options;
    keyhole_session_config_init(&options);
    options.max_tokens = 64;
    keyhole_session* session = nullptr;
    ASSERT_EQ(keyhole_session_create(engine, &options, &session), KEYHOLE_OK)
        << keyhole_last_error();
    // One token: attention to it is its V.
    std::vector<float> k(kDim, 0.5F), v(kDim), out(kDim);
    for (uint32_t i = 0; i < kDim; ++i) v[i] = static_cast<float>(i);
    const int64_t shape[] = {1, kDim};
    const auto tk = keyhole_tensor_host(k.data(), KEYHOLE_F32, 2, shape);
    const auto tv = keyhole_tensor_host(v.data(), KEYHOLE_F32, 2, shape);
    const auto to = keyhole_tensor_host(out.data(), KEYHOLE_F32, 2, shape);
    EXPECT_EQ(keyhole_attend(session, 0, &tk, &tk, &tv, &to, nullptr), KEYHOLE_OK)
        << keyhole_last_error();
    for (uint32_t i = 0; i < kDim; ++i) EXPECT_NEAR(out[i], v[i], 0.05F);
    keyhole_session_destroy(session);
    keyhole_engine_destroy(engine);
  });
}

constexpr uint32_t kKvHeads = 2, kLayers = 2;

struct EngineDeleter {
  void operator()(keyhole_engine* e) const { keyhole_engine_destroy(e); }
};
struct SessionDeleter {
  void operator()(keyhole_session* s) const { keyhole_session_destroy(s); }
};
/// A session that attends everything, and its engine; over ranks where c is one of theirs.
struct Exact {
  Exact(keyhole_device device, uint32_t ordinal, keyhole_communicator* c) {
    keyhole_engine_config config;
    keyhole_engine_config_init(&config);
    config.layers = kLayers;
    config.q_heads = kHeads;
    config.kv_heads = kKvHeads;
    config.head_dim = kDim;
    config.kv_dtype = KEYHOLE_F32;
    config.threads = 2;
    config.device = device;
    config.device_ordinal = ordinal;
    config.communicator = c;
    config.context_block = c == nullptr ? 0 : 16;
    keyhole_engine* e = nullptr;
    EXPECT_EQ(keyhole_engine_create(&config, &e), KEYHOLE_OK) << keyhole_last_error();
    engine.reset(e);
    keyhole_session_config options;
    keyhole_session_config_init(&options);
    options.max_tokens = 2000;
    options.sink = 4;
    options.window = 32;
    options.mode = KEYHOLE_MODE_EXACT;
    keyhole_session* s = nullptr;
    EXPECT_EQ(keyhole_session_create(e, &options, &s), KEYHOLE_OK) << keyhole_last_error();
    session.reset(s);
  }
  std::unique_ptr<keyhole_engine, EngineDeleter> engine;
  std::unique_ptr<keyhole_session, SessionDeleter> session;
};

std::vector<float> numbers(std::mt19937& random, size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(random);
  return v;
}

keyhole_tensor on_host(const std::vector<float>& v, std::initializer_list<int64_t> shape) {
  return keyhole_tensor_host(v.data(), KEYHOLE_F32, static_cast<int32_t>(shape.size()),
                             shape.begin());
}

/// A text over ranks with all tensors in device memory, beside one session on the host. A token is enqueued in all layers before
/// anybody waits.
void decode_beside_one_process(uint32_t size) {
  run(size, [&](uint32_t rank, ncclComm_t, keyhole_communicator* c, Shared&) {
    cudaStream_t stream = nullptr;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    {
      const Exact truth(KEYHOLE_DEVICE_HOST, 0, nullptr);
      const Exact spread(KEYHOLE_DEVICE_CUDA, static_cast<uint32_t>(device_of(rank)), c);
      keyhole_session* const s = spread.session.get();
      ASSERT_EQ(keyhole_session_set_stream(s, stream), KEYHOLE_OK) << keyhole_last_error();
      std::mt19937 random(7);
      constexpr uint32_t kPrompt = 500;
      for (uint32_t l = 0; l < kLayers; ++l) {
        const auto k = numbers(random, kPrompt * kKvHeads * kDim), v = numbers(random, k.size());
        const auto tk = on_host(k, {kPrompt, kKvHeads, kDim});
        const auto tv = on_host(v, {kPrompt, kKvHeads, kDim});
        ASSERT_EQ(keyhole_prefill(truth.session.get(), l, &tk, &tv, nullptr), KEYHOLE_OK);
        DeviceVector dk(k.size()), dv(v.size());
        dk.set(k, stream);
        dv.set(v, stream);
        const auto sk = dk.tensor({kPrompt, kKvHeads, kDim});
        const auto sv = dv.tensor({kPrompt, kKvHeads, kDim});
        ASSERT_EQ(keyhole_prefill(s, l, &sk, &sv, nullptr), KEYHOLE_OK) << keyhole_last_error();
      }
      // Past several ends of blocks.
      for (uint32_t t = 0; t < 70; ++t) {
        std::vector<std::vector<float>> wanted;
        std::vector<std::unique_ptr<DeviceVector>> alive;
        std::vector<DeviceVector*> outs, sums;
        const auto there = [&](const std::vector<float>& from) {
          alive.push_back(std::make_unique<DeviceVector>(from.size()));
          alive.back()->set(from, stream);
          return alive.back().get();
        };
        for (uint32_t l = 0; l < kLayers; ++l) {
          const auto q = numbers(random, kHeads * kDim), k = numbers(random, kKvHeads * kDim);
          const auto v = numbers(random, k.size());
          std::vector<float> o(q.size()), lse(kHeads);
          const auto tq = on_host(q, {kHeads, kDim}), tk = on_host(k, {kKvHeads, kDim});
          const auto tv = on_host(v, {kKvHeads, kDim}), to = on_host(o, {kHeads, kDim});
          ASSERT_EQ(keyhole_attend(truth.session.get(), l, &tq, &tk, &tv, &to, lse.data()),
                    KEYHOLE_OK);
          const auto sq = there(q)->tensor({kHeads, kDim}), sk = there(k)->tensor({kKvHeads, kDim});
          const auto sv = there(v)->tensor({kKvHeads, kDim});
          outs.push_back(there(o));
          sums.push_back(there(lse));
          const auto so = outs.back()->tensor({kHeads, kDim});
          auto* const sum = static_cast<float*>(sums.back()->tensor({kHeads}).data);
          if (t % 2 == 0) {
            ASSERT_EQ(keyhole_attend(s, l, &sq, &sk, &sv, &so, sum), KEYHOLE_OK)
                << keyhole_last_error();
          } else {
            ASSERT_EQ(keyhole_attend_begin(s, l, &sq, &sk, &sv), KEYHOLE_OK)
                << keyhole_last_error();
            ASSERT_EQ(keyhole_attend_end(s, &so, sum), KEYHOLE_OK) << keyhole_last_error();
          }
          o.insert(o.end(), lse.begin(), lse.end());
          wanted.push_back(o);
        }
        ASSERT_EQ(keyhole_session_synchronize(s), KEYHOLE_OK) << keyhole_last_error();
        for (uint32_t l = 0; l < kLayers; ++l) {
          std::vector<float> seen = outs[l]->get();
          const std::vector<float> lse = sums[l]->get();
          seen.insert(seen.end(), lse.begin(), lse.end());
          for (size_t i = 0; i < seen.size(); ++i) {
            ASSERT_NEAR(seen[i], wanted[l][i], 2e-4) << "token " << t << ", layer " << l;
          }
          // The same bits on all ranks.
          std::vector<float> all(seen.size() * size);
          ASSERT_EQ(keyhole_communicator_gather(c, seen.data(), all.data(), seen.size() * 4),
                    KEYHOLE_OK);
          ASSERT_EQ(std::memcmp(all.data(), seen.data(), seen.size() * 4), 0);
        }
      }
    }
    EXPECT_EQ(cudaSuccess, cudaStreamDestroy(stream));
  });
}

TEST(Nccl, OneRankDecodesWithTensorsInDeviceMemory) {
  KEYHOLE_NEEDS_GPUS(1U);
  decode_beside_one_process(1);
}

TEST(Nccl, TwoRanksDecodeWithTensorsInDeviceMemory) {
  KEYHOLE_NEEDS_GPUS(2U);
  decode_beside_one_process(2);
}

TEST(Nccl, FourRanksDecodeWithTensorsInDeviceMemory) {
  KEYHOLE_NEEDS_GPUS(4U);
  decode_beside_one_process(4);
}

TEST(Nccl, AStepThatTheOtherRankDoesNotMakeEndsInATimeout) {
  KEYHOLE_NEEDS_GPUS(2U);
  run(
      2,
      [&](uint32_t rank, ncclComm_t, keyhole_communicator* c, Shared& shared) {
        const Exact spread(KEYHOLE_DEVICE_CUDA, static_cast<uint32_t>(device_of(rank)), c);
        keyhole_session* const s = spread.session.get();
        DeviceVector q(kHeads * kDim), k(kKvHeads * kDim), o(kHeads * kDim);
        q.set(std::vector<float>(kHeads * kDim, 1.0F), nullptr);
        k.set(std::vector<float>(kKvHeads * kDim, 1.0F), nullptr);
        const auto tq = q.tensor({kHeads, kDim}), tk = k.tensor({kKvHeads, kDim});
        const auto to = o.tensor({kHeads, kDim});
        ASSERT_EQ(keyhole_attend(s, 0, &tq, &tk, &tk, &to, nullptr), KEYHOLE_OK);
        ASSERT_EQ(keyhole_session_synchronize(s), KEYHOLE_OK) << keyhole_last_error();
        EXPECT_NEAR(o.get()[0], 1.0F, 1e-5);
        if (rank == 0) {
          ASSERT_EQ(keyhole_attend(s, 0, &tq, &tk, &tk, &to, nullptr), KEYHOLE_OK);
          const auto begin = std::chrono::steady_clock::now();
          EXPECT_EQ(keyhole_session_synchronize(s), KEYHOLE_TIMEOUT);
          EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
          // NCCL's kernel has ended: the stream goes on.
          EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(nullptr));
          EXPECT_EQ(keyhole_build(s, nullptr, nullptr), KEYHOLE_TIMEOUT);
          shared.raise();
        }
        shared.await();
      },
      2000);
}

TEST(Nccl, ARankThatDoesNotComeEndsInATimeoutAndTheCallersCommunicatorLives) {
  KEYHOLE_NEEDS_GPUS(2U);
  run(
      2,
      [&](uint32_t rank, ncclComm_t comm, keyhole_communicator* c, Shared& shared) {
        float own = 1.0F, all[2] = {};
        if (rank == 0) {
          const auto begin = std::chrono::steady_clock::now();
          EXPECT_EQ(keyhole_communicator_gather(c, &own, all, sizeof own), KEYHOLE_TIMEOUT);
          EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
          EXPECT_NE(std::string(keyhole_last_error()).find("500 ms"), std::string::npos)
              << keyhole_last_error();
          // It is lost for all calls.
          EXPECT_EQ(keyhole_communicator_gather(c, &own, all, sizeof own), KEYHOLE_TIMEOUT);
          shared.raise();
        }
        shared.await();
        DeviceVector mine(1), both(2);
        mine.set({static_cast<float>(rank) + 1.0F}, nullptr);
        ASSERT_EQ(ncclAllGather(mine.tensor({1}).data, both.tensor({2}).data, 1, ncclFloat, comm,
                                nullptr),
                  ncclSuccess);
        EXPECT_EQ(both.get(), (std::vector<float>{1.0F, 2.0F}));
      },
      500);
}

TEST(Nccl, RefusesNull) {
  keyhole_communicator* c = nullptr;
  const ncclComm_t none = nullptr;
  EXPECT_EQ(keyhole_communicator_from_nccl(nullptr, nullptr, &c), KEYHOLE_RANK_FAILED);
  EXPECT_EQ(keyhole_communicator_from_nccl(&none, nullptr, &c), KEYHOLE_RANK_FAILED);
  EXPECT_NE(std::string(keyhole_last_error()).find("NULL"), std::string::npos);
  EXPECT_EQ(c, nullptr);
}

}  // namespace
}  // namespace keyhole::test
