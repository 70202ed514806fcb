// keyhole_fork of a session of N tokens (4 layers, 8 KV heads of 128, f16): its time, and what the copy takes of its own,
// at once and after it has grown by a block; beside the time in which one thread copies as many bytes as the indexes have.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "keyhole/keyhole.h"

namespace {

constexpr int64_t kLayers = 4, kHeads = 8, kDim = 128, kChunk = 2048;

void must(keyhole_status status) {
  if (status == KEYHOLE_OK) return;
  std::fprintf(stderr, "%s\n", keyhole_last_error());
  std::exit(1);
}

/// Random tokens `[n, kHeads, kDim]` in every layer.
void prefill(keyhole_session* session, int64_t n) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> kv(static_cast<size_t>(std::min(n, kChunk) * kHeads * kDim));
  for (float& x : kv) x = normal(random);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (int64_t at = 0; at < n; at += kChunk) {
      const int64_t shape[] = {std::min(n - at, kChunk), kHeads, kDim};
      const keyhole_tensor t = keyhole_tensor_host(kv.data(), KEYHOLE_F32, 3, shape);
      must(keyhole_prefill(session, layer, &t, &t, &t));
    }
  }
}

struct Session {
  keyhole_engine* engine = nullptr;
  keyhole_session* session = nullptr;

  Session(int64_t tokens, const char* index) {
    keyhole_engine_config ec;
    keyhole_engine_config_init(&ec);
    ec.layers = kLayers;
    ec.q_heads = kHeads;
    ec.kv_heads = kHeads;
    ec.head_dim = kDim;
    ec.device = KEYHOLE_DEVICE_HOST;
    must(keyhole_engine_create(&ec, &engine));
    keyhole_session_config sc;
    keyhole_session_config_init(&sc);
    sc.max_tokens = static_cast<uint32_t>(tokens) + 4096;
    sc.index = index;
    must(keyhole_session_create(engine, &sc, &session));
    prefill(session, tokens);
    must(keyhole_build(session, nullptr, nullptr));
  }
  ~Session() {
    keyhole_session_destroy(session);
    keyhole_engine_destroy(engine);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

keyhole_statistics statistics(const keyhole_session* session) {
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  must(keyhole_get_statistics(session, &s));
  return s;
}

double own_mb(const keyhole_session* session) {
  const keyhole_statistics s = statistics(session);
  return static_cast<double>(s.host_bytes - s.shared_bytes) / 1e6;
}

void fork_session(benchmark::State& state, const char* index) {
  const Session s(state.range(0), index);
  keyhole_session* copy = nullptr;
  for (auto _ : state) {
    must(keyhole_fork(s.session, &copy));
    state.PauseTiming();
    keyhole_session_destroy(copy);
    state.ResumeTiming();
  }
  const keyhole_statistics all = statistics(s.session);
  state.counters["index_MB"] = static_cast<double>(all.index_bytes) / 1e6;
  state.counters["session_MB"] = static_cast<double>(all.host_bytes) / 1e6;
  must(keyhole_fork(s.session, &copy));
  state.counters["copy_own_MB"] = own_mb(copy);
  prefill(copy, 1024);
  must(keyhole_build(copy, nullptr, nullptr));
  state.counters["grown_own_MB"] = own_mb(copy);
  keyhole_session_destroy(copy);
}

/// What a copy of the indexes' bytes alone takes.
void copy_floor(benchmark::State& state, const char* index) {
  const Session s(state.range(0), index);
  const size_t bytes = statistics(s.session).index_bytes;
  const std::vector<char> from(bytes, 'x');
  for (auto _ : state) {
    const std::unique_ptr<char[]> to(new char[bytes]);  // not a vector, which would write it twice
    std::memcpy(to.get(), from.data(), bytes);
    benchmark::DoNotOptimize(to.get());
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
}

void sizes(benchmark::internal::Benchmark* b) {
  b->Arg(8192)->Arg(131072)->UseRealTime()->Unit(benchmark::kMicrosecond);
}
BENCHMARK_CAPTURE(fork_session, codes, "codes:k=4,v=4")->Apply(sizes);
BENCHMARK_CAPTURE(fork_session, ivf, "ivf")->Apply(sizes);
BENCHMARK_CAPTURE(fork_session, sparq, "sparq")->Apply(sizes);
BENCHMARK_CAPTURE(copy_floor, codes, "codes:k=4,v=4")->Apply(sizes);

}  // namespace

BENCHMARK_MAIN();
