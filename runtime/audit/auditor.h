// Audits beside the decoding: steps leave records of some of their heads, a thread of the session's
// own computes them again from the offload store, and the figures are kept here.
//
// Records lie in a ring, are worked on in their order, and taken into the figures in their order by
// the decoding thread, so that nothing depends on how fast the audits were. The decoding thread
// collects results when the ring is full, when an action is due, when rows are about to be
// forgotten and when figures are asked for. What is not done then, it does itself on the worker
// pool.
//
// The thread runs only where the machine is idle (SCHED_IDLE): a step's tasks last tens of
// microseconds, an audit some milliseconds. On a busy machine it may get no time at all, so no step
// waits for it: the decoding thread takes the audit away from it and begins it anew, and the slot
// stays with the auditing thread until that thread has seen it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/pool.h"
#include "runtime/audit/audit_figures.h"
#include "runtime/audit/audit_schedule.h"
#include "runtime/audit/audit_truth.h"
#include "runtime/engine/engine.h"
#include "runtime/step/audit_record.h"

namespace keyhole::runtime {

/// Used by the decoding thread alone: of steps on a stream by whichever thread serves them, while it does; their calling
/// thread only counts steps then. No member throws but the constructor and reserve().
class Auditor {
 public:
  /// Takes all memory that audits of up to `capacity` rows and recall@top_k will need. Starts no
  /// thread yet.
  Auditor(const Engine& engine, size_t capacity, uint32_t top_k, AuditSchedule schedule);
  /// Cancels what is under way, and waits for it (one chunk of rows).
  ~Auditor();
  Auditor(const Auditor&) = delete;
  Auditor& operator=(const Auditor&) = delete;

  [[nodiscard]] AuditSchedule& schedule() { return schedule_; }
  [[nodiscard]] const AuditSchedule& schedule() const { return schedule_; }

  /// Reserves memory for recall of more keys. Finishes what is under way.
  void reserve(uint32_t top_k);

  /// A record for the step that is about to begin, of at most kv_heads; of its fields the step
  /// number, the heads and the budget are set. Valid until submit() or discard().
  HeadRecord& record(uint32_t layer, uint32_t kv_head, uint64_t step, uint32_t top_k, float bound,
                     bool searched);
  /// The step is over: its records may be audited. Their rows must stay as they are until finish().
  void submit();
  /// The step failed.
  void discard() { begun_ = submitted_by_step_; }

  /// Returns when everything submitted is in the figures and in the schedule.
  void finish();
  /// The same for what takes effect in this step of the layer.
  void finish_due(uint32_t layer, uint64_t step);
  /// The same for what reads rows of the layer from `rows` on; no audit reads them any more then.
  void finish_reading(uint32_t layer, size_t rows);

  void count_action(uint32_t layer, uint32_t kv_head) {
    figures_[heads_.at(layer, kv_head)].add_action();
  }
  /// By their HeadNumbers.
  [[nodiscard]] const std::vector<AuditFigures>& figures() const { return figures_; }
  /// Call finish() first.
  void reset_figures() { figures_.assign(figures_.size(), {}); }

  [[nodiscard]] size_t bytes() const;
  /// The same before there is one; `capacity` as above.
  [[nodiscard]] static size_t estimate_bytes(const ModelShape& model, uint32_t threads,
                                             uint32_t top_k, size_t capacity);

 private:
  struct Slot {
    Slot(size_t group, size_t numbers, size_t capacity) : record(group, numbers, capacity) {}
    enum class State : uint8_t { waiting, taken, done };
    HeadRecord record;
    AuditResult result{};
    State state = State::waiting;
    bool waited_for = false;             ///< the decoding thread had to do it
    std::atomic<bool> cancelled{false};  ///< taken away from the thread; set under the mutex
  };
  [[nodiscard]] Slot& slot(uint64_t number) { return *slots_[number % slots_.size()]; }

  /// Audits before `end` are done and in the figures. `waiting`: a step waits for them.
  void complete(uint64_t end, bool waiting);
  void take_in(const Slot& slot);
  /// Waits until the thread has left a slot that was taken away from it: one chunk of rows.
  void wait_for_thread();
  void work();

  const Engine* engine_;
  HeadNumbers heads_;
  size_t capacity_;
  uint32_t top_k_;
  AuditSchedule schedule_;
  std::vector<AuditFigures> figures_;  // by heads_
  std::vector<std::unique_ptr<Slot>> slots_;
  std::unique_ptr<Slot> spare_;  // takes the place of one that the thread has not left yet
  std::vector<std::unique_ptr<AuditTruth>> truths_;  // of the pool's workers, then the thread's
  // Audits are numbered in the order of their records: [taken_in_, submitted_by_step_) are under
  // way, [submitted_by_step_, begun_) belong to the step.
  uint64_t begun_ = 0, submitted_by_step_ = 0, taken_in_ = 0;
  std::vector<Slot*> own_;  // capacity for what complete() does itself
  const std::atomic<bool> never_{false};
  bool no_thread_ = false;

  std::mutex mutex_;                  // of all below, and of the states of the slots
  std::condition_variable work_;      // the thread waits: something to do, or stop
  std::condition_variable progress_;  // the decoder waits: the thread has left a slot
  uint64_t next_ = 0;                 // nothing before it is left for the thread
  uint64_t submitted_ = 0;
  Slot* running_ = nullptr;  // what the thread is at
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace keyhole::runtime
