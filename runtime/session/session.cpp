#include "runtime/session/session.h"

#include <algorithm>

#include "runtime/engine/sizes.h"
#include "runtime/plan/planner.h"

namespace keyhole::runtime {
namespace {

// Tokens per task when rows are checked: tens of microseconds of work.
constexpr uint32_t kTokensPerCheck = 64;

uint32_t pieces(uint32_t n, uint32_t piece) { return (n + piece - 1) / piece; }

uint32_t largest_top_k(const std::vector<HeadIndex>& heads) {
  uint32_t top_k = 0;
  for (const HeadIndex& h : heads) top_k = std::max(top_k, h.params.budget.top_k);
  return top_k;
}

}  // namespace

Session::Session(std::shared_ptr<const Engine> engine, SessionParams params, const Session* copied)
    : engine_(std::move(engine)),
      params_(std::move(params)),
      sequence_(*engine_, params_),
      step_(*engine_),
      keeper_(*engine_, params_, sequence_,
              [this](uint64_t bytes, const char* what) { check_index_memory(bytes, what); }),
      audits_(*engine_, params_, largest_top_k(keeper_.heads())),
      step_bytes_(step_.bytes()),
      extended_(engine_->model().layers) {
  params_.heads.clear();  // from here on each head has its own
  make_stream_runner(copied);
}

void Session::check_layer(uint32_t layer) const {
  if (layer >= engine_->model().layers) {
    throw Error(Status::invalid_argument, "layer is " + std::to_string(layer) + ", allowed: 0.." +
                                              std::to_string(engine_->model().layers - 1));
  }
}

// ---- Tokens -------------------------------------------------------------------------------------

void Session::check_memory(uint64_t more_bytes, const char* what) const {
  if (params_.host_memory_limit == 0) return;
  check_host_memory(params_.host_memory_limit, accounted_bytes(), more_bytes, what);
}

void Session::check_index_memory(uint64_t more_bytes, const char* what) const {
  if (params_.host_memory_limit == 0) return;
  if (!keeper_.has_first_under_way()) more_bytes += first_search_bytes();
  check_memory(more_bytes, what);
}

uint64_t Session::first_search_bytes() const {
  // Counted when the first index begins: a step that asks must not allocate.
  if (step_.capacity_k() != 0) return 0;
  if (keeper_.has_first_under_way() && promised_search_bytes_ != 0) return promised_search_bytes_;
  SessionParams with_heads = params_;
  for (const HeadParams* head : head_params()) with_heads.heads.push_back(*head);
  uint32_t rows = 0;
  for (uint32_t l = 0; l < engine_->model().layers; ++l) {
    rows = std::max(rows, sequence_.rows(l));
  }
  promised_search_bytes_ =
      estimate_search_bytes(engine_->model(), with_heads, rows, engine_->pool().threads());
  return promised_search_bytes_;
}

uint64_t Session::accounted_bytes() const {
  uint64_t bytes = host_bytes() + keeper_.promised_bytes();
  if (keeper_.has_first_under_way()) bytes += first_search_bytes();
  return bytes;
}

void Session::check_append(uint32_t layer, const RowsIn& k, const RowsIn& v) const {
  const uint32_t n = k.tokens;
  if (v.tokens != n) {
    throw Error(Status::invalid_argument, "tensor v has " + std::to_string(v.tokens) +
                                              " tokens, needed: as many as k, " +
                                              std::to_string(n));
  }
  check_room(layer, n);
  const DType to = engine_->model().kv_dtype;
  const auto check = [&](uint32_t task, uint32_t) {
    const uint32_t begin = task * kTokensPerCheck;
    const uint32_t end = std::min(n, begin + kTokensPerCheck);
    check_finite(engine_->kernels(), k, "k", begin, end, to);
    check_finite(engine_->kernels(), v, "v", begin, end, to);
  };
  if (n <= kTokensPerCheck) {
    if (n != 0) check(0, 0);
  } else {
    engine_->pool().run(pieces(n, kTokensPerCheck), check);
  }
}

void Session::check_queries(const RowsIn& q) const {
  const auto check = [&](uint32_t task, uint32_t) {
    const uint32_t begin = task * kTokensPerCheck;
    check_finite(engine_->kernels(), q, "q", begin, std::min(q.tokens, begin + kTokensPerCheck),
                 DType::f32);
  };
  if (q.tokens <= kTokensPerCheck) {
    if (q.tokens != 0) check(0, 0);
  } else {
    engine_->pool().run(pieces(q.tokens, kTokensPerCheck), check);
  }
}

void Session::check_room(uint32_t layer, uint32_t n) const {
  const uint64_t total = uint64_t{tokens(layer)} + n;
  if (total > params_.max_tokens) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " would hold " + std::to_string(total) +
                    " tokens, allowed: max_tokens = " + std::to_string(params_.max_tokens));
  }
  const uint64_t slots = uint64_t{params_.sink} + params_.window + params_.flush_block;
  if (sequence_.slides(layer)) {
    check_memory(sequence_.rings().more_bytes(layer, n), "appending tokens");
  } else if (params_.host_memory_limit != 0 && total > slots) {
    check_memory(params_.offload_bytes(engine_->model(), layer, std::max(n, params_.flush_block)),
                 "appending tokens");
  }
}

