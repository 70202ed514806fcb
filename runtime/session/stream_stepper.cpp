#include "runtime/session/stream_stepper.h"

#include <string>

namespace keyhole::runtime {

StreamStepper::StreamStepper(const StreamParts& parts, PromptMemory& prompts,
                             ExtendedTokens& extended)
    : parts_(parts),
      prompts_(&prompts),
      extended_(&extended),
      before_(parts.engine.model().layers) {
  gpu::StreamSteps* steps = parts.sequence.resident().stream_steps();
  if (steps == nullptr) return;
  const SessionParams& params = parts.params;
  const uint64_t exchange = gpu::cuda_pinned_bytes(params.resident_shape(parts.engine.model()));
  if (params.pinned_memory_limit != 0 && exchange > params.pinned_memory_limit) {
    throw Error(Status::out_of_memory,
                "the exchange with the device pins " + std::to_string(exchange) +
                    " bytes, pinned_memory_limit is " + std::to_string(params.pinned_memory_limit));
  }
  client_ = std::make_unique<SessionStreamClient>(parts, *steps);
  runner_ = std::make_unique<StreamRunner>(parts.engine, params, *steps, *parts.codes.codes(),
                                           *client_, &parts.sequence.rings());
}

StreamRunner& StreamStepper::runner(const char* what) {
  if (exists()) return *runner_;
  throw Error(Status::unsupported, std::string(what) + ": the session's device is the host");
}

DeviceRowsReader& StreamStepper::copies() {
  if (copies_ == nullptr) {
    copies_ = std::make_unique<DeviceRowsReader>(parts_.engine.stream_device().make_copies(),
                                                 parts_.engine.pool());
  }
  return *copies_;
}

// ---- Steps ---------------------------------------------------------------------------------------

void StreamStepper::enqueue(uint32_t layer, const TensorView& q, const TensorView* k,
                            const TensorView* v, const TensorOut* out, float* lse) {
  StreamRunner& stream = runner("tensors in device memory");
  prompts_->release();
  stream.enqueue(layer, q, k, v, out, lse);
  if (k != nullptr) extended_->note_change(layer);
}

void StreamStepper::enqueue_end(const TensorOut& out, float* lse) {
  runner("tensors in device memory").enqueue_end(out, lse);
}

const Capture& StreamStepper::ready_graph(uint64_t graph) {
  StreamRunner& steps = runner("a graph");
  steps.wait_for_host();
  const Capture& ready = steps.ready_graph(graph);
  for (uint32_t layer = 0; layer < before_.size(); ++layer) {
    before_[layer] = parts_.sequence.tokens(layer);
  }
  return ready;
}

void StreamStepper::submit_graph(const Capture& graph) noexcept {
  runner_->submit_graph(graph);
  for (uint32_t layer = 0; layer < before_.size(); ++layer) {
    const uint32_t n = runner_->announced_tokens(layer);
    if (n != 0) extended_->set(layer, before_[layer], n, true);
  }
}

void StreamStepper::keep_device_failure(const Error& e) {
  const bool is_the_device = e.status() == Status::device_error || e.status() == Status::timeout;
  if (exists() && is_the_device && !is_capturing()) runner_->fail(e);
}

// ---- Codes ---------------------------------------------------------------------------------------

void StreamStepper::place_codes_anew() {
  parts_.codes.retry();
  parts_.codes.place();
  for (uint32_t layer = 0; exists() && layer < parts_.engine.model().layers; ++layer) {
    runner_->update_codes(layer);
  }
}

void StreamStepper::finish_codes(uint32_t layer) {
  if (parts_.codes.of_step(layer) != nullptr) runner_->finish_codes(layer);
}

void StreamStepper::pin_all_codes() {
  for (uint32_t layer = 0; layer < parts_.engine.model().layers; ++layer) pin_codes(layer);
}

void StreamStepper::add_statistics(keyhole_statistics& s) const {
  if (exists()) runner_->add_statistics(s);
}

}  // namespace keyhole::runtime
