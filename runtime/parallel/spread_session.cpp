#include "runtime/parallel/spread_session.h"

#include <algorithm>
#include <span>
#include <sstream>

#include "cpu/attention.h"
#include "index/serial.h"
#include "runtime/parallel/spread_file.h"
#include "runtime/save/settings_io.h"
#include "runtime/session/session_file.h"

namespace keyhole::runtime {
namespace {

// New tokens whose states are exchanged at once: some MB for common shapes.
constexpr uint32_t kTokensPerRound = 512;

/// Of all settings that decide answers: not of memory limits, which each rank has of its own.
uint64_t settings_sum(const Session& session) {
  std::ostringstream text;
  ChecksumWriter out(text);
  SessionParams params = session.params();
  params.host_memory_limit = params.device_memory_limit = params.pinned_memory_limit = 0;
  save_shape(session.engine().model(), out);
  save_windows(session.engine().model(), out);
  save_params(params, out);
  save_heads(session.head_params(), out);
  out.value(session.engine().text_blocks().block);
  const std::string bytes = text.str();
  index::Checksum sum;
  sum.update(bytes.data(), bytes.size());
  return sum.value();
}

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, text); }

[[noreturn]] void refuse_call(const char* call) {
  throw Error(Status::unsupported,
              std::string(call) + " of a session that is spread over several ranks");
}

}  // namespace

SpreadSession::SpreadSession(std::unique_ptr<Session> own, std::vector<uint32_t> tokens)
    : own_(std::move(own)),
      ranks_(own_->engine().communicator().get()),
      shares_(own_->engine()),
      tokens_(std::move(tokens)),
      extended_(tokens_.size()) {}

void SpreadSession::check_indexes(const Session& session) {
  for (const HeadParams* head : session.head_params()) {
    const std::string& spec = head->index;
    if (!spec.starts_with("saap") && spec.find("rope=undo") == std::string::npos) continue;
    throw Error(
        Status::unsupported,
        "index '" + spec +
            "' undoes RoPE, for which a rank's tokens would have to be at their places in the "
            "text; allowed over several ranks: all types but saap and ivf with rope=undo");
  }
}

std::unique_ptr<Session> SpreadSession::make_own(
    Communicator& ranks, const std::function<std::unique_ptr<Session>()>& make) {
  std::unique_ptr<Session> own;
  std::exception_ptr error;
  uint64_t settings = 0;
  try {
    own = make();
    check_indexes(*own);
    settings = settings_sum(*own);
  } catch (...) {
    error = std::current_exception();
  }
  const auto all =
      ranks.exchange({"session", 0, Wait::work}, std::as_bytes(std::span(&settings, 1)), error);
  for (uint32_t r = 0; r < ranks.size(); ++r) {
    if (std::equal(all.of(r), all.of(r) + sizeof settings, all.of(0))) continue;
    refuse("rank " + std::to_string(r) +
           " has a session of other settings, or an engine of another shape or context_block, than "
           "rank 0: all ranks need the same");
  }
  return own;
}

void SpreadSession::enter(Needs needs) {
  if (needs == Needs::look) return own_->wait_until(needs);
  if (step_.under_way && needs != Needs::nothing && needs != Needs::end) throw_in_step();
  // Steps end with those of the other ranks, if these come.
  if (needs != Needs::stream && needs != Needs::end) wait_for_stream();
  own_->wait_until(needs);
}

void SpreadSession::end() {
  own_->end();
  // Gathers on the stream end with the other ranks, or are given up: what is destroyed waits for the stream.
  wait_for_stream();
}

keyhole_layer_tokens SpreadSession::layer_tokens(uint32_t layer) const {
  keyhole_layer_tokens t = own_->layer_tokens(layer);
  t.total = tokens_[layer];
  return t;
}

keyhole_statistics SpreadSession::statistics() const {
  keyhole_statistics s = own_->statistics();
  s.tokens = *std::max_element(tokens_.begin(), tokens_.end());
  return s;
}

// ---- What ranks refuse ---------------------------------------------------------------------------

