// Builds of indexes with a device's help: index::Accelerator over gpu/neighbours.h and gpu/kmeans.h.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "gpu/kmeans.h"
#include "gpu/neighbours.h"
#include "index/accelerator.h"
#include "runtime/engine/log.h"

namespace keyhole::runtime {

/// Threads that build heads share two workspaces of each kind: while one computes, the other copies. A third thread
/// waits. A call that fails is declined, and logged the first time; after a device error nothing is tried again.
class GpuAccelerator final : public index::Accelerator {
 public:
  /// device: makes the workspaces (gpu::DevicePart::builds).
  GpuAccelerator(std::shared_ptr<const gpu::Device> device, const Log& log);

  [[nodiscard]] bool nearest_keys(const index::NearestTask& task,
                                  const index::NearestLists& lists) override;
  [[nodiscard]] bool kmeans(const index::KMeansTask& task,
                            const index::KMeansResult& result) override;
  void release() override;

 private:
  static constexpr size_t kWorkspaces = 2;

  /// Workspaces of one kind, made when they are first needed.
  template <class T>
  struct Workspaces {
    std::vector<std::unique_ptr<T>> idle;
    size_t made = 0;
  };
  template <class T>
  class Lease;

  /// Runs work(workspace); false if it threw.
  template <class T, class Work>
  bool run(Workspaces<T>& workspaces, const std::function<std::unique_ptr<T>()>& make,
           const Work& work);
  void failed(const char* what, bool for_good);

  std::shared_ptr<const gpu::Device> device_;
  Log log_;
  std::mutex mutex_;
  std::condition_variable returned_;
  Workspaces<gpu::NeighbourSearch> neighbours_;
  Workspaces<gpu::KMeans> kmeans_;
  std::atomic<bool> broken_{false};
  bool told_ = false;
};

}  // namespace keyhole::runtime
