// Steps in the order of a caller's stream, see keyhole/stream.h: calls enqueue a step's kernels and
// submit it to a thread of the runner's own, which serves the host's part when the device has published q.
//
//   calling thread    enqueue: wait for the layer's step before, check, submit, launch
//   the stream        first half: append k and v, attend the resident tokens, publish q
//   serving thread    await q, search and attend the offloaded tokens, deliver, update the host's copy
//   the stream        second half: wait for the host's states, merge
//
// Where the device attends everything (gpu/codes.h) the serving thread only takes k and v in, and a calling thread that
// waits for that does it itself (StreamServer::wait()): no call needs the serving thread to get a core.
//
// The host's part is in stream_runner_host.cpp, and what captured graphs take in stream_runner_graphs.cpp. Sliding
// layers (gpu/windows.h) have no host's part: stream_runner_windows.cpp.
//
// The runner knows of a session only what StreamClient, and of sliding layers StreamWindows, tell.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gpu/step.h"
#include "keyhole/inspect.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/tensor.h"
#include "runtime/kv/stream_windows.h"
#include "runtime/step/decode_step.h"
#include "runtime/stream/capture.h"
#include "runtime/stream/device_codes.h"
#include "runtime/stream/offload_forecast.h"
#include "runtime/stream/stream_failure.h"
#include "runtime/stream/stream_server.h"

namespace keyhole::runtime {

/// What stream steps need of a session.
class StreamClient {
 public:
  virtual ~StreamClient() = default;

  // From the calling thread. Counts of a layer: while no step of that layer is under way.
  [[nodiscard]] virtual uint32_t tokens(uint32_t layer) const = 0;
  [[nodiscard]] virtual ResidentCounts resident_counts(uint32_t layer) const = 0;
  /// Whether the next step of the layer takes in or begins a block of pending tokens.
  [[nodiscard]] virtual bool append_is_due(uint32_t layer) const = 0;

  // From the calling thread, while no step at all is under way.
  /// Host memory that the session holds, and what blocks under way will add.
  [[nodiscard]] virtual uint64_t host_bytes() const = 0;
  virtual void advance_append(uint32_t layer) = 0;
  /// Rows leave the window in multiples of it (Sequence::row_block()).
  [[nodiscard]] virtual uint32_t row_block() const = 0;
  /// Layers have no codes on the device any more: see DeviceCodes::give_up().
  virtual void codes_gone() = 0;
  /// Offloads a block of rows, of which the window has as many or more. Throws Error(out_of_memory).
  virtual void flush(uint32_t layer) = 0;

  // Audits. From the calling thread:
  /// Whether steps may be audited.
  [[nodiscard]] virtual bool has_audits() const = 0;
  /// Counts a step that is about to be submitted; its number if it is audited: then it keeps its answer.
  [[nodiscard]] virtual std::optional<uint64_t> count_step(uint32_t layer) = 0;
  // From the thread that serves steps:
  /// Opens the audit of a step: after prepare_work(), or of a coded step, which has none, in its place.
  virtual void begin_audit(const StreamStep& step, const gpu::Published& published) = 0;
  /// The host's part of that step is over.
  virtual void end_served_audit() = 0;
  /// Takes the answer of the step whose audit is open, if one is. From either thread. is_over: the step has ended.
  virtual void close_audit(bool is_over) = 0;
  /// The step whose audit is open has failed.
  virtual void drop_audit() = 0;

  // From the serving thread, or from the calling one in its place, for one step after the other.
  /// Decides what the KV heads of a layer do in a step whose token is at `position`.
  virtual void prepare_work(uint32_t layer, uint32_t position) = 0;
  /// Hands the step to the pool; q `[q_heads, head_dim]` stays valid until finish_step().
  virtual void start_step(uint32_t layer, const float* q, ResultSink& sink) = 0;
  /// Waits for the step and adds what it cost to the session's statistics. Throws what a task threw.
  virtual void finish_step() = 0;
  /// Brings the host's copy of the layer's resident tokens up to the step of so many tokens
  /// (StreamSteps::update_host_copy), and offloads those that left the window.
  virtual void append_published(uint32_t layer, const gpu::Published& published,
                                uint32_t tokens) = 0;
};

class StreamRunner {
 public:
  /// Engine, params, steps, codes, client and windows (null: no layer slides) outlive the runner. Params may change
  /// while no step is under way; changes of the mode need invalidate_graphs().
  StreamRunner(const Engine& engine, const SessionParams& params, gpu::StreamSteps& steps,
               DeviceCodes& codes, StreamClient& client, StreamWindows* windows = nullptr);
  /// Ends the thread, and the device's waits for steps that it has not served.
  ~StreamRunner();
  StreamRunner(const StreamRunner&) = delete;
  StreamRunner& operator=(const StreamRunner&) = delete;

