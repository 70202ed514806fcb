// The order of k-means: points in blocks, on the device for good where they fit, else once per iteration.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/staging.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/common/supported_device.h"
#include "gpu/cuda/indexing/kmeans_kernels.h"
#include "gpu/cuda/indexing/neighbour_kernels.h"
#include "gpu/cuda/indexing/workspaces.h"

namespace keyhole::gpu {
namespace {

constexpr size_t kMemoryLimit = size_t{1} << 30U;
constexpr size_t kPointsPerCluster = 256;  // more do not move the centroids noticeably
constexpr size_t kMostBlock = 131072;      // points
constexpr size_t kMostPoints = size_t{1} << 31U;
constexpr int kFixedBits = 40;         // of the largest element of a point
constexpr int kSumBits = 62;           // of a sum
constexpr float kSplit = 1.0F / 1024;  // how far the halves of a cluster are moved apart

/// Returns `count` of the numbers [0, n) in random order, the same for the same seed.
std::vector<size_t> random_choice(size_t n, size_t count, uint32_t seed) {
  std::vector<size_t> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = i;
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < count; ++i) std::swap(order[i], order[i + random() % (n - i)]);
  order.resize(count);
  return order;
}

void normalise(float* row, uint32_t dim) {
  double sum = 0.0;
  for (uint32_t j = 0; j < dim; ++j) sum += double{row[j]} * row[j];
  if (sum <= 0.0) return;
  const double scale = 1.0 / std::sqrt(sum);
  for (uint32_t j = 0; j < dim; ++j) row[j] = static_cast<float>(row[j] * scale);
}

class CudaKMeans final : public KMeans {
 public:
  CudaKMeans(int ordinal, const KMeansConfig& config)
      : ordinal_(ordinal), config_(config), use_(std::make_unique<DeviceScope>(ordinal)) {
    if (config_.memory_limit == 0) config_.memory_limit = kMemoryLimit;
    use_.reset();
  }

  void train(const KMeansPoints& points, const KMeansTraining& training, float* centroids,
             uint32_t* labels) override {
    check_points(points);
    if (training.clusters < 1 || training.clusters > points.count) {
      throw Error(Status::invalid_argument,
                  "k-means: clusters is " + std::to_string(training.clusters) + ", allowed: 1.." +
                      std::to_string(points.count) + " (the points)");
    }
    guarded([&] { iterate(points, training, centroids, labels); });
  }

  void assign(const KMeansPoints& points, const float* centroids, const float* offsets, size_t n,
              uint32_t* labels) override {
    check_points(points);
    if (n < 1 || n > kMostPoints) {
      throw Error(Status::invalid_argument,
                  "k-means: " + std::to_string(n) + " centroids, allowed: 1..2^31");
    }
    guarded([&] {
      std::vector<float> halves;
      if (offsets == nullptr) {
        halves = half_squares(centroids, n, points.dim);
        offsets = halves.data();
      }
      set_centroids(centroids, offsets, n, points.dim);
      label_all(points, n, labels, choose_block(points.dim, points.count), false);
    });
  }

  [[nodiscard]] size_t bytes() const override {
    size_t sum = 0;
    for (const ScratchBuffer* s : {&raw_, &points_, &labels_, &centroids_, &centroid_planes_,
                                   &offsets_, &sums_, &sizes_, &largest_}) {
      sum += s->bytes();
    }
    return sum;
  }

 private:
  static void check_points(const KMeansPoints& points) {
    if (!is_device_index_dim(points.dim)) {
      throw Error(Status::invalid_argument, "k-means: dim is " + std::to_string(points.dim) +
                                                ", allowed: 64, 80, 96, 128, 256");
    }
    if (points.count > kMostPoints) {
      throw Error(Status::invalid_argument, "k-means: more than 2^31 points");
    }
  }
  template <class F>
  void guarded(F&& f) {
    const DeviceScope use(ordinal_);
    try {
      f();
    } catch (...) {
      (void)cudaStreamSynchronize(stream_.get());
      throw;
    }
  }
  static std::vector<float> half_squares(const float* rows, size_t n, uint32_t dim) {
    std::vector<float> out(n);
    for (size_t c = 0; c < n; ++c) {
      double sum = 0.0;
      for (uint32_t j = 0; j < dim; ++j) sum += double{rows[c * dim + j]} * rows[c * dim + j];
      out[c] = static_cast<float>(sum / 2);
    }
    return out;
  }

  /// Points of a block: all where they fit.
  [[nodiscard]] size_t choose_block(uint32_t dim, size_t count) const {
    const size_t most = std::max<size_t>(config_.memory_limit / (size_t{10} * dim + 4), 1024);
    return std::max<size_t>(std::min({count, most, kMostBlock}), 1);
  }

