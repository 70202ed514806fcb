#include "runtime/session/session.h"

#include <algorithm>

#include "runtime/session/device_batch.h"
#include "runtime/session/host_batch.h"
#include "runtime/session/session_file.h"
#include "runtime/session/stored_rows.h"
#include "runtime/session/token_removal.h"

namespace keyhole::runtime {
namespace {

uint32_t largest_top_k(const std::vector<HeadIndex>& heads) {
  uint32_t top_k = 0;
  for (const HeadIndex& h : heads) top_k = std::max(top_k, h.params.budget.top_k);
  return top_k;
}

}  // namespace

void check_layer(const ModelShape& model, uint32_t layer) {
  if (layer < model.layers) return;
  throw Error(Status::invalid_argument, "layer is " + std::to_string(layer) + ", allowed: 0.." +
                                            std::to_string(model.layers - 1));
}

void throw_in_step() {
  throw Error(
      Status::busy,
      "a step is under way: keyhole_session_attend_begin without keyhole_session_attend_end");
}

Session::Session(std::shared_ptr<const Engine> engine, SessionParams params, const Session* copied)
    : engine_(std::move(engine)),
      params_(std::move(params)),
      memory_(params_),
      sequence_(*engine_, params_),
      keeper_(*engine_, params_, sequence_,
              [this](uint64_t bytes, const char* what) { indexing_.check_memory(bytes, what); }),
      audits_(*engine_, params_, largest_top_k(keeper_.heads())),
      codes_(*engine_, params_, sequence_, keeper_, copied == nullptr ? nullptr : &copied->codes_),
      steps_(*engine_, params_, sequence_, keeper_, audits_, codes_, memory_),
      work_(*engine_, params_, sequence_, keeper_, codes_),
      step_audits_(*engine_, sequence_, keeper_, audits_, steps_),
      indexing_(keeper_, steps_, memory_),
      extended_(engine_->model().layers),
      patterns_(*engine_, params_, sequence_),
      blocks_(*engine_, params_, sequence_, codes_),
      stream_({*engine_, params_, sequence_, keeper_, audits_, memory_, totals_, codes_, steps_,
               work_, indexing_},
              prompt_memory_, extended_),
      tokens_(*engine_, params_, sequence_, keeper_, audits_, memory_, stream_, extended_),
      settings_(*engine_, params_, keeper_, audits_, codes_, steps_, stream_),
      host_(host_parts()),
      host_extends_(host_parts(), host_, memory_, patterns_, extended_, keeper_),
      prompts_(*engine_, params_, sequence_, keeper_, tokens_, stream_, prompt_memory_, extended_),
      device_extends_({*engine_, params_, sequence_, tokens_, extended_, codes_, stream_,
                       prompt_memory_, prompts_, blocks_, patterns_, totals_}),
      acceptance_(*engine_, params_, sequence_, tokens_, extended_, stream_),
      states_(host_parts(), params_, keeper_) {
  params_.heads.clear();  // from here on each head has its own
  count_memory();
  codes_.place();
}

HostParts Session::host_parts() {
  return {*engine_,       sequence_, tokens_, indexing_,    stream_, codes_,
          prompt_memory_, steps_,    work_,   step_audits_, totals_};
}

void Session::count_memory() {
  memory_.count([this] { return sequence_.bytes(); });
  memory_.count([this] { return keeper_.index_bytes() + keeper_.sample_bytes(); });
  memory_.count([this] { return steps_.bytes() + audits_.bytes(); });
  memory_.count(
      [this] { return host_extends_.bytes() + states_.bytes() + prompt_memory_.bytes(); });
  if (stream_.exists()) {
    // The host has a copy of the resident tokens.
    const uint64_t copy = gpu::resident_bytes(params_.resident_shape(engine_->model()));
    memory_.count([copy] { return copy; });
  }
  memory_.promise([this] { return indexing_.promised_bytes(); });
}

// ---- Calls ---------------------------------------------------------------------------------------

void Session::wait_until(Needs needs) {
  // The stream may be captured, or wait for other ranks: only who calls the session may wait for it.
  if (needs == Needs::look) return stream_.wait_for_host();
  const bool between_steps = needs != Needs::nothing && needs != Needs::end;
  if (between_steps && (host_.in_step() || stream_.in_step())) throw_in_step();
  if (needs == Needs::nothing && stream_.is_capturing()) {
    stream_.wait_for_host();
  } else if (needs != Needs::stream && needs != Needs::end) {
    stream_.check_not_capturing();
    stream_.wait_idle();
  }
}

void Session::enter(Needs needs) {
  wait_until(needs);
  if (needs == Needs::no_step) stream_.check_failure();
}

void Session::end() {
  // A step that was begun still has tasks in the pool which read the session.
  if (host_.in_step()) host_.abandon();
}

void Session::set_attend(keyhole_attend_mode attend, float min_weight) {
  settings_.set_attend(attend, min_weight);
}

void Session::set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget) {
  settings_.set_budget(layer, kv_head, budget);
}

Budget Session::budget(uint32_t layer, uint32_t kv_head) const {
  return settings_.budget(layer, kv_head);
}

