// Audits beside the decoding. Steps leave records of some of their heads, a thread of the session's own computes
// these heads again from the offload store, and the figures are kept here.
//
// Records lie in a ring, are worked on in their order, and are taken into the figures in their order by the decoding
// thread, so that nothing depends on how fast the audits were. The decoding thread collects results when the ring is
// full, when an action is due, when rows are about to be forgotten and when figures are asked for. Audits that are
// not done by then it does itself on the worker pool.
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

/// Runs the audits of a session. Used by the decoding thread alone; for steps on a stream by the thread that serves
/// them, while their calling thread only counts steps. No member throws except the constructor and reserve().
class Auditor {
 public:
  /// Takes all memory that audits of up to `capacity` rows and recall@top_k will need. Starts no thread yet.
  Auditor(const Engine& engine, size_t capacity, uint32_t top_k, AuditSchedule schedule);
  /// Cancels what is under way, and waits for it (one chunk of rows).
  ~Auditor();
  Auditor(const Auditor&) = delete;
  Auditor& operator=(const Auditor&) = delete;

  [[nodiscard]] AuditSchedule& schedule() { return schedule_; }
  [[nodiscard]] const AuditSchedule& schedule() const { return schedule_; }

  /// Reserves memory for recall of more keys. Finishes the audits under way.
  void reserve(uint32_t top_k);

  /// Returns a record for the step that is about to begin; a step has kv_heads of them at most. Its step number,
  /// heads and budget are set. Valid until submit() or discard().
  HeadRecord& record(uint32_t layer, uint32_t kv_head, uint64_t step, uint32_t top_k, float bound,
                     bool searched);
  /// Ends the step: its records may be audited. Their rows must not change until finish().
  void submit();
  /// Ends a step that has failed, and drops its records.
  void discard() { begun_ = submitted_by_step_; }

  /// Returns when everything submitted is in the figures and in the schedule.
  void finish();
  /// finish() for audits that take effect in this step of the layer.
  void finish_due(uint32_t layer, uint64_t step);
  /// finish() for audits that read rows of the layer from `rows` on; no audit reads these rows any more then.
  void finish_reading(uint32_t layer, size_t rows);

  void count_action(uint32_t layer, uint32_t kv_head) {
    figures_[heads_.at(layer, kv_head)].add_action();
  }
  /// The figures of all heads, by their HeadNumbers.
  [[nodiscard]] const std::vector<AuditFigures>& figures() const { return figures_; }
  /// Forgets the figures; call finish() first.
  void reset_figures() { figures_.assign(figures_.size(), {}); }
  /// Goes on with those of another auditor of as many heads.
  void take_figures(const Auditor& from) { figures_ = from.figures_; }

  [[nodiscard]] size_t bytes() const;
  /// What bytes() will be, before there is an object; `capacity` as in the constructor.
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

  /// Brings all audits before `end` into the figures. `waiting`: a step waits for them.
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
