// A session's work with codes on the device, 32 layers of Llama-3-8B's shape (32 query heads, 8 KV heads, 128 components,
// f16): pinning its store, encoding a prompt from there, encoding one block a layer as a decoding session does every 256
// tokens, and whole steps (640 resident tokens, a host that takes what is published) in a graph. Floors, in the same run: a
// copy of the same bytes over the bus; steps without offloaded tokens.
//
//   gpu_codes_session_bench [repetitions]
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "bench/gpu/step_timing.h"
#include "gpu/codes.h"
#include "gpu/cuda/common/host_pin.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/device.h"

namespace {

using namespace keyhole;
using namespace keyhole::gpu;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kLayers = 32, kQHeads = 32, kKvHeads = 8, kDim = 128;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Pages in the manner of a store; random f16 numbers between -2 and 2.
class Store {
 public:
  explicit Store(size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    if (data_ == MAP_FAILED) throw Error(Status::out_of_memory, "no memory for rows");
    (void)madvise(data_, bytes, MADV_HUGEPAGE);
    uint64_t state = 1;
    for (size_t at = 0; at < bytes; at += 8) {
      state ^= state << 13U;
      state ^= state >> 7U;
      state ^= state << 17U;
      const uint64_t x = (state & 0x83ff83ff83ff83ffU) | 0x3800380038003800U;
      __builtin_memcpy(data_ + at, &x, 8);
    }
  }
  ~Store() { munmap(data_, bytes_); }
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  std::byte* data_;
};

struct Tensors {
  DeviceBuffer q{kQHeads * kDim * 2}, k{kKvHeads * kDim * 2}, v{kKvHeads * kDim * 2},
      out{kQHeads * kDim * 2};
  explicit Tensors(const Store& store) {
    for (const DeviceBuffer* b : {&q, &k, &v}) {
      check(cudaMemcpy(b->data(), store.data(), b->bytes(), cudaMemcpyHostToDevice), "fill");
    }
  }
};

void session(uint32_t tokens, uint32_t bits, const Store& keys, const Store& values,
             cudaStream_t stream, int repetitions) {
  ResidentShape r;
  r.layers = kLayers;
  r.q_heads = kQHeads;
  r.kv_heads = kKvHeads;
  r.head_dim = kDim;
  r.sink = 128;
  r.window = r.window_capacity = 512;
  r.logits.scale = 1.0F / std::sqrt(static_cast<float>(kDim));
  CodesShape c;
  c.layers = kLayers;
  c.q_heads = kQHeads;
  c.kv_heads = kKvHeads;
  c.code = {kDim, bits, bits};
  c.blocks = tokens / kCodeBlock;
  c.exact_rows = 16;
  c.logits = r.logits;
  const auto device = make_cuda_device({});
  const auto resident = device->make_resident(r, std::make_shared<SessionOnDevice>());
  const auto codes = device->make_codes(*resident, c);
  const Tensors t(keys);
  const std::vector<float> scale(kDim, 1.0F);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    resident->append_sink(layer, keys.data(), values.data(), r.sink);
    resident->append_window(layer, keys.data(), values.data(), r.window);
    const auto rows = [&](const Store& of) {
      return RowsView{{.data = of.data(),
                       .token_stride = kDim,
                       .head_stride = ptrdiff_t{tokens} * kDim,
                       .heads = kKvHeads,
                       .dim = kDim,
                       .dtype = DType::f16}};
    };
    codes->set_rows(layer, {rows(keys), rows(values)});
    for (uint32_t h = 0; h < kKvHeads; ++h) codes->set_balance(layer, h, scale.data(), 1.0F);
  }
  const double whole = median_us(stream, 5, [&] { codes->encode(0, 0, c.blocks, stream); });
  const double bytes = 2.0 * kKvHeads * tokens * kDim * 2;
  for (uint32_t layer = 0; layer < kLayers; ++layer) codes->encode(layer, 0, c.blocks, stream);
  const double block = median_us(stream, repetitions, [&] {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      codes->encode(layer, c.blocks - 1, 1, stream);
    }
  });
  const auto rows = [](const DeviceBuffer& b) {
    return dense_tensor(b.data(), 1, static_cast<uint32_t>(b.bytes() / 2 / kDim), kDim, DType::f16,
                        Memory::device);
  };
  const TensorView k = rows(t.k), v = rows(t.v);
  StreamSteps& steps = *resident->stream_steps();
  const auto graph_of = [&](const OnDevice& on_device) {
    return captured(stream, [&] {
      for (uint32_t l = 0; l < kLayers; ++l) {
        steps.step(l, rows(t.q), &k, &v, on_device, rows(t.out), nullptr, stream);
      }
    });
  };
  const auto with = graph_of({codes.get()}), without = graph_of({});
  double step = 0, alone = 0;
  {
    const Answerer host(steps, r);
    step = median_us(stream, with, repetitions);
    alone = median_us(stream, without, repetitions);
  }
  std::printf(
      "%7u tokens, %u bits: encode %8.0f us a layer, %5.1f GB/s; one block %6.1f us a layer; step "
      "%6.2f us a layer, without offloaded tokens %6.2f us\n",
      tokens, bits, whole, bytes / whole * 1e-3, block / kLayers, step / kLayers, alone / kLayers);
  check(cudaGraphExecDestroy(with), "graph");
  check(cudaGraphExecDestroy(without), "graph");
}

}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 50;
  try {
    if (cuda_devices().empty()) {
      std::printf("no GPU: %s\n", cuda_status().c_str());
      return 0;
    }
    constexpr uint32_t kMostTokens = 131072;
    const Store keys(size_t{kMostTokens} * kKvHeads * kDim * 2), values(keys.bytes());
    HostPin pin;
    check(cudaFree(nullptr), "the device's context");  // else the first pinned range makes it
    auto begin = Clock::now();
    pin.add(keys.data(), keys.bytes());
    pin.add(values.data(), values.bytes());
    std::printf("pinning %zu MiB that were written: %.1f GB/s\n", pin.bytes() >> 20U,
                static_cast<double>(pin.bytes()) / seconds_since(begin) * 1e-9);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    {
      const DeviceBuffer to(keys.bytes());
      const double us = median_us(stream, 5, [&] {
        for (const Store* from : {&keys, &values}) {
          check(
              cudaMemcpyAsync(to.data(), from->data(), to.bytes(), cudaMemcpyHostToDevice, stream),
              "copy");
        }
      });
      std::printf("copy of the same bytes: %8.0f us, %5.1f GB/s\n", us,
                  static_cast<double>(pin.bytes()) / us * 1e-3);
    }
    for (uint32_t tokens : {32768U, kMostTokens}) {
      session(tokens, 2, keys, values, stream, repetitions);
      session(tokens, 4, keys, values, stream, repetitions);
    }
    begin = Clock::now();
    pin.drop(nullptr, nullptr);
    std::printf("dropping the pins: %.3f s\n", seconds_since(begin));
    check(cudaStreamDestroy(stream), "stream");
  } catch (const Error& e) {
    std::printf("failed: %s\n", e.what());
    return 1;
  }
  return 0;
}
