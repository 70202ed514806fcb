#include "runtime/session/host_stepper.h"

#include <string>

namespace keyhole::runtime {

// ---- One step ------------------------------------------------------------------------------------

void HostStepper::prepare(DecodeStep& step, const StepTokens& tokens, const TensorView& q) {
  const LayerShape m = parts_.engine.model().of(tokens.layer);
  const auto to_f32 = parts_.engine.kernels().to_f32[static_cast<int>(q.dtype)];
  float* to = step.queries();  // `[kv_heads, count, group, head_dim]`
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    for (uint32_t t = 0; t < tokens.count; ++t) {
      for (uint32_t g = 0; g < m.group(); ++g, to += m.head_dim) {
        to_f32(q.row(tokens.first + t, h * m.group() + g), to, m.head_dim);
      }
    }
  }
  parts_.work.prepare(step, tokens.layer, tokens.position, tokens.count);
  parts_.audits.begin(tokens.layer);
}

void HostStepper::launch(DecodeStep& step, const StepTokens& tokens, const NewTokens* fresh) {
  KvLayer& layer = parts_.sequence.layer(tokens.layer);
  try {
    parts_.codes.expect_step(tokens.layer);
    if (fresh != nullptr) layer.set_ahead(fresh->seen_by_first());
    step.start(tokens.layer, layer.resident(), parts_.codes.of_step(tokens.layer), fresh);
  } catch (...) {
    layer.set_ahead(0);
    parts_.audits.discard();
    throw;
  }
  // A ring without tokens was not asked.
  layer.set_ahead(0);
}

void HostStepper::finish(DecodeStep& step, const StepTokens& tokens, const TensorOut& out,
                         float* lse) {
  const LayerShape m = parts_.engine.model().of(tokens.layer);
  StepCost cost;
  try {
    cost = step.finish();
    const size_t values = size_t{tokens.count} * m.q_heads * m.head_dim;
    check_answer(parts_.engine.kernels(), reinterpret_cast<const std::byte*>(step.o()), DType::f32,
                 values);
  } catch (...) {
    parts_.audits.discard();
    parts_.steps.count_bytes();
    throw;
  }
  parts_.audits.end(tokens.layer, parts_.codes.of_step(tokens.layer) != nullptr);
  const auto from_f32 = parts_.engine.kernels().from_f32[static_cast<int>(out.dtype)];
  size_t from = 0;  // `[kv_heads, count, group]`
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    for (uint32_t t = 0; t < tokens.count; ++t) {
      for (uint32_t g = 0; g < m.group(); ++g, ++from) {
        const size_t token = tokens.first + t, head = h * m.group() + g;
        from_f32(step.o() + from * m.head_dim, out.row(token, head), m.value_dim);
        if (lse != nullptr) lse[token * m.q_heads + head] = step.lse()[from];
      }
    }
  }
  parts_.totals.add(cost, tokens.count);
  parts_.steps.count_bytes();
}

// ---- keyhole_session_attend ------------------------------------------------------------------------------

void HostStepper::begin(uint32_t layer, const TensorView& q, const TensorView* k,
                        const TensorView* v) {
  const Stopwatch watch;
  parts_.prompts.release();
  if (k != nullptr) parts_.tokens.check_append(layer, *k, *v);
  check_finite(parts_.engine.kernels(), q, "q", 0, 1, DType::f32);
  if (k == nullptr && parts_.sequence.tokens(layer) == 0) {
    throw Error(
        Status::invalid_argument,
        "layer " + std::to_string(layer) + " holds no token to attend to: append one with k and v");
  }
  parts_.indexing.advance_append(layer);
  if (k != nullptr) parts_.tokens.append(layer, *k, *v);
  const StepTokens tokens{.layer = layer, .position = parts_.sequence.tokens(layer) - 1};
  try {
    parts_.stream.finish_codes(layer);
    append_seconds_ = watch.seconds();
    prepare(parts_.steps.one(), tokens, q);
    launch(parts_.steps.one(), tokens, nullptr);
  } catch (...) {
    // The caller will bring the token again.
    parts_.audits.discard();
    if (k != nullptr) parts_.sequence.drop_newest(layer);
    throw;
  }
  begun_ = tokens;
  appended_ = k != nullptr;
  watch_ = watch;
  in_step_ = true;
}

void HostStepper::end(const TensorOut& out, float* lse) {
  in_step_ = false;
  try {
    finish(parts_.steps.one(), begun_, out, lse);
  } catch (...) {
    if (appended_) parts_.sequence.drop_newest(begun_.layer);
    throw;
  }
  parts_.totals.add_seconds(append_seconds_, watch_.seconds());
}

void HostStepper::abandon() noexcept {
  in_step_ = false;
  try {
    (void)parts_.steps.one().finish();
  } catch (...) {  // NOLINT: the session is about to go, and has no caller to tell
  }
}

}  // namespace keyhole::runtime
