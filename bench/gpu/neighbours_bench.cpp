// Exact neighbours on the device: time per call, beside its floor, the products on tensor cores.
//   neighbours_bench [queries keys dim most]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cpu/kernels.h"
#include "gpu/device.h"
#include "gpu/neighbours.h"

namespace {

using namespace keyhole;       // NOLINT
using namespace keyhole::gpu;  // NOLINT

void measure(const char* name, size_t m, size_t n, uint32_t dim, uint32_t most, DType type,
             bool host, bool limited, bool extra, uint32_t thin = 0) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const cpu::Kernels& kernels = cpu::select_kernels();
  // Random numbers of a long cycle that no dimension divides.
  std::vector<float> cycle(1048573);
  for (float& x : cycle) x = normal(random);
  const auto rows = [&](size_t count, size_t at) {
    std::vector<std::byte> out(count * dim * dtype_size(type));
    std::vector<float> row(dim);
    for (size_t i = 0; i < count; ++i) {
      for (float& x : row) {
        x = cycle[at % cycle.size()] + cycle[(at * 7 + i) % cycle.size()];
        ++at;
      }
      kernels.from_f32[static_cast<size_t>(type)](row.data(),
                                                  out.data() + i * dim * dtype_size(type), dim);
    }
    return out;
  };
  const std::vector<std::byte> keys = rows(n, 0);
  const std::vector<std::byte> queries = rows(m, 12345);
  std::vector<uint32_t> limits(m);
  for (size_t i = 0; i < m; ++i) limits[i] = static_cast<uint32_t>((i + 1) * n / m);
  std::vector<float> extras(std::max(m, n), 0.5F);
  std::vector<uint32_t> ids(m * most), counts(m);
  const auto on_device = [&](const void* from, size_t bytes) {
    void* p = nullptr;
    if (cudaMalloc(&p, bytes) != cudaSuccess) std::exit(1);
    (void)cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice);
    return p;
  };
  NeighbourTask task;
  task.keys = dense_rows(keys.data(), n, dim, type);
  task.queries = dense_rows(queries.data(), m, dim, type);
  task.most = most;
  task.thin = thin;
  if (limited) task.limits = limits.data();
  if (extra) task.key_extra = task.query_extra = extras.data();
  NeighbourLists lists = {ids.data(), nullptr, counts.data(), Memory::host};
  std::vector<void*> owned;
  if (!host) {
    owned = {
        on_device(keys.data(), keys.size()),         on_device(queries.data(), queries.size()),
        on_device(ids.data(), ids.size() * 4),       on_device(counts.data(), counts.size() * 4),
        on_device(limits.data(), limits.size() * 4), on_device(extras.data(), extras.size() * 4)};
    task.keys.data = static_cast<const std::byte*>(owned[0]);
    task.queries.data = static_cast<const std::byte*>(owned[1]);
    task.keys.memory = task.queries.memory = lists.in = Memory::device;
    lists.ids = static_cast<uint32_t*>(owned[2]);
    lists.counts = static_cast<uint32_t*>(owned[3]);
    if (limited) task.limits = static_cast<const uint32_t*>(owned[4]);
    if (extra) task.key_extra = task.query_extra = static_cast<const float*>(owned[5]);
  }
  const auto search = make_cuda_device({})->make_neighbours({});
  std::vector<double> times;
  for (int i = 0; i < 12; ++i) {
    const auto start = std::chrono::steady_clock::now();
    search->run(task, lists);
    times.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const double first = times[0];
  std::sort(times.begin(), times.end());
  const double flops =
      2.0 * static_cast<double>(m) * static_cast<double>(n) * dim * (limited ? 0.5 : 1.0);
  const double median = times[times.size() / 2];
  std::printf(
      "%-28s %7zu %7zu %4u %4u %5s %8.3f ms (first %7.2f, best %7.3f) %7.1f TFLOP/s  passed/query "
      "%6.1f repeated %llu  %4zu MiB\n",
      name, m, n, dim, most, dtype_name(type), median * 1e3, first * 1e3, times[0] * 1e3,
      flops / median * 1e-12,
      static_cast<double>(search->figures().passed) / static_cast<double>(m),
      static_cast<unsigned long long>(search->figures().repeated), search->bytes() >> 20U);
  for (void* p : owned) (void)cudaFree(p);
}

}  // namespace

int main(int argc, char** argv) {
  if (cuda_devices().empty()) {
    std::printf("%s\n", cuda_status().c_str());
    return 0;
  }
  if (argc == 5) {
    measure("as asked", std::strtoul(argv[1], nullptr, 10), std::strtoul(argv[2], nullptr, 10),
            static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10)),
            static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10)), DType::f16, false, false,
            false);
    return 0;
  }
  std::printf("%-28s %7s %7s %4s %4s %5s\n", "", "queries", "keys", "dim", "N", "dtype");
  measure("on the device", 8192, 131072, 128, 100, DType::f16, false, false, false);
  measure("on the device", 8192, 131072, 128, 100, DType::bf16, false, false, false);
  measure("on the device", 8192, 131072, 128, 100, DType::f32, false, false, false);
  measure("on the device, lifted", 8192, 131072, 128, 100, DType::f16, false, false, true);
  measure("on the device, N = 1", 8192, 131072, 128, 1, DType::f16, false, false, false);
  measure("on the device", 8192, 131072, 64, 100, DType::f16, false, false, false);
  measure("on the device", 8192, 131072, 256, 100, DType::f16, false, false, false);
  measure("on the device, causal", 4096, 131072, 128, 100, DType::f16, false, true, false);
  measure("from the host, causal", 4096, 131072, 128, 100, DType::f16, true, true, false);
  measure("from the host", 8192, 131072, 128, 100, DType::f16, true, false, false);
  measure("every key, from the host", 131072, 131072, 128, 100, DType::f16, true, false, true);
  measure("the same, thinned to 32", 131072, 131072, 128, 100, DType::f16, true, false, true, 32);
  measure("on the device, 1M keys", 8192, 1048576, 128, 100, DType::f16, false, false, false);
  return 0;
}