void SpreadSession::set_extend_pattern(const char* /*pattern*/, uint32_t /*tokens*/) {
  refuse_call("keyhole_session_set_extend_pattern");
}

void SpreadSession::set_prompt_chunk(uint32_t /*tokens*/) {
  refuse_call("keyhole_session_set_prompt_chunk");
}

Session& SpreadSession::batch_member() { refuse_call("keyhole_session_extend_batch"); }

std::unique_ptr<SessionInterface> SpreadSession::without(uint32_t /*first*/, uint32_t /*count*/,
                                                         int32_t /*shift*/) {
  refuse_call("keyhole_session_remove");
}

void SpreadSession::attend_queries(uint32_t /*layer*/, const TensorView& /*q*/,
                                   const TensorOut& /*out*/, float* /*lse*/) {
  refuse_call("keyhole_session_attend_queries");
}

void SpreadSession::check_takes(const char* call) const { refuse_call(call); }

void SpreadSession::read_rows(uint32_t /*layer*/, uint32_t /*first*/, uint32_t /*n*/,
                              const TensorOut* /*k*/, const TensorOut* /*v*/) {
  refuse_call("keyhole_session_get_rows");
}

void SpreadSession::attend_offloaded(uint32_t /*layer*/, const TensorView& /*q*/,
                                     const TensorOut& /*out*/, float* /*lse*/) {
  refuse_call("keyhole_session_attend_offloaded");
}

void SpreadSession::attend_tokens(uint32_t /*layer*/, const TensorView& /*q*/,
                                  const TokenChoice& /*choice*/, const TensorOut& /*out*/,
                                  float* /*lse*/) {
  refuse_call("keyhole_session_attend_tokens");
}

void SpreadSession::search_tokens(uint32_t /*layer*/, const TensorView& /*q*/,
                                  const TokenSearch::Found& /*found*/) {
  refuse_call("keyhole_session_search_tokens");
}

// ---- Copies --------------------------------------------------------------------------------------

std::unique_ptr<SessionInterface> SpreadSession::fork() {
  settle();
  own_->finish_audits();
  auto copy = make_own(*ranks_, [&] {
    check_failure();
    return fork_session(*own_);
  });
  return std::make_unique<SpreadSession>(std::move(copy), tokens_);
}

void SpreadSession::save(const std::string& path) {
  settle();
  own_->finish_audits();
  save_spread(*own_, *this, path);
}

Communicator::Call SpreadSession::call(const char* what, uint32_t layer, Wait wait) const {
  return {what, uint64_t{layer} << 32 | tokens_[layer], wait};
}

// ---- Tokens come and go --------------------------------------------------------------------------

void SpreadSession::check_room(uint32_t layer, const TensorView& k, const TensorView& v) const {
  if (k.tokens != v.tokens) {
    refuse("tensor v has " + std::to_string(v.tokens) + " tokens, needed: as many as k, " +
           std::to_string(k.tokens));
  }
  const uint32_t most = own_->params().max_tokens;
  if (k.tokens > most - std::min(most, tokens_[layer])) {
    refuse("layer " + std::to_string(layer) + " holds " + std::to_string(tokens_[layer]) +
           " tokens of the text; " + std::to_string(k.tokens) + " more would pass max_tokens, " +
           std::to_string(most));
  }
}

void SpreadSession::check_append(uint32_t layer, const TensorView& k, const TensorView& v) const {
  check_room(layer, k, v);
  const Engine& engine = own_->engine();
  const DType stored = engine.model().kv_dtype;
  // What lies on the device is looked at by the rank that takes it.
  if (!k.on_device()) check_finite(engine.kernels(), k, "k", 0, k.tokens, stored);
  if (!v.on_device()) check_finite(engine.kernels(), v, "v", 0, v.tokens, stored);
}

void SpreadSession::check_holds(uint32_t layer, uint32_t tokens) {
  if (tokens != 0) return;
  refuse("layer " + std::to_string(layer) +
         " holds no token to attend to: append one with k and v");
}

void SpreadSession::take_back() noexcept {
  try {
    own_->stream().wait_idle();
    own_->truncate_layers(shares_.of(tokens_));
  } catch (
      ...) {  // NOLINT: another error is on its way; a sliding layer that cannot is noticed by the next call
  }
}

