// A layer's step over codes where these cannot tell which rows weigh (gpu/cuda/codes/settle.cuh): 8 KV heads of 4
// query heads, d = 128, 131,072 random keys and values in pinned host memory, 16 rows of the budget, 8 steps in a
// graph. Arguments: `b=4` or `b=2` alone.
//
//   nats    standard deviation of the logits; `one` has it in one KV head, the others 1 nat
//   us      of a step; `asked not`: without the question and all that follows from it
//   heads   in doubt, of 8; gave up: that read more than an eighth of all rows
//   rows    read beside the 16, by a head in doubt
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "bench/gpu/step_timing.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/codes/encode.h"

namespace {

using namespace keyhole;       // NOLINT
using namespace keyhole::gpu;  // NOLINT

constexpr uint32_t kKvHeads = 8, kGroup = 4, kDim = 128, kTokens = 131072, kSteps = 8;

/// `n` zeros of T.
template <class T>
DeviceBuffer zeros(size_t n) {
  DeviceBuffer memory(n * sizeof(T));
  memory.clear();
  return memory;
}
DeviceBuffer copied(const void* from, size_t bytes) {
  DeviceBuffer memory(bytes);
  check(cudaMemcpy(memory.data(), from, bytes, cudaMemcpyHostToDevice), "copy");
  return memory;
}

/// Random fp16 numbers of either sign from 0.5 to 1, whose mean square is 7/12.
std::byte* random_rows(size_t bytes, uint64_t state) {
  std::byte* rows = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&rows), bytes, cudaHostAllocDefault), "pinned");
  for (size_t at = 0; at < bytes; at += 8) {
    state ^= state << 13U;
    state ^= state >> 7U;
    state ^= state << 17U;
    const uint64_t x = (state & 0x83ff83ff83ff83ffU) | 0x3800380038003800U;
    std::memcpy(rows + at, &x, 8);
  }
  return rows;
}

constexpr int kLaunches = 12;  // of a graph of kSteps steps

/// Microseconds of a step.
double time_steps(const CodesStep& step, cudaStream_t stream) {
  cudaGraphExec_t graph = captured(stream, [&] {
    for (uint32_t i = 0; i < kSteps; ++i) {
      check(attend_codes(step, stream, false), "attend");
      check(finish_codes(step, stream, true), "finish");
      check(settle_codes(step, stream), "settle");
    }
  });
  const double us = median_us(stream, graph, kLaunches - kWarmUpRuns);
  check(cudaGraphExecDestroy(graph), "destroy");
  return us / kSteps;
}

