// A session's side of stream steps: what the runner of runtime/stream asks of it, and the calls that go there.
#include <optional>

#include "runtime/session/session.h"
#include "runtime/session/stream_audits.h"

namespace keyhole::runtime {

/// The session as the runner sees it.
class Session::Client final : public StreamClient {
 public:
  Client(Session& session, gpu::StreamSteps& steps)
      : s_(&session), steps_(&steps), audits_(*session.engine_, session.audits_, steps) {}

  uint32_t tokens(uint32_t layer) const override { return s_->tokens(layer); }
  ResidentCounts resident_counts(uint32_t layer) const override {
    return {s_->sequence_.sink(layer), s_->sequence_.window(layer)};
  }
  bool append_is_due(uint32_t layer) const override { return s_->append_is_due(layer); }
  uint64_t host_bytes() const override { return s_->accounted_bytes(); }
  void advance_append(uint32_t layer) override { s_->advance_append(layer); }
  uint32_t row_block() const override { return s_->sequence_.row_block(); }
  void codes_gone() override { s_->place_codes(); }
  void flush(uint32_t layer) override {
    const ModelShape& m = s_->engine_->model();
    s_->check_memory(s_->params_.offload_bytes(m, layer, row_block()), "appending tokens");
    s_->sequence_.flush(layer);
  }

  void prepare_work(uint32_t layer, uint32_t position) override {
    s_->prepare_work(layer, position);
  }
  void start_step(uint32_t layer, const float* q, ResultSink& sink) override {
    s_->step_.start(layer, q, sink);
  }
  void finish_step() override { s_->add_cost(s_->step_.finish()); }
  void append_published(uint32_t layer, const gpu::Published& published, uint32_t tokens) override {
    const ModelShape& m = s_->engine_->model();
    const size_t token_bytes = m.of(layer).token_bytes(m.kv_dtype);
    Sequence& sequence = s_->sequence_;
    gpu::Published one = published;
    for (uint32_t i = 0; i < tokens; ++i) {
      const uint32_t left =
          steps_->update_host_copy(layer, one, sequence.staging_k(), sequence.staging_v());
      if (left != 0) sequence.store_staged(layer, left);
      one.k += token_bytes;
      one.v += token_bytes;
    }
  }

  bool has_audits() const override { return audits_.on(); }
  std::optional<uint64_t> count_step(uint32_t layer) override { return audits_.count(layer); }
  void begin_audit(const StreamStep& step, const gpu::Published& published) override {
    const LayerShape m = s_->engine_->model().of(step.layer);
    audits_.open(step);
    for (uint32_t h = 0; h < m.kv_heads; ++h) {
      HeadRecord* record = audits_.add(h, s_->keeper_.head(step.layer, h).params.budget);
      if (record == nullptr) continue;
      if (step.coded) {
        audits_.take_coded(h, published.q + size_t{h} * m.group() * m.head_dim,
                           s_->sequence_.view(step.layer, h));
        continue;
      }
      s_->step_.work(h).record = record;
    }
  }
  void end_served_audit() override { audits_.take_resident(); }
  void close_audit(bool is_over) override { audits_.close(is_over); }
  void drop_audit() override { audits_.drop(); }

 private:
  Session* s_;
  gpu::StreamSteps* steps_;
  StreamAudits audits_;
};

Session::~Session() = default;

/// The offloaded rows as their codes see them.
class Session::Rows final : public CodeSource {
 public:
  explicit Rows(Session& session) : s_(&session) {}
  KvView rows(uint32_t layer, uint32_t kv_head) const override {
    return s_->sequence_.view(layer, kv_head);
  }
  const uint16_t* scales(uint32_t layer) const override { return s_->sequence_.scales(layer); }
  uint32_t row_block() const override { return s_->sequence_.row_block(); }
  size_t row_capacity() const override { return s_->sequence_.row_capacity(); }
  void learn_balances(uint32_t layer) override {
    // One after the other, eight heads take 30 ms.
    s_->engine_->pool().run(s_->engine_->model().of(layer).kv_heads, [&](uint32_t h, uint32_t) {
      (void)s_->keeper_.fix_balance(layer, h, rows(layer, h));
    });
  }
  const index::Balance& balance(uint32_t layer, uint32_t kv_head) override {
    return s_->keeper_.fix_balance(layer, kv_head, rows(layer, kv_head));
  }
  void set_pinned(uint32_t layer, size_t rows) override { s_->sequence_.set_pinned(layer, rows); }
  bool is_shared(uint32_t layer, size_t row) const override {
    return s_->sequence_.is_shared(layer, static_cast<uint32_t>(row));
  }

