// Steps in the order of a stream: calls enqueue and submit, the session's serving thread does the host's part. See
// STREAM STEPS in the public header.
#include <algorithm>
#include <chrono>
#include <exception>

#include "runtime/session.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// A step that was submitted comes within the time of a model layer's other kernels, 100 us to 1 ms: the serving
// thread spins for it, as naps take 50 us or more. Beyond that (a prefill of somebody else) it naps.
constexpr uint32_t kAwaitSpinUs = 3000;

gpu::DeviceRows device_rows(const RowsIn& rows) {
  return {const_cast<std::byte*>(rows.data), rows.head_stride / dtype_size(rows.dtype), rows.dtype};
}

gpu::DeviceRows device_rows(const RowsOut& rows) {
  return {rows.data, rows.head_stride / dtype_size(rows.dtype), rows.dtype};
}

/// Hands one step's states to the device.
class StreamDelivery final : public Delivery {
 public:
  StreamDelivery(StreamSide& side, const StreamStep& step, uint64_t timeout_us)
      : side_(&side), step_(step), timeout_us_(timeout_us) {}

  StateView slot(uint32_t kv_head) override { return side_->steps.host_slot(step_.layer, kv_head); }
  void deliver(uint32_t kv_head) override {
    side_->steps.deliver(step_.layer, kv_head, step_.sequence);
  }
  std::span<const uint32_t> chosen(uint32_t kv_head) override {
    gpu::Chosen chosen;
    if (!side_->steps.chosen(step_.layer, kv_head, step_.sequence, timeout_us_,
                             side_->server.stopping(), chosen)) {
      throw Error(Status::timeout, "layer " + std::to_string(step_.layer) +
                                       ": the device has not chosen partitions within " +
                                       std::to_string(timeout_us_ / 1000) + " ms (timeout_ms)");
    }
    return {chosen.ids, chosen.count};
  }

 private:
  StreamSide* side_;
  StreamStep step_;
  uint64_t timeout_us_;
};

}  // namespace

Session::~Session() {
  if (stream_ == nullptr) return;
  // The thread first; what it has not served, the device must not wait for.
  StreamSide* side = stream_.get();
  side->server.stop();
  side->give_up_all();
}

void Session::make_stream_side() {
  gpu::StreamSteps* steps = sequence_.resident().stream_steps();
  if (steps == nullptr) return;
  const ModelShape& m = engine_->model();
  stream_ = std::make_unique<StreamSide>(*steps, m.layers, engine_->pool(),
                                         engine_->effective_config().spin_us,
                                         [this](const StreamStep& step) { serve(step); });
  stream_->front_layers.resize(m.layers);
  stream_->front_counts.resize(size_t{m.layers} * m.kv_heads);
}

StreamSide& Session::stream_side(const char* what) {
  if (stream_ == nullptr) {
    throw Error(Status::unsupported, std::string(what) + ": the session's device is the host");
  }
  return *stream_;
}

// ---- The host's part -----------------------------------------------------------------------------

void Session::serve(const StreamStep& step) {
  StreamSide& side = *stream_;
  if (side.failure) return side.steps.give_up(step.layer, step.sequence);
  const uint64_t timeout_us = uint64_t{engine_->effective_config().timeout_ms} * 1000;
  try {
    gpu::Published published;
    if (!side.steps.await(step.layer, step.sequence, kAwaitSpinUs, timeout_us,
                          side.server.stopping(), published)) {
      std::string text;
      const Status status = side.steps.failure(text);
      if (status != Status::ok) throw Error(status, text);
      throw Error(Status::timeout,
                  "layer " + std::to_string(step.layer) +
                      ": the query of a step has not come within " +
                      std::to_string(timeout_us / 1000) +
                      " ms (timeout_ms): was the stream's work, or an announced graph, launched?");
    }
    const auto arrived = Clock::now();
    check_published(step, published);
    // A full window gives tokens to the host, which this very step attends there.
    const bool overflows = step.appends && sequence_.window_is_full(step.layer);
    if (overflows) update_host_copy(step.layer, published);
    const uint32_t appended = step.appends && !overflows ? 1 : 0;
    prepare_work(step.layer, tokens(step.layer) + appended - 1, step.front);
    StreamDelivery delivery(side, step, timeout_us);
    step_.start(published.q, delivery);
    std::exception_ptr error;
    try {
      if (appended != 0) update_host_copy(step.layer, published);  // while the workers search
    } catch (...) {
      error = std::current_exception();
    }
    add_cost(step_.finish());
    if (error) std::rethrow_exception(error);
    const double seconds = std::chrono::duration<double>(Clock::now() - arrived).count();
    side.serve_seconds += seconds;
    totals_.attend_seconds += seconds;
    totals_.stream_steps += 1;
  } catch (const Error& e) {
    side.failure.set(e.status(), e.what());
    side.steps.give_up(step.layer, step.sequence);
  } catch (const std::bad_alloc&) {
    side.failure.set(Status::out_of_memory, "host memory is exhausted");
    side.steps.give_up(step.layer, step.sequence);
  } catch (const std::exception& e) {
    side.failure.set(Status::internal, e.what());
    side.steps.give_up(step.layer, step.sequence);
  }
}

