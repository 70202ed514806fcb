// Attention computed in the plainest way, in fp32 and double: what the card made of host memory attends with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tools/engines/llama.cpp/session.h"

struct ggml_tensor;

namespace keyhole::llama_cpp {

/// Keys and values of one KV head in some tokens, in fp32, `[tokens, components]`.
struct PlainRows {
  PlainRows(const Rows& keys, const Rows& values, uint32_t kv_head);
  size_t width = 0;
  std::vector<float> keys;
  std::vector<float> values;
};

/// One query head that attends to them.
struct PlainHead {
  /// `[components]`.
  const float* query = nullptr;
  float scale = 1;
  float softcap = 0;                                     // 0: none
  float sink = -std::numeric_limits<float>::infinity();  // a logit without key and value
  /// What is added to the logit of each token; -infinity: it is not seen. NULL: all are seen.
  const uint16_t* mask = nullptr;  // fp16
};
/// Writes the head's answer, `[components]`, of the first `tokens` tokens.
void attend_plainly(const PlainHead& head, const PlainRows& rows, int64_t tokens, float* out);

/// Computes a FLASH_ATTN_EXT whose tensors all lie in host memory.
void attend_plainly(ggml_tensor* attention);

}  // namespace keyhole::llama_cpp
