// k-means on the device: points from pageable host memory, centroids and labels back, beside the same on one thread.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "gpu/device.h"
#include "gpu/kmeans.h"
#include "index/partitions/kmeans.h"

namespace {

template <class F>
double seconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure(size_t n, uint32_t dim, uint32_t clusters, uint32_t iterations, bool host_too) {
  using namespace keyhole;  // NOLINT
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> points(n * dim);
  for (float& x : points) x = normal(random);
  std::vector<float> centroids(size_t{clusters} * dim);
  std::vector<uint32_t> labels(n);
  const auto kmeans = gpu::make_cuda_device({})->make_kmeans({});
  const auto train = [&] {
    kmeans->train({points.data(), n, dim}, {.clusters = clusters, .iterations = iterations},
                  centroids.data(), labels.data());
  };
  const double first = seconds(train);
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) times.push_back(seconds(train));
  std::sort(times.begin(), times.end());
  double host = 0.0;
  if (host_too) {
    const index::Progress none;
    index::ProgressMeter meter(none, 1.0);
    index::Context context;
    context.kernels = &cpu::select_kernels();
    host = seconds([&] {
      (void)index::cluster_points(context, nullptr, points.data(), n, dim,
                                  {.clusters = clusters, .iterations = iterations}, meter);
    });
  }
  std::printf(
      "%7zu points, dim %3u, %5u clusters, %2u iterations: %8.2f ms (first %7.2f), host, 1 thread "
      "%9.1f ms\n",
      n, dim, clusters, iterations, times[2] * 1e3, first * 1e3, host * 1e3);
}

}  // namespace

int main() {
  if (keyhole::gpu::cuda_devices().empty()) {
    std::printf("%s\n", keyhole::gpu::cuda_status().c_str());
    return 0;
  }
  measure(131072, 128, 1024, 10, true);
  measure(131072, 128, 4096, 10, false);
  measure(8192, 128, 64, 5, true);
  measure(8192, 128, 512, 10, true);
  return 0;
}
