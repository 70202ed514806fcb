#include "tools/engines/llama.cpp/rewriting.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

/// Tokens whose keys are turned at once.
constexpr size_t kTokens = 1024;

struct FreeContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};

/// Numbers of 16 bits as fp32, and back.
void widen(Number number, const std::byte* from, float* to, int64_t count) {
  if (number == Number::kBf16) {
    ggml_bf16_to_fp32_row(reinterpret_cast<const ggml_bf16_t*>(from), to, count);
  } else {
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(from), to, count);
  }
}
void narrow(Number number, const float* from, std::byte* to, int64_t count) {
  if (number == Number::kBf16) {
    ggml_fp32_to_bf16_row(from, reinterpret_cast<ggml_bf16_t*>(to), count);
  } else {
    ggml_fp32_to_fp16_row(from, reinterpret_cast<ggml_fp16_t*>(to), count);
  }
}

/// Rows of 16 bits that lie side by side.
Rows side_by_side(std::byte* data, Number number, const LayerShape& shape, size_t tokens) {
  const int64_t head = int64_t{shape.head_dim} * 2;
  return {data,
          number,
          static_cast<int64_t>(tokens),
          shape.kv_heads,
          shape.head_dim,
          head * shape.kv_heads,
          head};
}

/// Takes from a ROPE node's parameters what scales its numbers. Keys in a session have been scaled when their tokens
/// came; a node that shifts them would do it again (with YaRN, by 1 + 0.1 ln(1 / frequency scale)), to those alone that
/// are turned.
template <size_t kCount>
void make_rotation(std::array<int32_t, kCount>& params) {
  // In ggml_rope_ext()'s order.
  constexpr size_t kFrequencyScale = 6, kExtrapolation = 7, kScale = 8;
  const auto scale = std::bit_cast<float>(params[kFrequencyScale]);
  const auto extrapolation = std::bit_cast<float>(params[kExtrapolation]);
  constexpr float kOfYarn = 0.1F;
  const float by = extrapolation != 0.0F ? 1.0F + kOfYarn * std::log(1.0F / scale) : 1.0F;
  params[kScale] = std::bit_cast<int32_t>(1.0F / by);
}

/// K and V of tokens in a layer.
struct Kept {
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
};

}  // namespace

void KeyTurns::learn(uint32_t layer, const ggml_tensor* node, int64_t heads, int64_t components) {
  const ggml_tensor* cells = node->src[0];  // [turned components, heads, cells]
  const ggml_tensor* factors = node->src[2];
  const size_t element = ggml_type_size(cells->type);
  const size_t head = static_cast<size_t>(components) * element;
  Turn turn;
  turn.first = static_cast<int64_t>(cells->view_offs % head / element);
  turn.count = cells->ne[0];
  if (cells->nb[1] != head || cells->ne[1] != heads || turn.first + turn.count > components) {
    throw std::runtime_error("it turns keys in another way than heads of " +
                             std::to_string(components) + " components have");
  }
  static_assert(sizeof turn.params == sizeof node->op_params);
  std::memcpy(turn.params.data(), node->op_params, sizeof turn.params);
  make_rotation(turn.params);
  if (factors != nullptr) {
    if (factors->type != GGML_TYPE_F32) throw std::runtime_error("its factors are not in f32");
    turn.factors.resize(static_cast<size_t>(ggml_nelements(factors)));
    ggml_backend_tensor_get(factors, turn.factors.data(), 0, ggml_nbytes(factors));
  }
  layers_[layer] = std::move(turn);
}

void KeyTurns::turn(uint32_t layer, const Rows& keys, std::span<const int32_t> by) {
  const auto found = layers_.find(layer);
  if (found == layers_.end()) return;
  Turn& known = found->second;
  constexpr size_t kTensors = 8;
  const auto row = static_cast<size_t>(keys.heads * keys.components);
  std::vector<float> numbers(std::min(by.size(), kTokens) * row);
  for (size_t begin = 0; begin < by.size(); begin += kTokens) {
    const size_t count = std::min(by.size() - begin, kTokens);
    std::vector<int32_t> shifts(by.begin() + static_cast<ptrdiff_t>(begin),
                                by.begin() + static_cast<ptrdiff_t>(begin + count));
    std::byte* data = const_cast<std::byte*>(static_cast<const std::byte*>(keys.data)) +
                      begin * static_cast<size_t>(keys.token_stride);
    widen(keys.number, data, numbers.data(), static_cast<int64_t>(count * row));

    const std::unique_ptr<ggml_context, FreeContext> memory(
        ggml_init({kTensors * ggml_tensor_overhead(), nullptr, true}));
    ggml_context* context = memory.get();
    const auto tokens = static_cast<int64_t>(count);
    ggml_tensor* positions = ggml_new_tensor_1d(context, GGML_TYPE_I32, tokens);
    positions->data = shifts.data();
    ggml_tensor* all =
        ggml_new_tensor_3d(context, GGML_TYPE_F32, keys.components, keys.heads, tokens);
    all->data = numbers.data();
    ggml_tensor* part = ggml_view_3d(context, all, known.count, keys.heads, tokens, all->nb[1],
                                     all->nb[2], static_cast<size_t>(known.first) * sizeof(float));
    ggml_tensor* turned = ggml_view_tensor(context, part);
    turned->op = GGML_OP_ROPE;
    turned->flags |= GGML_TENSOR_FLAG_COMPUTE;  // what no graph is expanded by is left out else
    std::memcpy(turned->op_params, known.params.data(), sizeof turned->op_params);
    turned->src[0] = part;
    turned->src[1] = positions;
    if (!known.factors.empty()) {
      turned->src[2] =
          ggml_new_tensor_1d(context, GGML_TYPE_F32, static_cast<int64_t>(known.factors.size()));
      turned->src[2]->data = known.factors.data();
    }
    cpu_.compute(turned);
    narrow(keys.number, numbers.data(), data, static_cast<int64_t>(count * row));
  }
}

void SessionRewriter::rewrite(Session& session, const Rewriting& change) {
  const size_t count = change.kept.size();
  const bool turns =
      std::any_of(change.turns.begin(), change.turns.end(), [](int32_t turn) { return turn != 0; });
  std::vector<Kept> all(count == 0 ? 0 : layers_.size());
  for (uint32_t layer = 0; layer < all.size(); ++layer) {
    const LayerShape& shape = layers_[layer];
    const size_t row = size_t{shape.kv_heads} * shape.head_dim * 2;
    all[layer].keys.resize(count * row);
    all[layer].values.resize(count * row);
    for (size_t begin = 0; begin < count;) {
      size_t end = begin + 1;
      while (end < count && change.kept[end] == change.kept[end - 1] + 1) ++end;
      session.read(
          layer, change.kept[begin],
          side_by_side(all[layer].keys.data() + begin * row, number_, shape, end - begin),
          side_by_side(all[layer].values.data() + begin * row, number_, shape, end - begin));
      begin = end;
    }
    if (!turns) continue;
    turns_.turn(layer, side_by_side(all[layer].keys.data(), number_, shape, count), change.turns);
  }
  session.truncate(change.first);
  for (uint32_t layer = 0; layer < all.size(); ++layer) {
    session.append(layer, side_by_side(all[layer].keys.data(), number_, layers_[layer], count),
                   side_by_side(all[layer].values.data(), number_, layers_[layer], count));
    all[layer] = {};
  }
}

}  // namespace keyhole::llama_cpp
