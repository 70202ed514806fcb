// The keys, values and queries of a whole model in bench-step. Every (layer, KV head) takes one of a source's heads
// in turn, and turns it in its own way. Nothing of it is kept: rows are made when they are asked for, a layer at a
// time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/commands/bench_step/head_source.h"
#include "tools/commands/bench_step/head_turn.h"
#include "tools/llama/team.h"

namespace keyhole::tools {

struct StepShape {
  uint32_t layers = 32, q_heads = 32, kv_heads = 8, head_dim = 128;
  /// The first KV head of these, and the number of KV heads of the model, where the heads are a rank's share (0:
  /// these are all).
  uint32_t first_kv_head = 0, model_kv_heads = 0;

  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] uint32_t all_kv_heads() const {
    return model_kv_heads == 0 ? kv_heads : model_kv_heads;
  }
  /// Elements of one token of one layer: its queries, keys and values, in this order.
  [[nodiscard]] size_t token_elements() const { return size_t{q_heads + 2 * kv_heads} * head_dim; }
  [[nodiscard]] size_t q_elements() const { return size_t{q_heads} * head_dim; }
  [[nodiscard]] size_t kv_elements() const { return size_t{kv_heads} * head_dim; }
};

/// Makes the data of one layer. All elements are fp16. One thread at a time; works on the team's threads.
class LayerData {
 public:
  /// The arguments must outlive the object.
  LayerData(const HeadSource& source, const StepShape& shape, TurnKind turn, uint64_t seed,
            uint32_t layer, uint64_t context, Team& team);

  /// Writes k and v `[count, kv_heads, head_dim]` of tokens [first, first + count) of the context.
  void rows(uint64_t first, size_t count, uint16_t* k, uint16_t* v) const;

  /// Writes queries `[count, q_heads, head_dim]` of the same tokens: each is that of the nearest training position of
  /// the source before it. Returns false, and writes nothing, where the source has none.
  bool queries(uint64_t first, size_t count, uint16_t* q);

  /// Writes the token of decoding step `step`: q `[q_heads, head_dim]`, then k and v `[kv_heads, head_dim]`.
  void step(uint32_t step, uint16_t* token) const;

 private:
  [[nodiscard]] uint32_t source_head(uint32_t kv_head) const;
  void turn_training_queries();

  const HeadSource& source_;
  const StepShape shape_;
  const uint32_t layer_;
  const uint64_t context_;
  Team& team_;
  std::vector<HeadTurn> key_turns_, value_turns_;  ///< by KV head
  std::vector<uint16_t> training_;  ///< `[positions, q_heads, head_dim]`, once asked for
};

}  // namespace keyhole::tools
