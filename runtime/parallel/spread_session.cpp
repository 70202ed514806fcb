#include "runtime/parallel/spread_session.h"

#include <algorithm>
#include <sstream>

#include "index/serial.h"
#include "runtime/parallel/spread_file.h"
#include "runtime/save/settings_io.h"
#include "runtime/session/session_file.h"

namespace keyhole::runtime {
namespace {

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

}  // namespace

void refuse_call(const char* call) {
  throw Error(Status::unsupported,
              std::string(call) + " of a session that is spread over several ranks");
}

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

}  // namespace keyhole::runtime
