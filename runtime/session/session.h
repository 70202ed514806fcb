// One sequence being decoded: owns its parts and orders the calls to them.
//
//     sequence_  which token lies where               session/sequence.h
//     keeper_    what is indexed, builds, appends     build/index_keeper.h
//     step_      the host's part of one step          decode_step.h
//     audits_    steps computed again exactly         audit/session_audits.h
//     codes_     what the device has of the rows      stream/device_codes.h
//     stream_    steps in the order of a stream       stream/stream_runner.h
//
// Every token is resident, indexed or pending, in exactly one of the three: resident or offloaded
// by the sequence, and of the offloaded rows of a head [0, indexed) are in its index, all later
// ones pending.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/audit/session_audits.h"
#include "runtime/build/index_keeper.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/tensor.h"
#include "runtime/session/resident_truth.h"
#include "runtime/session/sequence.h"
#include "runtime/step/decode_step.h"
#include "runtime/stream/device_codes.h"
#include "runtime/stream/device_rows.h"
#include "runtime/stream/stream_runner.h"

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

  /// See keyhole_prefill, keyhole_build, keyhole_attend_begin/end, keyhole_truncate. All throw
  /// Error and then have changed nothing, except where the public header says so.
  void prefill(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  void build(const BuildProgress& progress);
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
  /// Throws the first error of stream steps, or of the device.
  void check_failure();
  /// What a call has thrown: where the device failed, nothing is known of its tokens any more, and the session takes no
  /// more steps or changes. During a capture only the graph is lost.
  void keep_device_failure(const Error& e);

  // What a stream step asks of the session that it belongs to.
  /// What the KV heads of a layer do in a step whose token is at `position`. on_device: of a
  /// stream step whose device chooses partitions.
  void prepare_work(uint32_t layer, uint32_t position, bool on_device);
  void prepare_codes(HeadWork& work, const HeadIndex& head, uint32_t position);
  [[nodiscard]] bool append_is_due(uint32_t layer) const { return keeper_.append_is_due(layer); }
  /// Takes a block of pending rows in, or begins one, if a step of the layer is to. Logs what
  /// fails.
  void advance_append(uint32_t layer);
  [[nodiscard]] uint32_t tokens(uint32_t layer) const { return sequence_.tokens(layer); }
  /// What a head has indexed on the host, null for nothing: as long as no call changes the session.
  [[nodiscard]] const index::Index* index_of(uint32_t layer, uint32_t kv_head) const {
    return keeper_.head(layer, kv_head).index.get();
  }
  /// Throws Error(out_of_memory) where so many bytes more would pass host_memory_limit.
  void check_memory(uint64_t more_bytes, const char* what) const;
  void add_cost(const StepCost& cost);

  // session/session_settings.cpp
  void set_index(const std::string& spec);
  /// top_k: 1..max_tokens, or 0 to keep it.
  void set_mode(keyhole_mode mode, uint32_t top_k);
  void set_attend(keyhole_attend_mode attend, float min_weight);
  /// See keyhole_session_set_budget; layer and kv_head may be KEYHOLE_ALL.
  void set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget);
  [[nodiscard]] Budget budget(uint32_t layer, uint32_t kv_head) const;

  [[nodiscard]] bool in_step() const { return in_step_; }
  [[nodiscard]] keyhole_layer_tokens layer_tokens(uint32_t layer) const;
  /// Reads nothing that workers write: also between attend_begin() and attend_end().
  [[nodiscard]] keyhole_statistics statistics() const;
  void reset_statistics();

  /// What audits have found of one head or several (KEYHOLE_ALL); waits for those under way.
  [[nodiscard]] keyhole_audit audit(uint32_t layer, uint32_t kv_head);
  /// Waits for audits under way. After it the session can be copied.
  void finish_audits() { audits_.finish(); }

  // Copies, see session_file.h. No step and no audit may be under way; load() and copy_from() are
  // for a new session with the parameters, and the settings of heads, of the one that was saved or
  // is copied.
  [[nodiscard]] std::vector<const HeadParams*> head_params() const;
  void save(ChecksumWriter& out) const;
  /// Reads to the end of the file. Throws Error(corrupt | io).
  void load(ChecksumReader& in);
  void copy_from(const Session& from);

  /// Throws Error(invalid_argument) for a layer that the model does not have.
  void check_layer(uint32_t layer) const;

 private:
  void check_append(uint32_t layer, const RowsIn& k, const RowsIn& v) const;
  /// The same for indexes, with what searches in them take.
  void check_index_memory(uint64_t more_bytes, const char* what) const;
  /// What searches will take once there is a first index; 0 after that.
  [[nodiscard]] uint64_t first_search_bytes() const;
  /// host_bytes() and what first indexes under way will add to it: what host_memory_limit is about.
  [[nodiscard]] uint64_t accounted_bytes() const;
  void begin_audits(uint32_t layer);
  /// The step whose offloaded tokens the device has attended by their codes is over: its records know its answer and the
  /// resident tokens.
  void end_coded_audits();

  /// The heads that a layer and KV head, each perhaps KEYHOLE_ALL, name; throws
  /// Error(invalid_argument).
  [[nodiscard]] std::vector<size_t> named_heads(uint32_t layer, uint32_t kv_head) const;
  /// What set_mode(), set_attend() and set_budget() change.
  struct Settings {
    keyhole_mode mode;
    Budget common;
    std::vector<Budget> heads;  ///< [layer * kv_heads + kv_head]
  };
  [[nodiscard]] Settings settings() const;
  /// Strong guarantee. `anew`: searches need memory of another shape.
  void change(const Settings& settings, bool anew);
  /// Reserves memory for searches in the indexes that there are; `anew`: even where it seems to
  /// suffice.
  void reserve_searches(bool anew);

  // session_stream.cpp
  class Client;
  class Rows;
  void make_stream_runner();
  /// Heads, budgets or what lies where have changed: decides anew which layers have codes on the device.
  void place_codes();
  /// After a change that failed. Throws nothing: the first error is the one to tell, the next step finds this one again.
  void place_codes_again() noexcept;
  /// Begins to pin the rows of a session that was loaded or copied.
  void pin_all_codes();
  /// The codes that a step attends on the device in place of the offloaded rows; null: none.
  [[nodiscard]] gpu::Codes* codes_of_step(uint32_t layer) const {
    const bool attends = codes_ != nullptr && params_.mode == KEYHOLE_MODE_INDEXED;
    return attends ? codes_->of_layer(layer) : nullptr;
  }
  [[nodiscard]] StreamRunner& runner(const char* what);
  /// Whether the device holds the partitions of a head and chooses among them.
  [[nodiscard]] bool device_chooses(uint32_t layer, uint32_t kv_head) const;
  [[nodiscard]] uint64_t device_bytes() const;

  [[nodiscard]] uint64_t host_bytes() const;

  std::shared_ptr<const Engine> engine_;
  SessionParams params_;
  Sequence sequence_;
  DecodeStep step_;
  // Last, so that they end before anything that they read.
  IndexKeeper keeper_;
  SessionAudits audits_;

  bool in_step_ = false;
  uint32_t step_layer_ = 0;
  bool step_appended_ = false;
  std::chrono::steady_clock::time_point step_began_;
  double step_append_seconds_ = 0.0;
  std::atomic<uint64_t> step_bytes_ =
      0;  ///< step_.bytes() when no worker wrote to it; read by any thread

  keyhole_statistics totals_{};
  uint64_t host_bytes_peak_ = 0;
  mutable uint64_t promised_search_bytes_ = 0;     ///< see first_search_bytes()
  std::unique_ptr<DeviceRowsReader> device_rows_;  ///< null: no prefill came from device memory
  RowBuffer prompt_rows_[3];  ///< k, v and q of a chunk, until a step or a build
  // Null where the device has no streams.
  std::unique_ptr<ResidentTruth> resident_truth_;
  std::unique_ptr<CodeSource> code_source_;
  std::unique_ptr<DeviceCodes> codes_;
  std::unique_ptr<StreamClient> stream_client_;
  std::unique_ptr<StreamRunner> stream_;  ///< the last: its thread reads all of the above
};

}  // namespace keyhole::runtime
