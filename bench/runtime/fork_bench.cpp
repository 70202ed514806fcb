// keyhole_session_fork of a session of N tokens (4 layers, 8 KV heads of 128, f16): its time, and what the copy takes
// of its own, at once and after it has grown by a block; beside the time in which one thread copies as many bytes as
// the indexes have.
//
// batch: one token of each of 16 copies (4 query heads for a KV head), which have N tokens in common and up to 480 of
// their own, by keyhole_session_extend_batch, beside keyhole_session_extend of one after the other in the same run:
// `ratio` is how many times as long that takes.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/inspect.h"
#include "keyhole/keyhole.h"
#include "keyhole/save.h"

namespace {

constexpr int64_t kLayers = 4, kHeads = 8, kDim = 128, kChunk = 2048;

void must(keyhole_status status) {
  if (status == KEYHOLE_OK) return;
  std::fprintf(stderr, "%s\n", keyhole_last_error());
  std::exit(1);
}

/// Random tokens `[n, kHeads, kDim]` in every layer.
void prefill(keyhole_session* session, int64_t n, bool with_queries = true) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> kv(static_cast<size_t>(std::min(n, kChunk) * kHeads * kDim));
  for (float& x : kv) x = normal(random);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (int64_t at = 0; at < n; at += kChunk) {
      const int64_t shape[] = {std::min(n - at, kChunk), kHeads, kDim};
      const keyhole_tensor t = keyhole_tensor_host(kv.data(), KEYHOLE_F32, 3, shape);
      must(keyhole_session_append(session, layer, &t, &t, with_queries ? &t : nullptr));
    }
  }
}

struct Session {
  keyhole_engine* engine = nullptr;
  keyhole_session* session = nullptr;

  Session(int64_t tokens, const char* index, int64_t group = 1) {
    keyhole_engine_config ec;
    keyhole_engine_config_init(&ec);
    ec.layers = kLayers;
    ec.q_heads = static_cast<uint32_t>(group * kHeads);
    ec.kv_heads = kHeads;
    ec.head_dim = kDim;
    ec.device = KEYHOLE_DEVICE_HOST;
    must(keyhole_engine_create(&ec, &engine));
    keyhole_session_config sc;
    keyhole_session_config_init(&sc);
    sc.max_tokens = static_cast<uint32_t>(tokens) + 4096;
    if (std::strcmp(index, "exact") == 0) {
      sc.mode = KEYHOLE_MODE_EXACT;
    } else {
      sc.index = index;
    }
    must(keyhole_session_create(engine, &sc, &session));
    prefill(session, tokens, group == 1);
    must(keyhole_session_build(session, nullptr, nullptr));
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
  must(keyhole_session_get_statistics(session, &s));
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
    must(keyhole_session_fork(s.session, &copy));
    state.PauseTiming();
    keyhole_session_destroy(copy);
    state.ResumeTiming();
  }
  const keyhole_statistics all = statistics(s.session);
  state.counters["index_MB"] = static_cast<double>(all.index_bytes) / 1e6;
  state.counters["session_MB"] = static_cast<double>(all.host_bytes) / 1e6;
  must(keyhole_session_fork(s.session, &copy));
  state.counters["copy_own_MB"] = own_mb(copy);
  prefill(copy, 1024);
  must(keyhole_session_build(copy, nullptr, nullptr));
  state.counters["grown_own_MB"] = own_mb(copy);
  keyhole_session_destroy(copy);
}

/// The time in which the indexes' bytes alone are copied.
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

