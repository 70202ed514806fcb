#include "tools/engines/llama.cpp/nodes.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

/// Of FLASH_ATTN_EXT, in its op_params.
struct AttentionParams {
  float scale;
  float max_bias;
  float softcap;
  int32_t precision;
  int32_t most_cells;
};

AttentionParams attention_params(const ggml_tensor* attention) {
  AttentionParams params{};
  static_assert(sizeof params <= sizeof attention->op_params);
  std::memcpy(&params, attention->op_params, sizeof params);
  return params;
}

/// Learned sinks in the model's weights. While contexts are only measured there are no weights: then they are zeros.
std::vector<float> learned_sinks(const ggml_tensor* sinks) {
  std::vector<float> logits(static_cast<size_t>(sinks->ne[0]));
  if (sinks->data != nullptr && sinks->buffer != nullptr) {
    ggml_backend_tensor_get(sinks, logits.data(), 0, logits.size() * sizeof(float));
  }
  return logits;
}

/// A weight of numbers in f32, one for each query head.
bool are_readable(const ggml_tensor* sinks, int64_t q_heads) {
  return sinks->op == GGML_OP_NONE && sinks->view_src == nullptr && sinks->type == GGML_TYPE_F32 &&
         sinks->ne[0] == q_heads && ggml_nelements(sinks) == q_heads;
}

LayerShape shape_without_sinks(const ggml_tensor* attention) {
  const ggml_tensor* q = attention->src[0];
  const ggml_tensor* k = attention->src[1];
  const AttentionParams params = attention_params(attention);
  return {static_cast<uint32_t>(q->ne[2]), static_cast<uint32_t>(k->ne[2]),
          static_cast<uint32_t>(k->ne[0]), params.scale, params.softcap};
}

}  // namespace

const ggml_tensor* root(const ggml_tensor* tensor) {
  return tensor->view_src != nullptr ? tensor->view_src : tensor;
}

std::optional<CacheName> cache_name(const ggml_tensor* tensor) {
  if (tensor == nullptr) return std::nullopt;
  CacheName name;
  char which = 0;
  int length = 0;
  const char* text = root(tensor)->name;
  if (std::sscanf(text, "cache_%c_l%d%n", &which, &name.layer, &length) != 2) return std::nullopt;
  if (text[length] != 0 || (which != 'k' && which != 'v') || name.layer < 0) return std::nullopt;
  name.values = which == 'v';
  return name;
}

std::optional<Number> number_of(const ggml_tensor* tensor) {
  switch (tensor->type) {
    case GGML_TYPE_F32: return Number::kF32;
    case GGML_TYPE_F16: return Number::kF16;
    case GGML_TYPE_BF16: return Number::kBf16;
    default: return std::nullopt;
  }
}

LayerShape layer_shape(const ggml_tensor* attention) {
  LayerShape shape = shape_without_sinks(attention);
  const ggml_tensor* sinks = attention->src[4];
  if (sinks != nullptr && are_readable(sinks, attention->src[0]->ne[2])) {
    shape.sinks = learned_sinks(sinks);
  }
  return shape;
}

bool has_shape(const ggml_tensor* attention, const LayerShape& shape) {
  LayerShape own = shape_without_sinks(attention);
  own.sinks = shape.sinks;
  return own == shape;
}

std::string why_not(const ggml_tensor* attention) {
  const ggml_tensor* q = attention->src[0];
  const ggml_tensor* k = attention->src[1];
  const ggml_tensor* v = attention->src[2];
  const ggml_tensor* mask = attention->src[3];
  const AttentionParams params = attention_params(attention);
  const auto values = cache_name(v);
  const auto keys = cache_name(k);
  if (!keys || keys->values || !values || !values->values || keys->layer != values->layer) {
    return "keys and values do not lie side by side in the cache (latent attention)";
  }
  if (!number_of(k) || k->type != v->type) {
    return std::string("keys in ") + ggml_type_name(k->type) + " and values in " +
           ggml_type_name(v->type) + ": both have to be f16, bf16 or f32";
  }
  if (q->type != GGML_TYPE_F32 || attention->type != GGML_TYPE_F32) return "queries not in f32";
  if (attention->src[4] != nullptr && !are_readable(attention->src[4], q->ne[2])) {
    return "learned sinks that are computed";
  }
  if (params.max_bias != 0) return "ALiBi";
  if (params.most_cells != 0) return "a choice of cells by the model itself";
  if (mask == nullptr || mask->type != GGML_TYPE_F16) return "no mask in f16";
  if (mask->ne[2] != 1) return "a mask for each head";
  if (mask->ne[0] != k->ne[1] || mask->ne[1] < q->ne[1] ||
      (mask->ne[3] != 1 && mask->ne[3] != q->ne[3])) {
    return "a mask of another shape than the batch";
  }
  if (k->ne[0] != v->ne[0] || k->ne[2] != v->ne[2]) return "values of another width than keys";
  if (root(k)->ne[0] != k->ne[0] * k->ne[2] || root(v)->ne[0] != v->ne[0] * v->ne[2]) {
    return "cells with more in them than the heads";
  }
  if (q->nb[0] != sizeof(float) || attention->nb[0] != sizeof(float)) return "strided queries";
  return "";
}

std::string node_text(const ggml_tensor* node) {
  std::string text = std::string(ggml_op_name(node->op)) + " '" + node->name + "'";
  for (const ggml_tensor* source : {node->view_src, node->src[1], node->src[0]}) {
    if (const auto name = cache_name(source)) {
      return text + " of layer " + std::to_string(name->layer);
    }
  }
  return text;
}

const ggml_tensor* shifts_of(const ggml_tensor* node, size_t cells) {
  const ggml_tensor* shifts = node->src[1];
  if (node->op != GGML_OP_ROPE || shifts->type != GGML_TYPE_I32 ||
      static_cast<size_t>(ggml_nelements(shifts)) != cells) {
    throw std::runtime_error("it changes llama.cpp's cache, for which Keyhole needs copy=on");
  }
  return shifts;
}

bool is_view_node(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE: return true;
    default: return false;
  }
}

}  // namespace keyhole::llama_cpp
