// Acceptance (keyhole_session_accept): cuts and reorders what an extension of all layers has appended.
#include <span>
#include <string>
#include <vector>

#include "gpu/step.h"
#include "runtime/session/session.h"

namespace keyhole::runtime {
namespace {

std::string layer_text(uint32_t layer) { return "layer " + std::to_string(layer); }

/// Tokens of a path that stay where they are: its beginning.
uint32_t prefix_of(uint32_t m, const uint32_t* path) {
  uint32_t prefix = 0;
  while (prefix < m && (path == nullptr || path[prefix] == prefix)) ++prefix;
  return prefix;
}

}  // namespace

Session::Extended Session::agreed_extended() const {
  const auto bad = [](const std::string& text) { throw Error(Status::invalid_argument, text); };
  Extended agreed;
  uint32_t agreed_layer = 0;
  for (uint32_t layer = 0; layer < extended_.size(); ++layer) {
    const Extended& e = extended_[layer];
    if (e.tokens == 0) continue;
    if (e.changed || (!e.on_stream && tokens(layer) != e.before + e.tokens)) {
      bad(layer_text(layer) + ": another call has changed its tokens since keyhole_extend");
    }
    if (agreed.tokens == 0) {
      agreed = e;
      agreed_layer = layer;
    } else if (e.tokens != agreed.tokens || e.before != agreed.before) {
      bad(layer_text(layer) + " was extended by " + std::to_string(e.tokens) + " tokens after " +
          std::to_string(e.before) + ", " + layer_text(agreed_layer) + " by " +
          std::to_string(agreed.tokens) + " after " + std::to_string(agreed.before) +
          ", needed: the same tokens in all layers");
    }
  }
  if (agreed.tokens == 0) bad("there is no keyhole_extend whose tokens could be accepted");
  return agreed;
}

void Session::accept(uint32_t m, const uint32_t* path) {
  check_not_capturing();
  const Extended e = agreed_extended();
  if (m > e.tokens) {
    throw Error(Status::invalid_argument, "m is " + std::to_string(m) + ", allowed: 0.." +
                                              std::to_string(e.tokens) +
                                              ", the tokens of keyhole_extend");
  }
  for (uint32_t i = 0; path != nullptr && i < m; ++i) {
    if (path[i] >= e.tokens || (i > 0 && path[i] <= path[i - 1])) {
      throw Error(Status::invalid_argument,
                  "path[" + std::to_string(i) + "] is " + std::to_string(path[i]) +
                      ", allowed: rising indexes below " + std::to_string(e.tokens));
    }
  }
  if (e.on_stream && e.tokens <= params_.window && e.tokens <= gpu::kMostDrafts &&
      windows_hold(e.tokens)) {
    accept_on_stream(e, m, path);
  } else {
    wait_idle();
    check_failure();
    accept_on_host(e, m, path);
  }
}

bool Session::windows_hold(uint32_t newest) const {
  const SlidingRings& rings = sequence_.rings();
  for (uint32_t layer = 0; layer < extended_.size(); ++layer) {
    if (extended_[layer].tokens == 0 || !sequence_.slides(layer)) continue;
    if (!rings.lies_on_device(layer) || !rings.holds(layer, tokens(layer) - newest)) return false;
  }
  return true;
}

void Session::accept_on_stream(const Extended& e, uint32_t m, const uint32_t* path) {
  // As where the host does it: what it would refuse is refused.
  const uint32_t prefix = prefix_of(m, path);
  std::vector<uint32_t> moved;
  for (uint32_t i = prefix; i < m; ++i) moved.push_back(e.before + path[i]);
  if (prefix < e.tokens) check_rings(e, prefix, moved);
  KeptTokens tokens;
  for (uint32_t layer = 0; layer < extended_.size(); ++layer) {
    if (extended_[layer].tokens != 0) tokens.layers.push_back(layer);
  }
  tokens.of = e.tokens;
  for (uint32_t i = 0; i < m; ++i) tokens.kept.push_back(path == nullptr ? i : path[i]);
  if (m != e.tokens) stream_->keep_newest(tokens);
  for (const uint32_t layer : tokens.layers) extended_[layer] = {};
}

void Session::check_rings(const Extended& e, uint32_t prefix,
                          std::span<const uint32_t> moved) const {
  const SlidingRings& rings = sequence_.rings();
  for (uint32_t layer = 0; layer < extended_.size(); ++layer) {
    if (extended_[layer].tokens == 0 || !sequence_.slides(layer)) continue;
    const uint32_t left = e.before + prefix;
    const bool has_moved = moved.empty() || rings.holds(layer, moved.front());
    if (rings.can_truncate(layer, left) && has_moved) continue;
    const Window& window = engine_->model().windows[layer];
    throw Error(Status::invalid_argument,
                layer_text(layer) + " has a sliding window of " + std::to_string(window.tokens) +
                    " and of the tokens before no longer those that dropping some of " +
                    std::to_string(e.tokens) + " new ones needs; allowed: to drop up to its " +
                    "slack, " + std::to_string(window.slack));
  }
}

void Session::accept_on_host(const Extended& e, uint32_t m, const uint32_t* path) {
  const uint32_t prefix = prefix_of(m, path);

  // All memory is taken before any layer changes.
  const ModelShape& model = engine_->model();
  std::vector<uint32_t> moved;
  for (uint32_t i = prefix; i < m; ++i) moved.push_back(e.before + path[i]);
  const auto n = static_cast<uint32_t>(moved.size());
  if (prefix < e.tokens) check_rings(e, prefix, moved);
  struct Kept {
    std::vector<std::byte> k, v;
  };
  std::vector<Kept> kept(n != 0 ? extended_.size() : 0);
  for (uint32_t layer = 0; layer < kept.size(); ++layer) {
    if (extended_[layer].tokens == 0) continue;
    kept[layer].k.resize(n * model.of(layer).token_bytes(model.kv_dtype));
    kept[layer].v.resize(kept[layer].k.size());
    sequence_.read(layer, moved, kept[layer].k.data(), kept[layer].v.data());
  }

  for (uint32_t layer = 0; layer < extended_.size(); ++layer) {
    if (extended_[layer].tokens == 0) continue;
    extended_[layer] = {};
    if (prefix < e.tokens) truncate_layer(layer, e.before + prefix);
    if (n == 0) continue;
    const LayerShape shape = model.of(layer);
    RowsIn k{.data = kept[layer].k.data(),
             .token_stride = shape.token_bytes(model.kv_dtype),
             .head_stride = shape.row_bytes(model.kv_dtype),
             .tokens = n,
             .heads = shape.kv_heads,
             .dim = shape.head_dim,
             .dtype = model.kv_dtype};
    RowsIn v = k;
    v.data = kept[layer].v.data();
    sequence_.append(layer, k, v);
    if (stream_ != nullptr) stream_->pin_codes(layer);
  }
}

}  // namespace keyhole::runtime
