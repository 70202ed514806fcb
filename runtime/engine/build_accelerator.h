// An accelerator that helps while a build asks for it, see AcceleratedBuild (engine.h).
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "index/accelerator.h"

namespace keyhole::runtime {

/// From any thread. Declines everything between the last close() and the next open().
class BuildAccelerator final : public index::Accelerator {
 public:
  explicit BuildAccelerator(std::unique_ptr<index::Accelerator> accelerator)
      : accelerator_(std::move(accelerator)) {}

  void open() { builds_.fetch_add(1); }
  void close() {
    if (builds_.fetch_sub(1) == 1) release();
  }

  [[nodiscard]] bool nearest_keys(const index::NearestTask& task,
                                  const index::NearestLists& lists) override {
    return builds_.load() != 0 && accelerator_->nearest_keys(task, lists);
  }
  [[nodiscard]] bool kmeans(const index::KMeansTask& task,
                            const index::KMeansResult& result) override {
    return builds_.load() != 0 && accelerator_->kmeans(task, result);
  }
  void release() override { accelerator_->release(); }

 private:
  std::unique_ptr<index::Accelerator> accelerator_;
  std::atomic<int> builds_{0};
};

}  // namespace keyhole::runtime
