// Sessions rewritten: tokens taken out of their middle, and keys turned to new positions, as llama.cpp would have
// turned those in its cells.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tools/engines/llama.cpp/cpu_backend.h"
#include "tools/engines/llama.cpp/session.h"
#include "tools/engines/llama.cpp/store.h"

struct ggml_tensor;

namespace keyhole::llama_cpp {

/// Turns keys by the ROPE nodes with which llama.cpp shifts the cells of each layer.
class KeyTurns {
 public:
  /// Remembers the node of a layer, the engine's `layer`th, with its frequency factors, which are read wherever they
  /// lie. Throws std::runtime_error where it does not turn the same part of each of `heads` heads of `components`
  /// components.
  void learn(uint32_t layer, const ggml_tensor* node, int64_t heads, int64_t components);
  /// Turns keys by a number of positions each; not those of a layer that llama.cpp has not turned, as it has no
  /// positions. keys: 16 bits, side by side, in memory that is ours to change.
  void turn(uint32_t layer, const Rows& keys, std::span<const int32_t> by);
  /// How many threads turn them: as many as llama.cpp computes with, see CpuBackend. Before it is set, as many as ggml
  /// does.
  void set_threads(int threads) { cpu_.set_threads(threads); }

 private:
  static constexpr size_t kParams = 16;  // of a node, in numbers
  struct Turn {
    std::array<int32_t, kParams> params{};
    int64_t first = 0;  // of a head's components
    int64_t count = 0;
    std::vector<float> factors;
  };
  std::map<uint32_t, Turn> layers_;
  CpuBackend cpu_;
};

/// Takes the tokens behind the first ones out of a session, to host memory, and puts those back that are kept. Takes
/// memory for the K and V of these in all layers while it works.
class SessionRewriter final : public Rewriter {
 public:
  /// Of an engine's layers.
  explicit SessionRewriter(const StoreShape& shape)
      : layers_(shape.layers), number_(shape.number) {}
  /// A ROPE that shifts the keys of a layer.
  void learn(uint32_t layer, const ggml_tensor* node) {
    turns_.learn(layer, node, layers_[layer].kv_heads, layers_[layer].head_dim);
  }
  void rewrite(Session& session, const Rewriting& change) override;
  void turn(uint32_t layer, const Rows& keys, std::span<const int32_t> by) override {
    turns_.turn(layer, keys, by);
  }
  /// As KeyTurns::set_threads().
  void set_threads(int threads) { turns_.set_threads(threads); }

 private:
  std::vector<LayerShape> layers_;
  Number number_;
  KeyTurns turns_;
};

}  // namespace keyhole::llama_cpp
