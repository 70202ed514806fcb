// Several new tokens at once in a session with codes on the device, tensors in device memory, by default in the shape
// of Llama-3-8B (8 KV heads with 4 query heads each, 128 components, f16): drafts in a graph, none of which is
// accepted, so that the context stays as long; and turns, which are attended at once or a few tokens at a time, as the
// library chooses. Microseconds a layer, beside one token; resident attention included. Drafts with the products of a
// layer beside: in the graph, too. Then longer turns, exactly and by a pattern of prompts, whose share of the blocks it
// says: numbers here are random, so that no choice by weight gives one that texts have. The default chooses as `auto`
// does, and attends the newest 10 % of 128k in place of what it has chosen. Beside drafts stands the share of the
// floor: the time in which a copy moves as many bytes as the layer's codes have. The products are those of Llama-3-8B
// in any shape. With a compute capability, such as 8.6, kernels are those of such devices on a newer one.
//
//   gpu_turn_bench [tokens] [layers] [bits] [pattern] [query heads] [KV heads] [components] [capability]
#include <cuda_runtime_api.h>
#include <keyhole/batch.h>
#include <keyhole/keyhole.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu/layer_products.h"
#include "bench/gpu/session_rows.h"
#include "cpu/code_layout.h"

namespace {

using namespace keyhole::bench;  // NOLINT

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

/// Bytes that a copy on the device moves in a microsecond, those read and those written.
double copied_bytes_per_us(cudaStream_t stream) {
  constexpr size_t kBytes = size_t{1} << 29U;
  void* memory = nullptr;
  must(cudaMalloc(&memory, 2 * kBytes) == cudaSuccess, "memory");
  auto* const to = static_cast<std::byte*>(memory) + kBytes;
  must(cudaMemsetAsync(memory, 0x5A, kBytes, stream) == cudaSuccess, "memory");
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess, "event");
  float best = 1e9F;
  for (int i = 0; i < 6; ++i) {
    (void)cudaEventRecord(begin, stream);
    must(cudaMemcpyAsync(to, memory, kBytes, cudaMemcpyDeviceToDevice, stream) == cudaSuccess,
         "copy");
    (void)cudaEventRecord(end, stream);
    must(cudaStreamSynchronize(stream) == cudaSuccess, "copy");
    float ms = 0;
    (void)cudaEventElapsedTime(&ms, begin, end);
    best = std::min(best, ms);
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  must(cudaFree(memory) == cudaSuccess, "memory");
  return 2.0 * static_cast<double>(kBytes) / (1000.0 * static_cast<double>(best));
}

}  // namespace

