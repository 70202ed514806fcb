#include "runtime/session/device_prompts.h"

namespace keyhole::runtime {

void DevicePrompts::prefill(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q) {
  const gpu::Stream stream = stream_->runner("tensors in device memory").stream();
  const bool offloads = sequence_->layer(layer).offloads();
  if (!offloads && prefill_window(layer, k, v, q)) return;
  DeviceRowsReader& copies = stream_->copies();
  const RowsIn hk = copies.read(k, "k", stream, memory_->rows[0]);
  const RowsIn hv = copies.read(v, "v", stream, memory_->rows[1]);
  if (q == nullptr) return tokens_->prefill(layer, hk, hv, nullptr);
  check_as_many(*q, k);
  // Of a prompt's queries, two thirds of all bytes, a sample takes one in 32 and less: the others need not leave the device. Rows
  // with gaps between heads are copied one by one, equally far apart: all of them.
  RowsIn wanted = *q;
  const bool spreads = q->on_device && q->head_stride == q->dim * dtype_size(q->dtype);
  if (spreads && offloads) wanted.step = keeper_->query_stride(layer);
  wanted.first = (wanted.step - sequence_->tokens(layer) % wanted.step) % wanted.step;
  if (wanted.first >= q->tokens) return tokens_->prefill(layer, hk, hv, nullptr);
  wanted.tokens = (q->tokens - wanted.first - 1) / wanted.step + 1;
  wanted.data += wanted.first * q->token_stride;
  wanted.token_stride *= wanted.step;
  const RowsIn hq = copies.read(wanted, "q", stream, memory_->rows[2]);
  tokens_->prefill(layer, hk, hv, &hq);
}

bool DevicePrompts::prefill_window(uint32_t layer, const RowsIn& k, const RowsIn& v,
                                   const RowsIn* q) {
  SlidingRings& rings = sequence_->rings();
  const uint32_t n = k.tokens;
  const bool on_device = k.on_device && v.on_device && (q == nullptr || q->on_device);
  // By way of host memory the errors that these have are found and told.
  if (!on_device || !rings.can_lie_on_device() || n == 0 || v.tokens != n ||
      (q != nullptr && q->tokens != n) || n > params_->max_tokens - sequence_->tokens(layer)) {
    return false;
  }
  const gpu::Stream stream = stream_->runner().stream();
  gpu::Windows& windows = rings.on_device(layer);
  const ModelShape& m = engine_->model();
  const auto are_finite = [&](const RowsIn& rows, DType as) {
    return windows.are_finite(rings.number_on_device(layer), device_tokens(rows), n, rows.heads, as,
                              stream);
  };
  if (!are_finite(k, m.kv_dtype) || !are_finite(v, m.kv_dtype) ||
      (q != nullptr && !are_finite(*q, DType::f32))) {
    return false;
  }
  rings.append_on_device(layer, n, device_tokens(k), device_tokens(v), stream);
  extended_->note_change(layer);
  return true;
}

}  // namespace keyhole::runtime
