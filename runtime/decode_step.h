// One step of one layer: resident attention (A), index search and attention over what it found (B), exact
// attention over pending or dense tokens, all as tasks of one parallel-for, then A + B by log-sum-exp.
//
// A model with few KV heads has too few searches for many threads: they are cut into parts. The last part of a
// head to end merges what all have found, and attends to it; parts that score all their keys for good attend to
// their own.
//
// Which task computes what depends on the shape and the token counts only, or leaves no trace in the result, and
// states are merged in a fixed order: the result has the same bits for any number of threads.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "cpu/pool.h"
#include "gpu/device.h"
#include "index/index.h"
#include "runtime/audit_record.h"
#include "runtime/engine.h"
#include "runtime/selection.h"
#include "runtime/tensor.h"

namespace keyhole::runtime {

/// What one KV head attends in this step beside its resident tokens.
struct HeadWork {
  const index::Index* index = nullptr;  ///< null: no search
  KvView kv;                            ///< all offloaded rows
  uint32_t exact_begin = 0;             ///< rows [exact_begin, kv.keys.count) exactly
  SearchParams search;                  ///< its k is at most room_k() in effect
  /// Not null: instead of a search, the rows of the partitions that the device chooses (Delivery::chosen).
  const index::TailTree* partitions = nullptr;
  HeadRecord* record = nullptr;  ///< not null: to be filled in for an audit
};

/// Where the host's part of a step goes as soon as a KV head has all of it, for a device that merges by itself.
/// Called by tasks, for different heads at once.
class Delivery {
 public:
  virtual ~Delivery() = default;
  /// The head's slot, o `[group, head_dim]`, lse `[group]`: written once.
  [[nodiscard]] virtual StateView slot(uint32_t kv_head) = 0;
  virtual void deliver(uint32_t kv_head) = 0;
  /// Partitions that the device has chosen for a head (HeadWork::partitions); waits for them. Throws
  /// Error(timeout).
  [[nodiscard]] virtual std::span<const uint32_t> chosen(uint32_t kv_head) = 0;
};

struct StepCost {
  uint64_t keys_scored = 0, keys_offered = 0, keys_attended = 0, bytes_read = 0;
  double search_seconds = 0.0, offload_seconds = 0.0, resident_seconds = 0.0;
  double tail_seconds = 0.0;  ///< within search_seconds
  uint64_t keys_opened = 0, targets_missed = 0;
};

class DecodeStep {
 public:
  DecodeStep(const Engine& engine);
  DecodeStep(const DecodeStep&) = delete;
  DecodeStep& operator=(const DecodeStep&) = delete;

  /// Makes room for searches of k results in indexes of these types, up to these sizes.
  void prepare(std::span<const Selection::Use> uses, uint32_t k);
  [[nodiscard]] bool has_room(const Selection::Use& use) const {
    return workers_.front().selection.has_room(use);
  }
  [[nodiscard]] uint32_t room_k() const { return room_k_; }

  /// Where the caller puts q `[q_heads, head_dim]` fp32 and the work of every KV head before start().
  [[nodiscard]] float* queries() { return queries_.data(); }
  [[nodiscard]] HeadWork& work(uint32_t kv_head) { return work_[kv_head]; }

  /// Hands the step to the pool and returns. queries() and the resident part are the step's.
  void start(uint32_t layer, gpu::Resident& resident);
  /// The same without a resident part: states go to `delivery`, o() and lse() are left alone, nothing is recorded,
  /// and targets are relative to the offloaded tokens alone. q `[q_heads, head_dim]` stays valid until finish().
  void start(const float* q, Delivery& delivery);
  /// Rows that partitions of a tree may have, for a step that gathers so many of them per head.
  void reserve_rows(size_t rows);

  /// Helps, waits, merges: o() `[q_heads, head_dim]`, lse() `[q_heads]`. Rethrows what a task threw; the
  /// step is over in any case.
  StepCost finish();
  [[nodiscard]] const float* o() const { return o_.data(); }
  [[nodiscard]] const float* lse() const { return lse_.data(); }

