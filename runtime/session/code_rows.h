// The offloaded rows of a session as their codes on the device see them (stream/device_codes.h).
#pragma once

#include "runtime/engine/engine.h"
#include "runtime/indexing/index_keeper.h"
#include "runtime/kv/sequence.h"
#include "runtime/stream/device_codes.h"

namespace keyhole::runtime {

class CodeRows final : public CodeSource {
 public:
  /// All that it is given outlives it.
  CodeRows(const Engine& engine, Sequence& sequence, IndexKeeper& keeper)
      : engine_(&engine), sequence_(&sequence), keeper_(&keeper) {}

  KvView rows(uint32_t layer) const override { return sequence_->view(layer); }
  const uint16_t* scales(uint32_t layer) const override { return sequence_->scales(layer); }
  uint32_t row_block() const override { return sequence_->row_block(); }
  void learn_balances(uint32_t layer) override {
    // One after the other, eight heads take 30 ms.
    engine_->pool().run(engine_->model().of(layer).kv_heads, [&](uint32_t h, uint32_t) {
      (void)keeper_->fix_balance(layer, h, sequence_->view(layer, h));
    });
  }
  const index::Balance& balance(uint32_t layer, uint32_t kv_head) override {
    return keeper_->fix_balance(layer, kv_head, sequence_->view(layer, kv_head));
  }
  void set_pinned(uint32_t layer, size_t rows) override { sequence_->set_pinned(layer, rows); }
  bool is_shared(uint32_t layer, size_t row) const override {
    return sequence_->is_shared(layer, static_cast<uint32_t>(row));
  }

 private:
  const Engine* engine_;
  Sequence* sequence_;
  IndexKeeper* keeper_;
};

}  // namespace keyhole::runtime
