// One sequence: which token lies where, and the calls that move them. The split of a layer's tokens is
//
//     [0, sink) resident | [sink, sink + rows) offloaded | the window: resident
//                          rows [0, indexed) of a head are in its index, [indexed, rows) are pending
//
// so every token is in exactly one of resident, indexed, pending, by construction. Rows on their way into an
// index (an AppendJob) are pending until the index has them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "index/index.h"
#include "runtime/auditor.h"
#include "runtime/background_builder.h"
#include "runtime/decode_step.h"
#include "runtime/engine.h"
#include "runtime/offload_store.h"
#include "runtime/query_sample.h"
#include "runtime/stream/device_rows.h"
#include "runtime/stream/stream_runner.h"
#include "runtime/tensor.h"

namespace keyhole::runtime {

class Session {
 public:
  Session(std::shared_ptr<const Engine> engine, SessionParams params);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  [[nodiscard]] const Engine& engine() const { return *engine_; }
  [[nodiscard]] const std::shared_ptr<const Engine>& shared_engine() const { return engine_; }
  [[nodiscard]] const SessionParams& params() const { return params_; }

  /// See keyhole_prefill, keyhole_build, keyhole_attend_begin/end, keyhole_truncate. All throw Error and
  /// then have changed nothing, except where the public header says so.
  void prefill(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  void build(const std::function<bool(double, const char*)>& progress);
  void attend_begin(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v);
  void attend_end(const RowsOut& out, float* lse);
  void truncate(uint32_t tokens);
  /// Ends a step without a result (before the session goes).
  void abandon_step() noexcept;

  // Stream steps, see the public header. All throw Error(unsupported) on a host device.
  /// q, k, v and out in device memory; with out null the first half of a step, else all of it.
  void enqueue(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v,
               const RowsOut* out, float* lse);
  void enqueue_end(const RowsOut& out, float* lse);
  [[nodiscard]] bool in_stream_step() const;
  void set_stream(gpu::Stream stream);
  void announce();
  void synchronize();
  void prefill_from_device(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  /// Whether the session's stream records a graph: then steps can be enqueued and counts be read, no more.
  [[nodiscard]] bool is_capturing() const;
  /// Throws Error(busy) during a capture.
  void check_not_capturing() const;
  /// Waits until no step is under way on the stream: nothing else touches the session then. Not during a capture.
  void wait_idle();
  /// Waits until the host's part of all steps is done, without touching the stream: also during a capture.
  void wait_for_host();
  /// Throws the first error of stream steps.
  void check_failure();

  void set_index(const std::string& spec);
  void set_mode(keyhole_mode mode, uint32_t top_k);
  void set_attend(keyhole_attend_mode attend, float min_weight);
  /// See keyhole_session_set_budget; layer and kv_head may be KEYHOLE_ALL.
  void set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget);
  [[nodiscard]] Budget budget(uint32_t layer, uint32_t kv_head) const;

  [[nodiscard]] bool in_step() const { return in_step_; }
  [[nodiscard]] uint32_t tokens(uint32_t layer) const;
  [[nodiscard]] keyhole_layer_tokens layer_tokens(uint32_t layer) const;
  [[nodiscard]] keyhole_statistics statistics() const;
  void reset_statistics();

  /// What audits have found of one head or several (KEYHOLE_ALL); waits for those under way.
  [[nodiscard]] keyhole_audit audit(uint32_t layer, uint32_t kv_head);
  /// Waits for audits under way. After it the session can be copied.
  void finish_audits() {
    if (auditor_ != nullptr) auditor_->finish();
  }

  /// Throws Error(invalid_argument) for a layer that the model does not have.
  void check_layer(uint32_t layer) const;

 private:
  friend class SessionFile;  // persistence reads and fills the parts

  struct Head {
    std::unique_ptr<index::Index> index;    ///< null: nothing indexed
    std::unique_ptr<index::TailTree> tail;  ///< of rows [0, tail->count()); null: no partitions
    QuerySample queries;
    HeadParams params;
    [[nodiscard]] uint32_t indexed() const {
      return index == nullptr ? 0 : static_cast<uint32_t>(index->count());
    }
    /// The tree, where it covers what is indexed.
    [[nodiscard]] const index::TailTree* full_tail() const {
      return tail != nullptr && tail->count() == indexed() ? tail.get() : nullptr;
    }
  };

  [[nodiscard]] Head& head(uint32_t layer, uint32_t kv_head) {
    return heads_[size_t{layer} * engine_->model().kv_heads + kv_head];
  }
  [[nodiscard]] const Head& head(uint32_t layer, uint32_t kv_head) const {
    return const_cast<Session*>(this)->head(layer, kv_head);
  }

  [[nodiscard]] bool is_dense(uint32_t layer, uint32_t kv_head) const {
    return params_.is_dense(layer) || head(layer, kv_head).params.dense;
  }
  /// The heads that a layer and KV head, each perhaps KEYHOLE_ALL, name; throws Error(invalid_argument).
  [[nodiscard]] std::vector<size_t> named_heads(uint32_t layer, uint32_t kv_head) const;

  void check_append(uint32_t layer, const RowsIn& k, const RowsIn& v) const;
  void check_memory(uint64_t more_bytes, const char* what) const;
  void append_tokens(uint32_t layer, const RowsIn& k, const RowsIn& v);
  void offload_from_window(uint32_t layer, uint32_t n);
  void offload_from_input(uint32_t layer, const RowsIn& k, const RowsIn& v, uint32_t begin,
                          uint32_t n);
  void drop_newest(uint32_t layer);
  /// Appends the first n tokens of the staging buffers to the offloaded ones.
  void store_staged(uint32_t layer, uint32_t n);
  void stage(const RowsIn& rows, uint32_t begin, uint32_t n, std::byte* to);
  void sample_queries(uint32_t layer, const RowsIn& q, uint32_t first_position);

  [[nodiscard]] std::unique_ptr<index::TailTree> make_tail(uint32_t layer, uint32_t kv_head) const;
  void build_head(uint32_t layer, uint32_t kv_head, const index::Progress& progress);
  void warn_of_poor_indexes(const std::vector<const Head*>& built) const;

  // Blocks of pending rows, see PENDING TOKENS in the public header.
  /// The number of the block that row `rows` of a layer falls into.
  [[nodiscard]] uint32_t append_round(uint32_t layer, uint32_t rows) const;
  void advance_append(uint32_t layer);
  void begin_append(uint32_t layer, uint32_t rows);
  void commit_append(uint32_t layer);
  void cancel_append(uint32_t layer) noexcept;
  void report_wait(uint32_t layer, double seconds);

  // Audits, see AUDIT in the public header; only with an auditor.
  /// The work of the heads is known but for what audits have to say: widened, exact, to be recorded.
  void begin_audits(uint32_t layer);
  void act_on_audits(uint32_t layer, uint64_t step);
  void report_action(uint32_t layer, uint32_t kv_head);
  /// The most keys that a search of the head is asked for.
  [[nodiscard]] uint32_t widened_top_k(size_t head) const;

  /// What the KV heads of a layer do in a step whose token is at `position`; on_device: of a stream step whose device
  /// chooses partitions.
  void prepare_work(uint32_t layer, uint32_t position, bool on_device);
  void add_cost(const StepCost& cost);

  // session_stream.cpp
  class Client;
  void make_stream_runner();
  [[nodiscard]] StreamRunner& runner(const char* what);
  [[nodiscard]] bool append_is_due(uint32_t layer) const;
  /// Whether the device holds the partitions of a head and chooses among them.
  [[nodiscard]] bool device_chooses(uint32_t layer, uint32_t kv_head) const;
  [[nodiscard]] uint64_t device_bytes() const;

  /// Another budget for heads_[i]; what audits have done to the old one is forgotten.
  void change_budget(size_t i, const Budget& budget);
  /// Makes room for searches in the indexes that there are; `anew`: even where it seems to suffice.
  void make_room(bool anew);
  [[nodiscard]] uint64_t count_index_bytes() const;
  [[nodiscard]] uint64_t host_bytes() const;

  std::shared_ptr<const Engine> engine_;
  SessionParams params_;
  OffloadStore store_;
  std::unique_ptr<gpu::Resident> resident_;
  std::vector<Head> heads_;                       ///< [layer * kv_heads + kv_head]
  std::vector<std::byte> staging_k_, staging_v_;  ///< `[window_capacity, kv_heads, head_dim]`
  DecodeStep step_;
  bool in_step_ = false;
  uint32_t step_layer_ = 0;
  bool step_appended_ = false;
  std::chrono::steady_clock::time_point step_began_;
  double step_append_seconds_ = 0.0;
  uint64_t index_bytes_ = 0;  ///< of all heads; counted when an index changes, not in every step
  keyhole_statistics totals_{};
  std::vector<std::unique_ptr<AppendJob>> appends_;  ///< [layer]; null: no block under way
  // Last, so that they end before anything that they read.
  BackgroundBuilder builder_;
  std::unique_ptr<Auditor> auditor_;  ///< null: nothing is audited
  uint64_t audit_actions_ = 0;
  uint64_t host_bytes_peak_ = 0;
  std::unique_ptr<DeviceRowsReader> device_rows_;  ///< null: no prefill came from device memory
  // Null where the device has no streams.
  std::unique_ptr<StreamClient> stream_client_;
  std::unique_ptr<StreamRunner> stream_;  ///< the last: its thread reads all of the above
};

}  // namespace keyhole::runtime
