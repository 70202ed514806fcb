#include "index/kmeans.h"

#include <faiss/Clustering.h>
#include <faiss/impl/FaissException.h>
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "index/accelerator.h"

namespace keyhole::index {
namespace {

constexpr size_t kPointsPerCluster =
    256;                        // Faiss's own default, stated because it subsamples silently
constexpr size_t kBlock = 512;  // points per task: about a millisecond at 1000 centroids

// Faiss 1.7.3 calls it Index::idx_t, later versions faiss::idx_t.
using FaissId = std::decay_t<decltype(faiss::Index::ntotal)>;

// Faiss's loops run on OpenMP, whose team size is a setting of each thread: one for the length of a
// training. Heads are built in parallel by the worker pool already, and a team per worker would
// oversubscribe the machine.
class SingleOmpThread {
 public:
  SingleOmpThread() : saved_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleOmpThread() { omp_set_num_threads(saved_); }
  SingleOmpThread(const SingleOmpThread&) = delete;
  SingleOmpThread& operator=(const SingleOmpThread&) = delete;

 private:
  int saved_;
};

// The index through which faiss::Clustering assigns points. Not faiss::IndexFlat, because (1) its sgemm
// depends on BLAS's thread count, which is global to the process, (2) Debian's Faiss 1.7.3 has no AVX,
// (3) a search is where a build can report progress and be cancelled.
class AssignmentIndex final : public faiss::Index {
 public:
  AssignmentIndex(const cpu::Kernels& kernels, cpu::Pool* pool, uint32_t dim, Nearness nearness,
                  ProgressMeter& meter)
      : faiss::Index(dim,
                     nearness == Nearness::l2 ? faiss::METRIC_L2 : faiss::METRIC_INNER_PRODUCT),
        pool_(pool),
        nearest_(kernels, nearness, dim),
        meter_(meter) {}

  void add(FaissId n, const float* x) override {
    centroids_.assign(x, x + n * d);
    nearest_.set(centroids_.data(), static_cast<size_t>(n));
    ntotal = n;
  }
  void reset() override { ntotal = 0; }

  // Distances only feed Faiss's statistics; they are left at zero.
  void search(FaissId n, const float* x, FaissId, float* distances, FaissId* labels,
              const faiss::SearchParameters*) const override {
    labels_.resize(static_cast<size_t>(n));
    assign_points(nearest_, pool_, x, labels_.size(), static_cast<uint32_t>(d), labels_.data(),
                  meter_);
    std::copy(labels_.begin(), labels_.end(), labels);
    std::fill(distances, distances + n, 0.0F);
  }

 private:
  cpu::Pool* pool_;
  NearestCentroid nearest_;
  ProgressMeter& meter_;
  std::vector<float> centroids_;
  mutable std::vector<uint32_t> labels_;
};

}  // namespace

size_t kmeans_sample(size_t n, size_t clusters) {
  return std::min(n, clusters * kPointsPerCluster);
}

void assign_points(const NearestCentroid& nearest, cpu::Pool* pool, const float* points, size_t n,
                   uint32_t dim, uint32_t* labels, ProgressMeter& meter) {
  const auto block = [&](uint32_t task, uint32_t) {
    const size_t first = task * kBlock;
    const size_t size = std::min(kBlock, n - first);
    meter.advance(static_cast<double>(size));
    nearest.assign(points + first * dim, size, labels + first);
  };
  const auto blocks = static_cast<uint32_t>((n + kBlock - 1) / kBlock);
  if (pool != nullptr) {
    pool->run(blocks, block);
  } else {
    for (uint32_t b = 0; b < blocks; ++b) block(b, 0);
  }
}

std::vector<float> train_kmeans(const cpu::Kernels& kernels, cpu::Pool* pool, const float* points,
                                size_t n, uint32_t dim, const KMeansConfig& config,
                                ProgressMeter& meter) {
  faiss::ClusteringParameters parameters;
  parameters.niter = static_cast<int>(config.iterations);
  parameters.spherical = config.nearness == Nearness::inner_product;
  parameters.min_points_per_centroid = 1;  // below it Faiss prints a warning
  parameters.max_points_per_centroid = static_cast<int>(kPointsPerCluster);
  parameters.seed = static_cast<int>(config.seed);
  const SingleOmpThread single;
  faiss::Clustering clustering(static_cast<int>(dim), static_cast<int>(config.clusters),
                               parameters);
  AssignmentIndex index(kernels, pool, dim, config.nearness, meter);
  try {
    clustering.train(static_cast<FaissId>(n), points, index);
  } catch (const faiss::FaissException& e) {
    throw Error(Status::internal, std::string("k-means: ") + e.what());
  }
  return std::move(clustering.centroids);
}

Clustering cluster_points(const Context& context, cpu::Pool* pool, const float* points, size_t n,
                          uint32_t dim, const KMeansConfig& config, ProgressMeter& meter) {
  Clustering out;
  out.labels.resize(n);
  if (context.accelerator != nullptr) {
    out.centroids.resize(size_t{config.clusters} * dim);
    if (context.accelerator->kmeans({.points = points, .n = n, .dim = dim, .config = config},
                                    {out.centroids.data(), out.labels.data()})) {
      const auto trained = static_cast<double>(kmeans_sample(n, config.clusters));
      meter.advance(trained * config.iterations + static_cast<double>(n));
      return out;
    }
  }
  out.centroids = train_kmeans(*context.kernels, pool, points, n, dim, config, meter);
  NearestCentroid nearest(*context.kernels, config.nearness, dim);
  nearest.set(out.centroids.data(), config.clusters);
  assign_points(nearest, pool, points, n, dim, out.labels.data(), meter);
  return out;
}

}  // namespace keyhole::index
