// Attention computed in the plainest way, in fp32 and double: what the card made of host memory attends with.
#pragma once

#include <cstdint>
#include <limits>

#include "tools/engines/llama.cpp/session.h"

struct ggml_tensor;

namespace keyhole::llama_cpp {

/// Attention of one query head to the keys and values of one KV head in some tokens.
struct PlainHead {
  /// `[components]`.
  const float* query = nullptr;
  uint32_t kv_head = 0;
  float scale = 1;
  float softcap = 0;                                     // 0: none
  float sink = -std::numeric_limits<float>::infinity();  // a logit without key and value
  /// What is added to the logit of each token; -infinity: it is not seen. NULL: all are seen.
  const uint16_t* mask = nullptr;  // fp16
};
/// Writes the head's answer, `[components]`, of the first `tokens` tokens of keys and values in 16 or 32 bits.
void attend_plainly(const PlainHead& head, const Rows& keys, const Rows& values, int64_t tokens,
                    float* out);

/// Computes a FLASH_ATTN_EXT whose tensors all lie in host memory.
void attend_plainly(ggml_tensor* attention);

}  // namespace keyhole::llama_cpp