void SpreadSession::append_own(uint32_t layer, const TensorView& k, const TensorView& v,
                               const TensorView* q) {
  for (uint32_t t = 0; t < k.tokens;) {
    const uint32_t n = shares_.blocks().run(tokens_[layer] + t, k.tokens - t);
    if (shares_.is_own(tokens_[layer] + t)) {
      TensorView queries;
      if (q != nullptr) queries = q->slice(t, n);
      own_->prefill(layer, k.slice(t, n), v.slice(t, n), q == nullptr ? nullptr : &queries);
    }
    t += n;
  }
}

void SpreadSession::prefill(uint32_t layer, const TensorView& k, const TensorView& v,
                            const TensorView* q) {
  settle();
  check_append(layer, k, v);
  if (q != nullptr && q->tokens != k.tokens) {
    refuse("tensor q has " + std::to_string(q->tokens) + " tokens, needed: as many as k, " +
           std::to_string(k.tokens));
  }
  try {
    together(call("prefill", layer, Wait::work), [&] {
      if (shares_.is_whole(layer)) return own_->prefill(layer, k, v, q);
      append_own(layer, k, v, q);
    });
  } catch (...) {
    take_back();
    throw;
  }
  tokens_[layer] += k.tokens;
  extended_[layer] = {};
}

void SpreadSession::together(const Communicator::Call& call, const std::function<void()>& part) {
  ranks_->together(call, [&] {
    check_failure();
    part();
  });
}

