// k-means on the device against double precision.
#include "gpu/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gpu/device.h"
#include "tests/gpu/cuda_parts.h"
#include "tests/normal.h"

namespace keyhole::gpu {
namespace {

std::vector<float> gaussian(std::mt19937& random, size_t n, float scale = 1.0F) {
  keyhole::test::Normal<float> normal(0.0F, scale);
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

/// Points around `centres` centres.
std::vector<float> clustered(std::mt19937& random, size_t n, uint32_t dim, size_t centres) {
  const std::vector<float> middle = gaussian(random, centres * dim, 3.0F);
  std::vector<float> out = gaussian(random, n * dim);
  for (size_t i = 0; i < n; ++i) {
    const size_t c = random() % centres;
    for (uint32_t j = 0; j < dim; ++j) out[i * dim + j] += middle[c * dim + j];
  }
  return out;
}

double score(const float* x, const float* c, uint32_t dim, double offset) {
  double sum = 0.0;
  for (uint32_t j = 0; j < dim; ++j) sum += double{x[j]} * c[j];
  return sum - offset;
}
double half_square(const float* c, uint32_t dim) { return score(c, c, dim, 0.0) / 2; }
double distance(const float* x, const float* c, uint32_t dim) {
  double sum = 0.0;
  for (uint32_t j = 0; j < dim; ++j) sum += (double{x[j]} - c[j]) * (double{x[j]} - c[j]);
  return sum;
}

class KMeansOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
    kmeans_ = make_cuda_kmeans({});
  }
  std::unique_ptr<KMeans> kmeans_;
};

TEST_F(KMeansOnDevice, AssignsToTheNearest) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr uint32_t kDims[] = {64, 80, 96, 128, 256};
  const auto small = make_cuda_kmeans({.memory_limit = 1});  // blocks of 1024 points
  for (int i = 0; i < 40; ++i) {
    const uint32_t dim = kDims[i % 5];
    const size_t n = 1 + random() % (i % 4 == 0 ? 5000 : 300);
    const size_t clusters = 1 + random() % (i % 3 == 0 ? 500 : 70);
    const bool whole = i % 2 == 0;  // whole numbers: exact, and they tie
    std::vector<float> points = gaussian(random, n * dim, whole ? 2.0F : 100.0F);
    std::vector<float> centroids = gaussian(random, clusters * dim, whole ? 2.0F : 100.0F);
    if (whole) {
      for (float& x : points) x = std::round(x);
      for (float& x : centroids) x = std::round(x);
      for (size_t c = 3; c < clusters; c += 5) {
        std::copy_n(centroids.begin(), dim,
                    centroids.begin() + static_cast<std::ptrdiff_t>(c * dim));
      }
    }
    const bool l2 = random() % 2;
    std::vector<float> offsets(clusters);
    for (float& x : offsets) x = static_cast<float>(random() % 50);
    std::vector<uint32_t> labels(n, 0xDEADBEEF);
    (i % 3 == 1 ? small : kmeans_)
        ->assign({points.data(), n, dim}, centroids.data(), l2 ? nullptr : offsets.data(), clusters,
                 labels.data());
    for (size_t p = 0; p < n; ++p) {
      ASSERT_LT(labels[p], clusters) << p;
      double best = -1e300;
      uint32_t first = 0;
      const auto of = [&](size_t c) {
        const float* row = centroids.data() + c * dim;
        return score(points.data() + p * dim, row, dim, l2 ? half_square(row, dim) : offsets[c]);
      };
      for (uint32_t c = 0; c < clusters; ++c) {
        if (of(c) > best) {
          best = of(c);
          first = c;
        }
      }
      if (whole) {
        ASSERT_EQ(labels[p], first) << "point " << p << " of " << n << ", " << clusters;
      } else {
        // fp32 sums of terms as large as 1e4 * dim.
        ASSERT_GE(of(labels[p]), best - 1e-6 * 1e4 * dim * 16) << "point " << p;
      }
    }
  }
}

// Lloyd's iterations in double precision from random points; returns the mean squared distance per element.
double reference_inertia(const std::vector<float>& points, uint32_t dim, uint32_t clusters,
                         std::mt19937& random) {
  const size_t n = points.size() / dim;
  std::vector<double> centroids(size_t{clusters} * dim);
  for (uint32_t c = 0; c < clusters; ++c) {
    const size_t from = random() % n;
    for (uint32_t j = 0; j < dim; ++j) centroids[c * dim + j] = points[from * dim + j];
  }
  double inertia = 0.0;
  for (int i = 0; i < 40; ++i) {
    std::vector<double> sums(centroids.size(), 0.0);
    std::vector<double> sizes(clusters, 0.0);
    inertia = 0.0;
    for (size_t p = 0; p < n; ++p) {
      double least = 1e300;
      uint32_t label = 0;
      for (uint32_t c = 0; c < clusters; ++c) {
        double sum = 0.0;
        for (uint32_t j = 0; j < dim; ++j) {
          const double x = points[p * dim + j] - centroids[c * dim + j];
          sum += x * x;
        }
        if (sum < least) {
          least = sum;
          label = c;
        }
      }
      inertia += least;
      sizes[label] += 1.0;
      for (uint32_t j = 0; j < dim; ++j) sums[label * dim + j] += points[p * dim + j];
    }
    for (uint32_t c = 0; c < clusters; ++c) {
      for (uint32_t j = 0; j < dim && sizes[c] > 0; ++j) {
        centroids[c * dim + j] = sums[c * dim + j] / sizes[c];
      }
    }
  }
  return inertia / static_cast<double>(n * dim);
}

