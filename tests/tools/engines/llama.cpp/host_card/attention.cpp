#include "tests/tools/engines/llama.cpp/host_card/attention.h"

#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "tools/engines/llama.cpp/nodes.h"
#include "tools/engines/llama.cpp/store.h"

namespace keyhole::llama_cpp {
namespace {

/// A head of a token in fp32.
void widen_head(const Rows& rows, int64_t token, uint32_t head, float* out) {
  const auto* from = static_cast<const std::byte*>(rows.data) + token * rows.token_stride +
                     int64_t{head} * rows.head_stride;
  switch (rows.number) {
    case Number::kF16:
      ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(from), out, rows.components);
      break;
    case Number::kBf16:
      ggml_bf16_to_fp32_row(reinterpret_cast<const ggml_bf16_t*>(from), out, rows.components);
      break;
    case Number::kF32:
      std::copy_n(reinterpret_cast<const float*>(from), rows.components, out);
      break;
  }
}

/// Cells of a stream, as a node's keys or values show them.
Rows cells_of(const ggml_tensor* t, int64_t stream) {
  return {static_cast<const std::byte*>(t->data) + stream * static_cast<int64_t>(t->nb[3]),
          *number_of(t),
          t->ne[1],
          t->ne[2],
          t->ne[0],
          static_cast<int64_t>(t->nb[1]),
          static_cast<int64_t>(t->nb[2])};
}

}  // namespace

PlainRows::PlainRows(const Rows& k, const Rows& v, uint32_t kv_head)
    : width(static_cast<size_t>(k.components)),
      keys(static_cast<size_t>(k.tokens) * width),
      values(keys.size()) {
  for (int64_t t = 0; t < k.tokens; ++t) {
    widen_head(k, t, kv_head, keys.data() + static_cast<size_t>(t) * width);
    widen_head(v, t, kv_head, values.data() + static_cast<size_t>(t) * width);
  }
}

void attend_plainly(const PlainHead& head, const PlainRows& rows, int64_t tokens, float* out) {
  std::vector<double> logits(static_cast<size_t>(tokens), -std::numeric_limits<double>::infinity());
  double most = head.sink;
  for (size_t t = 0; t < logits.size(); ++t) {
    const float bias = head.mask != nullptr ? ggml_fp16_to_fp32(head.mask[t]) : 0.0F;
    if (std::isinf(bias)) continue;
    const float* key = rows.keys.data() + t * rows.width;
    double dot = 0;
    for (size_t i = 0; i < rows.width; ++i) dot += double{head.query[i]} * key[i];
    double logit = dot * head.scale;
    if (head.softcap != 0) logit = head.softcap * std::tanh(logit / head.softcap);
    logits[t] = logit + bias;
    most = std::max(most, logits[t]);
  }
  std::vector<double> sum(rows.width, 0.0);
  double weight = std::exp(head.sink - most);
  for (size_t t = 0; t < logits.size(); ++t) {
    if (std::isinf(logits[t])) continue;
    const double own = std::exp(logits[t] - most);
    weight += own;
    const float* value = rows.values.data() + t * rows.width;
    for (size_t i = 0; i < rows.width; ++i) sum[i] += own * value[i];
  }
  for (size_t i = 0; i < rows.width; ++i) {
    out[i] = weight > 0 ? static_cast<float>(sum[i] / weight) : 0.0F;
  }
}

void attend_plainly(ggml_tensor* attention) {
  const ggml_tensor* q = attention->src[0];
  const ggml_tensor* mask = attention->src[3];
  const ggml_tensor* sinks = attention->src[4];
  const LayerShape shape = layer_shape(attention);
  const int64_t group = q->ne[2] / attention->src[1]->ne[2];
  std::optional<PlainRows> rows;  // of a group's KV head
  const auto at = [](const ggml_tensor* t, int64_t i, int64_t j, int64_t k) {
    return static_cast<std::byte*>(t->data) + i * static_cast<int64_t>(t->nb[1]) +
           j * static_cast<int64_t>(t->nb[2]) + k * static_cast<int64_t>(t->nb[3]);
  };
  for (int64_t stream = 0; stream < q->ne[3]; ++stream) {
    const Rows keys = cells_of(attention->src[1], stream);
    const Rows values = cells_of(attention->src[2], stream);
    for (int64_t h = 0; h < q->ne[2]; ++h) {
      if (h % group == 0) rows.emplace(keys, values, static_cast<uint32_t>(h / group));
      PlainHead head;
      head.scale = shape.scale;
      head.softcap = shape.softcap;
      if (sinks != nullptr) head.sink = static_cast<const float*>(sinks->data)[h];
      for (int64_t row = 0; row < q->ne[1]; ++row) {
        head.query = reinterpret_cast<const float*>(at(q, row, h, stream));
        if (mask != nullptr) {
          head.mask =
              reinterpret_cast<const uint16_t*>(at(mask, row, 0, mask->ne[3] > 1 ? stream : 0));
        }
        attend_plainly(head, *rows, keys.tokens,
                       reinterpret_cast<float*>(at(attention, h, row, stream)));
      }
    }
  }
}

}  // namespace keyhole::llama_cpp
