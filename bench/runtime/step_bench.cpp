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

#include "keyhole/batch.h"
#include "keyhole/inspect.h"
#include "keyhole/keyhole.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kDim = 128;
constexpr size_t kCentres = 256;

void must(keyhole_status status) {
  if (status == KEYHOLE_OK) return;
  std::fprintf(stderr, "%s\n", keyhole_last_error());
  std::exit(1);
}

struct Layer {
  keyhole_engine* engine = nullptr;
  keyhole_session* session = nullptr;
  int64_t q_heads, kv_heads;
  std::vector<float> q, out;
  std::mt19937 random{1};
  std::vector<float> centres;

  Layer(uint32_t context, keyhole_mode mode, uint32_t threads, const char* index = nullptr,
        int64_t heads = 8, uint32_t append_block = 0, uint32_t grow = 16,
        keyhole_append_mode append_mode = KEYHOLE_APPEND_BACKGROUND, double audit_share = 0)
      : q_heads(4 * heads), kv_heads(heads) {
    q.resize(static_cast<size_t>(q_heads * kDim));
    out = q;
    std::normal_distribution<float> normal;
    centres.resize(kCentres * kDim);
    for (float& x : centres) x = normal(random);
    keyhole_engine_config ec;
    keyhole_engine_config_init(&ec);
    ec.layers = 1;
    ec.q_heads = static_cast<uint32_t>(q_heads);
    ec.kv_heads = static_cast<uint32_t>(kv_heads);
    ec.head_dim = kDim;
    ec.threads = threads;
    must(keyhole_engine_create(&ec, &engine));
    keyhole_session_config sc;
    keyhole_session_config_init(&sc);
    sc.max_tokens = context + grow;
    sc.index = index;
    sc.append_block = append_block;
    sc.append_mode = append_mode;
    sc.audit_share = audit_share;
    sc.mode = mode;
    sc.training_queries = index == nullptr ? 0 : 2048;
    must(keyhole_session_create(engine, &sc, &session));
    constexpr int64_t kChunk = 512;
    std::vector<float> kv(static_cast<size_t>(kChunk * kv_heads * kDim));
    std::vector<float> queries(static_cast<size_t>(kChunk * q_heads * kDim));
    for (uint32_t at = 0; at < context; at += kChunk) {
      fill(kv);
      fill(queries);
      const int64_t n = std::min<int64_t>(kChunk, context - at);
      const int64_t shape[] = {n, kv_heads, kDim};
      const int64_t q_shape[] = {n, q_heads, kDim};
      const keyhole_tensor t = keyhole_tensor_host(kv.data(), KEYHOLE_F32, 3, shape);
      const keyhole_tensor tq = keyhole_tensor_host(queries.data(), KEYHOLE_F32, 3, q_shape);
      must(keyhole_session_append(session, 0, &t, &t, index == nullptr ? nullptr : &tq));
    }
    if (index != nullptr) must(keyhole_session_build(session, nullptr, nullptr));
    fill(q);
  }
  ~Layer() {
    keyhole_session_destroy(session);
    keyhole_engine_destroy(engine);
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  /// Vectors around common centres: neither a text nor as hopeless for an index as plain noise.
  void fill(std::vector<float>& rows) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows.size(); i += kDim) {
      const float* centre = &centres[random() % kCentres * kDim];
      for (size_t j = 0; j < kDim; ++j) rows[i + j] = centre[j] + 0.7F * normal(random);
    }
  }

  /// `kv` NULL: attends without appending; else `[kv_heads, d]`, the K and V of a token.
  void step(const std::vector<float>* kv = nullptr) {
    const int64_t shape[] = {q_heads, kDim};
    const int64_t kv_shape[] = {kv_heads, kDim};
    const keyhole_tensor tq = keyhole_tensor_host(q.data(), KEYHOLE_F32, 2, shape);
    const keyhole_tensor to = keyhole_tensor_host(out.data(), KEYHOLE_F32, 2, shape);
    if (kv == nullptr)
      return must(keyhole_session_attend(session, 0, &tq, nullptr, nullptr, &to, nullptr));
    const keyhole_tensor t = keyhole_tensor_host(kv->data(), KEYHOLE_F32, 2, kv_shape);
    must(keyhole_session_attend(session, 0, &tq, &t, &t, &to, nullptr));
  }
};

