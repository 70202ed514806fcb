#include "index/partitions/kmeans.h"

#include <cmath>
#include <set>

#include "tests/index/keys.h"
#include "tests/sanitized.h"

namespace keyhole::index::test {
namespace {

// Points made of mt19937's raw numbers, which every standard library has alike: around 37 centres where `spread` is
// not 0, else without structure.
std::vector<float> raw_points(size_t n, uint32_t dim, uint32_t spread) {
  std::mt19937 random(static_cast<uint32_t>(n));
  const auto element = [&] { return static_cast<float>(random() % 2001) / 500.0F - 2.0F; };
  std::vector<float> centres(size_t{37} * dim);
  for (float& x : centres) x = static_cast<float>(spread) * element();
  std::vector<float> points(n * dim);
  for (size_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < dim; ++j)
      points[i * dim + j] = centres[(i % 37) * dim + j] + element();
  }
  return points;
}

std::vector<float> train(const std::vector<float>& points, uint32_t dim, const KMeansConfig& config,
                         cpu::Pool* pool = nullptr) {
  const Progress no_progress;
  ProgressMeter meter(no_progress, 1.0);
  return train_kmeans(*context().kernels, pool, points.data(), points.size() / dim, dim, config,
                      meter);
}

// The mean over the points of |x - c|^2, or of -x . c, with the best centroid of each, in double precision.
double mean_cost(const std::vector<float>& points, uint32_t dim,
                 const std::vector<float>& centroids, Nearness nearness) {
  double total = 0.0;
  for (size_t p = 0; p < points.size(); p += dim) {
    double best = std::numeric_limits<double>::infinity();
    for (size_t c = 0; c < centroids.size(); c += dim) {
      double cost = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        const double x = points[p + j];
        const double y = centroids[c + j];
        cost += nearness == Nearness::l2 ? (x - y) * (x - y) : -x * y;
      }
      best = std::min(best, cost);
    }
    total += best;
  }
  return total * dim / static_cast<double>(points.size());
}

double length(const float* x, uint32_t dim) {
  double squares = 0.0;
  for (uint32_t j = 0; j < dim; ++j) squares += double{x[j]} * x[j];
  return std::sqrt(squares);
}

// The costs that Faiss 1.7.3 reaches on these points from the same seed: faiss::Clustering with spherical set for
// inner products, its other parameters at their defaults.
TEST(KMeans, CostsWhatFaissReaches) {
  KEYHOLE_SKIP_WITH_TSAN();
  struct Case {
    size_t n;
    uint32_t dim, clusters, spread, seed;
    double l2, inner_product;
  };
  constexpr Case kCases[] = {
      {3000, 64, 50, 0, 7, 74.979289, -3.2567836},
      {2000, 80, 64, 3, 1, 124.74257, -30.553807},
      {4000, 64, 8, 3, 2, 643.86268, -14.693616},   // trains on 2048 of the points
      {600, 96, 300, 0, 3, 50.429067, -8.7910453},  // some clusters lose all points
  };
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.n);
    const auto points = raw_points(c.n, c.dim, c.spread);
    for (const Nearness nearness : {Nearness::l2, Nearness::inner_product}) {
      const auto centroids =
          train(points, c.dim,
                {.clusters = c.clusters, .iterations = 10, .nearness = nearness, .seed = c.seed});
      ASSERT_EQ(centroids.size(), size_t{c.clusters} * c.dim);
      const double expected = nearness == Nearness::l2 ? c.l2 : c.inner_product;
      // The kernels of other levels round scores otherwise, which moves a point or two.
      EXPECT_NEAR(mean_cost(points, c.dim, centroids, nearness), expected,
                  2e-3 * std::abs(expected));
    }
  }
}

TEST(KMeans, MoreClustersThanDifferentPoints) {
  std::vector<float> points(400 * 64);
  for (size_t i = 0; i < 400; ++i) {
    for (size_t j = 0; j < 64; ++j) {
      points[i * 64 + j] = static_cast<float>((1 + i % 25) * (1 + j % 3));
    }
  }
  for (const Nearness nearness : {Nearness::l2, Nearness::inner_product}) {
    const auto centroids =
        train(points, 64, {.clusters = 60, .iterations = 10, .nearness = nearness, .seed = 4});
    for (const float x : centroids) ASSERT_TRUE(std::isfinite(x));
    std::set<std::vector<float>> different;
    for (size_t c = 0; c < 60; ++c) {
      different.emplace(centroids.begin() + c * 64, centroids.begin() + (c + 1) * 64);
    }
    EXPECT_GT(different.size(), 25U) << "a cluster without points becomes a part of another";
  }
  const auto l2 = train(points, 64, {.clusters = 60, .iterations = 20, .seed = 4});
  EXPECT_LT(mean_cost(points, 64, l2, Nearness::l2), 1.0);
}

TEST(KMeans, AsManyClustersAsPoints) {
  const auto points = raw_points(90, 64, 2);
  const auto l2 = train(points, 64, {.clusters = 90, .iterations = 5, .seed = 1});
  EXPECT_EQ(mean_cost(points, 64, l2, Nearness::l2), 0.0);
  const auto spherical =
      train(points, 64,
            {.clusters = 90, .iterations = 5, .nearness = Nearness::inner_product, .seed = 1});
  for (size_t c = 0; c < 90; ++c) EXPECT_NEAR(length(&spherical[c * 64], 64), 1.0, 1e-5);
}

TEST(KMeans, TheResultIsTheSameWithAnyPoolAndAnotherWithAnotherSeed) {
  const auto points = raw_points(5000, 64, 1);
  KMeansConfig config = {.clusters = 40, .iterations = 6, .nearness = Nearness::l2, .seed = 9};
  const auto alone = train(points, 64, config);
  for (const uint32_t threads : {1U, 2U, 5U}) {
    cpu::Pool pool({.threads = threads});
    EXPECT_EQ(train(points, 64, config, &pool), alone) << threads << " threads";
  }
  config.seed = 10;
  EXPECT_NE(train(points, 64, config), alone);
}

TEST(KMeans, RefusesWhatHasNoClusters) {
  auto points = raw_points(10, 64, 1);
  EXPECT_THROW((void)train(points, 64, {.clusters = 11, .iterations = 1}), Error);
  EXPECT_THROW((void)train(points, 64, {.clusters = 0, .iterations = 1}), Error);
  points[77] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW((void)train(points, 64, {.clusters = 2, .iterations = 1}), Error);
}

TEST(KMeans, AdvancesItsMeterByPointsAndIterationsAndCanBeCancelled) {
  const auto points = raw_points(3000, 64, 1);
  double share = 0.0;
  const Progress note = [&](double done) {
    share = done;
    return true;
  };
  ProgressMeter meter(note, 3000.0 * 4);
  (void)train_kmeans(*context().kernels, nullptr, points.data(), 3000, 64,
                     {.clusters = 20, .iterations = 4}, meter);
  EXPECT_EQ(share, 1.0);
  const Progress cancel = [](double done) { return done < 0.5; };
  ProgressMeter cancelled(cancel, 3000.0 * 4);
  EXPECT_THROW((void)train_kmeans(*context().kernels, nullptr, points.data(), 3000, 64,
                                  {.clusters = 20, .iterations = 4}, cancelled),
               Error);
}

}  // namespace
}  // namespace keyhole::index::test