void Session::prefill(uint32_t layer, const TensorView& k, const TensorView& v,
                      const TensorView* q) {
  if (k.on_device() || v.on_device() || (q != nullptr && q->on_device())) {
    prompts_.prefill(layer, k, v, q);
  } else {
    tokens_.prefill(layer, k, v, q);
  }
}

void Session::build(const BuildProgress& progress) {
  prompt_memory_.release();
  stream_.place_codes_anew();
  indexing_.build(progress);
}

bool Session::append_will_be_due(uint32_t layer) {
  stream_.settle(layer);
  return indexing_.append_is_due(layer);
}

void Session::truncate(uint32_t n) {
  truncate_layers(std::vector<uint32_t>(engine_->model().layers, n));
  identity_.truncate(n);
}

std::unique_ptr<SessionInterface> Session::without(uint32_t first, uint32_t count, int32_t shift) {
  const Removal removal{first, count, shift};
  if (stream_.exists()) {
    throw Error(Status::unsupported,
                "tokens in the middle of a session with a CUDA device; allowed: "
                "keyhole_session_truncate, and sessions of a host device");
  }
  check_removal(*engine_, sequence_, removal);
  if (removal.changes_nothing() || most_tokens() <= first) return nullptr;
  finish_audits();
  std::unique_ptr<Session> copy = fork_session(*this);
  for (uint32_t layer = 0; layer < engine_->model().layers; ++layer) {
    remove_tokens(*engine_, layer, removal, sequence_, copy->sequence_, copy->tokens_);
    if (tokens(layer) <= first || !sequence_.layer(layer).offloads()) continue;
    const index::RopeUndo turn = turn_of(*engine_, layer, removal);
    const auto turn_query = [&](float* row) {
      if (turn.changes()) turn.turn(row, 1, shift);
    };
    for (uint32_t h = 0; h < engine_->model().of(layer).kv_heads; ++h) {
      copy->keeper_.take_moved_queries(layer, h, keeper_.head(layer, h).queries, first,
                                       removal.removed_of(tokens(layer)), turn_query);
    }
  }
  copy->identity_.truncate(first);
  copy->take_figures(*this);
  return copy;
}

// ---- Steps ---------------------------------------------------------------------------------------

void Session::attend(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                     const TensorOut& out, float* lse) {
  if (q.on_device()) return stream_.enqueue(layer, q, k, v, &out, lse);
  attend_begin(layer, q, k, v);
  host_.end(out, lse);
}

void Session::attend_begin(uint32_t layer, const TensorView& q, const TensorView* k,
                           const TensorView* v) {
  if (q.on_device()) return stream_.enqueue(layer, q, k, v, nullptr, nullptr);
  // A step with tensors in host memory comes after those on the stream.
  stream_.check_not_capturing();
  stream_.wait_idle();
  stream_.check_failure();
  host_.begin(layer, q, k, v);
}

std::optional<SessionInterface::OpenStep> Session::open_step() const {
  if (stream_.in_step()) return OpenStep{stream_.runner().open_layer(), true};
  if (host_.in_step()) return OpenStep{host_.layer(), false};
  return std::nullopt;
}

void Session::attend_end(const TensorOut& out, float* lse) {
  if (stream_.in_step()) return stream_.enqueue_end(out, lse);
  host_.end(out, lse);
}

void Session::extend(uint32_t layer, const ExtendArgs& args) {
  if (args.q.on_device()) return device_extends_.extend(layer, args);
  enter(Needs::no_step);
  host_extends_.extend(layer, args);
}

void Session::attend_queries(uint32_t layer, const TensorView& q, const TensorOut& out,
                             float* lse) {
  if (tokens(layer) == 0) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " holds no token to attend to");
  }
  host_extends_.answer(layer, q, out, lse);
}

void Session::extend_batch(uint32_t layer, std::span<BatchMember> members) {
  if (members.empty()) return;
  const auto takes_part = [](const BatchMember& m) {
    return m.error == nullptr && m.args.k.tokens != 0;
  };
  if (members[0].args.q.on_device()) {
    std::vector<DeviceMember> on_device;
    for (BatchMember& m : members) {
      if (takes_part(m)) on_device.push_back({&m.session->device_extends_, &m.args, &m.error});
    }
    return extend_batch_on_device(layer, on_device);
  }
  std::vector<HostBatch::Member> on_host;
  for (BatchMember& m : members) {
    if (takes_part(m)) on_host.push_back({&m.session->host_extends_, &m.args, &m.error});
  }
  HostBatch(layer, on_host).run();
}

void Session::set_extend_pattern(const char* pattern, uint32_t tokens) {
  patterns_.set(pattern, tokens);
}

void Session::read_rows(uint32_t layer, uint32_t first, uint32_t n, const TensorOut* k,
                        const TensorOut* v) {
  runtime::read_rows(*engine_, sequence_, {layer, first, n}, k, v);
}

void Session::attend_offloaded(uint32_t layer, const TensorView& q, const TensorOut& out,
                               float* lse) {
  states_.attend_offloaded(layer, q, out, lse);
}