void Session::check_published(const StreamStep& step, const gpu::Published& published) const {
  const ModelShape& m = engine_->model();
  const auto check = [&](const char* name, const void* data, uint32_t heads, DType dtype) {
    RowsIn rows;
    rows.data = static_cast<const std::byte*>(data);
    rows.head_stride = m.head_dim * dtype_size(dtype);
    rows.tokens = 1;
    rows.heads = heads;
    rows.dim = m.head_dim;
    rows.dtype = dtype;
    // Rows lie one after the other: one look at all of them, and at each only where that finds something.
    if (engine_->kernels().all_finite[static_cast<int>(dtype)](rows.data,
                                                               size_t{heads} * m.head_dim)) {
      return;
    }
    check_finite(engine_->kernels(), rows, name, 0, 1, dtype);
  };
  check("q", published.q, m.q_heads, DType::f32);
  if (!step.appends) return;
  check("k", published.k, m.kv_heads, m.kv_dtype);
  check("v", published.v, m.kv_heads, m.kv_dtype);
}

void Session::update_host_copy(uint32_t layer, const gpu::Published& published) {
  const uint32_t left = stream_->steps.update_host_copy(layer, published, sequence_.staging_k(),
                                                        sequence_.staging_v());
  if (left != 0) sequence_.store_staged(layer, left);
}

// ---- Calls ---------------------------------------------------------------------------------------

void Session::wait_idle() {
  if (stream_ == nullptr) return;
  stream_->capturing = false;
  stream_->server.drain();
  try {
    stream_->steps.synchronize(stream_->stream);
  } catch (const Error& e) {
    stream_->failure.set(e.status(), e.what());
  }
  note_device_failure();
}

void Session::note_device_failure() {
  std::string text;
  const Status status = stream_->steps.failure(text);
  if (status != Status::ok) stream_->failure.set(status, text);
}

void Session::check_failure() {
  if (stream_ != nullptr) stream_->failure.rethrow();
}

void Session::prepare_stream_step(uint32_t layer, bool appends) {
  StreamSide& side = *stream_;
  side.failure.rethrow();
  // The tokens of a layer are those of its last step: the caller is at most one token ahead of the host.
  side.server.wait(side.tickets[layer]);
  side.failure.rethrow();
  const uint32_t held = tokens(layer);
  if (appends && held >= params_.max_tokens) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " would hold " + std::to_string(held + 1) +
                    " tokens, allowed: max_tokens = " + std::to_string(params_.max_tokens));
  }
  if (!appends && held == 0) {
    throw Error(
        Status::invalid_argument,
        "layer " + std::to_string(layer) + " holds no token to attend to: append one with k and v");
  }
  if (appends && params_.host_memory_limit != 0) {
    side.server.drain();
    check_memory(uint64_t{params_.flush_block} * 2 * engine_->model().kv_heads *
                     engine_->model().row_bytes(),
                 "appending tokens");
  }
  if (append_is_due(layer)) {
    wait_idle();
    side.failure.rethrow();
    advance_append(layer);
    if (side.front_layers[layer]) side.front_stale = true;
  }
  if (side.front_stale) update_front();
}

void Session::enqueue(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v,
                      const RowsOut* out, float* lse) {
  StreamSide& side = stream_side("tensors in device memory");
  if (side.open) {
    throw Error(Status::busy,
                "a step is under way: keyhole_attend_begin without keyhole_attend_end");
  }
  const bool capturing = side.steps.is_capturing(side.stream);
  if (capturing) {
    side.failure.rethrow();
    if (side.front_stale) {
      throw Error(Status::invalid_argument,
                  "capture: the session has changed since its last step; call "
                  "keyhole_session_synchronize before cudaStreamBeginCapture");
    }
    if (!side.capturing) side.captured.clear();
    side.captured_version = side.version;
  } else {
    prepare_stream_step(layer, k != nullptr);
  }
  side.capturing = capturing;

  const bool front =
      side.front != nullptr && side.front_layers[layer] && params_.mode == KEYHOLE_MODE_INDEXED;
  StreamStep step{layer, 0, k != nullptr, front};
  const auto launch = [&] {
    const gpu::DeviceRows rq = device_rows(q);
    gpu::DeviceRows rk, rv;
    if (k != nullptr) {
      rk = device_rows(*k);
      rv = device_rows(*v);
    }
    gpu::Partitions* partitions = front ? side.front.get() : nullptr;
    if (out == nullptr) {
      side.steps.begin(layer, rq, k != nullptr ? &rk : nullptr, k != nullptr ? &rv : nullptr,
                       partitions, side.stream);
    } else {
      side.steps.step(layer, rq, k != nullptr ? &rk : nullptr, k != nullptr ? &rv : nullptr,
                      partitions, device_rows(*out), lse, side.stream);
    }
  };
  if (capturing) {
    launch();
    side.captured.push_back(step);
  } else {
    step.sequence = ++side.sequences[layer];
    // Before the launch, so that the host is looking when q comes.
    side.tickets[layer] = side.server.submit(step);
    try {
      launch();
    } catch (const Error& e) {
      side.failure.set(e.status(), e.what());
      throw;
    }
  }
  if (out != nullptr) return;
  side.open = true;
  side.open_layer = layer;
}

