// Bringing all pending tokens into the indexes at once: keyhole_session_build, after a prefill. Heads are
// built in parallel.
#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "runtime/indexing/head_indexes.h"
#include "runtime/kv/sequence.h"

namespace keyhole::runtime {

/// Called with the share that is done, in [0, 1], and the name of what is being done. Returns false to stop.
using BuildProgress = std::function<bool(double, const char*)>;

class FullBuild {
 public:
  /// Finds the heads to build. Nothing else may change them until run() is over.
  FullBuild(const Engine& engine, const Sequence& sequence, HeadIndexes& heads);

  /// About how many bytes the heads will take beyond those that they have.
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  /// Whether some of the heads had no index.
  [[nodiscard]] bool has_first() const { return !first_.empty(); }

  /// Builds. A failure, or Error(cancelled), is kept for finish(): heads that were done stay built, others stay
  /// unchanged.
  void run(const BuildProgress& progress);
  /// Throws the failure of run(), if there was one. Otherwise logs which indexes are poor, and reports that all is
  /// done.
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