  /// q, k, v and out in device memory; with out null the first half of a step, else all of it. Throws Error:
  /// invalid_argument, out_of_memory (host_memory_limit), busy; those of update(); device_error where a launch fails.
  /// group: where the step, if it is a whole one over codes, may wait for those of other sessions (its count() grows);
  /// until it is launched this session enqueues nothing else.
  void enqueue(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
               const TensorOut* out, float* lse, gpu::StepGroup* group = nullptr);
  /// The same of a sliding layer, among drafts; of a first half drafts is empty.
  void enqueue_window(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                      const gpu::SeenDrafts& drafts, const TensorOut* out, float* lse);
  /// Waits for all that enqueue() of so many tokens would wait for, so that steps in a group wait for no other session.
  /// Throws as enqueue().
  void prepare_ahead(uint32_t layer, uint32_t appends);
  /// The step that was added to a group could not be launched: does what enqueue() would have done, and throws `error`.
  [[noreturn]] void fail_launch(const std::exception_ptr& error);
  /// Several tokens of a layer at once, at most most_tokens(layer) of them. False: the layer is not attended by codes
  /// on the device (any more), and nothing was done. tokens.group: as enqueue(), as what is thrown.
  [[nodiscard]] bool enqueue_tokens(uint32_t layer, const gpu::ManyTokens& tokens);
  [[nodiscard]] uint32_t most_tokens(uint32_t layer) const {
    return is_coded(layer) ? codes_->of_layer(layer)->most_tokens(layer) : 1;
  }
  /// Enqueues that of the newest tokens of these layers, which are resident, some remain; waits for nothing, and graphs
  /// stay valid. Throws Error: busy, device_error, or that of an earlier step.
  void keep_newest(KeptTokens tokens);
  /// Tokens of a layer after all steps that were enqueued: waits for the host's part of them.
  [[nodiscard]] uint32_t settled_tokens(uint32_t layer) {
    server_.wait(tickets_[layer]);
    return client_->tokens(layer);
  }
  /// Tokens that the graph announced last appends to a layer.
  [[nodiscard]] uint32_t announced_tokens(uint32_t layer) const { return ahead_[layer]; }
  /// The second half.
  void enqueue_end(const TensorOut& out, float* lse);
  /// Between enqueue() of a first half and enqueue_end().
  [[nodiscard]] bool in_step() const { return is_open_; }
  [[nodiscard]] uint32_t open_layer() const { return open_layer_; }  ///< of that step

  void set_stream(gpu::Stream stream);
  [[nodiscard]] gpu::Stream stream() const { return stream_; }
  /// See gpu::StreamSteps.
  [[nodiscard]] std::unique_ptr<gpu::StepGroup> make_group(uint32_t most) const {
    return steps_->make_group(most);
  }
  /// The capture with this number, whose steps can be submitted; 0: the last one. Throws Error where they cannot, as
  /// keyhole_session_announce_graph says.
  [[nodiscard]] const Capture& ready_graph(uint64_t graph);
  /// Submits the steps of what ready_graph() has returned, with no call of this session between.
  void submit_graph(const Capture& graph) noexcept;
  /// The number of the last capture that a step was recorded in, 0: none.
  [[nodiscard]] uint64_t last_graph() const { return captures_.newest().id(); }
  /// wait_idle(), then throws the first error of the steps; otherwise the device is made ready for a capture.
  void synchronize();

  /// Whether the stream is being captured: then only steps, and what reads, can be called.
  [[nodiscard]] bool is_capturing() const { return capture_id() != 0; }
  [[nodiscard]] uint64_t capture_id() const { return steps_->capture_id(stream_); }
  /// The number of the capture that a step is recorded in, 0: none. Throws Error(busy) where nothing can be enqueued.
  [[nodiscard]] uint64_t capture_of_step() const;
  /// Waits until no step is under way, on the host or on the stream. Not during a capture. Throws nothing: an error
  /// is kept for check_failure().
  void wait_idle();
  /// Waits until the host's part of all steps is done, and leaves the stream alone: also during a capture.
  void wait_for_host() { server_.drain(); }
  /// Enqueues what brings the layer's codes up to its rows, if it has any, and waits until their memory is pinned.
  /// Where it cannot be, layers go to the host until it can, the first ones first; after any other failure all do. The
  /// log says so; with KEYHOLE_PLACE_DEVICE it throws Error(out_of_memory | device_error).
  void update_codes(uint32_t layer);
  /// The same for a prompt that goes on, which waits for nothing: begins to pin rows, as DeviceCodes::pin_beside()
  /// does.
  void pin_codes(uint32_t layer);
  /// And enqueues the encoding of rows of any layer that are pinned by now, before rows of `layer` come.
  void encode_pinned(uint32_t layer);
  /// As update_codes(), and waits until the device has encoded them. While no step is under way.
  void finish_codes(uint32_t layer);
  /// Throws Error(busy) during a capture, for calls that would wait for the stream.
  void check_not_capturing() const;
  /// Throws the first error of the steps. After one there are no more steps.
  void check_failure() const { failure_.rethrow(); }
  /// Ends the session's steps with an error of the device, unless one has ended them before.
  void fail(const Error& e) { failure_.set(e.status(), e.what()); }

