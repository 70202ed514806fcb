#include "runtime/session/stored_rows.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace keyhole::runtime {
namespace {

// Tokens that are copied at a time: of 8 KV heads of 128 in 16 bits, 4 MiB.
constexpr uint32_t kTokensAtOnce = 1024;

void check_held(const KvLayer& layer, const TokenRange& tokens) {
  const uint64_t end = uint64_t{tokens.first} + tokens.n;
  if (tokens.first >= layer.oldest() && end <= layer.tokens()) return;
  throw Error(Status::invalid_argument, "tokens " + std::to_string(tokens.first) + " to " +
                                            std::to_string(end) + " of layer " +
                                            std::to_string(tokens.layer) + ", allowed: from " +
                                            std::to_string(layer.oldest()) + " to " +
                                            std::to_string(layer.tokens()) + ", which it holds");
}

/// Writes row `at` of the tensor from `dim` numbers of `dtype`.
void write_row(const cpu::Kernels& kernels, const std::byte* from, DType dtype, const TensorOut& to,
               uint32_t token, uint32_t head, uint32_t dim) {
  float scratch[kMaxHeadDim];
  std::byte* const row = to.row(token, head);
  convert_row(kernels, from, dtype, row, to.dtype, dim, scratch);
  if (kernels.all_finite[static_cast<size_t>(to.dtype)](row, dim)) return;
  throw Error(Status::not_finite,
              std::string("a stored number is beyond what ") + dtype_name(to.dtype) +
                  " holds, allowed: " + dtype_name(dtype) + ", as the session stores it");
}

}  // namespace

void read_rows(const Engine& engine, const Sequence& sequence, const TokenRange& tokens,
               const TensorOut* k, const TensorOut* v) {
  const KvLayer& layer = sequence.layer(tokens.layer);
  check_held(layer, tokens);
  const ModelShape& m = engine.model();
  const LayerShape shape = m.of(tokens.layer);
  const size_t row_bytes = shape.row_bytes(m.kv_dtype);
  const uint32_t most = std::min(tokens.n, kTokensAtOnce);
  std::vector<uint32_t> ids(most);
  std::vector<std::byte> keys(most * shape.token_bytes(m.kv_dtype)), values(keys.size());
  for (uint32_t at = 0; at < tokens.n; at += most) {
    const uint32_t n = std::min(tokens.n - at, most);
    std::iota(ids.begin(), ids.begin() + n, tokens.first + at);
    layer.read(std::span(ids).first(n), keys.data(), values.data());
    for (uint32_t i = 0; i < n * shape.kv_heads; ++i) {
      const uint32_t token = at + i / shape.kv_heads, head = i % shape.kv_heads;
      const auto write = [&](const std::byte* rows, const TensorOut& to, uint32_t dim) {
        write_row(engine.kernels(), rows + i * row_bytes, m.kv_dtype, to, token, head, dim);
      };
      if (k != nullptr) write(keys.data(), *k, shape.head_dim);
      if (v != nullptr) write(values.data(), *v, shape.value_dim);
    }
  }
}

}  // namespace keyhole::runtime
