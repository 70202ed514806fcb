// keyhole_prompt: attention of a prompt before it is stored.
#include <atomic>
#include <memory>
#include <string>

#include "keyhole/prefill.h"
#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"
#include "runtime/engine/prefill_pattern.h"
#include "runtime/engine/tensor.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

struct keyhole_prompt {
  std::shared_ptr<const Engine> engine;
  gpu::PromptPattern pattern;
  std::unique_ptr<gpu::PromptAttention> attention;
  std::atomic<bool> in_use = false;
};

namespace {

gpu::DeviceTokens device_tokens(const std::byte* data, size_t token_stride, size_t head_stride,
                                DType dtype) {
  const size_t element = dtype_size(dtype);
  return {const_cast<std::byte*>(data), token_stride / element, head_stride / element, dtype};
}

RowsIn rows_on_device(const keyhole_tensor* t, const char* name, uint32_t heads, uint32_t dim) {
  RowsIn rows = check_rows(t, name, heads, dim, false, true);
  if (!rows.on_device) {
    throw Error(Status::unsupported,
                std::string("tensor ") + name +
                    " lies in host memory; a prompt's attention takes device memory");
  }
  // An axis of length 1 has any stride.
  const size_t row = dim * dtype_size(rows.dtype);
  if (rows.head_stride == 0) rows.head_stride = row;
  if (rows.token_stride == 0) rows.token_stride = row * heads;
  return rows;
}

}  // namespace

extern "C" {

const char* keyhole_prompt_help(void) { return prefill_pattern_help().c_str(); }

keyhole_status keyhole_prompt_create(keyhole_engine* engine, const char* pattern,
                                     keyhole_prompt** out) {
  return guarded([&] {
    require(out, "out");
    *out = nullptr;
    require(engine, "engine");
    auto made = std::make_unique<keyhole_prompt>();
    made->engine = engine->engine;
    made->pattern = parse_prefill_pattern(pattern == nullptr ? "auto" : pattern);
    const StreamDevice& device = made->engine->stream_device();
    if (!device.make_prompt) {
      throw Error(Status::unsupported,
                  std::string("attention of a prompt: the engine's device is ") +
                      made->engine->device_name() + ", needed: a CUDA device");
    }
    const ModelShape& m = made->engine->model();
    made->attention = device.make_prompt({m.q_heads, m.kv_heads, m.head_dim});
    *out = made.release();
  });
}

void keyhole_prompt_destroy(keyhole_prompt* prompt) { delete prompt; }

keyhole_status keyhole_prompt_attend(keyhole_prompt* prompt, uint32_t layer,
                                     const keyhole_tensor* q, const keyhole_tensor* k,
                                     const keyhole_tensor* v, const keyhole_tensor* out, float* lse,
                                     void* stream) {
  return guarded([&] {
    require(prompt, "prompt");
    const UseLock lock(prompt->in_use, "the prompt");
    const ModelShape& m = prompt->engine->model();
    if (layer >= m.layers) {
      throw Error(Status::invalid_argument, "layer is " + std::to_string(layer) + ", allowed: 0.." +
                                                std::to_string(m.layers - 1));
    }
    const RowsIn rq = rows_on_device(q, "q", m.q_heads, m.head_dim);
    const RowsIn rk = rows_on_device(k, "k", m.kv_heads, m.head_dim);
    const RowsIn rv = m.values_in_keys ? check_values(v, m, rk, false, true)
                                       : rows_on_device(v, "v", m.kv_heads, m.head_dim);
    (void)rows_on_device(out, "out", m.q_heads, m.head_dim);
    const RowsOut ro = check_many_out(out, "out", rq.tokens, m.q_heads, m.head_dim, true);
    if (rv.tokens != rk.tokens) {
      throw Error(Status::invalid_argument, "tensor v has " + std::to_string(rv.tokens) +
                                                " tokens, needed: as many as k, " +
                                                std::to_string(rk.tokens));
    }
    gpu::PromptStretch s;
    s.q = device_tokens(rq.data, rq.token_stride, rq.head_stride, rq.dtype);
    s.k = device_tokens(rk.data, rk.token_stride, rk.head_stride, rk.dtype);
    s.v = device_tokens(rv.data, rv.token_stride, rv.head_stride, rv.dtype);
    s.out = device_tokens(ro.data, ro.token_stride, ro.head_stride, ro.dtype);
    s.lse = lse;
    s.n = rq.tokens;
    s.rows = rk.tokens;
    s.logits = m.logits_of(layer);
    s.sinks = m.sinks_of(layer);
    s.window = m.slides(layer) ? m.windows[layer].tokens : 0;
    prompt->attention->attend(s, prompt->pattern, stream);
  });
}

keyhole_status keyhole_prompt_blocks(keyhole_prompt* prompt, uint64_t* attended, uint64_t* seen) {
  return guarded([&] {
    require(prompt, "prompt");
    require(attended, "attended");
    require(seen, "seen");
    const UseLock lock(prompt->in_use, "the prompt");
    const gpu::PromptBlocks blocks = prompt->attention->blocks();
    *attended = blocks.attended;
    *seen = blocks.seen;
  });
}

}  // extern "C"
