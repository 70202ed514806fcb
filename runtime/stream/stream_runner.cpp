#include "runtime/stream/stream_runner.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <string>

#include "runtime/engine/sizes.h"
#include "runtime/stream/device_rows.h"
#include "runtime/stream/stream_delivery.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// A step that was submitted comes within the time of a model layer's other kernels, 100 us to 1 ms: the serving
// thread spins for it, as naps take 50 us or more. Beyond that (the stream has a prefill before it) the thread naps.
constexpr uint32_t kAwaitSpinUs = 3000;

}  // namespace

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

// ---- The host's part -----------------------------------------------------------------------------

bool StreamRunner::can_serve(const StreamStep& step, bool waits) {
  if (failure_ || step.keeps != nullptr) return true;
  gpu::Published published;
  const uint32_t spin_us = waits ? kAwaitSpinUs : 0;
  const uint64_t timeout_us = waits ? timeout_us_ : 0;
  return steps_->await(step.layer, step.sequence, spin_us, timeout_us, gives_up_, published) ||
         waits;
}

void StreamRunner::serve(const StreamStep& step) {
  if (step.keeps != nullptr) {
    if (failure_) return;
    for (const uint32_t layer : step.keeps->layers) {
      steps_->keep_newest_of_copy(layer, step.keeps->of, step.keeps->kept);
    }
    return;
  }
  if (failure_) return steps_->give_up(step.layer, step.sequence);
  try {
    gpu::Published published;
    // Its queries are here, or the wait for them has ended without.
    if (!steps_->await(step.layer, step.sequence, 0, 0, gives_up_, published)) {
      std::string text;
      const Status status = steps_->failure(text);
      if (status != Status::ok) throw Error(status, text);
      throw Error(Status::timeout,
                  "layer " + std::to_string(step.layer) +
                      ": the query of a step has not come within " +
                      std::to_string(timeout_us_ / 1000) +
                      " ms (timeout_ms): was the stream's work, or an announced graph, launched?");
    }
    serve_published(step, published);
  } catch (...) {
    client_->drop_audit();
    keep_failure();
    steps_->give_up(step.layer, step.sequence);
  }
}

void StreamRunner::serve_published(const StreamStep& step, const gpu::Published& published) {
  const auto arrived = Clock::now();
  client_->close_audit(true);  // the stream comes here after the steps before have ended
  check_finite_rows(step, published);
  if (step.coded) {
    if (step.appends != 0) client_->append_published(step.layer, published, step.appends);
    const uint32_t heads = model_.of(step.layer).kv_heads;
    for (uint32_t h = 0; h < heads; ++h) steps_->deliver(step.layer, h, step.sequence);
    steps_served_ += 1;
    coded_tokens_ += std::max(step.appends, 1U);
    // After all that the device could wait for. q stays until the host has taken the layer's next step.
    if (!step.audited) return;
    client_->begin_audit(step, published);
    client_->end_served_audit();
    return;
  }
  // A full window gives tokens to the host, which this very step attends there.
  const bool overflows = step.appends != 0 && client_->resident_counts(step.layer).window ==
                                                  params_->window + params_->flush_block;
  if (overflows) client_->append_published(step.layer, published, 1);
  const uint32_t appended = step.appends != 0 && !overflows ? 1 : 0;
  client_->prepare_work(step.layer, client_->tokens(step.layer) + appended - 1);
  if (step.audited) client_->begin_audit(step, published);
  StreamDelivery delivery(*steps_, step);
  client_->start_step(step.layer, published.q, delivery);
  std::exception_ptr error;
  try {
    if (appended != 0) client_->append_published(step.layer, published, 1);  // while workers search
  } catch (...) {
    error = std::current_exception();
  }
  client_->finish_step();
  if (error) std::rethrow_exception(error);
  if (step.audited) client_->end_served_audit();
  serve_seconds_ += std::chrono::duration<double>(Clock::now() - arrived).count();
  steps_served_ += 1;
}

