// Spread sessions with tensors in device memory. A step is enqueued whole: this rank's own step into a state, the
// gather of all ranks' states, their merge. No message of the library's goes with it, so that no host waits for
// another; what went wrong on a rank is told when all ranks meet next, in settle().
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "runtime/parallel/spread_session.h"
#include "runtime/ranks/transport_parts.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

DeviceRowsReader& SpreadSession::device_rows() {
  if (device_rows_ == nullptr) {
    const Engine& engine = own_->engine();
    device_rows_ =
        std::make_unique<DeviceRowsReader>(engine.stream_device().make_copies(), engine.pool());
  }
  return *device_rows_;
}

// ---- Waits ---------------------------------------------------------------------------------------

void SpreadSession::wait_for_stream() {
  if (!is_enqueued_ || on_device_ == nullptr || ranks_->is_lost() || own_->stream().is_capturing())
    return;
  if (!ranks_->gathers_on_stream()) return;  // nothing there waits for other ranks
  const uint32_t timeout_ms = ranks_->config().timeout_ms;
  const auto begin = Clock::now();
  while (!on_device_->is_done(stream_)) {
    if (Clock::now() - begin > std::chrono::milliseconds(timeout_ms)) {
      ranks_->abandon(Status::timeout, "the stream has not done its steps within " +
                                           std::to_string(timeout_ms) +
                                           " ms: other ranks have not enqueued theirs");
    }
    ranks::pause_since(begin);
  }
}

void SpreadSession::settle() {
  if (has_ended_) std::rethrow_exception(failure_);
  own_->stream().check_not_capturing();
  wait_for_stream();
  own_->stream().wait_idle();
  if (!is_enqueued_) return;
  try {
    own_->stream().check_failure();
  } catch (...) {
    if (failure_ == nullptr) failure_ = std::current_exception();
  }
  is_enqueued_ = false;
  try {
    ranks_->agree({"synchronize", 0, Wait::step}, failure_);
  } catch (const Error& e) {
    // Nothing was told while another thread was inside the communicator.
    is_enqueued_ = e.status() == Status::busy && !ranks_->is_lost();
    if (is_enqueued_) throw;
    failure_ = std::current_exception();
    has_ended_ = true;
    throw;
  }
}

void SpreadSession::synchronize() {
  settle();
  // Of this rank: codes of prompts are pinned and encoded.
  own_->synchronize();
}

// ---- Steps ---------------------------------------------------------------------------------------

RankPart SpreadSession::part_of(uint32_t layer, uint32_t held, bool appends) const {
  const uint32_t owner = appends ? shares_.blocks().owner(held) : 0;
  if (shares_.is_whole(layer)) return {owner, appends, true};
  const bool takes = appends && owner == shares_.rank();
  return {owner, takes, takes || shares_.of(layer, held) != 0};
}

TensorOut SpreadSession::own_state(const LayerShape& shape) const {
  return dense_tensor(reinterpret_cast<std::byte*>(on_device_->own()), 1, shape.q_heads,
                      shape.value_dim, DType::f32, Memory::device);
}

float* SpreadSession::own_sums(const LayerShape& shape) const {
  return on_device_->own() + size_t{shape.q_heads} * shape.value_dim;
}

void SpreadSession::open_device(uint32_t layer, const TensorOut* out, bool is_captured) {
  if (has_ended_) std::rethrow_exception(failure_);
  if (is_captured) check_failure();
  const Engine& engine = own_->engine();
  const LayerShape m = engine.model().of(layer);
  if (out != nullptr && m.q_heads > 1 && out->head_stride != ptrdiff_t{m.value_dim}) {
    throw Error(Status::unsupported,
                "out has gaps between heads; over several ranks allowed: heads without gaps");
  }
  if (is_captured && !ranks_->gathers_on_stream()) {
    throw Error(
        Status::unsupported,
        "a graph over ranks whose transport has no all_gather_on_stream: steps go by way of "
        "host memory");
  }
  if (on_device_ != nullptr) return;
  if (is_captured) {
    throw Error(
        Status::invalid_argument,
        "capture: all ranks make a step with tensors in device memory first, which takes the "
        "memory of the ranks' states");
  }
  if (!engine.device_has(gpu::DevicePart::rank_states)) {
    throw Error(
        Status::unsupported,
        std::string("tensors in device memory over several ranks, on ") + engine.device_name());
  }
  gpu::RankStatesShape shape{ranks_->size(), 0, 0};
  for (uint32_t l = 0; l < engine.model().layers; ++l) {
    shape.rows = std::max(shape.rows, engine.model().of(l).q_heads);
    shape.dim = std::max(shape.dim, engine.model().of(l).value_dim);
  }
  std::unique_ptr<gpu::RankStates> made;
  ranks_->together({"device", 0, Wait::step},
                   [&] { made = engine.stream_device().make_rank_states(shape); });
  on_device_ = std::move(made);
}