/// n new tokens of one layer at once, which do not stay.
class NewTokens {
 public:
  NewTokens(Layer& layer, int64_t n)
      : layer_(&layer),
        n_(n),
        q_(static_cast<size_t>(n * layer.q_heads * kDim)),
        kv_(static_cast<size_t>(n * layer.kv_heads * kDim)),
        out_(q_.size()) {}
  void fill() {
    layer_->fill(q_);
    layer_->fill(kv_);
  }
  void extend() {
    const int64_t shape[] = {n_, layer_->q_heads, kDim}, kv_shape[] = {n_, layer_->kv_heads, kDim};
    const keyhole_tensor tq = keyhole_tensor_host(q_.data(), KEYHOLE_F32, 3, shape),
                         t = keyhole_tensor_host(kv_.data(), KEYHOLE_F32, 3, kv_shape),
                         to = keyhole_tensor_host(out_.data(), KEYHOLE_F32, 3, shape);
    must(keyhole_session_extend(layer_->session, 0, &tq, &t, &t, nullptr, &to, nullptr));
  }
  void forget() { must(keyhole_session_accept(layer_->session, 0, nullptr)); }

 private:
  Layer* layer_;
  int64_t n_;
  std::vector<float> q_, kv_, out_;
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
  const size_t bytes = size_t{context} * 8 * kDim * 2 * 2;
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

constexpr const char* kIndexes[] = {"flat", "ivf", "roargraph"};

// A step that searches: KV heads 8 and 1, the latter in parts.
void indexed(benchmark::State& state) {
  const char* index = kIndexes[state.range(0)];
  Layer layer(32768, KEYHOLE_MODE_INDEXED, static_cast<uint32_t>(state.range(2)), index,
              state.range(1));
  state.SetLabel(index);
  for (auto _ : state) {
    state.PauseTiming();
    layer.fill(layer.q);
    state.ResumeTiming();
    layer.step();
  }
}
BENCHMARK(indexed)
    ->ArgNames({"index", "kv_heads", "threads"})
    ->Apply([](benchmark::internal::Benchmark* b) {
      const unsigned most = std::max(2U, std::thread::hardware_concurrency());
      for (const int64_t index : {0, 1, 2}) {
        for (const int64_t heads : {1, 8}) {
          for (int64_t threads = 1; threads <= most; threads *= 2) b->Args({index, heads, threads});
        }
      }
    })
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

// Several tokens at once over 32k tokens, by the time of one call: drafts (1 to 16) by codes and by the best 100 keys,
// and a turn of 512 tokens exactly.
void several(benchmark::State& state) {
  constexpr const char* kWays[] = {"codes", "flat", "exact"};
  const auto way = static_cast<size_t>(state.range(0));
  const int64_t n = state.range(1);
  const bool is_exact = way == 2;
  Layer layer(32768, is_exact ? KEYHOLE_MODE_EXACT : KEYHOLE_MODE_INDEXED,
              static_cast<uint32_t>(state.range(2)), is_exact ? nullptr : kWays[way], 8, 0,
              static_cast<uint32_t>(n) + 16);
  NewTokens tokens(layer, n);
  state.SetLabel(kWays[way]);
  for (auto _ : state) {
    state.PauseTiming();
    tokens.fill();
    state.ResumeTiming();
    tokens.extend();
    state.PauseTiming();
    tokens.forget();
    state.ResumeTiming();
  }
  state.counters["us/token"] =
      benchmark::Counter(static_cast<double>(state.iterations() * n) / 1e6,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(several)
    ->ArgNames({"way", "tokens", "threads"})
    ->ArgsProduct({{0, 1}, {1, 4, 8, 16}, {1, 2}})
    ->ArgsProduct({{2}, {1, 512}, {2}})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

// Steps of a growing context, 10 ms apart like those of one layer of a model: median, 99th percentile and
// worst, with blocks appended beside the steps (0) or in them (1).
void growing(benchmark::State& state) {
  constexpr uint32_t kSteps = 1500;
  const auto mode = static_cast<keyhole_append_mode>(state.range(1));
  Layer layer(16384, KEYHOLE_MODE_INDEXED, 2, "roargraph", 2, static_cast<uint32_t>(state.range(0)),
              kSteps + 16, mode);
  std::vector<float> kv(static_cast<size_t>(layer.kv_heads * kDim));
  std::vector<double> times;
  for (auto _ : state) {
    for (uint32_t i = 0; i < kSteps; ++i) {
      layer.fill(layer.q);
      layer.fill(kv);
      const auto start = Clock::now();
      layer.step(&kv);
      times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  must(keyhole_session_get_statistics(layer.session, &s));
  std::sort(times.begin(), times.end());
  state.counters["median_us"] = 1e6 * times[times.size() / 2];
  state.counters["p99_us"] = 1e6 * times[times.size() * 99 / 100];
  state.counters["worst_us"] = 1e6 * times.back();
  state.counters["blocks"] = static_cast<double>(s.append_blocks);
  state.counters["waits"] = static_cast<double>(s.append_waits);
  state.counters["background_s"] = s.background_seconds;
}
BENCHMARK(growing)
    ->ArgNames({"append_block", "in_step"})
    ->ArgsProduct({{256, 1024}, {0, 1}})
    ->Iterations(1)
    ->Unit(benchmark::kSecond)
    ->UseRealTime();

/// Gives both layers the same new queries.
void layer_queries(Layer& a, Layer& b) {
  a.fill(a.q);
  b.q = a.q;
}

// What audits cost: turns of 50 steps each of two sessions that differ in nothing but the audits. A turn with
// audits ends when they are done. Between two steps a decoder has other things to do, on as many threads: 0, or
// as many microseconds of arithmetic.
void audited(benchmark::State& state) {
  constexpr int kSteps = 50;
  constexpr int kPairs = 30;
  const auto context = static_cast<uint32_t>(state.range(0));
  const auto threads = static_cast<uint32_t>(state.range(1));
  const double share = static_cast<double>(state.range(2)) / 1000.0;
  const auto others = std::chrono::microseconds(state.range(3));
  Layer plain(context, KEYHOLE_MODE_INDEXED, threads, "ivf");
  Layer audited(context, KEYHOLE_MODE_INDEXED, threads, "ivf", 8, 0, 16, KEYHOLE_APPEND_BACKGROUND,
                share);
  const auto busy = [&] {
    const auto until = Clock::now() + others;
    double x = 1.0;
    while (Clock::now() < until) benchmark::DoNotOptimize(x *= 1.0000001);
  };
  const auto turn = [&](Layer& layer) {
    const auto start = Clock::now();
    for (int i = 0; i < kSteps; ++i) {
      layer.step();
      std::vector<std::thread> pool;
      if (others.count() > 0) {
        for (uint32_t t = 1; t < threads; ++t) pool.emplace_back(busy);
        busy();
      }
      for (auto& t : pool) t.join();
    }
    keyhole_audit a;
    keyhole_audit_init(&a);
    must(keyhole_session_get_audit(layer.session, KEYHOLE_ALL, KEYHOLE_ALL, &a));
    return std::chrono::duration<double>(Clock::now() - start).count() / kSteps;
  };
  std::vector<double> without, ratios;
  for (auto _ : state) {
    for (int i = 0; i < kPairs; ++i) {
      layer_queries(plain, audited);
      const bool first = i % 2 == 0;
      const double a = turn(first ? plain : audited);
      const double b = turn(first ? audited : plain);
      without.push_back(first ? a : b);
      ratios.push_back(first ? b / a : a / b);
    }
  }
  keyhole_audit a;
  keyhole_audit_init(&a);
  must(keyhole_session_get_audit(audited.session, KEYHOLE_ALL, KEYHOLE_ALL, &a));
  state.counters["step_us"] = 1e6 * median(without);
  state.counters["with/without"] = median(ratios);
  state.counters["audits"] = static_cast<double>(a.audits) / 4.0;
  state.counters["waits"] = static_cast<double>(a.waits);
  state.counters["audit_ms"] =
      a.audits == 0 ? 0.0 : 4e3 * a.seconds / static_cast<double>(a.audits);
}
BENCHMARK(audited)
    ->ArgNames({"context", "threads", "audit_permille", "others_us"})
    ->ArgsProduct({{32768}, {1, 2}, {0, 10}, {0, 2000}})
    ->Iterations(1)
    ->Unit(benchmark::kSecond)
    ->UseRealTime();

}  // namespace
