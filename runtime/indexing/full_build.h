// Bringing all pending tokens into the indexes at once: keyhole_build, after a prefill. Heads are
// built in parallel.
#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "runtime/indexing/head_indexes.h"
#include "runtime/kv/sequence.h"

namespace keyhole::runtime {

/// Called with the share that is done, in [0, 1], and with what is being done; false: stop.
using BuildProgress = std::function<bool(double, const char*)>;

class FullBuild {
 public:
  /// Finds out what there is to build. Nothing else may change the heads until run() is over.
  FullBuild(const Engine& engine, const Sequence& sequence, HeadIndexes& heads);

  /// Bytes that the heads will take beyond those that they have, about.
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  /// Whether heads are among it that had no index.
  [[nodiscard]] bool has_first() const { return !first_.empty(); }

  /// Builds. A failure, or Error(cancelled), is kept: heads that were done stay so, others are as
  /// they were.
  void run(const BuildProgress& progress);
  /// Throws that failure. Otherwise logs which indexes are poor, and reports that all is done.
  void finish(const BuildProgress& progress) const;

 private:
  struct Job {
    uint32_t layer, kv_head;
    double rows;  ///< its share of the progress
  };
  void plan(uint32_t layer, uint32_t kv_head);
  void build_head(const Job& job, const index::Progress& progress);
  void warn_of_poor() const;

  const Engine* engine_;
  const Sequence* sequence_;
  HeadIndexes* heads_;
  std::vector<Job> jobs_;
  double rows_ = 0.0;  ///< of all jobs
  uint64_t bytes_ = 0;
  std::vector<const HeadIndex*> first_;
  std::exception_ptr failure_;
};

}  // namespace keyhole::runtime