void SpreadSession::launch(const TensorView& q, const TensorView* k, const TensorView* v,
                           const TensorOut* out, float* lse) {
  const uint32_t layer = step_.layer;
  const bool whole = shares_.is_whole(layer);
  try {
    // Taking a block in waits for the stream, on which a gather may be that never ends.
    if (!whole && step_.capture == 0 && own_->append_will_be_due(layer)) wait_for_stream();
    const TensorView* const keys = step_.part.takes ? k : nullptr;
    const TensorView* const values = step_.part.takes ? v : nullptr;
    if (out == nullptr || whole) {
      own_->stream().enqueue(layer, q, keys, values, out, lse);
    } else {
      const LayerShape m = own_->engine().model().of(layer);
      const TensorOut state = own_state(m);
      own_->stream().enqueue(layer, q, keys, values, &state, own_sums(m));
    }
  } catch (...) {
    step_.error = std::current_exception();
  }
}

void SpreadSession::enqueue(uint32_t layer, const TensorView& q, const TensorView* k,
                            const TensorView* v, const TensorOut* out, float* lse) {
  const uint64_t capture = own_->stream().capture_of_step();
  uint32_t held = tokens_[layer];
  if (capture != 0) {
    graph_.enter(capture);
    held += graph_.appended(layer);  // what it may hold is checked when the graph is announced
  } else if (k != nullptr) {
    check_room(layer, *k, *v);
  } else {
    check_holds(layer, tokens_[layer]);
  }
  try {
    open_device(layer, out, capture != 0);
  } catch (...) {
    if (capture != 0) graph_.spoil();
    throw;
  }
  if (capture == 0) is_enqueued_ = true;
  const bool appends = k != nullptr;
  step_ = {true, layer, appends, part_of(layer, held, appends), failure_, true, capture};
  if (step_.part.asks && step_.error == nullptr) launch(q, k, v, out, lse);
  if (out != nullptr) finish_step(false, *out, lse);
}

void SpreadSession::enqueue_end(const TensorOut& out, float* lse) {
  const uint64_t capture = own_->stream().capture_id();
  if (capture != step_.capture) {
    if (step_.capture == 0) {
      throw Error(Status::busy,
                  "a step that was begun before a capture cannot end in it: end the capture first");
    }
    const Step step = std::exchange(step_, {});
    graph_.spoil();
    if (step.error != nullptr) std::rethrow_exception(step.error);
    if (step.part.asks) own_->stream().enqueue_end(out, lse);  // throws
    throw Error(Status::invalid_argument,
                "the step was begun in a capture that is over: what was captured has no end");
  }
  open_device(step_.layer, &out, capture != 0);
  finish_step(true, out, lse);
}

void SpreadSession::finish_step(bool is_half, const TensorOut& out, float* lse) {
  Step step = std::exchange(step_, {});
  const LayerShape m = own_->engine().model().of(step.layer);
  const bool whole = shares_.is_whole(step.layer);
  try {
    if (step.error == nullptr && step.part.asks && is_half) {
      own_->stream().enqueue_end(whole ? out : own_state(m), whole ? lse : own_sums(m));
    }
    if (!step.part.asks) {
      on_device_->fill(gpu::RankStates::Nothing::empty, m.q_heads, m.value_dim, stream_);
    }
  } catch (...) {
    step.error = std::current_exception();
  }
  if (!whole && !ranks_->gathers_on_stream()) return merge_by_host(step, out, lse);
  const bool is_captured = step.capture != 0;
  try {
    // What failed in a capture is captured again: nothing of it is launched.
    const bool has_failed = step.error != nullptr;
    if (!whole && !(is_captured && has_failed)) merge_on_stream(step.layer, has_failed, out, lse);
  } catch (...) {
    if (step.error == nullptr) step.error = std::current_exception();
  }
  if (is_captured) {
    if (step.error == nullptr) return graph_.add({step.layer, step.appends, step.part, out, lse});
    graph_.spoil();
    std::rethrow_exception(step.error);
  }
  // Counted in any case: the other ranks take it to be there.
  if (step.appends) {
    ++tokens_[step.layer];
    extended_[step.layer] = {};
  }
  if (step.error == nullptr) return;
  failure_ = step.error;
  std::rethrow_exception(step.error);
}

