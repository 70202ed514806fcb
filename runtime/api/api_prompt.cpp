// keyhole_prompt: attention of a prompt before it is stored.
#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/home_process.h"
#include "keyhole/prefill.h"
#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"
#include "runtime/engine/tensor.h"
#include "runtime/prefill/host_prompt.h"
#include "runtime/prefill/prefill_pattern.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

struct keyhole_prompt {
  std::shared_ptr<const Engine> engine;
  std::vector<gpu::PromptPattern> patterns;  ///< of each layer in turn `[q_heads]`
  /// Of layers of one shape.
  struct Attention {
    LayerShape shape;
    std::unique_ptr<gpu::PromptAttention> attention;
  };
  std::vector<Attention> attentions;
  cpu::HomeProcess home;
  std::atomic<bool> in_use = false;

  [[nodiscard]] std::span<gpu::PromptPattern> patterns_of(uint32_t layer) {
    const ModelShape& m = engine->model();
    return std::span(patterns).subspan(m.first_q_head(layer), m.of(layer).q_heads);
  }
  /// Null: there is none for the layer yet.
  [[nodiscard]] gpu::PromptAttention* attention_of(uint32_t layer) const {
    const LayerShape shape = engine->model().of(layer);
    const auto found = std::find_if(attentions.begin(), attentions.end(),
                                    [&](const Attention& a) { return a.shape == shape; });
    return found == attentions.end() ? nullptr : found->attention.get();
  }
};

namespace {

/// Rows where the engine's device is.
TensorView check_prompt_rows(const Engine& engine, const keyhole_tensor* t, const char* name,
                             uint32_t heads, uint32_t dim) {
  const bool device = engine.has_streams();
  TensorView rows = check_rows(t, name, heads, dim, false, device);
  if (device && !rows.on_device()) {
    throw Error(Status::unsupported, std::string("tensor ") + name +
                                         " lies in host memory; a prompt's attention on " +
                                         engine.device_name() + " takes device memory");
  }
  // The stride of an axis of length 1 is that of rows without gaps: kernels take one pair of strides for K and V.
  if (rows.heads <= 1) rows.head_stride = dim;
  if (rows.tokens <= 1) rows.token_stride = ptrdiff_t{dim} * heads;
  return rows;
}

std::unique_ptr<gpu::PromptAttention> make_attention(const Engine& engine, const LayerShape& m) {
  const gpu::PromptShape shape{m.q_heads, m.kv_heads, m.head_dim};
  if (!engine.has_streams()) {
    return std::make_unique<HostPrompt>(shape, engine.kernels(), engine.pool());
  }
  if (auto made = engine.stream_device().make_prompt(shape)) return made;
  throw Error(Status::unsupported, std::string("attention of a prompt: the engine's device is ") +
                                       engine.device_name() +
                                       ", needed: a CUDA device or the host");
}

bool are_alike(std::span<const gpu::PromptPattern> patterns) {
  return std::all_of(patterns.begin(), patterns.end(),
                     [&](const gpu::PromptPattern& p) { return p == patterns.front(); });
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
    const ModelShape& m = made->engine->model();
    for (uint32_t layer = 0; layer < m.layers; ++layer) {
      const LayerShape shape = m.of(layer);
      if (shape.value_dim == shape.head_dim) continue;
      throw Error(Status::unsupported,
                  "attention of a prompt: value_dim is " + std::to_string(shape.value_dim) +
                      ", needed: head_dim, which is " + std::to_string(shape.head_dim));
    }
    made->patterns = parse_head_patterns(pattern == nullptr ? "auto" : pattern, m);
    for (uint32_t layer = 0; layer < m.layers; ++layer) {
      if (made->attention_of(layer) != nullptr) continue;
      made->attentions.push_back({m.of(layer), make_attention(*made->engine, m.of(layer))});
    }
    *out = made.release();
  });
}

void keyhole_prompt_destroy(keyhole_prompt* prompt) { destroy(prompt); }

