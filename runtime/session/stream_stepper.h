// Steps of a session in the order of its caller's stream. On a device without streams the session has none: its calls
// wait for nothing here, and those that need a stream throw Error(unsupported).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/session/extended_tokens.h"
#include "runtime/session/prompt_memory.h"
#include "runtime/session/session_stream_client.h"

namespace keyhole::runtime {

class StreamStepper {
 public:
  /// All that it is given outlives it. Throws Error(out_of_memory) where what is exchanged with the device would pass
  /// pinned_memory_limit.
  StreamStepper(const StreamParts& parts, PromptMemory& prompts, ExtendedTokens& extended);
  StreamStepper(const StreamStepper&) = delete;
  StreamStepper& operator=(const StreamStepper&) = delete;

  [[nodiscard]] bool exists() const { return runner_ != nullptr; }
  /// Throws Error(unsupported) that names `what` needs it, where there is none.
  [[nodiscard]] StreamRunner& runner(const char* what);
  /// Where there is one.
  [[nodiscard]] StreamRunner& runner() { return *runner_; }
  [[nodiscard]] const StreamRunner& runner() const { return *runner_; }
  /// Copies tensors between host and device memory.
  [[nodiscard]] DeviceRowsReader& copies();

  // Steps, see keyhole_session_attend with tensors in device memory.
  /// With out null the first half of a step, else all of it.
  void enqueue(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
               const TensorOut* out, float* lse);
  void enqueue_end(const TensorOut& out, float* lse);
  [[nodiscard]] bool in_step() const { return exists() && runner_->in_step(); }
  void set_stream(gpu::Stream stream) { runner("a stream").set_stream(stream); }
  /// The graph with this number, which can be launched; 0: the one captured last. As StreamRunner::ready_graph().
  [[nodiscard]] const Capture& ready_graph(uint64_t graph);
  /// Announces a launch of what ready_graph() has returned, with no call of this session between.
  void submit_graph(const Capture& graph) noexcept;
  void announce(uint64_t graph) { submit_graph(ready_graph(graph)); }
  [[nodiscard]] uint64_t last_graph() { return runner("a graph").last_graph(); }
  void synchronize() {
    if (exists()) runner_->synchronize();
  }

  // Captures.
  [[nodiscard]] bool is_capturing() const { return exists() && runner_->is_capturing(); }
  /// The number of the stream's capture (gpu::StreamSteps::capture_id), 0: none.
  [[nodiscard]] uint64_t capture_id() const { return exists() ? runner_->capture_id() : 0; }
  /// The number of the capture that a step would be recorded in now; throws Error(busy) where no step can be enqueued.
  [[nodiscard]] uint64_t capture_of_step() const {
    return exists() ? runner_->capture_of_step() : 0;
  }
  /// Throws Error(busy) during a capture.
  void check_not_capturing() const {
    if (exists()) runner_->check_not_capturing();
  }
  /// Graphs that were captured before are not valid any more.
  void invalidate_graphs() {
    if (exists()) runner_->invalidate_graphs();
  }

  // Waits and failures.
  /// Waits until no step is under way on the stream: nothing else touches the session then. Not during a capture.
  void wait_idle() {
    if (exists()) runner_->wait_idle();
  }
  /// Waits until the host's part of all steps is done, without touching the stream: also during a capture.
  void wait_for_host() {
    if (exists()) runner_->wait_for_host();
  }
  /// Waits for the host's part of the layer's steps: its tokens are those after them then.
  void settle(uint32_t layer) {
    if (exists()) (void)runner_->settled_tokens(layer);
  }
  /// Throws the first error of steps, or of the device.
  void check_failure() const {
    if (exists()) runner_->check_failure();
  }
  /// What a call has thrown: where the device failed, nothing is known of the session's tokens any more, and it takes
  /// no more steps or changes. During a capture only the graph is lost.
  void keep_device_failure(const Error& e);

  // Codes of offloaded rows, while no step is under way on the stream.
  /// Decides anew which layers have codes, and encodes all rows of those that do: before a build.
  void place_codes_anew();
  /// Waits until the device has encoded the rows that a step of the layer is about to attend by codes.
  void finish_codes(uint32_t layer);
  /// Begins to pin rows that have come, as DeviceCodes::pin_beside() does, of the layer; of all layers.
  void pin_codes(uint32_t layer) {
    if (exists()) runner_->pin_codes(layer);
  }
  void pin_all_codes();
  /// Enqueues the encoding of rows that are pinned by now, before rows of `layer` come.
  void encode_pinned(uint32_t layer) {
    if (exists()) runner_->encode_pinned(layer);
  }
  /// The layer is about to keep its first `rows` offloaded rows.
  void truncate_codes(uint32_t layer, uint32_t rows) {
    if (exists()) parts_.codes.codes()->truncate(layer, rows, runner_->stream());
  }

  /// Adds the figures of stream steps; after wait_for_host().
  void add_statistics(keyhole_statistics& s) const;
  void reset_statistics() {
    if (exists()) runner_->reset_statistics();
  }

 private:
  StreamParts parts_;
  PromptMemory* prompts_;
  ExtendedTokens* extended_;
  std::vector<uint32_t> before_;              ///< [layer] tokens when ready_graph() has returned
  std::unique_ptr<DeviceRowsReader> copies_;  ///< null: nothing was copied yet
  std::unique_ptr<StreamClient> client_;      ///< null: the device has no streams
  std::unique_ptr<StreamRunner> runner_;      ///< the last: its thread reads all of the above
};

}  // namespace keyhole::runtime