 private:
  Session* s_;
};

void Session::make_stream_runner(const Session* copied) {
  gpu::StreamSteps* steps = sequence_.resident().stream_steps();
  if (steps == nullptr) return;
  const uint64_t exchange = gpu::cuda_pinned_bytes(params_.resident_shape(engine_->model()));
  if (params_.pinned_memory_limit != 0 && exchange > params_.pinned_memory_limit) {
    throw Error(Status::out_of_memory, "the exchange with the device pins " +
                                           std::to_string(exchange) +
                                           " bytes, pinned_memory_limit is " +
                                           std::to_string(params_.pinned_memory_limit));
  }
  const gpu::Device& device = engine_->stream_device();
  resident_truth_ = std::make_unique<ResidentTruth>(*engine_, *steps);
  code_source_ = std::make_unique<Rows>(*this);
  codes_ = std::make_unique<DeviceCodes>(
      params_, engine_->model(),
      [this, &device](const gpu::CodesShape& shape) {
        return device.make_codes(sequence_.resident(), shape);
      },
      device.has(gpu::DevicePart::codes)
          ? DeviceCodes::MakePin([&device] { return device.make_pin(); })
          : nullptr,
      [this](size_t held) { return code_room(params_.resident_shape(engine_->model()), held); },
      *code_source_, engine_->log(),
      RowServer::Waits{engine_->effective_config().spin_us,
                       engine_->effective_config().timeout_ms});
  if (copied != nullptr && copied->codes_ != nullptr) codes_->expect_copy_of(*copied->codes_);
  stream_client_ = std::make_unique<Client>(*this, *steps);
  stream_ = std::make_unique<StreamRunner>(*engine_, params_, *steps, *codes_, *stream_client_,
                                           &sequence_.rings());
  place_codes();
}

uint64_t Session::code_room(const gpu::ResidentShape& shape, size_t held) const {
  const SlidingRings& rings = sequence_.rings();
  return engine_->code_room_of(shape, params_.device_memory_limit, held,
                               {rings.device_bytes(), rings.device_bytes_to_come()});
}

void Session::place_codes() {
  if (codes_ == nullptr) return;
  codes_->plan(head_params());
  tell_keeper_of_codes();
}

void Session::tell_keeper_of_codes() {
  for (uint32_t layer = 0; layer < engine_->model().layers; ++layer) {
    keeper_.set_on_device(layer, codes_->layer_has(layer));
  }
}

void Session::place_codes_again() noexcept {
  try {
    place_codes();
  } catch (...) {  // NOLINT: see the header
  }
}

StreamRunner& Session::runner(const char* what) {
  if (stream_ == nullptr) {
    throw Error(Status::unsupported, std::string(what) + ": the session's device is the host");
  }
  return *stream_;
}

// ---- Calls ---------------------------------------------------------------------------------------

void Session::enqueue(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v,
                      const RowsOut* out, float* lse) {
  StreamRunner& stream = runner("tensors in device memory");
  release_prompt();
  stream.enqueue(layer, q, k, v, out, lse);
  if (k != nullptr) forget_extended(layer);
}

void Session::enqueue_end(const RowsOut& out, float* lse) {
  runner("tensors in device memory").enqueue_end(out, lse);
}

uint32_t Session::step_layer() const {
  return in_stream_step() ? stream_->open_layer() : step_layer_;
}

bool Session::in_stream_step() const { return stream_ != nullptr && stream_->in_step(); }
uint64_t Session::capture_id() const { return stream_ == nullptr ? 0 : stream_->capture_id(); }
uint64_t Session::capture_of_step() const {
  return stream_ == nullptr ? 0 : stream_->capture_of_step();
}
bool Session::append_will_be_due(uint32_t layer) {
  if (stream_ != nullptr) (void)stream_->settled_tokens(layer);
  return append_is_due(layer);
}
bool Session::is_capturing() const { return stream_ != nullptr && stream_->is_capturing(); }

void Session::check_not_capturing() const {
  if (stream_ != nullptr) stream_->check_not_capturing();
}

void Session::wait_idle() {
  if (stream_ != nullptr) stream_->wait_idle();
}

void Session::wait_for_host() {
  if (stream_ != nullptr) stream_->wait_for_host();
}

void Session::check_failure() {
  if (stream_ != nullptr) stream_->check_failure();
}

void Session::keep_device_failure(const Error& e) {
  const bool is_the_device = e.status() == Status::device_error || e.status() == Status::timeout;
  if (stream_ != nullptr && is_the_device && !stream_->is_capturing()) stream_->fail(e);
}

void Session::set_stream(gpu::Stream stream) { runner("a stream").set_stream(stream); }

void Session::announce() {
  StreamRunner& graph = runner("a graph");
  graph.wait_for_host();
  std::vector<uint32_t> before(engine_->model().layers);
  for (uint32_t layer = 0; layer < before.size(); ++layer) before[layer] = tokens(layer);
  graph.announce();
  for (uint32_t layer = 0; layer < before.size(); ++layer) {
    const uint32_t n = graph.announced_tokens(layer);
    if (n != 0) extended_[layer] = {before[layer], n, false, true};
  }
}

void Session::synchronize() {
  if (stream_ != nullptr) stream_->synchronize();
}

DeviceRowsReader& Session::device_rows_reader() {
  if (device_rows_ == nullptr) {
    device_rows_ =
        std::make_unique<DeviceRowsReader>(engine_->stream_device().make_copies(), engine_->pool());
  }
  return *device_rows_;
}

void Session::prefill_from_device(uint32_t layer, const RowsIn& k, const RowsIn& v,
                                  const RowsIn* q) {
  const gpu::Stream stream = runner("tensors in device memory").stream();
  if (sequence_.slides(layer) && prefill_window(layer, k, v, q)) return;
  DeviceRowsReader& reader = device_rows_reader();
  const RowsIn hk = reader.read(k, "k", stream, prompt_rows_[0]);
  const RowsIn hv = reader.read(v, "v", stream, prompt_rows_[1]);
  if (q == nullptr) return prefill(layer, hk, hv, nullptr);
  check_as_many(*q, k);
  // Of a prompt's queries, two thirds of all bytes, a sample takes one in 32 and less: the others need not leave the device. Rows
  // with gaps between heads are copied one by one, equally far apart: all of them.
  RowsIn wanted = *q;
  const bool spreads = q->on_device && q->head_stride == q->dim * dtype_size(q->dtype);
  if (spreads && !sequence_.slides(layer)) wanted.step = keeper_.query_stride(layer);
  wanted.first = (wanted.step - tokens(layer) % wanted.step) % wanted.step;
  if (wanted.first >= q->tokens) return prefill(layer, hk, hv, nullptr);
  wanted.tokens = (q->tokens - wanted.first - 1) / wanted.step + 1;
  wanted.data += wanted.first * q->token_stride;
  wanted.token_stride *= wanted.step;
  const RowsIn hq = reader.read(wanted, "q", stream, prompt_rows_[2]);
  prefill(layer, hk, hv, &hq);
}

bool Session::prefill_window(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q) {
  SlidingRings& rings = sequence_.rings();
  const uint32_t n = k.tokens;
  const bool on_device = k.on_device && v.on_device && (q == nullptr || q->on_device);
  // By way of host memory the errors that these have are found and told.
  if (!on_device || !rings.can_lie_on_device() || n == 0 || v.tokens != n ||
      (q != nullptr && q->tokens != n) || n > params_.max_tokens - tokens(layer)) {
    return false;
  }
  const gpu::Stream stream = stream_->stream();
  gpu::Windows& windows = rings.on_device(layer);
  const ModelShape& m = engine_->model();
  const auto are_finite = [&](const RowsIn& rows, DType as) {
    return windows.are_finite(rings.place(layer), device_tokens(rows), n, rows.heads, as, stream);
  };
  if (!are_finite(k, m.kv_dtype) || !are_finite(v, m.kv_dtype) ||
      (q != nullptr && !are_finite(*q, DType::f32))) {
    return false;
  }
  rings.append_on_device(layer, n, device_tokens(k), device_tokens(v), stream);
  forget_extended(layer);
  return true;
}

uint64_t Session::device_bytes() const {
  const gpu::ResidentShape shape = params_.resident_shape(engine_->model());
  if (stream_ == nullptr) return params_.host_resident_bytes(engine_->model());
  size_t blocked = 0;
  for (const Blocked& b : blocked_) {
    blocked += b.attention == nullptr ? 0 : b.attention->bytes();
    blocked += b.listed == nullptr ? 0 : b.listed->bytes();
  }
  return blocked + gpu::cuda_resident_bytes(shape) + codes_->bytes() +
         sequence_.rings().device_bytes();
}

}  // namespace keyhole::runtime
