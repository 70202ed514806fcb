// The transport over NCCL.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "keyhole/attention.h"
#include "tests/normal.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/parallel/nccl_ranks.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kHeads = 8, kDim = 64;

/// States of a rank: o [heads, dim], then lse [heads]; rank 1 of more has nothing in head 0.
std::vector<float> state_of(uint32_t rank) {
  std::mt19937 random(rank + 1);
  keyhole::test::Normal<float> normal;
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
  run_ranks(size, [&](uint32_t rank, ncclComm_t, keyhole_communicator* c, Shared&) {
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
  run_ranks(1, [&](uint32_t, ncclComm_t, keyhole_communicator* c, Shared&) {
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
    EXPECT_EQ(keyhole_session_attend(session, 0, &tk, &tk, &tv, &to, nullptr), KEYHOLE_OK)
        << keyhole_last_error();
    for (uint32_t i = 0; i < kDim; ++i) EXPECT_NEAR(out[i], v[i], 0.05F);
    keyhole_session_destroy(session);
    keyhole_engine_destroy(engine);
  });
}

TEST(Nccl, ARankThatDoesNotComeEndsInATimeoutAndTheCallersCommunicatorLives) {
  KEYHOLE_NEEDS_GPUS(2U);
  run_ranks(
      2,
      [&](uint32_t rank, ncclComm_t comm, keyhole_communicator* c, Shared& shared) {
        float own = 1.0F, all[2] = {};
        if (rank == 0) {
          const auto begin = std::chrono::steady_clock::now();
          EXPECT_EQ(keyhole_communicator_gather(c, &own, all, sizeof own), KEYHOLE_TIMEOUT);
          EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
          expect_error_text("500 ms");
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
  expect_error_text("NULL");
  EXPECT_EQ(c, nullptr);
}

}  // namespace
}  // namespace keyhole::test