void Session::check_as_many(const RowsIn& q, const RowsIn& k) {
  if (q.tokens == k.tokens) return;
  throw Error(Status::invalid_argument, "tensor q has " + std::to_string(q.tokens) +
                                            " tokens, needed: as many as k, " +
                                            std::to_string(k.tokens));
}

void Session::prefill(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q) {
  check_append(layer, k, v);
  // The device encodes rows of earlier calls while the host takes these in: behind them it would keep the stream from the
  // next call's copies.
  if (stream_ != nullptr) stream_->encode_pinned(layer);
  if (q != nullptr) {
    if (q->step == 1) check_as_many(*q, k);
    check_queries(*q);
  }
  const uint32_t before = tokens(layer);
  try {
    if (q != nullptr && !sequence_.slides(layer)) keeper_.sample_queries(layer, *q, before);
    sequence_.append(layer, k, v);
  } catch (...) {
    keeper_.forget_queries(layer, before);
    throw;
  }
  forget_extended(layer);
  if (stream_ != nullptr) stream_->pin_codes(layer);
}

void Session::truncate_layer(uint32_t layer, uint32_t n) {
  const uint32_t rows = sequence_.split(layer, n).rows;
  audits_.finish_reading(layer, rows);
  keeper_.truncate(layer, rows, n);
  if (codes_ != nullptr) codes_->truncate(layer, rows, stream_->stream());
  sequence_.truncate(layer, n);
  forget_extended(layer);
}

void Session::check_truncation(std::span<const uint32_t> to) const {
  for (uint32_t layer = 0; layer < engine_->model().layers; ++layer) {
    const uint32_t n = to[layer];
    if (!sequence_.slides(layer) || sequence_.rings().can_truncate(layer, n)) continue;
    throw Error(Status::invalid_argument,
                "n_tokens is " + std::to_string(n) + ", layer " + std::to_string(layer) +
                    " has a sliding window of " +
                    std::to_string(engine_->model().windows[layer].tokens) + " and of its " +
                    std::to_string(tokens(layer)) +
                    " tokens no longer those before; allowed: 0, and from " +
                    std::to_string(sequence_.rings().least_truncation(layer)) + " on");
  }
}

void Session::truncate_layers(std::span<const uint32_t> to) {
  check_truncation(to);
  for (uint32_t layer = 0; layer < engine_->model().layers; ++layer) {
    if (tokens(layer) > to[layer]) truncate_layer(layer, to[layer]);
  }
}

void Session::truncate(uint32_t n) {
  truncate_layers(std::vector<uint32_t>(engine_->model().layers, n));
  identity_.truncate(n);
}