void SpreadSession::merge_on_stream(uint32_t layer, bool failed, const TensorOut& out, float* lse) {
  const LayerShape m = own_->engine().model().of(layer);
  if (failed) on_device_->fill(gpu::RankStates::Nothing::failed, m.q_heads, m.value_dim, stream_);
  const size_t bytes = size_t{m.q_heads} * (m.value_dim + 1) * sizeof(float);
  ranks_->gather_on_stream(on_device_->own(), on_device_->all(), bytes, stream_);
  on_device_->merge(m.q_heads, m.value_dim, out.data, out.dtype, lse, stream_);
}

void SpreadSession::merge_by_host(const Step& step, const TensorOut& out, float* lse) {
  const LayerShape m = own_->engine().model().of(step.layer);
  std::exception_ptr error = step.error;
  (void)own_rows(step.layer, 1);
  const TensorOut merged = dense_tensor(rows_[3].room(m.q_heads * out.row_bytes()), 1, m.q_heads,
                                        m.value_dim, out.dtype);
  std::vector<float> sums(m.q_heads);
  try {
    if (error == nullptr) {
      const TensorView state =
          dense_tensor(reinterpret_cast<const std::byte*>(on_device_->own()), 1, 1,
                       static_cast<uint32_t>(states_.size()), DType::f32, Memory::device);
      const TensorView read = device_rows().read(state, "state", stream_, rows_[0]);
      std::copy_n(read.data, states_.size() * sizeof(float),
                  reinterpret_cast<std::byte*>(states_.data()));
      own_->stream().wait_idle();
      own_->stream().check_failure();
    }
  } catch (...) {
    error = std::current_exception();
  }
  try {
    merge(call("attend", step.layer, Wait::step), step.layer, 1, error, merged, sums.data());
  } catch (...) {
    take_back();
    throw;
  }
  if (step.appends) {
    ++tokens_[step.layer];
    extended_[step.layer] = {};
  }
  device_rows().write(merged.data, out, stream_);
  if (lse != nullptr) device_rows().write(sums.data(), sums.size(), lse, stream_);
}

// ---- Several tokens ------------------------------------------------------------------------------

void SpreadSession::extend_from_device(uint32_t layer, const ExtendArgs& args) {
  const uint32_t before = tokens_[layer], n = args.k.tokens;
  const LayerShape m = own_->engine().model().of(layer);
  ExtendArgs on_host = args;
  std::vector<float> sums(size_t{n} * m.q_heads);
  together(call("extend", layer, Wait::step), [&] {
    on_host.q = device_rows().read(args.q, "q", stream_, rows_[0]);
    on_host.k = device_rows().read(args.k, "k", stream_, rows_[1]);
    on_host.v = device_rows().read(args.v, "v", stream_, rows_[2]);
    on_host.out = dense_tensor(rows_[3].room(size_t{n} * m.q_heads * args.out.row_bytes()), n,
                               m.q_heads, m.value_dim, args.out.dtype);
  });
  on_host.lse = sums.data();
  extend_rows(layer, on_host);
  try {
    const bool gapless = args.out.head_stride == on_host.out.head_stride &&
                         args.out.token_stride == on_host.out.token_stride;
    TensorOut to = args.out;
    if (gapless) to.heads *= n;  // one copy takes all
    for (uint32_t t = 0; t < n; t += gapless ? n : 1) {
      to.data = args.out.row(t);
      device_rows().write(on_host.out.row(t), to, stream_);
    }
    if (args.lse != nullptr) device_rows().write(sums.data(), sums.size(), args.lse, stream_);
  } catch (...) {
    // The tokens are there on all ranks, the answers are not on this one.
    extended_[layer] = {before, n};
    throw;
  }
}

}  // namespace keyhole::runtime
