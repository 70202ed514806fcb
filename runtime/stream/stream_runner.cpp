#include "runtime/stream/stream_runner.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>

#include "runtime/engine/sizes.h"
#include "runtime/stream/device_rows.h"

namespace keyhole::runtime {

StreamRunner::StreamRunner(const Engine& engine, const SessionParams& params,
                           gpu::StreamSteps& steps, DeviceCodes& codes, StreamClient& client,
                           StreamWindows* windows)
    : engine_(&engine),
      params_(&params),
      steps_(&steps),
      codes_(&codes),
      client_(&client),
      windows_(windows),
      model_(engine.model()),
      timeout_us_(uint64_t{engine.effective_config().timeout_ms} * 1000),
      sequences_(model_.layers),
      tickets_(model_.layers),
      ahead_(model_.layers),
      forecast_(model_.layers, params.sink, params.window, params.window + params.flush_block),
      server_(
          engine.pool(), engine.effective_config().spin_us,
          [this](const StreamStep& step, bool waits) { return can_serve(step, waits); },
          [this](const StreamStep& step) { serve(step); }) {}

StreamRunner::~StreamRunner() {
  // The thread first; what it has not served, the device must not wait for.
  gives_up_.store(true);
  server_.stop();
  for (uint32_t l = 0; l < model_.resident_layers(); ++l) steps_->give_up(l, sequences_[l]);
}

void StreamRunner::keep_failure() {
  try {
    throw;
  } catch (const Error& e) {
    failure_.set(e.status(), e.what());
  } catch (const std::bad_alloc&) {
    failure_.set(Status::out_of_memory, "host memory is exhausted");
  } catch (const std::exception& e) {
    failure_.set(Status::internal, e.what());
  } catch (...) {
    failure_.set(Status::internal, "unknown exception");
  }
}

void StreamRunner::note_device_failure() {
  std::string text;
  const Status status = steps_->failure(text);
  if (status != Status::ok) failure_.set(status, text);
  note_window_failure();
}

// ---- Waiting -------------------------------------------------------------------------------------

void StreamRunner::wait_idle() {
  server_.drain();
  knows_held_ = false;  // the caller that waits may change what the session holds
  try {
    steps_->synchronize(stream_);
  } catch (const Error& e) {
    failure_.set(e.status(), e.what());
  }
  note_device_failure();
  if (failure_) {
    client_->drop_audit();
  } else {
    client_->close_audit(false);  // a step of which the second half is still to come has no answer
  }
}

void StreamRunner::check_not_capturing() const {
  if (!is_capturing()) return;
  throw Error(Status::busy,
              "a graph is being captured on the session's stream, where only steps with tensors in "
              "device memory and calls that read can be made: end the capture first");
}

void StreamRunner::check_no_open_step() const {
  if (!is_open_) return;
  throw Error(
      Status::busy,
      "a step is under way: keyhole_session_attend_begin without keyhole_session_attend_end");
}

void StreamRunner::synchronize() {
  check_not_capturing();
  wait_idle();
  failure_.rethrow();
  for (uint32_t l = 0; l < model_.layers; ++l) update_codes(l);
}

void StreamRunner::set_stream(gpu::Stream stream) {
  check_not_capturing();
  wait_idle();
  stream_ = stream;
  invalidate_graphs();
}

// ---- What a step needs before it is submitted ----------------------------------------------------

void StreamRunner::check_tokens(uint32_t layer, uint32_t appends, uint32_t ahead) const {
  const uint64_t held = uint64_t{client_->tokens(layer)} + ahead;
  if (appends != 0 && held + appends > params_->max_tokens) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " would hold " + std::to_string(held + appends) +
                    " tokens, allowed: max_tokens = " + std::to_string(params_->max_tokens));
  }
  if (appends == 0 && held == 0) {
    throw Error(
        Status::invalid_argument,
        "layer " + std::to_string(layer) + " holds no token to attend to: append one with k and v");
  }
}

void StreamRunner::update_index(uint32_t layer) {
  if (!client_->append_is_due(layer)) return;
  wait_idle();
  failure_.rethrow();
  client_->advance_append(layer);
}

