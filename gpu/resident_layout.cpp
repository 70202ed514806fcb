#include "gpu/resident_layout.h"

#include <algorithm>
#include <string>

#include "gpu/layer_kinds.h"

namespace keyhole::gpu {
namespace {

constexpr size_t aligned(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

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

PinnedLayout::PinnedLayout(const ResidentShape& shape) {
  const size_t heads = shape.kv_heads;
  const size_t group = heads == 0 ? 0 : shape.q_heads / heads;
  q_bytes_ = size_t{shape.q_heads} * shape.head_dim * sizeof(float);
  kv_bytes_ = heads * shape.head_dim * dtype_size(shape.dtype);
  step_tokens_ = most_step_tokens(static_cast<uint32_t>(group));
  rows_bytes_ = aligned(q_place() + 2 * kv_place());
  slot_bytes_ = aligned(group * (size_t{shape.head_dim} + 1) * sizeof(float));
  delivered_ = heads * kLine;
  rows_ = 2 * heads * kLine;
  slots_ = rows_ + 2 * rows_bytes_;
  answers_ = slots_ + heads * slot_bytes_;
  answer_bytes_ = shape.keeps_answers ? heads * slot_bytes_ : 0;
  answered_ = answers_ + 2 * answer_bytes_;
  layer_ = answered_ + (shape.keeps_answers ? heads * kLine : 0);

  failure_ = shape.layers * layer_;
  host_done_ = failure_ + kLine;
  host_q_ = host_done_ + heads * kLine;
  host_o_ = host_q_ + aligned(q_bytes_);
  host_lse_ = host_o_ + aligned(q_bytes_);
  copied_ = host_lse_ + aligned(shape.q_heads * sizeof(float));
  static_assert(sizeof(WaitSums) == sizeof(RingState));
  bytes_ = copied_ + aligned(heads * sizeof(RingState));
}

ScratchLayout::ScratchLayout(const ResidentShape& shape) {
  const size_t rows = size_t{split_capacity(shape.kv_heads)} * shape.q_heads;
  states_bytes_ = aligned(shape.kv_heads * sizeof(RingState));
  arrivals_ = shape.layers * states_bytes_;
  arrivals_bytes_ = aligned(shape.kv_heads * sizeof(uint32_t));
  numbers_ = arrivals_ + kStepQueues * arrivals_bytes_;
  numbers_bytes_ = aligned(shape.kv_heads * sizeof(uint32_t));
  ready_ = numbers_ + shape.layers * numbers_bytes_;
  host_states_ = ready_ + aligned(shape.kv_heads * sizeof(uint32_t));
  waited_ =
      host_states_ +
      aligned((size_t{shape.q_heads} * shape.head_dim + size_t{shape.kv_heads} * kMaxDeviceGroup) *
              sizeof(float));
  o_ = waited_ + aligned(shape.kv_heads * sizeof(WaitSums));
  o_bytes_ = aligned(size_t{shape.q_heads} * shape.head_dim * sizeof(float));
  lse_ = o_ + shape.layers * o_bytes_;
  lse_bytes_ = aligned(shape.q_heads * sizeof(float));
  host_q_ = lse_ + shape.layers * lse_bytes_;
  answer_o_ = host_q_ + o_bytes_;
  answer_lse_ = answer_o_ + (shape.keeps_answers ? o_bytes_ : 0);
  partial_ = answer_lse_ + (shape.keeps_answers ? lse_bytes_ : 0);
  partial_o_bytes_ = aligned(rows * shape.head_dim * sizeof(float));
  partial_states_bytes_ = aligned(rows * 2 * sizeof(float));
  bytes_ = partial_ + kStepQueues * (partial_o_bytes_ + partial_states_bytes_);
}

size_t staging_bytes(const ResidentShape& shape) {
  const size_t token =
      2 * size_t{shape.kv_heads} * shape.head_dim * dtype_size(shape.dtype);  // k and v
  const size_t layer = token * (size_t{shape.sink} + shape.window_capacity);
  return 2 * aligned(std::clamp(layer, std::min(token, kStagingBytes / 2), kStagingBytes / 2));
}

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

size_t cuda_resident_bytes(const ResidentShape& shape) {
  return sum_of_parts(parts_of(shape), [](const ResidentShape& part) {
    return resident_bytes(part) + ScratchLayout(part).bytes();
  });
}

size_t cuda_pinned_bytes(const ResidentShape& shape) {
  return sum_of_parts(parts_of(shape), [](const ResidentShape& part) {
    return PinnedLayout(part).bytes() + staging_bytes(part);
  });
}

}  // namespace keyhole::gpu
