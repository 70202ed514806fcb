// Time of exact attention of n new tokens of one layer behind 128k, of an 8B shape (32 query and 8 KV heads of 128), in f16:
// with the rows in pinned host memory, which they leave for each layer, beside a plain copy of them; and with the rows on the
// device. Argument: tokens of the context.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "gpu/blocked.h"
#include "gpu/device.h"

namespace {

using namespace keyhole;       // NOLINT
using namespace keyhole::gpu;  // NOLINT

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

/// Best of five, in microseconds.
double best_of(const std::function<void()>& work) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  float best = 1e9F;
  for (int i = 0; i < 5; ++i) {
    check(cudaEventRecord(begin), "record");
    work();
    check(cudaEventRecord(end), "record");
    check(cudaDeviceSynchronize(), "synchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    best = std::min(best, ms);
  }
  check(cudaEventDestroy(begin), "destroy");
  check(cudaEventDestroy(end), "destroy");
  return 1000.0 * static_cast<double>(best);
}

}  // namespace

int main(int argc, char** argv) {
  constexpr uint32_t kHeads = 32, kKvHeads = 8, kDim = 128;
  const uint32_t rows = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 131072;
  ResidentShape r;
  r.layers = 1;
  r.q_heads = kHeads;
  r.kv_heads = kKvHeads;
  r.head_dim = kDim;
  r.sink = 128;
  r.window = 512;
  r.window_capacity = 768;
  r.logits.scale = 1.0F / std::sqrt(static_cast<float>(kDim));
  BlockedShape shape{kHeads, kKvHeads, kDim, DType::f16};
  const auto cuda = make_cuda_device({});
  const auto resident = cuda->make_resident(r, std::make_shared<SessionOnDevice>());
  const auto blocked = cuda->make_blocked(*resident, shape);

  const size_t head_bytes = size_t{rows} * kDim * 2, plane = kKvHeads * head_bytes;
  std::byte *pinned = nullptr, *device = nullptr, *tokens = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&pinned), 2 * plane, cudaHostAllocDefault),
        "pinned memory");
  for (size_t i = 0; i < plane; ++i) {  // fp16 numbers around +-1
    reinterpret_cast<uint16_t*>(pinned)[i] =
        static_cast<uint16_t>(0x3800U + i * 2654435761U % 2048 + (i * 40503U & 0x8000U));
  }
  check(cudaMalloc(reinterpret_cast<void**>(&device), 2 * plane), "device memory");
  check(cudaMemcpy(device, pinned, 2 * plane, cudaMemcpyHostToDevice), "copy");
  const size_t token_bytes = size_t{kMostBlockedTokens} * kHeads * kDim * 2;
  check(cudaMalloc(reinterpret_cast<void**>(&tokens), 2 * token_bytes), "device memory");
  check(cudaMemcpy(tokens, pinned, std::min(token_bytes, 2 * plane), cudaMemcpyHostToDevice),
        "copy");

  const double copy = best_of(
      [&] { check(cudaMemcpyAsync(device, pinned, 2 * plane, cudaMemcpyHostToDevice), "copy"); });
  std::printf("%u tokens before, K and V %.0f MB; their copy to the device %.0f us\n", rows,
              static_cast<double>(plane) * 2e-6, copy);
  std::printf("%8s %14s %10s %14s %10s\n", "new", "from host us", "/ copy", "on device us",
              "TFLOP/s");
  for (const uint32_t n : {1U, 16U, 64U, 128U, 256U, 512U, 1024U, 2048U, 4096U}) {
    const auto time = [&](bool on_device) {
      const std::byte* const at = on_device ? device : pinned;
      return best_of([&] {
        const auto new_tokens = [&](std::byte* data, uint32_t heads) {
          return dense_tensor(data, n, heads, kDim, DType::f16, Memory::device);
        };
        const auto before = [&](const std::byte* data) {
          return RowsView{{.data = data,
                           .token_stride = kDim,
                           .head_stride = ptrdiff_t{rows} * kDim,
                           .tokens = rows,
                           .heads = kKvHeads,
                           .dim = kDim,
                           .dtype = DType::f16,
                           .memory = on_device ? Memory::device : Memory::pinned}};
        };
        const TensorView kv = new_tokens(tokens, kKvHeads);
        blocked->begin(new_tokens(tokens, kHeads), {r.logits}, nullptr);
        blocked->attend({before(at), before(at + plane)}, nullptr);
        blocked->attend_new(kv, kv, nullptr, nullptr);
        blocked->finish(new_tokens(tokens + token_bytes, kHeads), nullptr, nullptr);
      });
    };
    const double host = time(false), own = time(true);
    const double flops = 4.0 * n * (rows + n / 2.0) * kHeads * kDim;
    std::printf("%8u %14.0f %10.2f %14.0f %10.0f\n", n, host, host / copy, own, flops / own * 1e-6);
    std::fflush(stdout);
  }
  return 0;
}