void SpreadSession::shorten(const std::vector<uint32_t>& left) {
  std::exception_ptr error;
  try {
    own_->stream().check_failure();
    own_->truncate_layers(shares_.of(left));
    return;
  } catch (const Error& e) {
    // Everyone's: a sliding layer that cannot, and nothing has changed.
    if (e.status() == Status::invalid_argument && failure_ == nullptr) throw;
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  // The others have shorter layers from here on: this rank's next call is still theirs, and tells them why it takes no
  // part.
  if (failure_ == nullptr) failure_ = error;
  tokens_ = left;
  std::fill(extended_.begin(), extended_.end(), Extended{});
  std::rethrow_exception(error);
}

void SpreadSession::truncate(uint32_t n) {
  std::vector<uint32_t> left = tokens_;
  for (uint32_t& tokens : left) tokens = std::min(tokens, n);
  shorten(left);
  own_->identity().truncate(n);
  for (uint32_t layer = 0; layer < left.size(); ++layer) {
    if (left[layer] != tokens_[layer]) extended_[layer] = {};
  }
  tokens_ = std::move(left);
}

void SpreadSession::accept(uint32_t m, const uint32_t* path) {
  enter(Needs::no_step);
  Extended agreed;
  for (uint32_t layer = 0; layer < tokens_.size(); ++layer) {
    const Extended& e = extended_[layer];
    if (e.tokens == 0) continue;
    if (agreed.tokens != 0 && (e.tokens != agreed.tokens || e.before != agreed.before)) {
      refuse("layer " + std::to_string(layer) + " was extended by " + std::to_string(e.tokens) +
             " tokens after " + std::to_string(e.before) + ", others by " +
             std::to_string(agreed.tokens) + " after " + std::to_string(agreed.before) +
             ", needed: the same tokens in all layers");
    }
    agreed = e;
  }
  if (agreed.tokens == 0)
    refuse("there is no keyhole_session_extend whose tokens could be accepted");
  if (m > agreed.tokens) {
    refuse("m is " + std::to_string(m) + ", allowed: 0.." + std::to_string(agreed.tokens) +
           ", the tokens of keyhole_session_extend");
  }
  for (uint32_t i = 0; path != nullptr && i < m; ++i) {
    if (path[i] == i) continue;
    throw Error(
        Status::unsupported,
        "path[" + std::to_string(i) + "] is " + std::to_string(path[i]) +
            ": over several ranks tokens stay where they are, allowed: the first m, path NULL");
  }
  std::vector<uint32_t> left = tokens_;
  for (uint32_t layer = 0; layer < left.size(); ++layer) {
    if (extended_[layer].tokens != 0) left[layer] = agreed.before + m;
  }
  shorten(left);
  own_->identity().truncate(agreed.before + m);
  std::fill(extended_.begin(), extended_.end(), Extended{});
  tokens_ = std::move(left);
}

// ---- Indexes -------------------------------------------------------------------------------------

void SpreadSession::build(const BuildProgress& progress) {
  settle();
  together({"build", 0, Wait::work}, [&] { own_->build(progress); });
}

void SpreadSession::set_index(const std::string& spec) {
  settle();
  together({"set_index", 0, Wait::work}, [&] {
    const std::string before = own_->params().index;
    own_->set_index(spec);
    try {
      check_indexes(*own_);
    } catch (...) {
      own_->set_index(before);
      throw;
    }
  });
}

// ---- Answers -------------------------------------------------------------------------------------

TensorOut SpreadSession::own_rows(uint32_t layer, uint32_t n) {
  const LayerShape m = own_->engine().model().of(layer);
  states_.resize(size_t{n} * m.q_heads * (m.value_dim + 1));
  return dense_tensor(reinterpret_cast<std::byte*>(states_.data()), n, m.q_heads, m.value_dim,
                      DType::f32);
}

float* SpreadSession::own_lse(uint32_t layer, uint32_t n) {
  const LayerShape m = own_->engine().model().of(layer);
  return states_.data() + size_t{n} * m.q_heads * m.value_dim;
}

void SpreadSession::merge(const Communicator::Call& call, uint32_t layer, uint32_t n,
                          const std::exception_ptr& error, const TensorOut& out, float* lse) {
  const LayerShape m = own_->engine().model().of(layer);
  const size_t heads = size_t{n} * m.q_heads;
  const auto all = ranks_->exchange(call, std::as_bytes(std::span(states_)), error);
  std::vector<StateView> states(ranks_->size());
  for (uint32_t r = 0; r < states.size(); ++r) {
    // merge_states only reads its inputs.
    auto* const o = const_cast<float*>(reinterpret_cast<const float*>(all.of(r)));
    states[r] = {o, o + heads * m.value_dim};
  }
  merged_.resize(heads * (m.value_dim + 1));
  const StateView to{merged_.data(), merged_.data() + heads * m.value_dim};
  cpu::merge_states(states, static_cast<uint32_t>(heads), m.value_dim, to);
  const auto from_f32 = own_->engine().kernels().from_f32[static_cast<int>(out.dtype)];
  for (size_t i = 0; i < heads; ++i) {
    from_f32(to.o + i * m.value_dim, out.row(i / m.q_heads, i % m.q_heads), m.value_dim);
  }
  if (lse != nullptr) std::copy_n(to.lse, heads, lse);
}

void SpreadSession::attend(uint32_t layer, const TensorView& q, const TensorView* k,
                           const TensorView* v, const TensorOut& out, float* lse) {
  if (q.on_device()) return enqueue(layer, q, k, v, &out, lse);
  begin_on_host(layer, q, k, v);
  end_on_host(out, lse);
}

void SpreadSession::attend_begin(uint32_t layer, const TensorView& q, const TensorView* k,
                                 const TensorView* v) {
  if (q.on_device()) return enqueue(layer, q, k, v, nullptr, nullptr);
  begin_on_host(layer, q, k, v);
}

std::optional<SessionInterface::OpenStep> SpreadSession::open_step() const {
  if (!step_.under_way) return std::nullopt;
  return OpenStep{step_.layer, step_.on_device};
}

void SpreadSession::attend_end(const TensorOut& out, float* lse) {
  step_.on_device ? enqueue_end(out, lse) : end_on_host(out, lse);
}

void SpreadSession::begin_on_host(uint32_t layer, const TensorView& q, const TensorView* k,
                                  const TensorView* v) {
  settle();
  if (k != nullptr) check_append(layer, *k, *v);
  if (k == nullptr) check_holds(layer, tokens_[layer]);
  check_finite(own_->engine().kernels(), q, "q", 0, 1, DType::f32);
  const RankPart part = part_of(layer, tokens_[layer], k != nullptr);
  if (shares_.is_whole(layer)) {
    own_->host().begin(layer, q, k, v);
    step_ = {true, layer, k != nullptr, part, nullptr, false, 0};
    return;
  }
  // From here on the others wait for this rank, whatever happens on it.
  step_ = {true, layer, k != nullptr, part, failure_, false, 0};
  step_.part.asks = false;  // until the session has a step under way
  if (!part.asks || failure_ != nullptr) return;
  try {
    own_->host().begin(layer, q, part.takes ? k : nullptr, part.takes ? v : nullptr);
    step_.part.asks = true;
  } catch (...) {
    step_.error = std::current_exception();
  }
}

void SpreadSession::end_on_host(const TensorOut& out, float* lse) {
  const Step step = std::exchange(step_, {});
  if (shares_.is_whole(step.layer)) {
    own_->host().end(out, lse);
    tokens_[step.layer] += step.appends ? 1 : 0;
    return;
  }
  std::exception_ptr error = step.error;
  const TensorOut rows = own_rows(step.layer, 1);
  float* const sums = own_lse(step.layer, 1);
  try {
    if (step.part.asks) {
      own_->host().end(rows, sums);
    } else {
      std::fill(states_.data(), sums, 0.0F);
      std::fill(sums, states_.data() + states_.size(), kMinusInf);
    }
  } catch (...) {
    error = std::current_exception();
  }
  try {
    merge(call("attend", step.layer, Wait::step), step.layer, 1, error, out, lse);
  } catch (...) {
    take_back();
    throw;
  }
  if (!step.appends) return;
  ++tokens_[step.layer];
  extended_[step.layer] = {};
}

void SpreadSession::extend_in_block(uint32_t layer, const ExtendArgs& args) {
  const uint32_t n = args.q.tokens;
  const TensorOut rows = own_rows(layer, n);
  float* const sums = own_lse(layer, n);
  std::exception_ptr error;
  try {
    check_failure();
    if (shares_.is_own(tokens_[layer])) {
      ExtendArgs own = args;
      own.out = rows;
      own.lse = sums;
      own_->host_extends().extend(layer, own);
    } else {
      own_->host_extends().answer(layer, args.q, rows, sums);
    }
  } catch (...) {
    error = std::current_exception();
  }
  merge(call("extend", layer, Wait::step), layer, n, error, args.out, args.lse);
  tokens_[layer] += n;
}

void SpreadSession::extend(uint32_t layer, const ExtendArgs& args) {
  settle();
  if (args.k.tokens == 0) refuse("tensor k has 0 tokens, allowed: at least 1");
  if (args.q.tokens != args.k.tokens) {
    refuse("tensor q has " + std::to_string(args.q.tokens) + " tokens, needed: as many as k, " +
           std::to_string(args.k.tokens));
  }
  if (args.mask != nullptr) {
    throw Error(Status::unsupported, "a mask over several ranks, allowed: NULL, causal");
  }
  if (!args.q.on_device()) return extend_rows(layer, args);
  check_room(layer, args.k, args.v);
  extend_from_device(layer, args);
}

void SpreadSession::extend_rows(uint32_t layer, const ExtendArgs& args) {
  check_append(layer, args.k, args.v);
  check_finite(own_->engine().kernels(), args.q, "q", 0, args.q.tokens, DType::f32);
  const uint32_t before = tokens_[layer], n = args.k.tokens;
  if (shares_.is_whole(layer)) {
    own_->host_extends().extend(layer, args);
    tokens_[layer] += n;
    extended_[layer] = {before, n};
    return;
  }
  try {
    for (uint32_t t = 0; t < n;) {
      const uint32_t part = shares_.blocks().run(before + t, std::min(n - t, kTokensPerRound));
      extend_in_block(layer, slice(args, t, part));
      t += part;
    }
  } catch (...) {
    tokens_[layer] = before;
    take_back();
    throw;
  }
  extended_[layer] = {before, n};
}

}  // namespace keyhole::runtime
