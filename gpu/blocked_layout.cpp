#include "gpu/blocked_layout.h"

#include <algorithm>

#include "gpu/prompt.h"

namespace keyhole::gpu {
namespace {

// A piece of 16 MiB takes 300 us over the bus: enough to hide what starting its copies costs.
constexpr size_t kBlockedPieceBytes = size_t{16} << 20U;
constexpr size_t kMostMaskedTokens = 64;

}  // namespace

BlockedLayout::BlockedLayout(const BlockedShape& s, uint32_t n) {
  size_t end = 0;
  const auto take = [&](size_t size) {
    const size_t at = end;
    end += (size + 255) / 256 * 256;
    return at;
  };
  const size_t element = dtype_size(s.dtype);
  const size_t rows = size_t{n} * s.q_heads;
  const size_t row = size_t{2} * s.kv_heads * s.head_dim * element;
  const size_t whole = kBlockedPieceBytes / row / kScaleRows * kScaleRows;
  piece_rows = static_cast<uint32_t>(std::max<size_t>(whole, kScaleRows));
  piece_bytes = piece_rows * row;
  scale_bytes = size_t{piece_rows / kScaleRows} * s.kv_heads * 2 * s.head_dim * sizeof(uint16_t);
  q = take(rows * s.head_dim * element);
  q_low = take(rows * s.head_dim * element);
  const size_t few = size_t{std::min(n, kFewBlockedTokens)} * s.q_heads;
  const size_t states = std::max(rows, few * kBlockedStates);
  o = take(states * s.head_dim * sizeof(float));
  sums = take(states * 2 * sizeof(float));
  keys = take(size_t{n} * s.kv_heads * s.head_dim * element);
  values = take(size_t{n} * s.kv_heads * s.head_dim * element);
  mask = take(kMostMaskedTokens * sizeof(uint64_t));
  bad = take(sizeof(uint32_t));
  sinks = take(s.q_heads * sizeof(float));
  pieces = take(2 * piece_bytes);
  scales = take(s.rows_in_int8 ? 2 * scale_bytes : 0);
  unpacked = take(s.rows_in_int8 ? piece_bytes : 0);
  bytes = end;
}

size_t blocked_bytes(const BlockedShape& shape, uint32_t n) {
  return BlockedLayout(shape, n).bytes;
}

std::string why_no_blocked(const BlockedShape& s) {
  if (s.dtype != DType::f16 && s.dtype != DType::bf16) {
    return std::string("K and V in ") + dtype_name(s.dtype) +
           "; there are kernels for f16 and bf16";
  }
  return why_no_prompt({s.q_heads, s.kv_heads, s.head_dim});
}

std::string why_no_prompt(const PromptShape& s) {
  const uint32_t d = s.head_dim;
  if (s.kv_heads == 0 || s.q_heads == 0 || s.q_heads % s.kv_heads != 0) {
    return std::to_string(s.q_heads) + " query heads and " + std::to_string(s.kv_heads) +
           " KV heads";
  }
  if (!is_device_head_dim(d)) {
    return "head dimension " + std::to_string(d) + "; there are kernels for " + kDeviceHeadDims;
  }
  return {};
}

}  // namespace keyhole::gpu