// ---- Indexes ------------------------------------------------------------------------------------

void Session::build(const BuildProgress& progress) {
  release_prompt();
  if (codes_ != nullptr) codes_->retry();
  place_codes();
  for (uint32_t layer = 0; stream_ != nullptr && layer < engine_->model().layers; ++layer) {
    stream_->update_codes(layer);
  }
  keeper_.build(progress, [&](bool has_first) { reserve_searches(has_first); });
}

void Session::advance_append(uint32_t layer) {
  if (!keeper_.advance_append(layer)) return;
  try {
    reserve_searches(false);
  } catch (const std::exception& e) {
    // Heads without the capacity for a search are attended exactly.
    engine_->log()(KEYHOLE_LOG_WARNING,
                   "layer " + std::to_string(layer) +
                       ": its larger index has no memory for searches: " + e.what());
  }
}

// ---- Figures ------------------------------------------------------------------------------------

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

uint64_t Session::host_bytes() const {
  uint64_t bytes = sequence_.bytes() + keeper_.index_bytes() + keeper_.sample_bytes() +
                   step_bytes_ + audits_.bytes() + new_rows_.capacity() + token_call_bytes();
  if (extend_prompt_ != nullptr) bytes += extend_prompt_->bytes();
  // On a CUDA device the resident tokens have a copy here.
  if (stream_ != nullptr) bytes += gpu::resident_bytes(params_.resident_shape(engine_->model()));
  return bytes;
}

keyhole_statistics Session::statistics() const {
  keyhole_statistics s = totals_;
  s.struct_size = sizeof s;
  s.tokens = most_tokens();
  s.host_bytes = host_bytes();
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
  s.device_bytes_peak = s.device_bytes;
  s.host_bytes_peak = std::max(host_bytes_peak_, s.host_bytes);
  s.signal = "";
  if (stream_ != nullptr) {
    s.device_bytes_peak += codes_->bytes_peak() - codes_->bytes();
    stream_->add_statistics(s);
  }
  s.device = engine_->device_name();
  s.cpu_level = engine_->kernels().name;
  s.threads = engine_->pool().threads();
  return s;
}

void Session::reset_statistics() {
  totals_ = {};
  keeper_.reset_figures();
  if (stream_ != nullptr) stream_->reset_statistics();
  audits_.reset_figures();
}

keyhole_audit Session::audit(uint32_t layer, uint32_t kv_head) {
  return audits_.summary(named_heads(layer, kv_head));
}

// ---- Copies -------------------------------------------------------------------------------------

std::vector<const HeadParams*> Session::head_params() const {
  std::vector<const HeadParams*> heads;
  for (const HeadIndex& h : keeper_.heads()) heads.push_back(&h.params);
  return heads;
}

void Session::save(ChecksumWriter& out) const {
  audits_.save(out);
  sequence_.save(out);
  keeper_.save(out);
}

void Session::pin_all_codes() {
  for (uint32_t layer = 0; stream_ != nullptr && layer < engine_->model().layers; ++layer) {
    stream_->pin_codes(layer);
  }
}

void Session::load(ChecksumReader& in) {
  audits_.load(in);
  sequence_.load(in);
  keeper_.load(in);
  in.finish();
  place_codes();
  keeper_.begin_loaded();
  reserve_searches(true);
  pin_all_codes();
}

void Session::copy_from(const Session& from) {
  identity_ = from.identity_;
  audits_.copy_from(from.audits_);
  sequence_.copy_from(from.sequence_);
  keeper_.copy_from(from.keeper_);
  extend_patterns_ = from.extend_patterns_;
  extend_pattern_from_ = from.extend_pattern_from_;
  reserve_searches(true);
  if (codes_ != nullptr) {
    codes_->copy();
    tell_keeper_of_codes();
  }
  pin_all_codes();
}

}  // namespace keyhole::runtime
