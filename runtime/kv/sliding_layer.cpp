#include "runtime/kv/sliding_layer.h"

#include <algorithm>
#include <string>

namespace keyhole::runtime {

void SlidingLayer::append(const TensorView& k, const TensorView& v) {
  const auto n = static_cast<uint32_t>(k.tokens);
  uint32_t at = rings_->first_kept(layer_, n);
  rings_->skip(layer_, at);
  while (at < n) {
    const uint32_t piece = std::min(n - at, most_staged_);
    staging_->stage(layer_, k, at, piece, staging_->k());
    staging_->stage(layer_, v, at, piece, staging_->v());
    rings_->append_window(layer_, staging_->k(), staging_->v(), piece);
    at += piece;
  }
}

void SlidingLayer::read(std::span<const uint32_t> tokens, std::byte* k, std::byte* v) const {
  const size_t token_bytes = engine_->model().of(layer_).token_bytes(engine_->model().kv_dtype);
  for (const uint32_t token : tokens) {
    rings_->read_token(layer_, token, k, v);
    k += token_bytes;
    v += token_bytes;
  }
}

void SlidingLayer::check_truncation(uint32_t n) const {
  if (rings_->can_truncate(layer_, n)) return;
  throw Error(Status::invalid_argument,
              "n_tokens is " + std::to_string(n) + ", layer " + std::to_string(layer_) +
                  " has a sliding window of " + std::to_string(reach()) + " and of its " +
                  std::to_string(tokens()) +
                  " tokens no longer those before; allowed: 0, and from " +
                  std::to_string(rings_->least_truncation(layer_)) + " on");
}

void SlidingLayer::check_drop(uint32_t left, std::optional<uint32_t> first_moved,
                              uint32_t of) const {
  const bool has_moved = !first_moved || rings_->holds(layer_, *first_moved);
  if (rings_->can_truncate(layer_, left) && has_moved) return;
  throw Error(Status::invalid_argument,
              "layer " + std::to_string(layer_) + " has a sliding window of " +
                  std::to_string(reach()) +
                  " and of the tokens before no longer those that dropping some of " +
                  std::to_string(of) + " new ones needs; allowed: to drop up to its slack, " +
                  std::to_string(engine_->model().windows[layer_].slack));
}

}  // namespace keyhole::runtime