void Session::enqueue_end(const RowsOut& out, float* lse) {
  StreamSide& side = stream_side("tensors in device memory");
  if (!side.open) {
    throw Error(Status::invalid_argument, "no step is under way: call keyhole_attend_begin first");
  }
  side.open = false;
  side.steps.end(side.open_layer, device_rows(out), lse, side.stream);
}

bool Session::in_stream_step() const { return stream_ != nullptr && stream_->open; }

void Session::set_stream(gpu::Stream stream) {
  StreamSide& side = stream_side("a stream");
  wait_idle();
  side.stream = stream;
  side.version += 1;
}

void Session::announce() {
  StreamSide& side = stream_side("a graph");
  side.failure.rethrow();
  side.capturing = false;
  if (side.captured.empty()) {
    throw Error(Status::invalid_argument, "no step was captured on the session's stream");
  }
  side.server.drain();
  note_device_failure();
  side.failure.rethrow();
  for (const StreamStep& step : side.captured) prepare_stream_step(step.layer, step.appends);
  if (side.captured_version != side.version) {
    throw Error(Status::invalid_argument,
                "the session has changed since the graph was captured: capture it again");
  }
  for (const StreamStep& captured : side.captured) {
    StreamStep step = captured;
    step.sequence = ++side.sequences[step.layer];
    side.tickets[step.layer] = side.server.submit(step);
  }
}

void Session::synchronize() {
  if (stream_ == nullptr) return;
  wait_idle();
  stream_->failure.rethrow();
  if (stream_->front_stale) update_front();
}

void Session::prefill_from_device(uint32_t layer, const RowsIn& k, const RowsIn& v,
                                  const RowsIn* q) {
  StreamSide& side = stream_side("tensors in device memory");
  if (side.copies == nullptr) side.copies = gpu::make_host_copies();
  std::vector<std::byte> buffers[3];
  const auto read = [&](const RowsIn& rows, std::vector<std::byte>& to) {
    const size_t row = size_t{rows.dim} * dtype_size(rows.dtype);
    const size_t token = row * rows.heads;
    to.resize(token * rows.tokens);
    const bool whole = rows.heads == 1 || rows.head_stride == row;
    const bool packed =
        whole || rows.token_stride == 0 || rows.token_stride == rows.head_stride * rows.heads;
    if (!whole && !packed) {
      throw Error(Status::invalid_argument,
                  "a tensor in device memory whose heads are not next to each other, allowed: head "
                  "stride = d, or token stride = heads * head stride");
    }
    const size_t bytes = whole ? token : row;
    const size_t pitch = whole ? std::max(rows.token_stride, token) : rows.head_stride;
    side.copies->read(
        rows.data, bytes, pitch, whole ? rows.tokens : size_t{rows.tokens} * rows.heads,
        side.stream, [&](size_t first, size_t count, const std::byte* data) {
          std::byte* out = to.data() + first * bytes;
          constexpr size_t kPiece = size_t{1} << 20;
          const size_t all = count * bytes;
          engine_->pool().run(static_cast<uint32_t>((all + kPiece - 1) / kPiece),
                              [&](uint32_t i, uint32_t) {
                                const size_t at = i * kPiece;
                                std::copy_n(data + at, std::min(kPiece, all - at), out + at);
                              });
        });
    RowsIn host = rows;
    host.data = to.data();
    host.head_stride = row;
    host.token_stride = token;
    host.on_device = false;
    return host;
  };
  const RowsIn hk = k.on_device ? read(k, buffers[0]) : k;
  const RowsIn hv = v.on_device ? read(v, buffers[1]) : v;
  if (q == nullptr) return prefill(layer, hk, hv, nullptr);
  const RowsIn hq = q->on_device ? read(*q, buffers[2]) : *q;
  prefill(layer, hk, hv, &hq);
}

void Session::stream_statistics(keyhole_statistics& s) const {
  if (stream_ == nullptr) return;
  s.pinned_bytes = gpu::cuda_pinned_bytes(params_.resident_shape(engine_->model()));
  s.partition_bytes = stream_->front == nullptr ? 0 : stream_->front->bytes();
  s.device_wait_seconds =
      static_cast<double>(stream_->steps.wait_nanoseconds() - stream_->waited_before) * 1e-9;
  s.serve_seconds = stream_->serve_seconds;
  s.signal = stream_->steps.signal() == gpu::Signal::device_wait ? "wait" : "launch";
}

uint64_t Session::device_bytes() const {
  const gpu::ResidentShape shape = params_.resident_shape(engine_->model());
  if (stream_ == nullptr) return gpu::resident_bytes(shape);
  return gpu::cuda_resident_bytes(shape) +
         (stream_->front == nullptr ? 0 : stream_->front->bytes());
}

}  // namespace keyhole::runtime
