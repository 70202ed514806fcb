// Saving and loading a session of 1 GiB of K and V (8 layers, 8 KV heads of 128, 32768 tokens, f16) through the C API,
// beside the time in which as many threads copy the file's bytes into memory that nobody has touched.
//   KEYHOLE_BENCH_FOLDER=/dev/shm    where the file lies (the default)
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "keyhole/keyhole.h"
#include "keyhole/save.h"

namespace {

constexpr int64_t kLayers = 8, kHeads = 8, kDim = 128, kTokens = 32768, kChunk = 2048;

void must(keyhole_status status) {
  if (status == KEYHOLE_OK) return;
  std::fprintf(stderr, "%s\n", keyhole_last_error());
  std::exit(1);
}

struct Session {
  keyhole_engine* engine = nullptr;
  keyhole_session* session = nullptr;

  Session(uint32_t threads, const char* index) {
    keyhole_engine_config ec;
    keyhole_engine_config_init(&ec);
    ec.layers = kLayers;
    ec.q_heads = 4 * kHeads;
    ec.kv_heads = kHeads;
    ec.head_dim = kDim;
    ec.threads = threads;
    ec.device = KEYHOLE_DEVICE_HOST;
    must(keyhole_engine_create(&ec, &engine));
    keyhole_session_config sc;
    keyhole_session_config_init(&sc);
    sc.max_tokens = kTokens + kChunk;
    sc.index = index;
    must(keyhole_session_create(engine, &sc, &session));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> kv(kChunk * kHeads * kDim);
    for (float& x : kv) x = normal(random);
    const int64_t shape[] = {kChunk, kHeads, kDim};
    const keyhole_tensor t = keyhole_tensor_host(kv.data(), KEYHOLE_F32, 3, shape);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t at = 0; at < kTokens; at += kChunk) {
        must(keyhole_session_append(session, layer, &t, &t, nullptr));
      }
    }
    must(keyhole_session_build(session, nullptr, nullptr));
  }
  ~Session() {
    keyhole_session_destroy(session);
    keyhole_engine_destroy(engine);
  }
};

std::string file_name() {
  const char* folder = std::getenv("KEYHOLE_BENCH_FOLDER");
  return std::string(folder == nullptr ? "/dev/shm" : folder) + "/keyhole_session_bench";
}

void tell_bytes(benchmark::State& state, const std::string& path) {
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * bytes);
}

void save(benchmark::State& state, const char* index) {
  const Session s(static_cast<uint32_t>(state.range(0)), index);
  const std::string path = file_name();
  for (auto _ : state) must(keyhole_session_save(s.session, path.c_str()));
  tell_bytes(state, path);
  std::filesystem::remove(path);
}

void load(benchmark::State& state, const char* index) {
  const Session s(static_cast<uint32_t>(state.range(0)), index);
  const std::string path = file_name();
  must(keyhole_session_save(s.session, path.c_str()));
  keyhole_session* loaded = nullptr;
  // A machine that is virtual has its memory from the first load on.
  must(keyhole_session_load(s.engine, path.c_str(), nullptr, &loaded));
  keyhole_session_destroy(loaded);
  for (auto _ : state) {
    must(keyhole_session_load(s.engine, path.c_str(), nullptr, &loaded));
    state.PauseTiming();
    keyhole_session_destroy(loaded);
    state.ResumeTiming();
  }
  tell_bytes(state, path);
  std::filesystem::remove(path);
}

/// Nothing but the copy, which bounds the speed of a load.
void read_floor(benchmark::State& state) {
  const std::string path = file_name();
  const size_t bytes = size_t{1} << 30;
  const int out = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  const std::vector<char> piece(size_t{1} << 20, 'x');
  for (size_t at = 0; at < bytes; at += piece.size()) {
    if (write(out, piece.data(), piece.size()) != static_cast<ssize_t>(piece.size())) std::exit(1);
  }
  const auto threads = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    void* to = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)madvise(to, bytes, MADV_HUGEPAGE);
    std::vector<std::thread> workers;
    for (size_t w = 0; w < threads; ++w) {
      workers.emplace_back([&, w] {
        for (size_t at = w * piece.size(); at < bytes; at += threads * piece.size()) {
          if (pread(out, static_cast<char*>(to) + at, piece.size(), static_cast<off_t>(at)) < 0)
            std::exit(1);
        }
      });
    }
    for (std::thread& t : workers) t.join();
    state.PauseTiming();
    munmap(to, bytes);
    state.ResumeTiming();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
  close(out);
  std::filesystem::remove(path);
}

BENCHMARK_CAPTURE(save, flat, "flat")->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(load, flat, "flat")->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(save, codes, "codes:k=4,v=4")
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(load, codes, "codes:k=4,v=4")
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(read_floor)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