  /// Points [first, first + n) to place `at` of points_.
  void load(const float* from, size_t n, uint32_t dim, size_t at) {
    staging_.send(dense_rows(from, n, dim, DType::f32), raw_.as<std::byte>(), stream_.get());
    check(launch_convert(dense_rows(raw_.as<std::byte>(), n, dim, DType::f32), DType::f32,
                         points_.as<uint16_t>() + at * dim * 3, nullptr, nullptr, stream_.get()),
          "converting points");
  }
  void set_centroids(const float* centroids, const float* offsets, size_t n, uint32_t dim) {
    float* to = centroids_.reserve_of<float>(n * dim);
    uint16_t* planes = centroid_planes_.reserve_of<uint16_t>(n * dim * 3);
    // Pageable memory: the calls return when they have read it.
    check(cudaMemcpyAsync(to, centroids, n * dim * sizeof(float), cudaMemcpyHostToDevice,
                          stream_.get()),
          "copying centroids");
    check(cudaMemcpyAsync(offsets_.reserve_of<float>(n), offsets, n * sizeof(float),
                          cudaMemcpyHostToDevice, stream_.get()),
          "copying centroids");
    check(launch_convert(dense_rows(to, n, dim, DType::f32), DType::f32, planes, nullptr, nullptr,
                         stream_.get()),
          "converting centroids");
  }
  void label(size_t at, size_t n, uint32_t dim, size_t clusters) {
    check(
        launch_assign(points_.as<uint16_t>() + at * dim * 3, static_cast<uint32_t>(n), dim,
                      centroid_planes_.as<uint16_t>(), offsets_.as<float>(),
                      static_cast<uint32_t>(clusters), labels_.as<uint32_t>() + at, stream_.get()),
        "assigning points");
  }
  /// loaded: all points are in points_ already, in their order.
  void label_all(const KMeansPoints& points, size_t clusters, uint32_t* labels, size_t block,
                 bool loaded) {
    const size_t n = points.count;
    if (!loaded) reserve_points(block, block, points.dim);
    for (size_t first = 0; first < n; first += block) {
      const size_t size = std::min(block, n - first);
      const size_t at = loaded ? first : 0;
      if (!loaded) load(points.data + first * points.dim, size, points.dim, 0);
      label(at, size, points.dim, clusters);
      check(cudaMemcpyAsync(labels + first, labels_.as<uint32_t>() + at, size * sizeof(uint32_t),
                            cudaMemcpyDeviceToHost, stream_.get()),
            "copying labels");
    }
    stream_.wait();
  }
  void reserve_points(size_t n, size_t block, uint32_t dim) {
    raw_.reserve_of<float>(block * dim);
    points_.reserve_of<uint16_t>(n * dim * 3);
    labels_.reserve_of<uint32_t>(n);
  }

  void iterate(const KMeansPoints& points, const KMeansTraining& training, float* centroids,
               uint32_t* labels);
  /// Computes new centroids from the sums; returns, for clusters that were empty, centroids split off others.
  void update(const KMeansTraining& training, uint32_t dim, double scale, float* centroids);

