// Tokens that a step attends beside those that the sequence holds: the new ones of keyhole_extend, each by itself and by
// those that may see it, exactly.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/types.h"

namespace keyhole::runtime {

/// Query heads of a KV head that one step answers several tokens with, at most: keys are read once for all of them. A model
/// whose group has more is answered token by token.
inline constexpr uint32_t kJointHeads = 16;

struct NewTokens {
  const cpu::Kernels* kernels = nullptr;
  const std::byte* k = nullptr;  ///< `[kv_heads, count, head_dim]` of dtype
  const std::byte* v = nullptr;
  uint32_t count = 0;  ///< 0: there are none, the asking tokens are somebody else's
  uint32_t head_dim = 0;
  DType dtype = DType::f32;
  LogitParams logits;
  /// Bit j of word i: token i attends to token j. Null: to all tokens up to itself.
  const uint64_t* mask = nullptr;
  /// Of these, a token attends to the newest so many; 0: to all. Then one asks at a time.
  uint32_t window = 0;
  /// The tokens that the step answers: [first, first + asking).
  uint32_t first = 0;
  uint32_t asking = 1;

  /// How many of the new tokens, with itself, token `first` sees before a window cuts them.
  [[nodiscard]] uint32_t seen_by_first() const;

  /// The states of the asking tokens over what they see of the new ones. q `[asking, group, head_dim]`, where
  /// asking is 1 or asking * group <= kJointHeads; out of the same shape.
  void attend(uint32_t kv_head, const float* q, uint32_t group, StateView out) const;

 private:
  [[nodiscard]] KvView rows(uint32_t kv_head, uint32_t begin, uint32_t n) const;
  void attend_window(uint32_t kv_head, const float* q, uint32_t group, StateView out) const;
  void attend_masked(uint32_t kv_head, const float* q, uint32_t group, StateView out) const;
};

}  // namespace keyhole::runtime
