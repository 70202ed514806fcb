#include "runtime/session/token_removal.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace keyhole::runtime {
namespace {

// Tokens that are copied at a time: of 8 KV heads of 128 in 16 bits, 4 MiB.
constexpr uint32_t kTokensMovedAtOnce = 1024;

/// The oldest tokens of a sliding layer that are still there and stay, and those behind the removed ones.
struct Kept {
  uint32_t before = 0;  ///< of [oldest, first)
  uint32_t behind = 0;  ///< from `from` on
  uint32_t from = 0;
  [[nodiscard]] uint32_t all() const { return before + behind; }
};

Kept kept_of(const KvLayer& layer, const Removal& removal) {
  const uint32_t tokens = layer.tokens();
  const uint32_t end = removal.first + removal.removed_of(tokens);
  Kept kept;
  kept.from = std::max(end, layer.oldest());
  kept.behind = tokens - kept.from;
  // Tokens in front of a gap of lost ones are no part of a window.
  if (layer.oldest() <= removal.first) kept.before = removal.first - layer.oldest();
  return kept;
}

void check_window(const KvLayer& layer, uint32_t number, const Removal& removal) {
  const uint32_t left = layer.tokens() - removal.removed_of(layer.tokens());
  if (layer.tokens() <= removal.first) return;
  const uint32_t needed = std::min(layer.reach(), left);
  const uint32_t kept = kept_of(layer, removal).all();
  if (kept >= needed) return;
  throw Error(Status::invalid_argument,
              "layer " + std::to_string(number) + " has a sliding window of " +
                  std::to_string(layer.reach()) + " and of the tokens before " +
                  std::to_string(removal.first) +
                  " no longer those that its window holds without " +
                  std::to_string(removal.removed_of(layer.tokens())) + " tokens: it has " +
                  std::to_string(kept) + ", needed: " + std::to_string(needed) +
                  " (window_slack keeps more)");
}

/// Appends tokens [begin, end) of `from` to the copy, with keys turned.
void append_again(const Engine& engine, uint32_t layer, const index::RopeUndo& turn, int32_t shift,
                  const Sequence& from, uint32_t begin, uint32_t end, SessionTokens& copy_tokens) {
  const ModelShape& m = engine.model();
  const LayerShape shape = m.of(layer);
  const uint32_t most = std::min(end - begin, kTokensMovedAtOnce);
  const size_t numbers = size_t{shape.kv_heads} * shape.head_dim;
  std::vector<uint32_t> ids(most);
  std::vector<std::byte> keys(most * shape.token_bytes(m.kv_dtype)), values(keys.size());
  std::vector<float> turned(turn.changes() ? most * numbers : 0);
  for (uint32_t at = begin; at < end; at += most) {
    const uint32_t n = std::min(end - at, most);
    std::iota(ids.begin(), ids.begin() + n, at);
    from.read(layer, std::span(ids).first(n), keys.data(), values.data());
    const auto rows = [&](const std::vector<std::byte>& data) {
      return dense_tensor<const std::byte>(data.data(), n, shape.kv_heads, shape.head_dim,
                                           m.kv_dtype);
    };
    TensorView k = rows(keys);
    if (turn.changes()) {
      engine.kernels().to_f32[static_cast<size_t>(m.kv_dtype)](keys.data(), turned.data(),
                                                               n * numbers);
      turn.turn(turned.data(), size_t{n} * shape.kv_heads, shift);
      k = dense_tensor(reinterpret_cast<const std::byte*>(turned.data()), n, shape.kv_heads,
                       shape.head_dim, DType::f32);
    }
    copy_tokens.prefill(layer, k, rows(values), nullptr);
  }
}

}  // namespace

void check_removal(const Engine& engine, const Sequence& sequence, const Removal& removal) {
  const ModelShape& m = engine.model();
  if (removal.shift != 0 && !m.has_rope) {
    throw Error(
        Status::invalid_argument,
        "shift is " + std::to_string(removal.shift) +
            ", and the engine knows of no RoPE to turn keys by: rope_theta is 0; allowed: 0, "
            "or an engine with the model's rope_theta");
  }
  if (removal.shift != 0 && m.values_in_keys) {
    throw Error(Status::invalid_argument,
                "shift is " + std::to_string(removal.shift) +
                    " with values_in_keys, of whose keys RoPE would turn the values; allowed: 0");
  }
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (m.slides(layer)) check_window(sequence.layer(layer), layer, removal);
  }
}

index::RopeUndo turn_of(const Engine& engine, uint32_t layer, const Removal& removal) {
  if (removal.shift == 0) return {};
  return {&engine.rope(layer), engine.model().of(layer).head_dim, 0};
}

void remove_tokens(const Engine& engine, uint32_t layer, const Removal& removal,
                   const Sequence& from, Sequence& copy, SessionTokens& copy_tokens) {
  const uint32_t tokens = from.tokens(layer);
  if (tokens <= removal.first) return;
  const index::RopeUndo turn = turn_of(engine, layer, removal);
  const uint32_t end = removal.first + removal.removed_of(tokens);
  const auto append = [&](uint32_t begin, uint32_t until, bool turns) {
    if (begin == until) return;
    append_again(engine, layer, turns ? turn : index::RopeUndo(), removal.shift, from, begin, until,
                 copy_tokens);
  };
  if (!engine.model().slides(layer)) {
    copy_tokens.truncate_layer(layer, removal.first);
    append(end, tokens, true);
    return;
  }
  const Kept kept = kept_of(from.layer(layer), removal);
  copy_tokens.truncate_layer(layer, 0);
  copy.rings().skip(layer, tokens - (end - removal.first) - kept.all());
  append(removal.first - kept.before, removal.first, false);
  append(kept.from, tokens, true);
}

}  // namespace keyhole::runtime