void Session::attend_tokens(uint32_t layer, const TensorView& q, const TokenChoice& choice,
                            const TensorOut& out, float* lse) {
  states_.attend_tokens(layer, q, choice, out, lse);
}

void Session::search_tokens(uint32_t layer, const TensorView& q, const TokenSearch::Found& found) {
  states_.search_tokens(layer, q, found);
}

// ---- Figures -------------------------------------------------------------------------------------

keyhole_layer_tokens Session::layer_tokens(uint32_t layer) const {
  keyhole_layer_tokens t{};
  t.struct_size = sizeof t;
  t.total = tokens(layer);
  t.sink = sequence_.sink(layer);
  t.window = sequence_.window(layer);
  t.indexed = keeper_.indexed(layer);
  t.pending = sequence_.rows(layer) - t.indexed;
  return t;
}

uint32_t Session::most_tokens() const {
  uint32_t most = 0;
  for (uint32_t l = 0; l < engine_->model().layers; ++l) most = std::max(most, tokens(l));
  return most;
}

uint64_t Session::device_bytes() const {
  if (!stream_.exists()) return params_.host_resident_bytes(engine_->model());
  return gpu::cuda_resident_bytes(params_.resident_shape(engine_->model())) + blocks_.bytes() +
         codes_.bytes() + sequence_.rings().device_bytes();
}

keyhole_statistics Session::statistics() const {
  keyhole_statistics s = totals_.figures();
  s.struct_size = sizeof s;
  s.tokens = most_tokens();
  s.host_bytes = memory_.held();
  s.shared_bytes = sequence_.bytes_of_others() + keeper_.bytes_of_others();
  s.index_bytes = keeper_.index_bytes();
  s.tail_bytes = keeper_.tail_bytes();
  s.build_seconds = keeper_.build_seconds();
  const AppendBlocks::Figures& appends = keeper_.append_figures();
  s.append_blocks = appends.blocks;
  s.append_waits = appends.waits;
  s.append_wait_seconds = appends.wait_seconds;
  s.background_seconds = appends.background_seconds;
  s.device_bytes = device_bytes();
  s.device_bytes_peak = s.device_bytes + codes_.bytes_peak() - codes_.bytes();
  s.host_bytes_peak = std::max(memory_.peak(), s.host_bytes);
  s.signal = "";
  stream_.add_statistics(s);
  s.device = engine_->device_name();
  s.cpu_level = engine_->kernels().name;
  s.threads = engine_->pool().threads();
  return s;
}

MemoryFigures Session::memory() const {
  const uint64_t others_kv = sequence_.bytes_of_others();
  const uint64_t others_indexes = keeper_.bytes_of_others();
  const bool on_device = stream_.exists();
  MemoryFigures m;
  m.kv = sequence_.kv_bytes() - others_kv;
  m.resident = on_device ? gpu::resident_bytes(params_.resident_shape(engine_->model()))
                         : params_.host_resident_bytes(engine_->model());
  m.indexes = keeper_.index_bytes() + keeper_.sample_bytes() - others_indexes;
  m.shared_pages = sequence_.shared_page_bytes();
  // Of a host device, what is resident is not among what the session counts as host memory.
  const uint64_t held = memory_.held() + (on_device ? 0 : m.resident);
  m.work = held - others_kv - others_indexes - m.kv - m.resident - m.indexes;
  if (!on_device) return m;
  keyhole_statistics of_stream{};
  stream_.add_statistics(of_stream);
  m.pinned = of_stream.pinned_bytes;
  m.codes = of_stream.code_bytes;
  m.device = device_bytes();
  return m;
}

void Session::reset_statistics() {
  totals_.reset();
  keeper_.reset_figures();
  stream_.reset_statistics();
  audits_.reset_figures();
}

keyhole_audit Session::audit(uint32_t layer, uint32_t kv_head) {
  return audits_.summary(settings_.named_heads(layer, kv_head));
}

// ---- Copies --------------------------------------------------------------------------------------

std::unique_ptr<SessionInterface> Session::fork() {
  finish_audits();
  return fork_session(*this);
}

void Session::save(const std::string& path) {
  finish_audits();
  save_session(*this, path);
}

void Session::save(ChecksumWriter& out) const {
  audits_.save(out);
  sequence_.save(out);
  keeper_.save(out);
}

void Session::load(ChecksumReader& in) {
  audits_.load(in);
  sequence_.load(in);
  keeper_.load(in);
  in.finish();
  codes_.place();
  keeper_.begin_loaded();
  steps_.reserve(true);
  stream_.pin_all_codes();
}

void Session::copy_from(const Session& from) {
  identity_ = from.identity_;
  audits_.copy_from(from.audits_);
  sequence_.copy_from(from.sequence_);
  keeper_.copy_from(from.keeper_);
  patterns_.copy_from(from.patterns_);
  steps_.reserve(true);
  codes_.copy();
  stream_.pin_all_codes();
}

void Session::take_figures(const Session& from) {
  totals_ = from.totals_;
  memory_.take_peak(from.memory_);
  keeper_.take_figures(from.keeper_);
  audits_.take_figures(from.audits_);
  patterns_.add(from.patterns_.blocks());
}

}  // namespace keyhole::runtime