void StreamRunner::make_room(uint32_t layer, uint32_t appended) {
  const uint32_t block = client_->row_block();
  if (block == 1) return;
  const uint32_t slots = params_->window + params_->flush_block;
  while (appended != 0) {
    const uint32_t window = client_->resident_counts(layer).window;
    if (window + appended <= slots) break;
    if (window < block) {
      throw Error(Status::invalid_argument,
                  "layer " + std::to_string(layer) + ": a graph that appends " +
                      std::to_string(appended) +
                      " tokens, allowed: " + std::to_string(slots - window) +
                      " (window and flush_block, less those there)");
    }
    knows_held_ = false;
    client_->flush(layer);
  }
}

template <class F>
void StreamRunner::keep_codes(uint32_t layer, F&& update) {
  while (codes_->layer_has(layer)) {
    try {
      return update();
    } catch (const Error& e) {
      const bool may_go = params_->offload_placement != KEYHOLE_PLACE_DEVICE;
      if (!may_go && params_->exact_rows_by != KEYHOLE_ROWS_BY_AUTO) throw;
      wait_idle();
      const bool cannot_pin =
          e.status() == Status::out_of_memory || e.status() == Status::unsupported;
      if (cannot_pin && codes_->let_host_read(e.what())) {
        client_->codes_gone();
        continue;
      }
      if (!may_go) throw;
      // Where no more memory can be pinned, what one layer gives back serves the others.
      if (e.status() == Status::out_of_memory) {
        codes_->give_up_first(e.what());
      } else {
        codes_->give_up(e.what());
      }
      client_->codes_gone();
    }
  }
}

void StreamRunner::update_codes(uint32_t layer) {
  keep_codes(layer, [&] { codes_->update(layer, stream_); });
}

void StreamRunner::pin_codes(uint32_t layer) {
  keep_codes(layer, [&] { codes_->pin_beside(layer); });
}

void StreamRunner::encode_pinned(uint32_t layer) {
  keep_codes(layer, [&] { codes_->encode_pinned(stream_); });
}

void StreamRunner::finish_codes(uint32_t layer) {
  if (codes_->is_current(layer)) return;  // begin_on_host() has waited for the stream
  update_codes(layer);
  steps_->synchronize(stream_);
}

void StreamRunner::know_held_bytes() {
  if (knows_held_) return;
  server_.drain();
  held_bytes_ = client_->host_bytes();
  for (uint32_t l = 0; l < model_.resident_layers(); ++l) {
    forecast_.reset(l, client_->resident_counts(l));
  }
  knows_held_ = true;
}

uint64_t StreamRunner::offloaded_bytes(uint32_t layer, uint32_t appends) const {
  return forecast_.offloaded(layer, appends) * 2 * model_.of(layer).token_bytes(model_.kv_dtype);
}

void StreamRunner::check_memory(uint64_t offloaded_bytes) const {
  if (offloaded_bytes == 0) return;
  check_host_memory(params_->host_memory_limit, held_bytes_, offloaded_bytes, "appending tokens");
}

void StreamRunner::prepare(uint32_t layer, uint32_t appends) {
  // The tokens of a layer are those of its last step: the caller is at most one token ahead of the host.
  server_.wait(tickets_[layer]);
  failure_.rethrow();
  check_tokens(layer, appends, 0);
  update_index(layer);
  make_room(layer, appends);
  update_codes(layer);
  if (appends == 0 || params_->host_memory_limit == 0) return;
  know_held_bytes();
  check_memory(offloaded_bytes(layer, appends));
}

StreamStep StreamRunner::counted(StreamStep step) {
  const std::optional<uint64_t> number = client_->count_step(step.layer);
  step.audited = number.has_value();
  step.number = number.value_or(0);
  return step;
}

void StreamRunner::submit(StreamStep step) {
  step.sequence = ++sequences_[step.layer];
  if (step.coded) codes_->expect_step();
  tickets_[step.layer] = server_.submit(step);
  if (!knows_held_) return;
  for (uint32_t i = 0; i < step.appends; ++i) {
    held_bytes_ += offloaded_bytes(step.layer, 1);
    forecast_.append(step.layer);
  }
}

// ---- Steps ---------------------------------------------------------------------------------------

uint64_t StreamRunner::open(uint32_t layer, uint32_t appends) {
  check_no_open_step();
  failure_.rethrow();
  const uint64_t id = capture_of_step();
  if (id != 0) {
    prepare_capture(id, layer);
  } else {
    prepare(layer, appends);
  }
  return id;
}

void StreamRunner::prepare_ahead(uint32_t layer, uint32_t appends) {
  check_no_open_step();
  failure_.rethrow();
  if (steps_->capture_id(stream_) == 0) prepare(layer, appends);
}

