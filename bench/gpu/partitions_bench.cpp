// What choosing and attending partitions takes per layer, each as a CUDA graph of all layers in turn, so that the
// L2 cache does not hold what a layer reads (Llama-3-8B shape at 128k keys: 26 MB a layer). Floors: the codes and
// values over the bandwidth of a copy within the device, measured in the same run.
//
//   gpu_partitions_bench [partitions] [chosen] [group] [layers] [dim] [in clusters: 0 or 1]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/partitions/cuda_partitions.h"
#include "gpu/device.h"

namespace {

using namespace keyhole;
using namespace keyhole::gpu;

constexpr uint32_t kKvHeads = 8;

uint32_t argument(int argc, char** argv, int i, uint32_t otherwise) {
  return argc > i ? static_cast<uint32_t>(std::atoi(argv[i])) : otherwise;
}

/// Median microseconds of a graph of what `enqueue` enqueues.
float time_graph(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  enqueue();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  constexpr int kWarm = 20;
  constexpr int kRuns = 41;
  std::vector<float> times;
  for (int i = 0; i < kWarm + kRuns; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(exec, stream), "launch");
    check(cudaEventRecord(end, stream), "event");
    check(cudaStreamSynchronize(stream), "graph");
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= kWarm) times.push_back(1000.0F * ms);
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  return times[kRuns / 2];
}

/// Bytes per microsecond that are read in a copy within the device; as many are written.
double copy_rate(cudaStream_t stream) {
  constexpr size_t kBytes = size_t{1} << 30;
  const DeviceBuffer from(kBytes);
  const DeviceBuffer to(kBytes);
  const float us = time_graph(stream, [&] {
    check(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream),
          "copy");
  });
  return 2.0 * static_cast<double>(kBytes) / static_cast<double>(us);
}

void run(int argc, char** argv) {
  PartitionsShape shape;
  const uint32_t partitions = argument(argc, argv, 1, 8192);
  const uint32_t chosen = argument(argc, argv, 2, 64);
  const uint32_t group = argument(argc, argv, 3, 4);
  shape.layers = argument(argc, argv, 4, 32);
  shape.head_dim = argument(argc, argv, 5, 128);
  shape.kv_heads = kKvHeads;
  shape.q_heads = kKvHeads * group;
  shape.partitions = partitions + 256;
  shape.most_chosen = std::max(chosen, 1U);
  shape.logits.scale = 0.088F;

  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const auto begin = std::chrono::steady_clock::now();
  double rate = copy_rate(stream);  // and again, until the clocks are up
  while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(500)) {
    rate = copy_rate(stream);
  }
  const bool may_cluster = argument(argc, argv, 6, 1) != 0;
  CudaPartitions device(shape, 0, may_cluster);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const size_t dim = shape.head_dim;
  std::vector<int8_t> keys(partitions * dim);
  std::vector<float> scales(dim, 0.02F);
  std::vector<float> center(dim, 0.1F);
  std::vector<float> sizes(partitions, 16.0F);
  std::vector<float> variances(partitions, 0.4F);
  std::vector<uint16_t> values(partitions * dim);
  for (auto& k : keys) k = static_cast<int8_t>(random() % 255 - 127);
  for (auto& v : values) v = static_cast<uint16_t>(0x3800U | random() % 1024);
  const auto before = std::chrono::steady_clock::now();
  for (uint32_t l = 0; l < shape.layers; ++l) {
    for (uint32_t k = 0; k < kKvHeads; ++k) {
      device.upload(l, k, 0,
                    {.count = partitions,
                     .keys = keys.data(),
                     .scales = scales.data(),
                     .center = center.data(),
                     .sizes = sizes.data(),
                     .variances = variances.data(),
                     .values = reinterpret_cast<const std::byte*>(values.data())});
      device.set(l, k, chosen, PartitionsTail::second);
    }
  }
  const std::chrono::duration<double> uploaded = std::chrono::steady_clock::now() - before;

  std::vector<float> q(shape.q_heads * dim);
  for (auto& x : q) x = 1.5F * normal(random);
  const DeviceBuffer queries(q.size() * sizeof(float));
  check(cudaMemcpy(queries.data(), q.data(), queries.bytes(), cudaMemcpyHostToDevice), "q");
  DeviceBuffer sequence(sizeof(uint32_t));
  sequence.clear();
  const DeviceRows rows{queries.data(), dim, DType::f32};
  const auto choose = [&](uint32_t l) { device.choose(l, rows, sequence.as<uint32_t>(), stream); };
  const auto layers = static_cast<float>(shape.layers);
  const float both = time_graph(stream,
                                [&] {
                                  for (uint32_t l = 0; l < shape.layers; ++l) {
                                    choose(l);
                                    device.attend(l, stream);
                                  }
                                }) /
                     layers;
  const float choices = time_graph(stream,
                                   [&] {
                                     for (uint32_t l = 0; l < shape.layers; ++l) choose(l);
                                   }) /
                        layers;
  const float tails = time_graph(stream,
                                 [&] {
                                   for (uint32_t l = 0; l < shape.layers; ++l)
                                     device.attend(l, stream);
                                 }) /
                      layers;

  const double code_bytes = double{kKvHeads} * partitions * static_cast<double>(dim + 8);
  const double value_bytes = double{kKvHeads} * partitions * static_cast<double>(2 * dim);
  std::printf(
      "%u partitions x %u KV heads x %u, d = %zu, %u chosen, %u layers%s; upload %.2f s; copy "
      "%.2f TB/s\n",
      partitions, kKvHeads, group, dim, chosen, shape.layers, may_cluster ? "" : ", no clusters",
      uploaded.count(), rate * 1e-6);
  std::printf(
      "  us per layer: choose %.2f (floor %.2f), attend %.2f (all values %.2f), both %.2f\n",
      choices, code_bytes / rate, tails, value_bytes / rate, both);
  std::fflush(stdout);

  // From the launch to the numbers of the first and of the last KV head on the host.
  std::vector<double> first;
  std::vector<double> last;
  uint32_t step = 0;
  const std::atomic<bool> stop{false};
  constexpr int kRuns = 41;
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t layer = static_cast<uint32_t>(i) % shape.layers;
    check(cudaMemcpy(sequence.data(), &++step, sizeof(step), cudaMemcpyHostToDevice), "sequence");
    check(cudaDeviceSynchronize(), "sequence");
    const auto start = std::chrono::steady_clock::now();
    choose(layer);
    double earliest = 1e30;
    double latest = 0.0;
    for (uint32_t k = 0; k < kKvHeads; ++k) {
      Chosen c;
      if (!device.await(layer, k, step + 1, 1'000'000, stop, c)) {
        std::fprintf(stderr, "no answer\n");
        std::exit(1);
      }
      const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - start;
      earliest = std::min(earliest, us.count());
      latest = std::max(latest, us.count());
    }
    first.push_back(earliest);
    last.push_back(latest);
    check(cudaStreamSynchronize(stream), "step");
  }
  std::nth_element(first.begin(), first.begin() + kRuns / 2, first.end());
  std::nth_element(last.begin(), last.begin() + kRuns / 2, last.end());
  (void)cudaStreamDestroy(stream);

  std::printf("  us from the launch to the numbers on the host: first KV head %.1f, last %.1f\n",
              first[kRuns / 2], last[kRuns / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (cuda_devices().empty()) {
    std::printf("%s\n", cuda_status().c_str());
    return 0;
  }
  try {
    run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
