#include "gpu/mirror.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/types.h"

namespace keyhole::gpu {

Mirror::Mirror(const RingShape& shape, uint32_t layers, size_t row_bytes)
    : shape_(shape), row_bytes_(row_bytes), states_(layers) {
  const size_t slots = size_t{shape.sink} + shape.capacity;
  if (__builtin_mul_overflow(slots * layers, 2 * row_bytes, &bytes_)) {
    throw Error(Status::invalid_argument, "resident tokens: the size in bytes exceeds 2^64 - 1");
  }
  if (bytes_ == 0) return;
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Status::out_of_memory,
                "the host's copy of the resident tokens: " + std::to_string(bytes_) +
                    " bytes of address space could not be reserved");
  }
  data_ = static_cast<std::byte*>(memory);
}

Mirror::~Mirror() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::byte* Mirror::row(uint32_t layer, uint32_t slot, uint32_t which) const {
  const size_t slots = size_t{shape_.sink} + shape_.capacity;
  return data_ + ((size_t{layer} * 2 + which) * slots + slot) * row_bytes_;
}

void Mirror::write(uint32_t layer, uint32_t slot, const std::byte* k, const std::byte* v) {
  std::memcpy(row(layer, slot, 0), k, row_bytes_);
  std::memcpy(row(layer, slot, 1), v, row_bytes_);
}

void Mirror::append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    write(layer, states_[layer].sink++, k + i * row_bytes_, v + i * row_bytes_);
  }
}

void Mirror::append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) {
  RingState& state = states_[layer];
  for (uint32_t i = 0; i < n; ++i) {
    write(layer, window_slot(shape_, state, state.window), k + i * row_bytes_, v + i * row_bytes_);
    ++state.window;
  }
}

void Mirror::evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) {
  read(layer, states_[layer].sink, n, k, v);
  states_[layer] = without_oldest(shape_, states_[layer], n);
}

void Mirror::truncate(uint32_t layer, uint32_t sink, uint32_t window) {
  RingState& state = states_[layer];
  state.sink = sink;
  state.window = window;
  if (window == 0) state.begin = 0;
}

uint32_t Mirror::update_host_copy(uint32_t layer, const std::byte* new_k, const std::byte* new_v,
                                  std::byte* k, std::byte* v) {
  RingState& state = states_[layer];
  const uint32_t n = leaving(shape_, state);
  if (n > 0) read(layer, state.sink, n, k, v);
  state = after_step(shape_, state, true);
  write(layer, token_slot(shape_, state, state.tokens() - 1), new_k, new_v);
  return n;
}

void Mirror::read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k, std::byte* v) const {
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t slot = token_slot(shape_, states_[layer], first + i);
    std::memcpy(k + i * row_bytes_, row(layer, slot, 0), row_bytes_);
    std::memcpy(v + i * row_bytes_, row(layer, slot, 1), row_bytes_);
  }
}

void Mirror::keep_newest(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) {
  RingState& state = states_[layer];
  const uint32_t first = state.tokens() - of;
  for (uint32_t i = 0; i < kept.size(); ++i) {
    if (kept[i] == i) continue;
    for (uint32_t which = 0; which < 2; ++which) {
      std::memcpy(row(layer, token_slot(shape_, state, first + i), which),
                  row(layer, token_slot(shape_, state, first + kept[i]), which), row_bytes_);
    }
  }
  state = without_newest(state, of - static_cast<uint32_t>(kept.size()));
}

KvPieces Mirror::rows(uint32_t layer, uint32_t heads, uint32_t dim, DType dtype) const {
  KvPieces all;
  for_pieces(layer, [&](uint32_t slot, uint32_t n) {
    const auto view = [&](uint32_t which) {
      const std::byte* const first = row(layer, slot, which);
      return RowsView{dense_tensor(first, n, heads, dim, dtype)};
    };
    all.pieces[all.count++] = {view(0), view(1)};
  });
  return all;
}

}  // namespace keyhole::gpu