keyhole_status keyhole_prompt_attend(keyhole_prompt* prompt, uint32_t layer,
                                     const keyhole_tensor* q, const keyhole_tensor* k,
                                     const keyhole_tensor* v, const keyhole_tensor* out, float* lse,
                                     void* stream) {
  return guarded([&] {
    require(prompt, "prompt");
    const UseLock lock(prompt->in_use, "the prompt");
    const ModelShape& model = prompt->engine->model();
    if (layer >= model.layers) {
      throw Error(Status::invalid_argument, "layer is " + std::to_string(layer) + ", allowed: 0.." +
                                                std::to_string(model.layers - 1));
    }
    const LayerShape m = model.of(layer);
    const Engine& engine = *prompt->engine;
    const TensorView rq = check_prompt_rows(engine, q, "q", m.q_heads, m.head_dim);
    const TensorView rk = check_prompt_rows(engine, k, "k", m.kv_heads, m.head_dim);
    const TensorView rv = model.values_in_keys
                              ? check_values(v, model, layer, rk, false, engine.has_streams())
                              : check_prompt_rows(engine, v, "v", m.kv_heads, m.head_dim);
    (void)check_prompt_rows(engine, out, "out", m.q_heads, m.head_dim);
    const TensorOut ro =
        check_many_out(out, "out", rq.tokens, m.q_heads, m.head_dim, engine.has_streams());
    if (rv.tokens != rk.tokens) {
      throw Error(Status::invalid_argument, "tensor v has " + std::to_string(rv.tokens) +
                                                " tokens, needed: as many as k, " +
                                                std::to_string(rk.tokens));
    }
    gpu::PromptStretch s;
    s.q = rq;
    s.k = rk;
    s.v = rv;
    s.out = ro;
    s.lse = lse;
    s.n = rq.tokens;
    s.rows = rk.tokens;
    s.logits = model.logits_of(layer);
    s.sinks = model.sinks_of(layer);
    s.window = model.slides(layer) ? model.windows[layer].tokens : 0;
    const std::span<const gpu::PromptPattern> patterns = prompt->patterns_of(layer);
    prompt->attention_of(layer)->attend(s, are_alike(patterns) ? patterns.first(1) : patterns,
                                        stream);
  });
}

keyhole_status keyhole_prompt_set_pattern(keyhole_prompt* prompt, uint32_t layer, uint32_t q_head,
                                          const char* pattern) {
  return guarded([&] {
    require(prompt, "prompt");
    require(pattern, "pattern");
    const UseLock lock(prompt->in_use, "the prompt");
    const ModelShape& m = prompt->engine->model();
    const std::vector<gpu::PromptPattern> parsed = parse_head_patterns(pattern, m);
    const auto check = [](const char* name, uint32_t value, uint32_t count) {
      if (value == KEYHOLE_ALL || value < count) return;
      throw Error(Status::invalid_argument, std::string(name) + " is " + std::to_string(value) +
                                                ", allowed: 0.." + std::to_string(count - 1) +
                                                " and KEYHOLE_ALL");
    };
    check("layer", layer, m.layers);
    check("q_head", q_head, layer == KEYHOLE_ALL ? m.largest().q_heads : m.of(layer).q_heads);
    for (uint32_t l = 0; l < m.layers; ++l) {
      if (layer != KEYHOLE_ALL && layer != l) continue;
      const std::span<gpu::PromptPattern> of_layer = prompt->patterns_of(l);
      for (uint32_t h = 0; h < of_layer.size(); ++h) {
        if (q_head == KEYHOLE_ALL || q_head == h) of_layer[h] = parsed[m.first_q_head(l) + h];
      }
    }
  });
}

keyhole_status keyhole_prompt_get_blocks(keyhole_prompt* prompt, uint64_t* attended,
                                         uint64_t* seen) {
  return guarded([&] {
    require(prompt, "prompt");
    require(attended, "attended");
    require(seen, "seen");
    const UseLock lock(prompt->in_use, "the prompt");
    gpu::PromptBlocks all;
    for (const keyhole_prompt::Attention& a : prompt->attentions) {
      const gpu::PromptBlocks blocks = a.attention->blocks();
      all.attended += blocks.attended;
      all.seen += blocks.seen;
    }
    *attended = all.attended;
    *seen = all.seen;
  });
}

}  // extern "C"