void StreamRunner::check_finite_rows(const StreamStep& step,
                                     const gpu::Published& published) const {
  const uint32_t tokens = std::max(step.appends, 1U);
  const LayerShape shape = model_.of(step.layer);
  const auto check = [&](const char* name, const void* data, uint32_t heads, DType dtype) {
    const TensorView rows =
        dense_tensor(static_cast<const std::byte*>(data), tokens, heads, shape.head_dim, dtype);
    // Rows lie one after the other: one look at all of them, and at each only where that finds something.
    if (engine_->kernels().all_finite[static_cast<int>(dtype)](
            rows.data, size_t{tokens} * heads * shape.head_dim)) {
      return;
    }
    check_finite(engine_->kernels(), rows, name, 0, tokens, dtype);
  };
  check("q", published.q, shape.q_heads, DType::f32);
  if (step.appends == 0) return;
  check("k", published.k, shape.kv_heads, model_.kv_dtype);
  check("v", published.v, shape.kv_heads, model_.kv_dtype);
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

void StreamRunner::prepare_capture(uint64_t id, uint32_t layer) {
  captures_.enter(id, graph_version());
  try {
    if (codes_->layer_has(layer) && !codes_->is_current(layer)) {
      throw Error(Status::invalid_argument,
                  "capture: layer " + std::to_string(layer) +
                      " has tokens without codes; call keyhole_session_synchronize before "
                      "cudaStreamBeginCapture");
    }
    if (captures_.newest().steps().size() >= StreamServer::kCapacity) {
      throw Error(Status::invalid_argument,
                  "capture: a step of layer " + std::to_string(layer) + " after " +
                      std::to_string(captures_.newest().steps().size()) + " others, allowed: " +
                      std::to_string(StreamServer::kCapacity) + " steps in a graph");
    }
  } catch (...) {
    captures_.newest().spoil();
    throw;
  }
}

uint64_t StreamRunner::capture_of_step() const {
  const uint64_t id = steps_->capture_id(stream_);
  if (id == gpu::kLostCapture) {
    throw Error(Status::busy,
                "the capture on the session's stream has failed, or another stream is being "
                "captured and the session's is the default stream: end that capture first");
  }
  return id;
}

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

void StreamRunner::announce(uint64_t graph) {
  failure_.rethrow();
  check_not_capturing();
  check_no_open_step();
  const Capture* known = graph == 0 ? &captures_.newest() : captures_.find(graph);
  if (known == nullptr) {
    throw Error(Status::invalid_argument, "no graph has the number " + std::to_string(graph) +
                                              ", or " + std::to_string(Captures::kMost) +
                                              " others were captured since: capture it again");
  }
  const auto captured = known->steps();
  if (known->is_spoiled()) {
    throw Error(Status::invalid_argument,
                "a call failed while the graph was captured: capture it again");
  }
  if (captured.empty()) {
    throw Error(Status::invalid_argument, "no step was captured on the session's stream");
  }
  server_.drain();
  note_device_failure();
  failure_.rethrow();
  // All is checked before anything is submitted: the graph runs as a whole or not at all.
  std::fill(ahead_.begin(), ahead_.end(), 0U);
  for (const StreamStep& step : captured) {
    check_tokens(step.layer, step.appends, ahead_[step.layer]);
    ahead_[step.layer] += step.appends;
  }
  for (const StreamStep& step : captured) update_index(step.layer);
  place_windows(captured);
  for (const StreamStep& step : captured) {
    if (model_.slides(step.layer)) continue;
    make_room(step.layer, ahead_[step.layer]);
    update_codes(step.layer);
  }
  if (known->version() != graph_version()) {
    throw Error(Status::invalid_argument,
                "the session has changed since the graph was captured: capture it again");
  }
  if (params_->host_memory_limit != 0) {
    know_held_bytes();
    uint64_t offloaded = 0;
    for (uint32_t l = 0; l < model_.layers; ++l) {
      if (!model_.slides(l)) offloaded += offloaded_bytes(l, ahead_[l]);
    }
    check_memory(offloaded);
  }
  for (const StreamStep& step : captured) {
    if (model_.slides(step.layer)) {
      note_window_step(step.layer, step.appends);
    } else {
      submit(counted(step));
    }
  }
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
