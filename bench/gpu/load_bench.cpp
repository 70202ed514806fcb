// A saved session with codes on the device: how long until its first token after keyhole_session_load, by parts, beside
// the time in which the machine's threads copy the file's bytes into memory that nobody has touched. Shape of
// Llama-3-8B (8 KV heads with 4 query heads each, 128 components, f16), tensors in device memory; the file lies in
// memory (a page cache that is warm).
//
//   gpu_load_bench [tokens] [layers] [bits] [FOLDER]    131072 32 2 /dev/shm
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <keyhole/keyhole.h>
#include <keyhole/save.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "bench/gpu/session_rows.h"

namespace {

using namespace keyhole::bench;  // NOLINT
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// By all threads, 1 MiB at a time.
double copy_seconds(const std::string& path) {
  constexpr size_t kPiece = size_t{1} << 20;
  const size_t bytes = std::filesystem::file_size(path);
  const int file = open(path.c_str(), O_RDONLY);
  void* to = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  must(file >= 0 && to != MAP_FAILED, "the file");
  (void)madvise(to, bytes, MADV_HUGEPAGE);
  const size_t threads = std::thread::hardware_concurrency();
  const auto begin = Clock::now();
  std::vector<std::thread> workers;
  for (size_t w = 0; w < threads; ++w) {
    workers.emplace_back([&, w] {
      for (size_t at = w * kPiece; at < bytes; at += threads * kPiece) {
        must(pread(file, static_cast<char*>(to) + at, kPiece, static_cast<off_t>(at)) >= 0, "read");
      }
    });
  }
  for (std::thread& t : workers) t.join();
  const double seconds = seconds_since(begin);
  munmap(to, bytes);
  close(file);
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  const uint32_t tokens = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 131072;
  const uint32_t layers = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 32;
  const std::string bits = argc > 3 ? argv[3] : "2";
  const std::string path = std::string(argc > 4 ? argv[4] : "/dev/shm") + "/keyhole_load_bench";
  keyhole_engine* const engine = make_engine(layers);
  const std::string spec = codes_spec(bits);
  keyhole_session* session = make_session(engine, tokens + 512, spec);
  cudaStream_t stream;
  must(cudaStreamCreate(&stream) == cudaSuccess, "stream");
  must(keyhole_session_set_stream(session, stream) == KEYHOLE_OK, "stream");
  const Rows q(kChunk, kHeads), k(kChunk, kKvHeads), v(kChunk, kKvHeads), out(1, kHeads);
  fill(session, layers, tokens, q, k, v);
  const auto token = [&] {
    const keyhole_tensor tq = q.tensor(1), tk = k.tensor(1), tv = v.tensor(1), to = out.tensor(1);
    for (uint32_t l = 0; l < layers; ++l) {
      must(keyhole_session_attend(session, l, &tq, &tk, &tv, &to, nullptr) == KEYHOLE_OK, "attend");
    }
    must(cudaStreamSynchronize(stream) == cudaSuccess, "synchronize");
    must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
  };
  token();
  auto begin = Clock::now();
  must(keyhole_session_save(session, path.c_str()) == KEYHOLE_OK, "save");
  const double save = seconds_since(begin);
  keyhole_session_destroy(session);
  const double gib = static_cast<double>(std::filesystem::file_size(path)) / (1 << 30);
  const double copy = copy_seconds(path);

  begin = Clock::now();
  must(keyhole_session_load(engine, path.c_str(), nullptr, &session) == KEYHOLE_OK, "load");
  const double load = seconds_since(begin);
  must(keyhole_session_set_stream(session, stream) == KEYHOLE_OK, "stream");
  token();
  const double first = seconds_since(begin);
  begin = Clock::now();
  token();
  const double second = seconds_since(begin);
  std::printf("%u tokens, %u layers, %s: a file of %.1f GiB\n", tokens, layers, spec.c_str(), gib);
  std::printf("%28s %8.2f s\n%28s %8.2f s\n%28s %8.2f s\n%28s %8.2f s\n%28s %8.4f s\n", "save",
              save, "copy of the file's bytes", copy, "load", load, "load and first token", first,
              "second token", second);
  keyhole_session_destroy(session);
  keyhole_engine_destroy(engine);
  std::filesystem::remove(path);
  return 0;
}