void StreamRunner::fail_launch(const std::exception_ptr& error) {
  launch(is_capturing(), [&] { std::rethrow_exception(error); });
  std::rethrow_exception(error);
}

bool StreamRunner::enqueue_tokens(uint32_t layer, const gpu::ManyTokens& tokens) {
  const auto n = static_cast<uint32_t>(tokens.q.tokens);
  const bool is_captured = open(layer, n) != 0;
  if (!is_coded(layer)) return false;
  const StreamStep step{layer, 0, n, true};
  if (is_captured) {
    captures_.newest().add(step);
  } else {
    submit(step);
  }
  launch(is_captured,
         [&] { steps_->step_tokens(layer, tokens, *codes_->of_layer(layer), stream_); });
  return true;
}

void StreamRunner::enqueue(uint32_t layer, const TensorView& q, const TensorView* k,
                           const TensorView* v, const TensorOut* out, float* lse,
                           gpu::StepGroup* group) {
  if (model_.slides(layer)) return enqueue_window(layer, q, k, v, {}, out, lse);
  const uint32_t appends = k != nullptr ? 1 : 0;
  const uint64_t id = open(layer, appends);
  const bool is_captured = id != 0;
  gpu::OnDevice on_device;
  on_device.group = group;
  if (is_coded(layer)) on_device.codes = codes_->of_layer(layer);
  StreamStep step{layer, 0, appends, on_device.codes != nullptr};
  if (is_captured) {
    on_device.keeps_answer = client_->has_audits();  // which launches are audited is not known yet
    captures_.newest().add(step);
  } else {
    step = counted(step);
    on_device.keeps_answer = step.audited;
    submit(step);  // before the launch, so that the host is looking when q comes
  }
  launch(is_captured, [&] {
    if (out == nullptr) {
      steps_->begin(layer, q, k, v, on_device, stream_);
    } else {
      steps_->step(layer, q, k, v, on_device, *out, lse, stream_);
    }
  });
  if (out != nullptr) return;
  is_open_ = true;
  open_layer_ = layer;
  open_capture_ = id;
}

void StreamRunner::enqueue_end(const TensorOut& out, float* lse) {
  if (!is_open_) {
    throw Error(Status::invalid_argument,
                "no step is under way: call keyhole_session_attend_begin first");
  }
  const uint64_t id = steps_->capture_id(stream_);
  if (id != open_capture_ && open_capture_ == 0) {
    throw Error(Status::busy,
                "a step that was begun before a capture cannot end in it: end the capture first");
  }
  is_open_ = false;
  if (id != open_capture_) {
    captures_.newest().spoil();
    throw Error(Status::invalid_argument,
                "the step was begun in a capture that is over: what was captured has no end");
  }
  launch(id != 0, [&] {
    if (model_.slides(open_layer_)) {
      gpu::Windows& windows = windows_->on_device(open_layer_);
      return windows.end(windows_->number_on_device(open_layer_), out, lse, stream_);
    }
    steps_->end(open_layer_, out, lse, stream_);
  });
}

// ---- Figures -------------------------------------------------------------------------------------

void StreamRunner::add_statistics(keyhole_statistics& s) const {
  s.pinned_bytes = gpu::cuda_pinned_bytes(params_->resident_shape(model_)) + codes_->pinned_bytes();
  s.code_bytes = codes_->bytes();
  s.code_layers = codes_->layers();
  s.rows_by_host = codes_->rows_by_host() ? 1 : 0;
  s.device_wait_seconds = static_cast<double>(steps_->wait_nanoseconds() - waited_before_) * 1e-9;
  const gpu::CodesDoubts doubts = codes_->doubts();
  s.codes_doubted += doubts.doubted - doubts_before_.doubted;
  s.codes_given_up += doubts.given_up - doubts_before_.given_up;
  s.keys_opened += doubts.rows - doubts_before_.rows;
  s.stream_steps += steps_served_ + window_steps_;
  s.attends += window_steps_ + coded_tokens_;
  s.attend_seconds += serve_seconds_;
  s.serve_seconds = serve_seconds_;
  s.signal = steps_->signal() == gpu::Signal::device_wait ? "wait" : "launch";
}

void StreamRunner::reset_statistics() {
  steps_served_ = 0;
  window_steps_ = 0;
  coded_tokens_ = 0;
  serve_seconds_ = 0.0;
  waited_before_ = steps_->wait_nanoseconds();
  doubts_before_ = codes_->doubts();
}

}  // namespace keyhole::runtime