/// One token of each of some copies, in every layer.
class Batch {
 public:
  Batch(const Session& of, int64_t group, uint32_t copies) : q_heads_(group * kHeads) {
    for (uint32_t i = 0; i < copies; ++i) {
      keyhole_session* copy = nullptr;
      must(keyhole_session_fork(of.session, &copy));
      prefill(copy, 32 * i, false);
      sessions_.push_back(copy);
      start_.push_back(i + 1);
    }
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    kv_.resize(copies * static_cast<size_t>(kHeads * kDim));
    q_.resize(copies * static_cast<size_t>(q_heads_ * kDim));
    o_.resize(q_.size());
    for (float& x : kv_) x = normal(random);
    for (float& x : q_) x = normal(random);
  }
  ~Batch() {
    for (keyhole_session* s : sessions_) keyhole_session_destroy(s);
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  /// Seconds of one call for all of them.
  double together() {
    return timed([&](uint32_t layer) {
      const auto n = static_cast<int64_t>(sessions_.size());
      const keyhole_tensor q = rows(q_, 0, n, q_heads_), kv = rows(kv_, 0, n, kHeads),
                           o = rows(o_, 0, n, q_heads_);
      must(keyhole_session_extend_batch(sessions_.data(), static_cast<uint32_t>(n), layer, &q, &kv,
                                        &kv, start_.data(), &o, nullptr, nullptr));
    });
  }
  double one_by_one() {
    return timed([&](uint32_t layer) {
      for (size_t i = 0; i < sessions_.size(); ++i) {
        const keyhole_tensor q = rows(q_, i, 1, q_heads_), kv = rows(kv_, i, 1, kHeads),
                             o = rows(o_, i, 1, q_heads_);
        must(keyhole_session_extend(sessions_[i], layer, &q, &kv, &kv, nullptr, &o, nullptr));
      }
    });
  }

 private:
  template <class Body>
  double timed(const Body& body) {
    const auto began = std::chrono::steady_clock::now();
    for (uint32_t layer = 0; layer < kLayers; ++layer) body(layer);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    for (keyhole_session* s : sessions_) {
      must(keyhole_session_truncate(s, static_cast<uint32_t>(statistics(s).tokens) - 1));
    }
    return took.count();
  }
  static keyhole_tensor rows(std::vector<float>& x, size_t first, int64_t n, int64_t heads) {
    const int64_t shape[] = {n, heads, kDim};
    float* const at = x.data() + first * static_cast<size_t>(heads * kDim);
    return keyhole_tensor_host(at, KEYHOLE_F32, 3, shape);
  }

  int64_t q_heads_;
  std::vector<keyhole_session*> sessions_;
  std::vector<uint32_t> start_{0};
  std::vector<float> kv_, q_, o_;
};

void batch(benchmark::State& state, const char* index) {
  constexpr int64_t kGroup = 4;
  const Session s(state.range(0), index, kGroup);
  Batch copies(s, kGroup, 16);
  (void)copies.together();
  (void)copies.one_by_one();
  double together = 0.0, one_by_one = 0.0;
  for (auto _ : state) {
    const double seconds = copies.together();
    state.SetIterationTime(seconds);
    together += seconds;
    one_by_one += copies.one_by_one();
  }
  state.counters["one_by_one_ms"] = 1e3 * one_by_one / static_cast<double>(state.iterations());
  state.counters["ratio"] = one_by_one / together;
}

void sizes(benchmark::internal::Benchmark* b) {
  b->Arg(8192)->Arg(131072)->UseRealTime()->Unit(benchmark::kMicrosecond);
}
BENCHMARK_CAPTURE(fork_session, codes, "codes:k=4,v=4")->Apply(sizes);
BENCHMARK_CAPTURE(fork_session, ivf, "ivf")->Apply(sizes);
BENCHMARK_CAPTURE(fork_session, sparq, "sparq")->Apply(sizes);
void batch_sizes(benchmark::internal::Benchmark* b) {
  b->Arg(32768)->UseManualTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(batch, codes2, "codes:k=2,v=2")->Apply(batch_sizes);
BENCHMARK_CAPTURE(batch, codes4, "codes:k=4,v=4")->Apply(batch_sizes);
BENCHMARK_CAPTURE(batch, lists4, "codes:k=4,v=4,lists=64")->Apply(batch_sizes);
BENCHMARK_CAPTURE(batch, exact, "exact")->Apply(batch_sizes);
BENCHMARK_CAPTURE(copy_floor, codes, "codes:k=4,v=4")->Apply(sizes);

}  // namespace

BENCHMARK_MAIN();
