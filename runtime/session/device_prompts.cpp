#include "runtime/session/device_prompts.h"

namespace keyhole::runtime {

void DevicePrompts::prefill(uint32_t layer, const TensorView& k, const TensorView& v,
                            const TensorView* q) {
  const gpu::Stream stream = stream_->runner("tensors in device memory").stream();
  if (!sequence_->layer(layer).offloads() && prefill_window(layer, k, v, q)) return;
  store(layer, bring(layer, k, v, q, stream));
}

DevicePrompts::Brought DevicePrompts::bring(uint32_t layer, const TensorView& k,
                                            const TensorView& v, const TensorView* q,
                                            gpu::Stream stream) {
  DeviceRowsReader& copies = stream_->copies();
  Brought brought;
  brought.k = copies.read(k, "k", stream, memory_->rows[0]);
  brought.v = copies.read(v, "v", stream, memory_->rows[1]);
  if (q == nullptr) return brought;
  check_as_many(*q, k);
  // Of a prompt's queries, two thirds of all bytes, a sample takes one in 32 and less: the others need not leave the
  // device. Rows with gaps between heads are copied one by one, equally far apart: all of them.
  TokenSample& sample = brought.sample;
  const bool spreads = q->on_device() && q->head_stride == ptrdiff_t{q->dim};
  if (spreads && sequence_->layer(layer).offloads()) sample.step = keeper_->query_stride(layer);
  sample.first = (sample.step - sequence_->tokens(layer) % sample.step) % sample.step;
  if (sample.first >= q->tokens) {
    sample = {};
    return brought;
  }
  TensorView wanted = q->slice(sample.first, (q->tokens - sample.first - 1) / sample.step + 1);
  if (wanted.tokens > 1) wanted.token_stride *= sample.step;
  brought.q = copies.read(wanted, "q", stream, memory_->rows[2]);
  return brought;
}

gpu::Stream DevicePrompts::stream_beside() {
  return stream_->copies().beside(stream_->runner("tensors in device memory").stream());
}

void DevicePrompts::take_in(uint32_t layer, const TensorView& k, const TensorView& v,
                            gpu::Stream beside) {
  DeviceRowsReader& copies = stream_->copies();
  const TensorView hk = copies.read(k, "k", beside, memory_->rows[0]);
  const TensorView hv = copies.read(v, "v", beside, memory_->rows[1]);
  tokens_->take_in(layer, hk, hv);
}

bool DevicePrompts::prefill_window(uint32_t layer, const TensorView& k, const TensorView& v,
                                   const TensorView* q) {
  SlidingRings& rings = sequence_->rings();
  const uint32_t n = k.tokens;
  const bool on_device = k.on_device() && v.on_device() && (q == nullptr || q->on_device());
  // By way of host memory the errors that these have are found and told.
  if (!on_device || !rings.can_lie_on_device() || n == 0 || v.tokens != n ||
      (q != nullptr && q->tokens != n) || n > params_->max_tokens - sequence_->tokens(layer)) {
    return false;
  }
  const gpu::Stream stream = stream_->runner().stream();
  gpu::Windows& windows = rings.on_device(layer);
  const ModelShape& m = engine_->model();
  const auto are_finite = [&](const TensorView& rows, DType as) {
    return windows.are_finite(rings.number_on_device(layer), rows, as, stream);
  };
  if (!are_finite(k, m.kv_dtype) || !are_finite(v, m.kv_dtype) ||
      (q != nullptr && !are_finite(*q, DType::f32))) {
    return false;
  }
  rings.append_on_device(layer, k, v, stream);
  extended_->note_change(layer);
  return true;
}

}  // namespace keyhole::runtime