TEST_F(KMeansOnDevice, LloydReachesWhatDoublePrecisionDoes) {
  std::mt19937 random(3);
  constexpr uint32_t kDim = 64;
  constexpr size_t kPoints = 1500;
  constexpr uint32_t kClusters = 12;
  const std::vector<float> points = clustered(random, kPoints, kDim, 12);
  std::vector<float> centroids(kClusters * kDim, 1e30F);
  std::vector<uint32_t> labels(kPoints, 0xDEADBEEF);
  double mean = 0.0;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    kmeans_->train({points.data(), kPoints, kDim},
                   {.clusters = kClusters, .iterations = 40, .seed = seed}, centroids.data(),
                   labels.data());
    double inertia = 0.0;
    std::vector<double> sums(kClusters * kDim, 0.0);
    std::vector<double> sizes(kClusters, 0.0);
    for (size_t p = 0; p < kPoints; ++p) {
      ASSERT_LT(labels[p], kClusters);
      inertia += distance(points.data() + p * kDim, centroids.data() + labels[p] * kDim, kDim);
      sizes[labels[p]] += 1.0;
      for (uint32_t j = 0; j < kDim; ++j) sums[labels[p] * kDim + j] += points[p * kDim + j];
    }
    inertia /= kPoints * kDim;
    mean += inertia / 8;
    // After 40 iterations of well separated points labels no longer change: centroids are means.
    for (uint32_t c = 0; c < kClusters; ++c) {
      ASSERT_GT(sizes[c], 0.0);
      for (uint32_t j = 0; j < kDim; ++j) {
        EXPECT_NEAR(sums[c * kDim + j] / sizes[c], centroids[c * kDim + j], 0.05) << seed;
      }
    }
  }
  double reference = 0.0;
  for (int i = 0; i < 8; ++i) reference += reference_inertia(points, kDim, kClusters, random) / 8;
  EXPECT_LT(mean, 1.3 * reference);
  EXPECT_GE(mean, 0.95);  // the variance within the true clusters
}

TEST_F(KMeansOnDevice, TheSameBitsHoweverPointsArePassed) {
  std::mt19937 random(4);
  const auto small = make_cuda_kmeans({.memory_limit = 1});
  for (const bool spherical : {false, true}) {
    for (const size_t n : {size_t{5000}, size_t{40000}}) {  // 40000: a sample of 256 * 30
      const std::vector<float> points = clustered(random, n, 128, 40);
      std::vector<float> first(30 * 128);
      std::vector<uint32_t> labels(n, 0xDEADBEEF);
      const KMeansTraining training = {30, 6, spherical, 17};
      kmeans_->train({points.data(), n, 128}, training, first.data(), labels.data());
      for (KMeans* other : {kmeans_.get(), small.get()}) {
        std::vector<float> again(30 * 128);
        std::vector<uint32_t> labels_again(n, 0xDEADBEEF);
        other->train({points.data(), n, 128}, training, again.data(), labels_again.data());
        EXPECT_EQ(first, again);
        EXPECT_EQ(labels, labels_again);
      }
      for (size_t c = 0; spherical && c < 30; ++c) {
        EXPECT_NEAR(half_square(first.data() + c * 128, 128), 0.5, 1e-5);
      }
      std::vector<float> without(30 * 128);
      kmeans_->train({points.data(), n, 128}, training, without.data(), nullptr);
      EXPECT_EQ(first, without);
    }
  }
}

TEST_F(KMeansOnDevice, EmptyClustersTakeFromTheLargest) {
  std::mt19937 random(6);
  // 1000 points, most of them the same: random beginnings coincide.
  std::vector<float> points(1000 * 64, 1.0F);
  const std::vector<float> others = gaussian(random, 200 * 64, 5.0F);
  std::copy(others.begin(), others.end(), points.begin());
  std::vector<float> centroids(50 * 64);
  std::vector<uint32_t> labels(1000);
  kmeans_->train({points.data(), 1000, 64}, {.clusters = 50, .iterations = 10, .seed = 1},
                 centroids.data(), labels.data());
  for (const float x : centroids) ASSERT_TRUE(std::isfinite(x));
  std::sort(labels.begin(), labels.end());
  EXPECT_GT(std::unique(labels.begin(), labels.end()) - labels.begin(), 25);
}

TEST_F(KMeansOnDevice, LargeNumbersAndRefusals) {
  std::mt19937 random(7);
  const std::vector<float> points = gaussian(random, 600 * 64, 1e14F);
  std::vector<float> centroids(5 * 64);
  std::vector<uint32_t> labels(600, 0xDEADBEEF);
  kmeans_->train({points.data(), 600, 64}, {.clusters = 5, .iterations = 8}, centroids.data(),
                 labels.data());
  for (const float x : centroids) ASSERT_TRUE(std::isfinite(x) && std::fabs(x) < 1e15F);
  std::vector<float> bad = points;
  bad[1234] = std::nanf("");
  EXPECT_THROW(kmeans_->train({bad.data(), 600, 64}, {.clusters = 5, .iterations = 8},
                              centroids.data(), labels.data()),
               Error);
  EXPECT_THROW(kmeans_->train({points.data(), 600, 63}, {.clusters = 5}, centroids.data(), nullptr),
               Error);
  EXPECT_THROW(
      kmeans_->train({points.data(), 600, 64}, {.clusters = 601}, centroids.data(), nullptr),
      Error);
  EXPECT_THROW(kmeans_->train({points.data(), 600, 64}, {.clusters = 0}, centroids.data(), nullptr),
               Error);
}

TEST(KMeansWithout, ADeviceThatIsNotThere) {
  try {
    (void)make_cuda_kmeans({}, 4711);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::unsupported) << error.what();
  }
}

}  // namespace
}  // namespace keyhole::gpu