  [[nodiscard]] size_t bytes() const;

 private:
  struct alignas(64) Worker {
    Selection selection;
    StepCost cost;
    std::vector<uint32_t> rows;  ///< of chosen partitions
  };

  /// Rows per exact task: enough to outweigh a hand-off, and never more than kMaxChunks tasks a head.
  static constexpr uint32_t kMinChunk = 1024;
  static constexpr uint32_t kMaxChunks = 64;
  /// Slots of a KV head: those of the parts of its search, those of its chunks, and its tail.
  static constexpr uint32_t kTailSlot = kMaxParts + kMaxChunks;
  static constexpr uint32_t kSlots = kTailSlot + 1;

  /// What the parts of one KV head's search have found.
  struct Parts {
    std::vector<uint32_t> ids, counts;  ///< `[kMaxParts, group, k]`, `[kMaxParts, group]`
    std::vector<float> scores;
    std::vector<index::Hits> hits;  ///< views of them
    uint32_t count = 0;             ///< of this step
    std::atomic<uint32_t> left{0};  ///< that are not done
  };

  void start_tasks(uint32_t host_tasks);
  void run_task(uint32_t task, uint32_t worker);
  void run_work(uint32_t kv_head, uint32_t slot, Worker& worker);
  /// One of the tasks of a head is done: the last one merges and delivers.
  void end_task(uint32_t kv_head);
  using States = std::array<StateView, 1 + kSlots>;
  /// The states of what a head has attended on the host, the tail's last (also in `tail`); returns how many.
  size_t host_states(uint32_t kv_head, StateView* states, StateView& tail);
  void merge_all();
  [[nodiscard]] uint32_t chosen_parts() const;
  void run_chosen(uint32_t kv_head, uint32_t part, Worker& worker);
  [[nodiscard]] uint32_t search_parts(const HeadWork& work) const;
  void run_resident(uint32_t host_task, Worker& worker);
  /// The resident state of a KV head, which targets are relative to: computed here if nobody has begun it.
  [[nodiscard]] StateView resident_state(uint32_t kv_head, Worker& worker);
  void run_search(uint32_t kv_head, uint32_t part, Worker& worker);
  void run_chunk(uint32_t kv_head, uint32_t chunk, Worker& worker);
  [[nodiscard]] StateView slot(uint32_t kv_head, uint32_t i);
  /// Of a group, `[group, dim]`, in the step under way.
  [[nodiscard]] const float* queries_of(uint32_t kv_head) const {
    return q_ + size_t{kv_head} * group_ * dim_;
  }
  void begin_record(uint32_t kv_head);
  void end_record(uint32_t kv_head, std::span<const StateView> read, StateView tail);

  const Engine* engine_;
  uint32_t group_, dim_;
  uint32_t most_parts_;  ///< of a search
  std::vector<float> queries_, o_, lse_;
  const float* q_ = nullptr;  ///< of the step under way
  std::vector<HeadWork> work_;
  std::vector<Worker> workers_;
  uint32_t room_k_ = 0;

  // The step under way.
  cpu::Job job_;
  gpu::Resident* resident_ = nullptr;
  std::vector<uint32_t> chunk_rows_, chunks_;  ///< per KV head
  std::unique_ptr<Parts[]> parts_;             ///< [kv_heads]
  struct HostTask {
    std::atomic<bool> taken{false}, done{false};
  };
  std::unique_ptr<HostTask[]> host_tasks_;  ///< [kv_heads]
  Delivery* delivery_ = nullptr;            ///< of the step under way; null: o() and lse()
  struct alignas(64) Left {
    std::atomic<uint32_t> tasks{0};
    std::atomic<bool> failed{false};
  };
  std::unique_ptr<Left[]> left_;          ///< [kv_heads] tasks that are not done
  std::vector<uint32_t> tasks_;           ///< kv_head * kSlots + slot; resident tasks follow
  std::vector<float> slot_o_, slot_lse_;  ///< `[kv_heads, kSlots, group, dim]`, without dim
  std::vector<float> resident_o_, resident_lse_;
};

}  // namespace keyhole::runtime