  /// Graphs that were captured before are not valid any more.
  void invalidate_graphs() { settings_version_ += 1; }

  /// Adds the figures of stream steps; after wait_for_host().
  void add_statistics(keyhole_statistics& s) const;
  void reset_statistics();

 private:
  [[nodiscard]] GraphVersion graph_version() const {
    return {settings_version_, codes_->version()};
  }
  /// Throws Error(busy) between enqueue() of a first half and enqueue_end().
  void check_no_open_step() const;
  /// A step outside of captures: waits until it can be submitted, and checks that it may be.
  void prepare(uint32_t layer, uint32_t appends);
  /// What every step begins with; the number of the capture that it is recorded in, 0: none.
  uint64_t open(uint32_t layer, uint32_t appends);
  void check_tokens(uint32_t layer, uint32_t appends, uint32_t ahead) const;
  void update_index(uint32_t layer);
  /// Where rows leave the window in blocks: makes room for `appended` tokens, so that the device's own rule, which
  /// makes the window fall back by another number, never applies.
  void make_room(uint32_t layer, uint32_t appended);
  [[nodiscard]] bool is_coded(uint32_t layer) const {
    return params_->mode == KEYHOLE_MODE_INDEXED && codes_->layer_has(layer);
  }
  void know_held_bytes();
  /// Host memory of the tokens that will leave the layer's window when so many come.
  [[nodiscard]] uint64_t offloaded_bytes(uint32_t layer, uint32_t appends) const;
  void check_memory(uint64_t offloaded_bytes) const;
  /// The step as it is submitted: whether it is audited.
  [[nodiscard]] StreamStep counted(StreamStep step);
  void submit(StreamStep step);
  /// Keeps the exception being handled as the session's failure.
  void keep_failure();
  void note_device_failure();
  /// Runs an update of codes until it succeeds or `layer` has none any more.
  template <class F>
  void keep_codes(uint32_t layer, F&& update);
  /// Runs launches of a step; what they throw spoils the capture, or ends the session's stream steps.
  template <class F>
  void launch(bool is_captured, F&& launches);

  // stream_runner_graphs.cpp
  void prepare_capture(uint64_t id, uint32_t layer);

  // stream_runner_windows.cpp
  void note_window_step(uint32_t layer, uint32_t appends);
  void note_window_failure();
  /// The tokens of sliding layers that take part lie on the device before a graph is launched.
  void place_windows(std::span<const StreamStep> steps);
  void keep_newest_of_windows(const KeptTokens& tokens);

  // stream_runner_host.cpp: for the server; see there.
  [[nodiscard]] bool can_serve(const StreamStep& step, bool waits);
  void serve(const StreamStep& step);
  void serve_published(const StreamStep& step, const gpu::Published& published);
  void check_finite_rows(const StreamStep& step, const gpu::Published& published) const;

  const Engine* engine_;
  const SessionParams* params_;
  gpu::StreamSteps* steps_;
  DeviceCodes* codes_;
  StreamClient* client_;
  StreamWindows* windows_;
  ModelShape model_;
  uint64_t timeout_us_;

  gpu::Stream stream_ = nullptr;
  std::vector<uint32_t> sequences_;  ///< [layer] steps submitted, cyclic
  std::vector<uint32_t> tickets_;    ///< [layer] of the last of them
  StreamFailure failure_;
  std::atomic<bool> gives_up_{false};  ///< waits for the device end: it will not publish any more

  Captures captures_;
  uint64_t settings_version_ = 1;
  std::vector<uint32_t> ahead_;  ///< [layer] tokens of a capture, while it is announced

  OffloadForecast forecast_;
  uint64_t held_bytes_ = 0;  ///< of host memory, after all that was submitted
  bool knows_held_ = false;

  // Between enqueue() of a first half and enqueue_end().
  bool is_open_ = false;
  uint32_t open_layer_ = 0;
  uint64_t open_capture_ = 0;  ///< in which the half was recorded; 0: none

  uint64_t steps_served_ = 0;
  uint64_t coded_tokens_ = 0;  ///< of steps over codes, each new token is one attend
  uint64_t window_steps_ = 0;  ///< of sliding layers, enqueued or announced
  double serve_seconds_ = 0.0;
  uint64_t waited_before_ = 0;      ///< nanoseconds, at the last reset of statistics
  gpu::CodesDoubts doubts_before_;  ///< likewise

  StreamServer server_;  // last: its thread ends before all that it reads
};

template <class F>
void StreamRunner::launch(bool is_captured, F&& launches) {
  try {
    launches();
  } catch (...) {
    if (is_captured) {
      captures_.newest().spoil();
    } else {
      // The host is waiting for a step that may never come.
      keep_failure();
      gives_up_.store(true);
    }
    throw;
  }
}

}  // namespace keyhole::runtime
