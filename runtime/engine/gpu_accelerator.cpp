#include "runtime/engine/gpu_accelerator.h"

#include <exception>
#include <utility>

namespace keyhole::runtime {
namespace {

// Below so many multiply-adds (20 ms of one thread) a launch and its copies are not worth it.
constexpr double kLeastProducts = 5e8;
// k-means waits for the device in every iteration: a tenth of a millisecond, some 2 M multiply-adds of a thread.
constexpr double kLeastProductsPerIteration = 1e7;

// Of each workspace; 128k keys of d = 128 need a third of either.
constexpr size_t kNeighbourBytes = size_t{1} << 30U;
constexpr size_t kKMeansBytes = size_t{1} << 29U;

}  // namespace

GpuAccelerator::GpuAccelerator(std::shared_ptr<const gpu::Device> device, const Log& log)
    : device_(std::move(device)), log_(log) {}

// A workspace of one's own for a while: an idle one, a new one, or the next that comes back.
template <class T>
class GpuAccelerator::Lease {
 public:
  Lease(GpuAccelerator& owner, Workspaces<T>& from, const std::function<std::unique_ptr<T>()>& make)
      : owner_(owner), from_(from) {
    std::unique_lock lock(owner.mutex_);
    owner.returned_.wait(lock, [&] { return !from.idle.empty() || from.made < kWorkspaces; });
    if (!from.idle.empty()) {
      workspace_ = std::move(from.idle.back());
      from.idle.pop_back();
      return;
    }
    ++from.made;
    lock.unlock();
    try {
      workspace_ = make();
    } catch (...) {
      give_back();
      throw;
    }
  }
  ~Lease() { give_back(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  T& operator*() { return *workspace_; }
  /// After an error the workspace goes, and what it held with it.
  void drop() { workspace_.reset(); }

 private:
  void give_back() {
    const std::lock_guard lock(owner_.mutex_);
    if (workspace_ != nullptr) {
      from_.idle.push_back(std::move(workspace_));
    } else {
      --from_.made;
    }
    owner_.returned_.notify_all();
  }
  GpuAccelerator& owner_;
  Workspaces<T>& from_;
  std::unique_ptr<T> workspace_;
};

template <class T, class Work>
bool GpuAccelerator::run(Workspaces<T>& workspaces, const std::function<std::unique_ptr<T>()>& make,
                         const Work& work) {
  if (broken_) return false;
  try {
    Lease<T> lease(*this, workspaces, make);
    try {
      work(*lease);
    } catch (...) {
      lease.drop();
      throw;
    }
    return true;
  } catch (const Error& error) {
    failed(error.what(), error.status() != Status::out_of_device_memory &&
                             error.status() != Status::invalid_argument);
  } catch (const std::exception& error) {
    failed(error.what(), false);
  }
  return false;
}

void GpuAccelerator::failed(const char* what, bool for_good) {
  if (for_good) broken_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(told_, true)) return;
  }
  log_(KEYHOLE_LOG_WARNING, std::string("a build goes on without the device's help: ") + what);
}

bool GpuAccelerator::nearest_keys(const index::NearestTask& task,
                                  const index::NearestLists& lists) {
  const double products = static_cast<double>(task.keys.tokens) *
                          static_cast<double>(task.queries.tokens) * task.keys.dim;
  if (task.most > gpu::kMostNeighbours || products < kLeastProducts) return false;
  if (!is_device_index_dim(task.keys.dim)) return false;
  gpu::NeighbourTask wanted;
  wanted.keys = task.keys;
  wanted.key_extra = task.key_extra;
  wanted.queries = task.queries;
  wanted.query_extra = task.query_extra;
  wanted.limits = task.limits;
  wanted.most = task.most;
  wanted.thin = task.thin;
  const auto make = [this] { return device_->make_neighbours({.memory_limit = kNeighbourBytes}); };
  return run<gpu::NeighbourSearch>(neighbours_, make, [&](gpu::NeighbourSearch& search) {
    search.run(wanted, {.ids = lists.rows, .counts = lists.counts});
  });
}

bool GpuAccelerator::kmeans(const index::KMeansTask& task, const index::KMeansResult& result) {
  const double products = static_cast<double>(index::kmeans_sample(task.n, task.config.clusters)) *
                          task.config.clusters * task.dim;
  if (products < kLeastProductsPerIteration || !is_device_index_dim(task.dim)) return false;
  const auto make = [this] { return device_->make_kmeans({.memory_limit = kKMeansBytes}); };
  return run<gpu::KMeans>(kmeans_, make, [&](gpu::KMeans& kmeans) {
    kmeans.train({.data = task.points, .count = task.n, .dim = task.dim},
                 {.clusters = task.config.clusters,
                  .iterations = task.config.iterations,
                  .spherical = task.config.nearness == index::Nearness::inner_product,
                  .seed = task.config.seed},
                 result.centroids, result.labels);
  });
}

void GpuAccelerator::release() {
  std::vector<std::unique_ptr<gpu::NeighbourSearch>> neighbours;
  std::vector<std::unique_ptr<gpu::KMeans>> kmeans;
  const std::lock_guard lock(mutex_);
  neighbours_.made -= neighbours_.idle.size();
  kmeans_.made -= kmeans_.idle.size();
  neighbours.swap(neighbours_.idle);
  kmeans.swap(kmeans_.idle);
}

}  // namespace keyhole::runtime