int main(int argc, char** argv) {
  const uint32_t tokens = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 131072;
  const uint32_t layers = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 8;
  const std::string bits = argc > 3 ? argv[3] : "2";
  const char* const pattern = argc > 4 ? argv[4] : "sampled:mass=0,near=13056,from=0";
  const auto number = [&](int i, uint32_t otherwise) {
    return argc > i ? static_cast<uint32_t>(std::atoi(argv[i])) : otherwise;
  };
  const Heads heads{number(5, kHeads), number(6, kKvHeads), number(7, kDim)};
  if (argc > 8) must(setenv("KEYHOLE_CUDA_CAPABILITY", argv[8], 1) == 0, "capability");
  constexpr uint32_t kMost = kChunk;
  keyhole_engine* const engine = make_engine(layers, heads);
  const std::string spec = codes_spec(bits);
  keyhole_session* const session = make_session(engine, tokens + 2 * kMost, spec);
  cudaStream_t stream;
  must(cudaStreamCreate(&stream) == cudaSuccess, "stream");
  must(keyhole_session_set_stream(session, stream) == KEYHOLE_OK, "stream");
  const double rate = copied_bytes_per_us(stream);
  const auto width = static_cast<uint32_t>(std::atoi(bits.c_str()));
  const keyhole::CodeShape shape{heads.dim, width, width};
  const double floor = static_cast<double>(size_t{heads.kv_heads} * (tokens / keyhole::kCodeBlock) *
                                           shape.block_bytes()) /
                       rate;
  const Rows q(kChunk, heads.heads, heads.dim), k(kChunk, heads.kv_heads, heads.dim),
      v(kChunk, heads.kv_heads, heads.dim), out(kMost, heads.heads, heads.dim);
  fill(session, layers, tokens, q, k, v);
  const auto extend = [&](uint32_t n, LayerProducts* products = nullptr) {
    const keyhole_tensor tq = q.tensor(n), tk = k.tensor(n), tv = v.tensor(n), to = out.tensor(n);
    for (uint32_t l = 0; l < layers; ++l) {
      if (products != nullptr) products->before(n, stream);
      must(keyhole_session_extend(session, l, &tq, &tk, &tv, nullptr, &to, nullptr) == KEYHOLE_OK,
           "extend");
      if (products != nullptr) products->after(n, stream);
    }
  };
  LayerProducts products(16);

  std::printf(
      "%u / %u heads of %u, %u tokens before, %u layers, %s; copies %.2f TB/s, floor %.1f us\n",
      heads.heads, heads.kv_heads, heads.dim, tokens, layers, spec.c_str(), rate * 1e-6, floor);
  std::printf("%8s %12s %8s %8s %14s %8s\n", "drafts", "us a layer", "/ one", "floor",
              "with products", "/ one");
  double one = 0, one_with = 0;
  const auto time = [&](uint32_t n, LayerProducts* with) {
    cudaGraph_t graph;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
         "capture");
    extend(n, with);
    must(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "capture");
    cudaGraphExec_t exec;
    must(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "graph");
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess, "event");
    std::vector<float> times;
    for (int i = 0; i < 25; ++i) {
      must(keyhole_session_announce(session) == KEYHOLE_OK, "announce");
      (void)cudaEventRecord(begin, stream);
      must(cudaGraphLaunch(exec, stream) == cudaSuccess, "launch");
      (void)cudaEventRecord(end, stream);
      must(keyhole_session_accept(session, 0, nullptr) == KEYHOLE_OK, "accept");
      must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
      float ms = 0;
      (void)cudaEventElapsedTime(&ms, begin, end);
      if (i >= 5) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    return 1000.0 * static_cast<double>(times[times.size() / 2]) / layers;
  };
  for (const uint32_t n : {1U, 2U, 4U, 8U, 16U}) {
    const double us = time(n, nullptr), with = time(n, &products);
    if (n == 1) one = us, one_with = with;
    std::printf("%8u %12.1f %8.2f %7.0f%% %14.1f %8.2f\n", n, us, us / one, 100.0 * floor / us,
                with, with / one_with);
    std::fflush(stdout);
  }
  std::printf("%8s %12s %8s %14s\n", "turn", "us a layer", "/ one", "as single steps");
  const auto time_turn = [&](uint32_t n) {
    double best = 1e12;
    for (int i = 0; i < 3; ++i) {
      const auto begin = Clock::now();
      extend(n);
      must(cudaStreamSynchronize(stream) == cudaSuccess, "synchronize");
      best = std::min(best, us_since(begin) / layers);
      must(keyhole_session_truncate(session, tokens) == KEYHOLE_OK, "truncate");
      must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
    }
    return best;
  };
  for (const uint32_t n : {32U, 128U, 256U, 512U, 1024U, 2048U}) {
    const double best = time_turn(n);
    std::printf("%8u %12.0f %8.1f %14.0f\n", n, best, best / one, n * one);
    std::fflush(stdout);
  }
  std::printf("%s\n%8s %12s %14s %8s %8s\n", pattern, "turn", "exact, us", "by pattern, us",
              "/ exact", "blocks");
  for (const uint32_t n : {128U, 512U, 1024U, 2048U, 4096U, 8192U}) {
    const auto time_by = [&](const char* text) {
      must(keyhole_session_set_extend_pattern(session, text, 1) == KEYHOLE_OK, "pattern");
      return time_turn(n);
    };
    const double exact = time_by("dense");
    uint64_t before[2] = {}, after[2] = {};
    must(keyhole_session_get_extend_blocks(session, &before[0], &before[1]) == KEYHOLE_OK,
         "blocks");
    const double us = time_by(pattern);
    must(keyhole_session_get_extend_blocks(session, &after[0], &after[1]) == KEYHOLE_OK, "blocks");
    const auto seen = static_cast<double>(after[1] - before[1]);
    std::printf("%8u %12.0f %14.0f %8.2f %7.1f%%\n", n, exact, us, us / exact,
                seen > 0 ? 100.0 * static_cast<double>(after[0] - before[0]) / seen : 100.0);
    std::fflush(stdout);
  }
  keyhole_session_destroy(session);
  keyhole_engine_destroy(engine);
  return 0;
}
