#include "tools/engines/llama.cpp/cuda/card_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {
namespace {

/// Memory is taken in steps for each tensor, of a quarter of what it needs, so that growing takes few calls of the
/// driver and the first tokens little memory: a session is made beside them.
constexpr size_t kLeastStep = size_t{2} << 20U, kMostStep = size_t{16} << 20U;

size_t place(const CardMemory& memory, const ggml_tensor* tensor) {
  return static_cast<size_t>(static_cast<const std::byte*>(tensor->data) - memory.data());
}

}  // namespace

bool CardRows::hold(CardMemory& memory, uint32_t stream, uint32_t cells) {
  const ggml_tensor* keys = tensors_[0];
  const auto all = static_cast<uint32_t>(keys->ne[1]);
  held_.resize(static_cast<size_t>(keys->ne[2]));
  if (cells <= held_[stream]) return true;
  const size_t bytes = std::clamp(cells * keys->nb[1] / 4, kLeastStep, kMostStep);
  const auto step = static_cast<uint32_t>(std::clamp<size_t>(bytes / keys->nb[1], 1, all));
  const uint32_t wanted = std::min(all, (cells + step - 1) / step * step);
  for (const ggml_tensor* tensor : tensors_) {
    if (tensor == nullptr) continue;
    const size_t begin = place(memory, tensor) + stream * tensor->nb[2];
    if (!memory.hold(begin, begin + wanted * tensor->nb[1])) return false;
  }
  held_[stream] = wanted;
  return true;
}

bool CardRows::hold_bytes(CardMemory& memory, bool values, size_t offset, size_t bytes) {
  const size_t begin = place(memory, tensor(values)) + offset;
  return memory.hold(begin, begin + bytes);
}

void CardRows::let_go(CardMemory& memory) {
  held_.assign(held_.size(), 0);
  for (const ggml_tensor* tensor : tensors_) {
    if (tensor == nullptr) continue;
    const size_t begin = place(memory, tensor);
    memory.let_go(begin, begin + ggml_nbytes(tensor));
  }
}

void CardRows::read(const CardMemory& memory, bool values, size_t first, size_t count,
                    std::byte* out) const {
  const ggml_tensor* t = tensor(values);
  memory.read(place(memory, t) + first * t->nb[1], count * t->nb[1], out);
}

bool CardRows::write(CardMemory& memory, bool values, size_t first, size_t count,
                     const std::byte* from) {
  const ggml_tensor* t = tensor(values);
  if (!hold_bytes(memory, values, first * t->nb[1], count * t->nb[1])) return false;
  memory.write(place(memory, t) + first * t->nb[1], count * t->nb[1], from);
  return true;
}

Rows CardRows::rows(bool values, uint32_t stream, uint32_t cell, uint32_t count,
                    uint32_t heads) const {
  const ggml_tensor* t = tensor(values);
  return {static_cast<const std::byte*>(t->data) + stream * t->nb[2] + cell * t->nb[1],
          *number_of(t),
          count,
          heads,
          t->ne[0] / heads,
          static_cast<int64_t>(t->nb[1]),
          static_cast<int64_t>(t->nb[1] / heads),
          true};
}

}  // namespace keyhole::llama_cpp
