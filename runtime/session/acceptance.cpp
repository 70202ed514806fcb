#include "runtime/session/acceptance.h"

#include <string>

#include "gpu/step.h"

namespace keyhole::runtime {
namespace {

/// Tokens of a path that stay where they are: its beginning.
uint32_t prefix_of(uint32_t m, const uint32_t* path) {
  uint32_t prefix = 0;
  while (prefix < m && (path == nullptr || path[prefix] == prefix)) ++prefix;
  return prefix;
}

/// The tokens of a path behind its prefix, by their places in the layer.
std::vector<uint32_t> moved_of(uint32_t before, uint32_t prefix, uint32_t m, const uint32_t* path) {
  std::vector<uint32_t> moved;
  for (uint32_t i = prefix; i < m; ++i) moved.push_back(before + path[i]);
  return moved;
}

}  // namespace

uint32_t Acceptance::accept(uint32_t m, const uint32_t* path) {
  stream_->check_not_capturing();
  const Extended e = extended_->agreed(*sequence_);
  if (m > e.tokens) {
    throw Error(Status::invalid_argument, "m is " + std::to_string(m) + ", allowed: 0.." +
                                              std::to_string(e.tokens) +
                                              ", the tokens of keyhole_session_extend");
  }
  for (uint32_t i = 0; path != nullptr && i < m; ++i) {
    if (path[i] >= e.tokens || (i > 0 && path[i] <= path[i - 1])) {
      throw Error(Status::invalid_argument,
                  "path[" + std::to_string(i) + "] is " + std::to_string(path[i]) +
                      ", allowed: rising indexes below " + std::to_string(e.tokens));
    }
  }
  if (e.on_stream && e.tokens <= params_->window && e.tokens <= gpu::kMostDrafts &&
      drops_on_device(e.tokens)) {
    accept_on_stream(e, m, path);
  } else {
    stream_->wait_idle();
    stream_->check_failure();
    accept_on_host(e, m, path);
  }
  return e.before + prefix_of(m, path);
}

bool Acceptance::drops_on_device(uint32_t newest) const {
  for (uint32_t layer = 0; layer < extended_->layers(); ++layer) {
    if (!extended_->takes_part(layer)) continue;
    if (!sequence_->layer(layer).drops_on_device(newest)) return false;
  }
  return true;
}

void Acceptance::check_drop(const Extended& e, uint32_t prefix,
                            const std::vector<uint32_t>& moved) const {
  if (prefix == e.tokens) return;
  std::optional<uint32_t> first_moved;
  if (!moved.empty()) first_moved = moved.front();
  for (uint32_t layer = 0; layer < extended_->layers(); ++layer) {
    if (!extended_->takes_part(layer)) continue;
    sequence_->layer(layer).check_drop(e.before + prefix, first_moved, e.tokens);
  }
}

void Acceptance::accept_on_stream(const Extended& e, uint32_t m, const uint32_t* path) {
  // What the host would refuse is refused here, too.
  const uint32_t prefix = prefix_of(m, path);
  check_drop(e, prefix, moved_of(e.before, prefix, m, path));
  KeptTokens tokens;
  for (uint32_t layer = 0; layer < extended_->layers(); ++layer) {
    if (extended_->takes_part(layer)) tokens.layers.push_back(layer);
  }
  tokens.of = e.tokens;
  for (uint32_t i = 0; i < m; ++i) tokens.kept.push_back(path == nullptr ? i : path[i]);
  if (m != e.tokens) stream_->runner().keep_newest(tokens);
  for (const uint32_t layer : tokens.layers) extended_->clear(layer);
}

void Acceptance::accept_on_host(const Extended& e, uint32_t m, const uint32_t* path) {
  // All memory is taken before any layer changes.
  const uint32_t prefix = prefix_of(m, path);
  const std::vector<uint32_t> moved = moved_of(e.before, prefix, m, path);
  const ModelShape& model = engine_->model();
  const auto n = static_cast<uint32_t>(moved.size());
  check_drop(e, prefix, moved);
  struct Kept {
    std::vector<std::byte> k, v;
  };
  std::vector<Kept> kept(n != 0 ? extended_->layers() : 0);
  for (uint32_t layer = 0; layer < kept.size(); ++layer) {
    if (!extended_->takes_part(layer)) continue;
    kept[layer].k.resize(n * model.of(layer).token_bytes(model.kv_dtype));
    kept[layer].v.resize(kept[layer].k.size());
    sequence_->read(layer, moved, kept[layer].k.data(), kept[layer].v.data());
  }

  for (uint32_t layer = 0; n != 0 && layer < extended_->layers(); ++layer) {
    if (!extended_->takes_part(layer)) continue;
    if (sequence_->replaces_shared(layer, e.before + prefix, n)) {
      // Pinned pages cannot be exchanged. Codes that go with them are made anew before the layer's next step.
      stream_->truncate_codes(layer, sequence_->split(layer, e.before + prefix).rows);
    }
    sequence_->prepare_replacement(layer, e.before + prefix, n);
  }

  for (uint32_t layer = 0; layer < extended_->layers(); ++layer) {
    if (!extended_->takes_part(layer)) continue;
    if (prefix < e.tokens) tokens_->truncate_layer(layer, e.before + prefix);
    if (n == 0) continue;
    const LayerShape shape = model.of(layer);
    const auto rows = [&](const std::vector<std::byte>& of) {
      return dense_tensor(of.data(), n, shape.kv_heads, shape.head_dim, model.kv_dtype);
    };
    sequence_->append(layer, rows(kept[layer].k), rows(kept[layer].v));
  }
  for (uint32_t layer = 0; layer < extended_->layers(); ++layer) {
    if (!extended_->takes_part(layer)) continue;
    extended_->clear(layer);
    if (n == 0) continue;
    try {
      stream_->pin_codes(layer);
    } catch (
        const Error&) {  // NOLINT: the tokens are accepted; the next step waits for the pins, and says what failed
    }
  }
}

}  // namespace keyhole::runtime
