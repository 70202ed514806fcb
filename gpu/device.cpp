// The part of the device interface that needs no device.
#include "gpu/device.h"

namespace keyhole::gpu {

namespace {

// Sizes come from callers that plan for contexts nobody has run yet: a product that does not fit is
// their mistake and must not wrap to a small number.
size_t multiply(size_t a, size_t b) {
  size_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw Error(Status::invalid_argument, "resident tokens: the size in bytes exceeds 2^64 - 1 (" +
                                              std::to_string(a) + " times " + std::to_string(b) +
                                              ")");
  }
  return product;
}

}  // namespace

size_t resident_bytes(const ResidentShape& shape) {
  constexpr size_t kKeysAndValues = 2;
  const size_t tokens = size_t{shape.sink} + shape.window_capacity;
  const size_t row = multiply(size_t{shape.kv_heads} * shape.head_dim, dtype_size(shape.dtype));
  return multiply(multiply(multiply(row, tokens), shape.layers), kKeysAndValues);
}

size_t front_bytes(const FrontShape& shape) {
  const size_t heads = multiply(shape.layers, shape.kv_heads);
  const size_t row = shape.head_dim * (1 + dtype_size(shape.dtype)) + 2 * sizeof(float);
  const size_t scales = multiply(heads, 2 * size_t{shape.head_dim} * sizeof(float));
  // Logits of the step under way, of all query heads.
  const size_t scratch = multiply(multiply(shape.q_heads, shape.partitions), sizeof(float));
  return multiply(multiply(heads, shape.partitions), row) + scales + scratch;
}

}  // namespace keyhole::gpu