void table(uint32_t bits, const std::byte* keys, const std::byte* values, uint32_t processors,
           cudaStream_t stream) {
  constexpr uint32_t kBlocks = kTokens / kCodeBlock;
  CodesStep s;
  s.shape = {kDim, bits, bits};
  s.kv_heads = kKvHeads;
  s.group = kGroup;
  s.block_capacity = kBlocks;
  s.splits = code_splits(s.shape, kKvHeads, kGroup, kBlocks, processors);
  s.logits.scale = 1.0F / std::sqrt(static_cast<float>(kDim));
  s.head_stride = s.shape.block_bytes();
  s.block_stride = kKvHeads * s.head_stride;
  check(prepare_codes(s, 0), "prepare");
  const std::vector<float> ones(kKvHeads * kDim, 1.0F);
  const DeviceBuffer scales = copied(ones.data(), ones.size() * sizeof(float));
  s.key_scale = s.value_scale = scales.as<float>();
  const DeviceBuffer count = copied(&kBlocks, sizeof kBlocks);
  s.block_count = count.as<uint32_t>();
  const DeviceBuffer blocks = zeros<std::byte>(kBlocks * s.block_stride);
  s.blocks = blocks.data();
  s.exact_rows = 16;
  s.row_stride = kDim * 2;
  s.kv_head_stride = size_t{kTokens} * s.row_stride;
  s.keys = keys;
  s.values = values;
  const DeviceBuffer work = zeros<std::byte>(codes_work_bytes(s));
  s.work = work.data();
  const DeviceBuffer q = zeros<float>(kKvHeads * kGroup * kDim);
  const DeviceBuffer out = zeros<float>(kKvHeads * kGroup * kDim);
  s.q = dense_tensor(q.data(), 1, kKvHeads * kGroup, kDim, DType::f32, Memory::device);
  s.out = dense_tensor(out.data(), 1, kKvHeads * kGroup, kDim, DType::f32, Memory::device);
  const DeviceBuffer figures = zeros<CodeFigures>(kKvHeads);
  const DoubtLayout layout(kKvHeads, kGroup, kDim);
  DeviceBuffer memory = zeros<std::byte>(layout.bytes);

  EncodeParams p;
  p.shape = s.shape;
  p.kv_heads = kKvHeads;
  p.count = kBlocks;
  p.keys = keys;
  p.values = values;
  p.rows_stride = s.kv_head_stride;
  p.key_scale = p.value_scale = scales.as<float>();
  p.blocks = blocks.data();
  p.block_stride = s.block_stride;
  p.head_stride = s.head_stride;
  const DeviceBuffer arrivals = zeros<uint32_t>(size_t{kBlocks} * kKvHeads);
  p.arrivals = arrivals.as<uint32_t>();
  p.figures = figures.as<CodeFigures>();
  EncodeLauncher(s.shape, DType::f16).launch(p, stream);

  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  const auto row = [&](double nats, bool one) {
    std::vector<float> queries(kKvHeads * kGroup * kDim);
    for (uint32_t h = 0; h < kKvHeads * kGroup; ++h) {
      const double own = one && h >= kGroup ? 1.0 : nats;
      for (uint32_t j = 0; j < kDim; ++j) {
        queries[h * kDim + j] = normal(rng) * static_cast<float>(own / std::sqrt(7.0 / 12.0));
      }
    }
    check(cudaMemcpy(q.data(), queries.data(), queries.size() * 4, cudaMemcpyHostToDevice), "copy");
    s.doubt = {};
    const double plain = time_steps(s, stream);
    s.doubt = doubt_in(memory.data(), layout, figures.as<CodeFigures>());
    memory.clear();
    const double us = time_steps(s, stream);
    DoubtBoard board;
    check(cudaMemcpy(&board, memory.data(), sizeof board, cudaMemcpyDeviceToHost), "copy");
    const double steps = kLaunches * kSteps, doubted = static_cast<double>(board.doubted);
    std::printf("%6u %6.1f %4s %10.1f %10.1f %8.1f %8.1f %10.0f\n", bits, nats, one ? "one" : "all",
                plain, us, doubted / steps, static_cast<double>(board.given_up) / steps,
                doubted == 0.0 ? 0.0 : static_cast<double>(board.rows) / doubted);
    std::fflush(stdout);
  };
  row(1.0, false);
  for (const bool one : {true, false}) {
    for (const double nats : {3.0, 8.0, 20.0, 50.0}) row(nats, one);
  }
}

}  // namespace

int main(int argc, char** argv) {
  uint32_t only = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::sscanf(argv[i], "b=%u", &only) != 1) {
      std::fprintf(stderr, "%s: allowed is b=<bits>\n", argv[i]);
      return 1;
    }
  }
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, 0), "device");
  std::printf("%s, %d multiprocessors\n", prop.name, prop.multiProcessorCount);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  const size_t bytes = size_t{kKvHeads} * kTokens * kDim * 2;
  const std::byte *keys = random_rows(bytes, 1), *values = random_rows(bytes, 2);
  std::printf("%6s %6s %4s %10s %10s %8s %8s %10s\n", "bits", "nats", "in", "asked not", "us",
              "heads", "gave up", "rows");
  for (const uint32_t bits : {2U, 4U}) {
    if (only != 0 && bits != only) continue;
    table(bits, keys, values, static_cast<uint32_t>(prop.multiProcessorCount), stream);
  }
  return 0;
}
