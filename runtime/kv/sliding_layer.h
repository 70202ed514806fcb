// One sliding layer of a sequence: a ring (kv/sliding_rings.h), and nothing offloaded.
#pragma once

#include "runtime/kv/kv_layer.h"
#include "runtime/kv/sliding_rings.h"
#include "runtime/kv/staging.h"

namespace keyhole::runtime {

class SlidingLayer final : public KvLayer {
 public:
  /// All that it is given outlives it. most_staged: tokens that `staging` has room for.
  SlidingLayer(const Engine& engine, uint32_t layer, SlidingRings& rings, Staging& staging,
               uint32_t most_staged)
      : engine_(&engine),
        layer_(layer),
        rings_(&rings),
        staging_(&staging),
        most_staged_(most_staged) {}

  uint32_t sink() const override { return 0; }
  uint32_t rows() const override { return 0; }
  uint32_t window() const override { return rings_->window_count(layer_); }
  uint32_t tokens() const override { return rings_->tokens(layer_); }
  bool window_is_full() const override { return false; }
  bool offloads() const override { return false; }
  uint32_t reach() const override { return engine_->model().windows[layer_].tokens; }

  std::optional<uint64_t> more_bytes(uint32_t n) const override {
    return rings_->more_bytes(layer_, n);
  }
  void append(const TensorView& k, const TensorView& v) override;
  void drop_newest() override { rings_->truncate_to(layer_, tokens() - 1); }
  uint32_t oldest() const override { return rings_->oldest(layer_); }
  void read(std::span<const uint32_t> tokens, std::byte* k, std::byte* v) const override;
  Split split(uint32_t /*tokens*/) const override { return {}; }
  void check_truncation(uint32_t tokens) const override;
  void truncate(uint32_t tokens) override { rings_->truncate_to(layer_, tokens); }
  void check_drop(uint32_t left, std::optional<uint32_t> first_moved, uint32_t of) const override;
  bool drops_on_device(uint32_t newest) const override {
    return rings_->lies_on_device(layer_) && rings_->holds(layer_, tokens() - newest);
  }
  gpu::Resident& resident() override { return *rings_; }
  void set_ahead(uint32_t ahead) override { rings_->set_ahead(ahead); }

 private:
  const Engine* engine_;
  uint32_t layer_;
  SlidingRings* rings_;
  Staging* staging_;
  uint32_t most_staged_;
};

}  // namespace keyhole::runtime
