// Resident attention and the hand-off to the host, per layer, in graphs of 32 layers of Llama-3-8B's shape (32
// query heads, 8 KV heads, 128 components, f16). Every layer has K and V of its own, so that no run finds them
// in the L2 cache. Floors, in the same run: a copy of the same bytes on the device; one flag's way over the bus
// and back.
//
//   gpu_resident_bench [repetitions]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "bench/gpu/flag_floor.h"
#include "bench/gpu/step_timing.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/device.h"

namespace {

using namespace keyhole;
using namespace keyhole::gpu;

constexpr uint32_t kLayers = 32;

ResidentShape shape_of(uint32_t tokens, uint32_t layers) {
  ResidentShape s;
  s.layers = layers;
  s.q_heads = 32;
  s.kv_heads = 8;
  s.head_dim = 128;
  s.sink = 128;
  s.window = tokens - s.sink;
  s.window_capacity = s.window;  // each step drops one token and takes one: the length stays
  s.logits.scale = 1.0F / std::sqrt(128.0F);
  return s;
}

std::vector<std::byte> random_rows(std::mt19937& rng, size_t elements) {
  // Bits of f16 numbers between -2 and 2: what they are does not matter, that they differ does.
  std::vector<std::byte> bytes(2 * elements);
  for (size_t i = 0; i < elements; ++i) {
    const uint32_t r = rng();
    bytes[2 * i] = static_cast<std::byte>(r & 0xffU);
    bytes[2 * i + 1] = static_cast<std::byte>(((r >> 8U) & 0x83U) | 0x38U);
  }
  return bytes;
}

struct Stream {
  Stream() { check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream"); }
  ~Stream() { (void)cudaStreamDestroy(s); }
  cudaStream_t s = nullptr;
};

/// A session whose layers are full, and tensors of one step.
struct Session {
  Session(uint32_t tokens, uint32_t layers)
      : shape(shape_of(tokens, layers)),
        resident(make_cuda_device({})->make_resident(shape, std::make_shared<SessionOnDevice>())),
        q(32 * 128 * 2),
        k(8 * 128 * 2),
        v(8 * 128 * 2),
        out(32 * 128 * 2) {
    std::mt19937 rng(1);
    const size_t token = size_t{8} * 128;
    const uint32_t chunk = std::min(tokens, 4096U);
    const auto rows = random_rows(rng, chunk * token);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      resident->append_sink(layer, rows.data(), rows.data(), shape.sink);
      for (uint32_t done = 0; done < shape.window; done += chunk) {
        const uint32_t n = std::min(chunk, shape.window - done);
        resident->append_window(layer, rows.data(), rows.data(), n);
      }
    }
    const auto fill = [&](const DeviceBuffer& to) {
      const auto bytes = random_rows(rng, to.bytes() / 2);
      check(cudaMemcpy(to.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "fill");
    };
    fill(q);
    fill(k);
    fill(v);
  }
  StreamSteps& steps() const { return *resident->stream_steps(); }
  void begin(uint32_t layer, cudaStream_t s) const {
    const TensorView key = rows(k), value = rows(v);
    steps().begin(layer, rows(q), &key, &value, {}, s);
  }
  void end(uint32_t layer, cudaStream_t s) const { steps().end(layer, rows(out), nullptr, s); }
  void step(uint32_t layer, cudaStream_t s) const {
    const TensorView key = rows(k), value = rows(v);
    steps().step(layer, rows(q), &key, &value, {}, rows(out), nullptr, s);
  }
  static TensorOut rows(const DeviceBuffer& b) {
    return dense_tensor(b.data(), 1, static_cast<uint32_t>(b.bytes() / 2 / 128), 128, DType::f16,
                        Memory::device);
  }

  ResidentShape shape;
  std::unique_ptr<Resident> resident;
  DeviceBuffer q, k, v, out;
};

void attention(uint32_t tokens, int repetitions) {
  const uint32_t layers = tokens > 60000 ? 8 : kLayers;
  const Session session(tokens, layers);
  const Stream stream;
  const size_t layer_bytes = size_t{tokens} * 8 * 128 * 2 * 2;
  const auto begins = captured(stream.s, [&] {
    for (uint32_t l = 0; l < layers; ++l) session.begin(l, stream.s);
  });
  const double us = median_us(stream.s, begins, repetitions) / layers;
  check(cudaGraphExecDestroy(begins), "graph");

  // A copy reads and writes: of half the bytes, it moves as many as the attention reads.
  const DeviceBuffer from(layer_bytes / 2 * layers), to(layer_bytes / 2 * layers);
  check(cudaMemset(from.data(), 0x5a, from.bytes()), "fill");
  const auto copies = captured(stream.s, [&] {
    for (uint32_t l = 0; l < layers; ++l) {
      check(cudaMemcpyAsync(to.data() + l * layer_bytes / 2, from.data() + l * layer_bytes / 2,
                            layer_bytes / 2, cudaMemcpyDeviceToDevice, stream.s),
            "copy");
    }
  });
  const double floor = median_us(stream.s, copies, repetitions) / layers;
  check(cudaGraphExecDestroy(copies), "graph");
  std::printf("resident %7u tokens  %8.2f us  %6.0f GB/s   copy %8.2f us  %6.0f GB/s   %4.2f x\n",
              tokens, us, layer_bytes / us * 1e-3, floor, layer_bytes / floor * 1e-3, us / floor);
}

void hand_off(uint32_t tokens, int repetitions) {
  const Session session(tokens, kLayers);
  if (session.steps().signal() != Signal::device_wait) {
    std::printf("hand-off: kernels cannot wait for the host here\n");
    return;
  }
  const Stream stream;
  const auto steps = captured(stream.s, [&] {
    for (uint32_t l = 0; l < kLayers; ++l) session.step(l, stream.s);
  });
  const auto pairs = captured(stream.s, [&] {
    for (uint32_t l = 0; l < kLayers; ++l) {
      session.begin(l, stream.s);
      session.end(l, stream.s);
    }
  });
  const auto begins = captured(stream.s, [&] {
    for (uint32_t l = 0; l < kLayers; ++l) session.begin(l, stream.s);
  });
  double fused = 0, apart = 0, alone = 0, waited = 0;
  {
    const Answerer host(session.steps(), session.shape);
    fused = median_us(stream.s, steps, repetitions) / kLayers;
    apart = median_us(stream.s, pairs, repetitions) / kLayers;
    const uint64_t merges = session.steps().merges(), ns = session.steps().wait_nanoseconds();
    waited = merges == 0 ? 0.0 : static_cast<double>(ns) / static_cast<double>(merges) * 1e-3;
    alone = median_us(stream.s, begins, repetitions) / kLayers;
  }
  std::printf(
      "hand-off %7u tokens  step() %6.2f us  begin()+end() %6.2f us  begin() %6.2f us  "
      "waited %5.2f us a merge\n",
      tokens, fused, apart, alone, waited);
}

}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 50;
  try {
    if (cuda_devices().empty()) {
      std::printf("no GPU: %s\n", cuda_status().c_str());
      return 0;
    }
    std::printf("flag to the host and back: %.2f us\n", flag_round_trip_ns(1000) * 1e-3);
    for (uint32_t tokens : {640U, 2048U}) hand_off(tokens, repetitions);
    for (uint32_t tokens : {640U, 2048U, 32768U, 131072U}) attention(tokens, repetitions);
  } catch (const Error& e) {
    std::printf("failed: %s\n", e.what());
    return 1;
  }
  return 0;
}
