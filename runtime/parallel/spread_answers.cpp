// Answers of a spread session to tensors in host memory: every rank's state of its own tokens, and their merge.
#include <algorithm>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpu/attention.h"
#include "runtime/parallel/spread_session.h"

namespace keyhole::runtime {
namespace {

// New tokens whose states are exchanged at once: some MB for common shapes.
constexpr uint32_t kTokensPerRound = 512;

}  // namespace

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
  if (args.k.tokens == 0) {
    throw Error(Status::invalid_argument, "tensor k has 0 tokens, allowed: at least 1");
  }
  if (args.q.tokens != args.k.tokens) {
    throw Error(Status::invalid_argument, "tensor q has " + std::to_string(args.q.tokens) +
                                              " tokens, needed: as many as k, " +
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
