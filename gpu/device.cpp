// The part of the device interface that needs no device.
#include "gpu/device.h"

#include "gpu/layer_kinds.h"

namespace keyhole::gpu {

namespace {

// Sizes come from callers that plan for contexts of any length: a product that exceeds 64 bits is refused, as it would
// wrap to a small number.
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
  if (!shape.shapes.empty()) {
    return sum_of_parts(parts_of(shape),
                        [](const ResidentShape& part) { return resident_bytes(part); });
  }
  constexpr size_t kKeysAndValues = 2;
  const size_t tokens = size_t{shape.sink} + shape.window_capacity;
  const size_t row = multiply(size_t{shape.kv_heads} * shape.head_dim, dtype_size(shape.dtype));
  return multiply(multiply(multiply(row, tokens), shape.layers), kKeysAndValues);
}

std::string unsupported_reason(const DeviceInfo& device) {
  constexpr int kLeastMajor = 8;
  if (device.compute_major >= kLeastMajor) return {};
  return device.name + " has compute capability " + std::to_string(device.compute_major) + "." +
         std::to_string(device.compute_minor) + ", needed: 8.0 or newer";
}

std::string unsupported_shape(uint32_t q_heads, uint32_t kv_heads, uint32_t head_dim) {
  if (q_heads / kv_heads > kMaxDeviceGroup) {
    return "there are no GPU kernels for " + std::to_string(q_heads / kv_heads) +
           " query heads per KV head, allowed: 1.." + std::to_string(kMaxDeviceGroup);
  }
  if (!is_device_head_dim(head_dim)) {
    return "there are no GPU kernels for head_dim " + std::to_string(head_dim) +
           ", allowed: " + kDeviceHeadDims;
  }
  return {};
}

}  // namespace keyhole::gpu
