// What a rank holds of the tokens of a text: its blocks of them (ranks/blocks.h), and of sliding layers, which have few
// tokens, all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/engine/engine.h"
#include "runtime/ranks/blocks.h"

namespace keyhole::runtime {

class LayerShares {
 public:
  /// What the engine's own rank holds, in the engine's blocks. The engine outlives it.
  explicit LayerShares(const Engine& engine)
      : LayerShares(engine, engine.text_blocks(),
                    engine.communicator() == nullptr ? 0 : engine.communicator()->rank()) {}
  LayerShares(const Engine& engine, const TextBlocks& blocks, uint32_t rank)
      : engine_(&engine), blocks_(blocks), rank_(rank) {}

  [[nodiscard]] uint32_t rank() const { return rank_; }
  [[nodiscard]] const TextBlocks& blocks() const { return blocks_; }
  /// Whether every rank holds all of the layer's tokens.
  [[nodiscard]] bool is_whole(uint32_t layer) const { return engine_->model().slides(layer); }
  [[nodiscard]] bool is_own(uint32_t token) const { return blocks_.owner(token) == rank_; }
  /// How many tokens the rank has of a layer that holds the first `tokens` of the text.
  [[nodiscard]] uint32_t of(uint32_t layer, uint32_t tokens) const {
    return is_whole(layer) ? tokens : blocks_.share(rank_, tokens);
  }
  /// How many it has of each layer, `[layers]`.
  [[nodiscard]] std::vector<uint32_t> of(std::vector<uint32_t> tokens) const {
    for (uint32_t layer = 0; layer < tokens.size(); ++layer) {
      tokens[layer] = of(layer, tokens[layer]);
    }
    return tokens;
  }

 private:
  const Engine* engine_;
  TextBlocks blocks_;
  uint32_t rank_;
};

}  // namespace keyhole::runtime
