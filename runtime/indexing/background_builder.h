// Appends beside the decoding. A thread of the session's own works on a layer's next block of rows while steps go on
// searching the index as it is; the block is taken in between two steps. Where a head has no index yet, its block is
// built as a first one.
//
// A job belongs to the decoding thread, which begins it with submit() and ends it with finish() or
// cancel(). finish() does what the builder has not begun, on the worker pool: a decoder that
// outruns its builder is as fast as one that appends in its steps, and a session without a builder
// thread needs no other code.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/pool.h"
#include "index/index.h"
#include "index/tail/tail_tree.h"
#include "runtime/indexing/head_indexes.h"

namespace keyhole::runtime {

/// A job: the rows [.., rows) of one layer on their way into its indexes.
struct AppendJob {
  struct Part {
    uint32_t kv_head = 0;
    /// Builds the first index of a head from kv. Empty: the head's index and tail grow instead.
    std::function<BuiltHead(const KvView& kv, const index::Progress& progress)> build;
    const index::Index* index = nullptr;    ///< that grows; does not change while the job lives
    const index::TailTree* tail = nullptr;  ///< tail that grows, likewise; null: none
    KvView kv;  ///< rows [0, rows) of the head: neither moved nor overwritten
    // The result: `first`, or `addition` with a `segment` for a tail, or the error that prevented it.
    BuiltHead first;
    std::unique_ptr<index::Addition> addition;
    std::unique_ptr<index::TailSegment> segment;
    std::exception_ptr error;
    enum class State : uint8_t { waiting, taken, done };
    State state = State::waiting;
  };

  AppendJob(uint32_t target, std::vector<Part> heads)
      : rows(target), parts(std::move(heads)), undone(parts.size()) {}

  uint32_t rows;
  uint32_t round = 0;           ///< round of the step that began it, see AppendBlocks
  uint64_t promised_bytes = 0;  ///< estimated bytes of its first indexes
  std::vector<Part> parts;      ///< one per head that takes part
  std::atomic<bool> cancelled{false};
  size_t undone;                    ///< parts that are not done
  double background_seconds = 0.0;  ///< that the builder's thread has worked on it
};

class BackgroundBuilder {
 public:
  /// Starts no thread yet. The pool is for finish(); it outlives this object.
  explicit BackgroundBuilder(cpu::Pool& pool) : pool_(&pool) {}
  /// Cancels what is under way, and waits for it.
  ~BackgroundBuilder();
  BackgroundBuilder(const BackgroundBuilder&) = delete;
  BackgroundBuilder& operator=(const BackgroundBuilder&) = delete;

  /// Queues the job, all of whose parts wait, behind earlier jobs; the first call starts the thread. On an exception
  /// (no thread, no memory) the job is not queued, and finish() does all of it.
  void submit(AppendJob& job);

  /// Returns when every part is done; false if all of them were done already. Also works for a job that was never
  /// submitted.
  bool finish(AppendJob& job);

  /// Returns when no thread works on the job any more. Results of the job must not be used.
  void cancel(AppendJob& job) noexcept;

  /// Destroys a finished job on the builder's thread: an addition that was taken in holds what it has replaced, which
  /// can be a whole graph.
  void retire(std::unique_ptr<AppendJob> job) noexcept;

 private:
  void work();
  [[nodiscard]] AppendJob::Part* next_part(AppendJob*& job);
  void prepare(AppendJob& job, AppendJob::Part& part, bool in_background);
  void drop(AppendJob& job);

  cpu::Pool* pool_;
  std::mutex mutex_;                  // of all below, and of the states and counts in jobs
  std::condition_variable work_;      // the builder waits: something to do, or stop
  std::condition_variable progress_;  // the decoder waits: a part is done
  std::vector<AppendJob*> queue_;     // in order of submission; may hold jobs without waiting parts
  std::vector<std::unique_ptr<AppendJob>> retired_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace keyhole::runtime
