// Prefill's attention on the GPU in TFLOP/s, and a step's products in GB/s. Rates of the card's data sheet are no floor for
// kernels that use mma.sync.
#include <benchmark/benchmark.h>
#include <cuda_fp16.h>

#include <cmath>
#include <random>
#include <vector>

#include "tools/llama/cuda/attention.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/step_kernels.h"

namespace {

using namespace keyhole::tools::cuda;

template <class T, class Convert>
Buffer<T> random_numbers(size_t count, float spread, const Convert& convert) {
  // A quarter of a million numbers, over and over: tensor cores run at the same clock on them.
  std::mt19937 random(static_cast<uint32_t>(count));
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<T> values(count);
  constexpr size_t kDifferent = size_t{1} << 18;
  for (size_t i = 0; i < count; ++i) {
    values[i] = i < kDifferent ? convert(normal(random)) : values[i - kDifferent];
  }
  Buffer<T> buffer(count);
  copy_now(buffer.get(), values.data(), count);
  return buffer;
}
Buffer<__half> halves(size_t count, float spread = 1.0F) {
  return random_numbers<__half>(count, spread, [](float x) { return __float2half_rn(x); });
}
Buffer<__nv_bfloat16> bf16s(size_t count, float spread = 1.0F) {
  return random_numbers<__nv_bfloat16>(count, spread,
                                       [](float x) { return __float2bfloat16_rn(x); });
}
Buffer<float> floats(size_t count) {
  return random_numbers<float>(count, 1.0F, [](float x) { return x; });
}

/// Runs `launch` once per iteration, timed by the GPU.
template <class Launch>
void time(benchmark::State& state, const Launch& launch) {
  const Event begin(cudaEventDefault), end(cudaEventDefault);
  launch();
  for (auto _ : state) {
    begin.record(nullptr);
    launch();
    end.record(nullptr);
    end.wait();
    float milliseconds = 0.0F;
    check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "the clock");
    state.SetIterationTime(1e-3 * milliseconds);
  }
}
void rate(benchmark::State& state, const char* name, double count) {
  state.counters[name] = benchmark::Counter(count * static_cast<double>(state.iterations()),
                                            benchmark::Counter::kIsRate);
}

/// Attention with numbers of two fp16: the last `queries` of `tokens`, 8 query heads on 2 KV heads (the bundled
/// model) or 32 on 8.
void BM_Attention(benchmark::State& state) {
  const auto d = static_cast<uint32_t>(state.range(0));
  const auto heads = static_cast<uint32_t>(state.range(1));
  const auto tokens = static_cast<uint32_t>(state.range(2));
  const auto queries = static_cast<uint32_t>(state.range(3));
  const Buffer<__half> q = halves(size_t{queries} * heads * d);
  const Buffer<__half> k = halves(size_t{tokens} * heads / 4 * d);
  const Buffer<__half> v = halves(size_t{tokens} * heads / 4 * d);
  const Buffer<__nv_bfloat16> high(q.size()), low(q.size());
  AttentionArgs args;
  args.q = args.q_low = q.get();
  args.k = args.k_low = k.get();
  args.v = args.v_low = v.get();
  args.out = {high.get(), low.get()};
  args.first = tokens - queries;
  args.queries = queries;
  args.q_heads = heads;
  args.kv_heads = heads / 4;
  args.scale = 1.0F / std::sqrt(static_cast<float>(d));
  time(state, [&] { causal_attention(args, d, nullptr); });
  const double cells = queries * (args.first + 0.5 * queries);
  rate(state, "TFLOP/s", 1e-12 * 4.0 * cells * heads * d);
}
BENCHMARK(BM_Attention)
    ->ArgNames({"d", "heads", "tokens", "queries"})
    ->Args({128, 8, 32768, 32768})
    ->Args({128, 8, 131072, 8192})
    ->Args({128, 32, 32768, 32768})
    ->Args({64, 8, 32768, 32768})
    ->Args({256, 8, 32768, 32768})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

/// Gate and up of one token; the floor is a copy's rate.
void BM_StepProduct(benchmark::State& state) {
  const auto rows = static_cast<uint32_t>(state.range(0));
  const auto columns = static_cast<uint32_t>(state.range(1));
  const Buffer<__nv_bfloat16> w = bf16s(size_t{rows} * columns);
  const Buffer<float> x = floats(columns), weight = floats(columns), y(rows);
  time(state, [&] {
    step_gate_up({{w.get(), nullptr}, rows, columns}, x.get(), {weight.get(), 1e-5F}, y.get(),
                 nullptr);
  });
  rate(state, "GB/s", 1e-9 * 2.0 * rows * columns);
}
BENCHMARK(BM_StepProduct)
    ->ArgNames({"rows", "columns"})
    ->Args({2048, 384})
    ->Args({28672, 4096})
    ->Args({128256, 4096})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

void BM_Copy(benchmark::State& state) {
  const size_t count = size_t{1} << 28;
  const Buffer<char> from(count), to(count);
  time(state, [&] {
    check(cudaMemcpyAsync(to.get(), from.get(), count, cudaMemcpyDeviceToDevice, nullptr), "copy");
  });
  rate(state, "GB/s", 2e-9 * static_cast<double>(count));
}
BENCHMARK(BM_Copy)->UseManualTime()->Unit(benchmark::kMicrosecond);

}  // namespace
