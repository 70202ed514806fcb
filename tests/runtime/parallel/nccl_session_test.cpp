// Sessions over NCCL with tensors in device memory, beside one session on the host.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "keyhole/stream.h"
#include "tests/captured_graph.h"
#include "tests/normal.h"
#include "tests/runtime/parallel/nccl_ranks.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kHeads = 8, kDim = 64, kKvHeads = 2, kLayers = 2, kPrompt = 500;

struct EngineDeleter {
  void operator()(keyhole_engine* e) const { keyhole_engine_destroy(e); }
};
struct SessionDeleter {
  void operator()(keyhole_session* s) const { keyhole_session_destroy(s); }
};

/// A session and its engine; over ranks where c is one of theirs. index NULL: it attends everything exactly.
struct Decoder {
  Decoder(keyhole_device device, uint32_t ordinal, keyhole_communicator* c,
          const char* index = nullptr) {
    keyhole_engine_config config;
    keyhole_engine_config_init(&config);
    config.layers = kLayers;
    config.q_heads = kHeads;
    config.kv_heads = kKvHeads;
    config.head_dim = kDim;
    config.kv_dtype = index == nullptr ? KEYHOLE_F32 : KEYHOLE_F16;
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
    options.mode = index == nullptr ? KEYHOLE_MODE_EXACT : KEYHOLE_MODE_INDEXED;
    if (index != nullptr) options.index = index;
    keyhole_session* s = nullptr;
    EXPECT_EQ(keyhole_session_create(e, &options, &s), KEYHOLE_OK) << keyhole_last_error();
    session.reset(s);
  }
  std::unique_ptr<keyhole_engine, EngineDeleter> engine;
  std::unique_ptr<keyhole_session, SessionDeleter> session;
};

std::vector<float> numbers(std::mt19937& random, size_t n) {
  keyhole::test::Normal<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(random);
  return v;
}

keyhole_tensor on_host(const std::vector<float>& v, std::initializer_list<int64_t> shape) {
  return keyhole_tensor_host(v.data(), KEYHOLE_F32, static_cast<int32_t>(shape.size()),
                             shape.begin());
}

