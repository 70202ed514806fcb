// The audits of one session: which heads of a step leave a record, what a head reads more because of its audits, and
// the figures. Without audits (audit_share 0) every call does nothing.
//
// A step calls begin_step(), act() for every KV head, record() for every KV head, and at its end
// submit() or discard().
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>

#include "runtime/audit/auditor.h"
#include "runtime/save/checksum_io.h"
#include "runtime/step/decode_step.h"

namespace keyhole::runtime {

class SessionAudits {
 public:
  /// Reads max_tokens, audit_share, audit_action and audit_bound of `params`. top_k: the largest over all heads.
  SessionAudits(const Engine& engine, const SessionParams& params, uint32_t top_k);

  [[nodiscard]] bool on() const { return auditor_ != nullptr; }

  /// Counts a step of the layer, and completes the audits whose actions take effect in it.
  void begin_step(uint32_t layer);
  /// Lets findings about the head take effect if they are due. True: its searches are wider from now on, and need the
  /// capacity for it. Call begin_step() first.
  bool act(uint32_t layer, uint32_t kv_head, const Budget& budget);
  /// Widens the head's work as far as audits ask for it, and gives it a record if the head is
  /// audited.
  void record(uint32_t layer, uint32_t kv_head, const Budget& budget, HeadWork& work);
  // For steps on a stream, where audits only report:
  /// Counts a step of the layer; returns its number if a KV head of it is audited. For the thread that submits steps.
  [[nodiscard]] std::optional<uint64_t> count(uint32_t layer);
  /// The record of a KV head of the step that was counted; null: this head is not audited.
  [[nodiscard]] HeadRecord* record(uint32_t layer, uint32_t kv_head, uint64_t number,
                                   const Budget& budget);

  /// Ends the step: its records may be audited.
  void submit();
  /// Ends a step that has failed: its records are void.
  void discard();

  /// The most keys that a search of the head is asked for. head: its number, see HeadNumbers.
  [[nodiscard]] uint32_t widened_top_k(size_t head, uint32_t top_k) const;
  /// Takes in that the head has a new budget: findings about the old one are forgotten.
  void reset_widening(size_t head);
  /// Reserves memory for recall of more keys. Throws std::bad_alloc.
  void reserve(uint32_t top_k);

  /// Returns when no audit is under way.
  void finish();
  /// finish() for audits that read rows of the layer from `rows` on.
  void finish_reading(uint32_t layer, uint32_t rows);

  /// The figures of several heads together. Finishes the audits under way.
  [[nodiscard]] keyhole_audit summary(std::span<const size_t> heads);
  void reset_figures();
  /// Bytes of host memory as counted when the last step ended, because workers write to records during a step.
  [[nodiscard]] uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  // Saves and loads the schedule, but no figures. No audit may be under way.
  void save(ChecksumWriter& out) const;
  /// Throws Error(corrupt | io).
  void load(ChecksumReader& in);
  void copy_from(const SessionAudits& from);
  /// The figures, too, go on here. Finishes the audits of `from`.
  void take_figures(const SessionAudits& from);

 private:
  void report_action(uint32_t layer, uint32_t kv_head, float bound);
  [[nodiscard]] float bound_of(const Budget& budget) const;
  void count_bytes() { bytes_.store(auditor_->bytes(), std::memory_order_relaxed); }

  const Engine* engine_;
  const SessionParams* params_;
  uint64_t step_ = 0;  ///< of the layer that begin_step() was called for
  uint64_t actions_ = 0;
  std::atomic<uint64_t> bytes_{0};
  std::unique_ptr<Auditor> auditor_;  ///< null: nothing is audited
};

}  // namespace keyhole::runtime
