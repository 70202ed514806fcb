// The rows behind a cache whose tokens age (tools/caches/aging_format.h): the newest ones as they came, from which the
// content of such a cache is made anew whenever tokens come or are taken back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/caches/aging_format.h"

namespace keyhole::tools {

/// Keys and values of all layers, in fp16, from a token on that moves. A copy is a cache of its own. One thread at a
/// time.
class AgingRows {
 public:
  /// Of layers 0..layers-1, of which those below `aging` have tokens that age; the others (with a sliding window) keep
  /// 16 bits.
  AgingRows(std::shared_ptr<const AgingFormat> format, uint32_t layers, uint32_t aging,
            uint32_t kv_heads, uint32_t head_dim);

  /// Takes k and v `[count, kv_heads, head_dim]` behind the layer's tokens.
  void add(uint32_t layer, const float* k, const float* v, size_t count);
  [[nodiscard]] uint32_t tokens(uint32_t layer) const { return layers_[layer].tokens; }
  /// Whether all layers have as many tokens, as they have between steps.
  [[nodiscard]] bool level() const;

  /// Tokens of each kind that are in few bits while all layers have `tokens`.
  struct State {
    TokenRange keys, values;
    bool operator==(const State&) const = default;
  };
  [[nodiscard]] State state(uint32_t tokens) const;
  /// The tokens before which both hold then what they will always hold.
  [[nodiscard]] uint32_t settled(uint32_t tokens) const {
    return format_->layout().settled(tokens);
  }

  /// Writes what the cache holds of one layer's tokens from `first` to its last, `[count, kv_heads, head_dim]` both.
  /// `first` is what settled() gave for no more tokens than these.
  void content(uint32_t layer, uint32_t first, std::vector<float>& k, std::vector<float>& v) const;

  /// Forgets tokens from `tokens` on. Throws std::runtime_error, and changes nothing, where the rows of which that
  /// state is made are no longer kept.
  void truncate(uint32_t tokens);
  /// Forgets the rows of tokens so old that neither a later state nor a truncation by kSlack tokens needs them.
  void forget_old();
  static constexpr uint32_t kSlack = 4096;

 private:
  struct Layer {
    uint32_t first = 0, tokens = 0;  ///< rows of tokens [first, tokens) are kept
    std::vector<uint16_t> k, v;      ///< fp16 `[tokens - first, kv_heads, head_dim]`
  };
  void round(uint32_t layer, KvRows rows, TokenRange few, uint32_t first,
             std::vector<float>& numbers) const;

  std::shared_ptr<const AgingFormat> format_;
  uint32_t aging_, kv_heads_, head_dim_;
  std::vector<Layer> layers_;
};

}  // namespace keyhole::tools
