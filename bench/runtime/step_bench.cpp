// One layer of one decoding step through the C API, in the shape of an 8B Llama (32 query heads on 8 KV
// heads of 128): what the step costs without offloaded tokens, and exact attention over all of them
// beside the time that plain reading of the same bytes takes in the same run.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "keyhole/keyhole.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kQueryHeads = 32, kKvHeads = 8, kDim = 128;

void must(keyhole_status status) {
  if (status == KEYHOLE_OK) return;
  std::fprintf(stderr, "%s\n", keyhole_last_error());
  std::exit(1);
}

struct Layer {
  keyhole_engine* engine = nullptr;
  keyhole_session* session = nullptr;
  std::vector<float> q = std::vector<float>(kQueryHeads * kDim);
  std::vector<float> out = q;

  Layer(uint32_t context, keyhole_mode mode, uint32_t threads) {
    keyhole_engine_config ec;
    keyhole_engine_config_init(&ec);
    ec.layers = 1;
    ec.q_heads = kQueryHeads;
    ec.kv_heads = kKvHeads;
    ec.head_dim = kDim;
    ec.threads = threads;
    must(keyhole_engine_create(&ec, &engine));
    keyhole_session_config sc;
    keyhole_session_config_init(&sc);
    sc.max_tokens = context + 16;
    sc.mode = mode;
    sc.training_queries = 0;
    must(keyhole_session_create(engine, &sc, &session));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    constexpr int64_t kChunk = 512;
    std::vector<float> kv(kChunk * kKvHeads * kDim);
    for (uint32_t at = 0; at < context; at += kChunk) {
      for (float& x : kv) x = normal(random);
      const int64_t shape[] = {std::min<int64_t>(kChunk, context - at), kKvHeads, kDim};
      const keyhole_tensor t = keyhole_tensor_host(kv.data(), KEYHOLE_F32, 3, shape);
      must(keyhole_prefill(session, 0, &t, &t, nullptr));
    }
    for (float& x : q) x = normal(random);
  }
  ~Layer() {
    keyhole_session_destroy(session);
    keyhole_engine_destroy(engine);
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  void step() {
    const int64_t shape[] = {kQueryHeads, kDim};
    const keyhole_tensor tq = keyhole_tensor_host(q.data(), KEYHOLE_F32, 2, shape);
    const keyhole_tensor to = keyhole_tensor_host(out.data(), KEYHOLE_F32, 2, shape);
    must(keyhole_attend(session, 0, &tq, nullptr, nullptr, &to, nullptr));
  }
};

/// Seconds to read `bytes` once with all threads: the floor of any exact attention.
class ReadFloor {
 public:
  ReadFloor(size_t bytes, uint32_t threads) : words_(bytes / 8, 1), threads_(threads) {}
  double seconds() {
    std::vector<std::thread> pool;
    const auto start = Clock::now();
    for (uint32_t t = 0; t < threads_; ++t) {
      pool.emplace_back([this, t] {
        const size_t piece = words_.size() / threads_;
        uint64_t sums[8] = {};
        for (size_t i = t * piece; i + 8 <= (t + 1) * piece; i += 8) {
          for (size_t j = 0; j < 8; ++j) sums[j] += words_[i + j];
        }
        for (const uint64_t s : sums) benchmark::DoNotOptimize(s);
      });
    }
    for (auto& t : pool) t.join();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  std::vector<uint64_t> words_;
  uint32_t threads_;
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

void resident_only(benchmark::State& state) {
  Layer layer(640, KEYHOLE_MODE_INDEXED, static_cast<uint32_t>(state.range(0)));
  for (auto _ : state) layer.step();
}
BENCHMARK(resident_only)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

void exact(benchmark::State& state) {
  const auto context = static_cast<uint32_t>(state.range(0));
  const auto threads = static_cast<uint32_t>(state.range(1));
  Layer layer(context, KEYHOLE_MODE_EXACT, threads);
  const size_t bytes = size_t{context} * kKvHeads * kDim * 2 * 2;
  ReadFloor floor(bytes, threads);
  std::vector<double> steps, reads;
  for (auto _ : state) {
    const auto start = Clock::now();
    layer.step();
    steps.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    state.PauseTiming();
    reads.push_back(floor.seconds());
    state.ResumeTiming();
  }
  state.counters["GB/s"] = static_cast<double>(bytes) / median(steps) / 1e9;
  state.counters["step/read"] = median(steps) / median(reads);
}
BENCHMARK(exact)
    ->ArgNames({"context", "threads"})
    ->Args({32768, 1})
    ->Args({32768, 2})
    ->Args({131072, 2})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