  int ordinal_;
  KMeansConfig config_;
  std::unique_ptr<DeviceScope> use_;  // while members are made, and no longer
  OwnStream stream_;
  Staging staging_{2};
  ScratchBuffer raw_, points_, labels_, centroids_, centroid_planes_, offsets_, sums_, sizes_,
      largest_;
};

void CudaKMeans::iterate(const KMeansPoints& points, const KMeansTraining& training,
                         float* centroids, uint32_t* labels) {
  const uint32_t dim = points.dim;
  const size_t clusters = training.clusters;
  const size_t n = std::min(points.count, clusters * kPointsPerCluster);
  const bool all = n == points.count;
  // A random order: the first of it are the first centroids, and all of it is the sample.
  const std::vector<size_t> order = random_choice(points.count, all ? clusters : n, training.seed);
  for (size_t c = 0; c < clusters; ++c) {
    std::memcpy(centroids + c * dim, points.data + order[c] * dim, dim * sizeof(float));
    if (training.spherical) normalise(centroids + c * dim, dim);
  }
  std::vector<float> gathered;  // one block of the sample
  const size_t block = choose_block(dim, n);
  const size_t left = config_.memory_limit - std::min(config_.memory_limit, block * dim * 4);
  const bool stays = n * (size_t{6} * dim + 4) <= left;
  reserve_points(stays ? n : block, block, dim);
  auto* largest = largest_.reserve_of<uint32_t>(1);
  const auto load_block = [&](size_t first, size_t size) {
    const float* from = points.data + first * dim;
    if (!all) {
      gathered.resize(block * dim);
      for (size_t i = 0; i < size; ++i) {
        std::memcpy(gathered.data() + i * dim, points.data + order[first + i] * dim,
                    dim * sizeof(float));
      }
      from = gathered.data();
    }
    load(from, size, dim, stays ? first : 0);
  };

  // The scale of the sums needs the largest element of all.
  check(cudaMemsetAsync(largest, 0, sizeof(uint32_t), stream_.get()), "clearing a number");
  for (size_t first = 0; first < n; first += block) {
    const size_t size = std::min(block, n - first);
    load_block(first, size);
    check(launch_largest(raw_.as<float>(), size * dim, largest, stream_.get()),
          "finding the largest element");
  }
  uint32_t bits = 0;
  check(cudaMemcpyAsync(&bits, largest, sizeof bits, cudaMemcpyDeviceToHost, stream_.get()),
        "copying from the device");
  stream_.wait();
  float most = 0.0F;
  std::memcpy(&most, &bits, sizeof most);
  if (!std::isfinite(most)) throw Error(Status::not_finite, "k-means: a point is not finite");
  const int spare = kSumBits - static_cast<int>(std::ceil(std::log2(static_cast<double>(n) + 1)));
  const double scale =
      std::ldexp(1.0, std::min(kFixedBits, spare) - (most > 0.0F ? std::ilogb(most) + 1 : 0));

  auto* sums = sums_.reserve_of<long long>(clusters * dim);
  auto* sizes = sizes_.reserve_of<uint32_t>(clusters);
  const auto use_centroids = [&] {
    const std::vector<float> offsets = training.spherical ? std::vector<float>(clusters, 0.0F)
                                                          : half_squares(centroids, clusters, dim);
    set_centroids(centroids, offsets.data(), clusters, dim);
  };
  for (uint32_t i = 0; i < training.iterations; ++i) {
    use_centroids();
    check(cudaMemsetAsync(sums, 0, clusters * dim * sizeof(long long), stream_.get()),
          "clearing sums");
    check(cudaMemsetAsync(sizes, 0, clusters * sizeof(uint32_t), stream_.get()), "clearing sums");
    for (size_t first = 0; first < n; first += block) {
      const size_t size = std::min(block, n - first);
      const size_t at = stays ? first : 0;
      if (!stays) load_block(first, size);
      label(at, size, dim, clusters);
      check(launch_accumulate(points_.as<uint16_t>() + at * dim * 3, static_cast<uint32_t>(size),
                              dim, labels_.as<uint32_t>() + at, scale, sums, sizes, stream_.get()),
            "adding points up");
    }
    update(training, dim, scale, centroids);
  }
  if (labels == nullptr) return;
  use_centroids();
  label_all(points, clusters, labels, block, stays && all);
}

void CudaKMeans::update(const KMeansTraining& training, uint32_t dim, double scale,
                        float* centroids) {
  const size_t clusters = training.clusters;
  std::vector<long long> sums(clusters * dim);
  std::vector<uint32_t> sizes(clusters);
  check(cudaMemcpyAsync(sums.data(), sums_.as<long long>(), sums.size() * sizeof(long long),
                        cudaMemcpyDeviceToHost, stream_.get()),
        "copying sums");
  check(cudaMemcpyAsync(sizes.data(), sizes_.as<uint32_t>(), clusters * sizeof(uint32_t),
                        cudaMemcpyDeviceToHost, stream_.get()),
        "copying sums");
  stream_.wait();
  for (size_t c = 0; c < clusters; ++c) {
    if (sizes[c] == 0) continue;
    const double share = 1.0 / (scale * sizes[c]);
    for (uint32_t j = 0; j < dim; ++j) {
      centroids[c * dim + j] = static_cast<float>(static_cast<double>(sums[c * dim + j]) * share);
    }
  }
  for (size_t c = 0; c < clusters; ++c) {
    if (sizes[c] != 0) continue;
    const auto at = std::max_element(sizes.begin(), sizes.end());
    if (*at < 2) continue;  // as many clusters as different points: it stays where it was
    const auto from = static_cast<size_t>(at - sizes.begin());
    for (uint32_t j = 0; j < dim; ++j) {
      const float x = centroids[from * dim + j];
      const float step = j % 2 == 0 ? kSplit : -kSplit;
      centroids[c * dim + j] = x * (1 + step);
      centroids[from * dim + j] = x * (1 - step);
    }
    sizes[c] = sizes[from] / 2;
    sizes[from] -= sizes[c];
  }
  if (!training.spherical) return;
  for (size_t c = 0; c < clusters; ++c) normalise(centroids + c * dim, dim);
}

}  // namespace

std::unique_ptr<KMeans> make_cuda_kmeans(int ordinal, const KMeansConfig& config) {
  require_device(ordinal, "k-means");
  return std::make_unique<CudaKMeans>(ordinal, config);
}

}  // namespace keyhole::gpu