/// A stream of the rank's device.
class Stream {
 public:
  Stream() { EXPECT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { EXPECT_EQ(cudaSuccess, cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// The tensors of a layer's steps, which stay where they are.
struct LayerRows {
  std::vector<float> q, k, v;
  DeviceVector dq{kHeads * kDim}, dk{kKvHeads * kDim}, dv{kKvHeads * kDim}, out{kHeads * kDim};
  DeviceVector lse{kHeads};

  void fill(std::mt19937& random, cudaStream_t stream) {
    q = numbers(random, kHeads * kDim);
    k = numbers(random, kKvHeads * kDim);
    v = numbers(random, kKvHeads * kDim);
    put(stream);
  }
  void put(cudaStream_t stream) {
    dq.set(q, stream);
    dk.set(k, stream);
    dv.set(v, stream);
  }
  keyhole_status enqueue(keyhole_session* s, uint32_t layer, bool halves) const {
    const auto tq = dq.tensor({kHeads, kDim}), tk = dk.tensor({kKvHeads, kDim});
    const auto tv = dv.tensor({kKvHeads, kDim}), to = out.tensor({kHeads, kDim});
    auto* const sums = static_cast<float*>(lse.tensor({kHeads}).data);
    if (!halves) return keyhole_session_attend(s, layer, &tq, &tk, &tv, &to, sums);
    const keyhole_status begun = keyhole_session_attend_begin(s, layer, &tq, &tk, &tv);
    return begun != KEYHOLE_OK ? begun : keyhole_session_attend_end(s, &to, sums);
  }
  /// o and lse of a step on the host.
  [[nodiscard]] std::vector<float> attend(keyhole_session* s, uint32_t layer) const {
    std::vector<float> o(kHeads * kDim), sums(kHeads);
    const auto tq = on_host(q, {kHeads, kDim}), tk = on_host(k, {kKvHeads, kDim});
    const auto tv = on_host(v, {kKvHeads, kDim}), to = on_host(o, {kHeads, kDim});
    EXPECT_EQ(keyhole_session_attend(s, layer, &tq, &tk, &tv, &to, sums.data()), KEYHOLE_OK);
    o.insert(o.end(), sums.begin(), sums.end());
    return o;
  }
  [[nodiscard]] std::vector<float> answer() const {
    std::vector<float> o = out.get();
    const std::vector<float> sums = lse.get();
    o.insert(o.end(), sums.begin(), sums.end());
    return o;
  }
};

/// A prompt in every layer, of tensors in device memory; also in `truth`, if it is not null, from the host's.
void prefill(keyhole_session* s, keyhole_session* truth, std::mt19937& random,
             cudaStream_t stream) {
  for (uint32_t l = 0; l < kLayers; ++l) {
    const auto k = numbers(random, kPrompt * kKvHeads * kDim), v = numbers(random, k.size());
    const auto tk = on_host(k, {kPrompt, kKvHeads, kDim});
    const auto tv = on_host(v, {kPrompt, kKvHeads, kDim});
    if (truth != nullptr) {
      ASSERT_EQ(keyhole_session_append(truth, l, &tk, &tv, nullptr), KEYHOLE_OK);
    }
    DeviceVector dk(k.size()), dv(v.size());
    dk.set(k, stream);
    dv.set(v, stream);
    const auto sk = dk.tensor({kPrompt, kKvHeads, kDim});
    const auto sv = dv.tensor({kPrompt, kKvHeads, kDim});
    ASSERT_EQ(keyhole_session_append(s, l, &sk, &sv, nullptr), KEYHOLE_OK) << keyhole_last_error();
  }
}

/// A token as a graph of its layers, captured again where the session says so.
class TokenGraph {
 public:
  void launch(keyhole_session* s, const std::vector<LayerRows>& rows, cudaStream_t stream) {
    keyhole_status status = graph_ ? keyhole_session_announce(s) : KEYHOLE_INVALID_ARGUMENT;
    if (status == KEYHOLE_INVALID_ARGUMENT) {
      capture(s, rows, stream);
      status = keyhole_session_announce(s);
    }
    ASSERT_EQ(status, KEYHOLE_OK) << keyhole_last_error();
    graph_.launch();
  }
  [[nodiscard]] uint32_t captures() const { return captures_; }

 private:
  void capture(keyhole_session* s, const std::vector<LayerRows>& rows, cudaStream_t stream) {
    ++captures_;
    graph_ = CapturedGraph(stream, cudaStreamCaptureModeThreadLocal, [&] {
      for (uint32_t l = 0; l < kLayers; ++l) {
        EXPECT_EQ(rows[l].enqueue(s, l, l % 2 == 1), KEYHOLE_OK) << keyhole_last_error();
      }
    });
  }
  CapturedGraph graph_;
  uint32_t captures_ = 0;
};

/// A text over ranks with all tensors in device memory, past several ends of blocks, beside one session on the host. A
/// token is enqueued in all layers before anybody waits; by_graphs: the second half of them by graphs.
void decode_beside_one_process(uint32_t size, bool by_graphs) {
  run_ranks(size, [&](uint32_t rank, ncclComm_t, keyhole_communicator* c, Shared&) {
    const Stream stream;
    const Decoder truth(KEYHOLE_DEVICE_HOST, 0, nullptr);
    const Decoder spread(KEYHOLE_DEVICE_CUDA, static_cast<uint32_t>(device_of(rank)), c);
    keyhole_session* const s = spread.session.get();
    ASSERT_EQ(keyhole_session_set_stream(s, stream.get()), KEYHOLE_OK) << keyhole_last_error();
    std::mt19937 random(7);
    prefill(s, truth.session.get(), random, stream.get());
    std::vector<LayerRows> rows(kLayers);
    TokenGraph graph;
    for (uint32_t t = 0; t < 70; ++t) {
      std::vector<std::vector<float>> wanted;
      for (uint32_t l = 0; l < kLayers; ++l) {
        rows[l].fill(random, stream.get());
        wanted.push_back(rows[l].attend(truth.session.get(), l));
      }
      const bool by_graph = by_graphs && t >= 10;
      for (uint32_t l = 0; l < kLayers && !by_graph; ++l) {
        ASSERT_EQ(rows[l].enqueue(s, l, t % 2 == 1), KEYHOLE_OK) << keyhole_last_error();
      }
      if (by_graph) graph.launch(s, rows, stream.get());
      if (!by_graph || t % 3 == 0) {
        ASSERT_EQ(keyhole_session_synchronize(s), KEYHOLE_OK) << keyhole_last_error();
      } else {
        ASSERT_CUDA(cudaStreamSynchronize(stream.get()));
      }
      for (uint32_t l = 0; l < kLayers; ++l) {
        const std::vector<float> seen = rows[l].answer();
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
    // Tokens 510 to 569 lie in blocks of 16 that begin at 496, 512, 528, 544 and 560: the first graph, and one again at
    // each end.
    EXPECT_EQ(graph.captures(), !by_graphs ? 0 : size == 1 ? 1 : 5) << "rank " << rank;
  });
}

TEST(NcclSession, OneRankDecodesWithTensorsInDeviceMemory) {
  KEYHOLE_NEEDS_GPUS(1U);
  for (const bool by_graphs : {false, true}) decode_beside_one_process(1, by_graphs);
}

TEST(NcclSession, TwoRanksDecodeWithTensorsInDeviceMemory) {
  KEYHOLE_NEEDS_GPUS(2U);
  decode_beside_one_process(2, false);
}

TEST(NcclSession, TwoRanksDecodeByGraphs) {
  KEYHOLE_NEEDS_GPUS(2U);
  decode_beside_one_process(2, true);
}

TEST(NcclSession, FourRanksDecodeWithTensorsInDeviceMemory) {
  KEYHOLE_NEEDS_GPUS(4U);
  for (const bool by_graphs : {false, true}) decode_beside_one_process(4, by_graphs);
}

TEST(NcclSession, ATokenThatIsNotFiniteIsNanOnAllRanksAndEveryRanksErrorWhenTheyMeet) {
  KEYHOLE_NEEDS_GPUS(2U);
  for (const char* const index : {static_cast<const char*>(nullptr), "codes"}) {
    run_ranks(2, [&](uint32_t rank, ncclComm_t, keyhole_communicator* c, Shared&) {
      const Stream stream;
      const Decoder spread(KEYHOLE_DEVICE_CUDA, static_cast<uint32_t>(device_of(rank)), c, index);
      keyhole_session* const s = spread.session.get();
      ASSERT_EQ(keyhole_session_set_stream(s, stream.get()), KEYHOLE_OK) << keyhole_last_error();
      std::mt19937 random(11);
      prefill(s, nullptr, random, stream.get());
      ASSERT_EQ(keyhole_session_build(s, nullptr, nullptr), KEYHOLE_OK) << keyhole_last_error();
      LayerRows rows;
      rows.fill(random, stream.get());
      ASSERT_EQ(rows.enqueue(s, 0, false), KEYHOLE_OK) << keyhole_last_error();
      ASSERT_EQ(keyhole_session_synchronize(s), KEYHOLE_OK) << keyhole_last_error();
      for (const float x : rows.answer()) ASSERT_TRUE(std::isfinite(x));
      // Token 501 is of rank 1, which looks at its keys; nobody looks at those that the others take.
      rows.k[5] = NAN;
      rows.put(stream.get());
      ASSERT_EQ(rows.enqueue(s, 0, false), KEYHOLE_OK) << keyhole_last_error();
      EXPECT_EQ(keyhole_session_synchronize(s), KEYHOLE_NOT_FINITE) << keyhole_last_error();
      EXPECT_TRUE(std::string(keyhole_last_error()).starts_with("rank 1: "))
          << keyhole_last_error();
      // The query heads of the first KV head have seen it.
      const std::vector<float> seen = rows.answer();
      for (uint32_t h = 0; h < kHeads / kKvHeads; ++h) {
        EXPECT_TRUE(std::isnan(seen[h * kDim])) << "head " << h << (index == nullptr ? "" : index);
        EXPECT_TRUE(std::isnan(seen[kHeads * kDim + h])) << "head " << h;
      }
    });
  }
}

TEST(NcclSession, AStepThatTheOtherRankDoesNotMakeEndsInATimeout) {
  KEYHOLE_NEEDS_GPUS(2U);
  run_ranks(
      2,
      [&](uint32_t rank, ncclComm_t, keyhole_communicator* c, Shared& shared) {
        const Decoder spread(KEYHOLE_DEVICE_CUDA, static_cast<uint32_t>(device_of(rank)), c);
        keyhole_session* const s = spread.session.get();
        DeviceVector q(kHeads * kDim), k(kKvHeads * kDim), o(kHeads * kDim);
        q.set(std::vector<float>(kHeads * kDim, 1.0F), nullptr);
        k.set(std::vector<float>(kKvHeads * kDim, 1.0F), nullptr);
        const auto tq = q.tensor({kHeads, kDim}), tk = k.tensor({kKvHeads, kDim});
        const auto to = o.tensor({kHeads, kDim});
        ASSERT_EQ(keyhole_session_attend(s, 0, &tq, &tk, &tk, &to, nullptr), KEYHOLE_OK);
        ASSERT_EQ(keyhole_session_synchronize(s), KEYHOLE_OK) << keyhole_last_error();
        EXPECT_NEAR(o.get()[0], 1.0F, 1e-5);
        if (rank == 0) {
          ASSERT_EQ(keyhole_session_attend(s, 0, &tq, &tk, &tk, &to, nullptr), KEYHOLE_OK);
          const auto begin = std::chrono::steady_clock::now();
          EXPECT_EQ(keyhole_session_synchronize(s), KEYHOLE_TIMEOUT);
          EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
          // NCCL's kernel has ended: the stream goes on.
          EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(nullptr));
          EXPECT_EQ(keyhole_session_build(s, nullptr, nullptr), KEYHOLE_TIMEOUT);
          shared.raise();
        }
        shared.await();
      },
      2000);
}

}  // namespace
}  // namespace keyhole::test
