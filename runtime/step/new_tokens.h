// The new tokens of keyhole_session_extend, which a step attends exactly beside those that the sequence holds: each is
// seen by itself and by those that may see it.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/types.h"

namespace keyhole::runtime {

/// The most query heads of a KV head that answer several tokens in one step: keys are read once for all of them. A
/// model whose group is larger is answered token by token.
inline constexpr uint32_t kJointHeads = 16;

struct NewTokens {
  const cpu::Kernels* kernels = nullptr;
  const std::byte* k = nullptr;  ///< `[kv_heads, count, head_dim]` of dtype
  const std::byte* v = nullptr;
  /// Number of new tokens; 0: none, because the caller has the keys and values of the asking tokens elsewhere.
  uint32_t count = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::f32;
  LogitParams logits;
  /// Bit j of word i: token i attends to token j. Null: a token attends to all up to itself.
  const uint64_t* mask = nullptr;
  /// A token attends to the newest `window` of these; 0: to all. With a window one token asks at a time.
  uint32_t window = 0;
  /// The step answers tokens [first, first + asking).
  uint32_t first = 0;
  uint32_t asking = 1;

  /// How many of the new tokens, including itself, token `first` sees before a window cuts them; 0 where there are
  /// none.
  [[nodiscard]] uint32_t seen_by_first() const;

  /// Writes the states of the asking tokens over the new tokens that they see. q `[asking, group, head_dim]`, where
  /// asking is 1 or asking * group <= kJointHeads; out of the same shape.
  void attend(uint32_t kv_head, const float* q, uint32_t group, StateView out) const;

 private:
  [[nodiscard]] KvView rows(uint32_t kv_head, uint32_t begin, uint32_t n) const;
  void attend_window(uint32_t kv_head, const float* q, uint32_t group, StateView out) const;
  void attend_masked(uint32_t kv_head, const float* q, uint32_t group, StateView out) const;
};

}  // namespace keyhole::runtime
