#include "tests/tools/engines/llama.cpp/host_card/buffers.h"

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace keyhole::llama_cpp {
namespace {

constexpr size_t kAlignment = 128;

void free_buffer(ggml_backend_buffer_t buffer) { std::free(buffer->context); }
void* base_of(ggml_backend_buffer_t buffer) { return buffer->context; }
void fill(ggml_backend_buffer_t /*buffer*/, ggml_tensor* tensor, uint8_t value, size_t offset,
          size_t size) {
  std::memset(static_cast<std::byte*>(tensor->data) + offset, value, size);
}
void write_to(ggml_backend_buffer_t /*buffer*/, ggml_tensor* tensor, const void* data,
              size_t offset, size_t size) {
  std::memcpy(static_cast<std::byte*>(tensor->data) + offset, data, size);
}
void read_from(ggml_backend_buffer_t /*buffer*/, const ggml_tensor* tensor, void* data,
               size_t offset, size_t size) {
  std::memcpy(data, static_cast<const std::byte*>(tensor->data) + offset, size);
}
void clear_all(ggml_backend_buffer_t buffer, uint8_t value) {
  std::memset(buffer->context, value, buffer->size);
}

const char* name_of(ggml_backend_buffer_type_t /*type*/) { return "CUDA0"; }
size_t alignment_of(ggml_backend_buffer_type_t /*type*/) { return kAlignment; }
ggml_backend_buffer_t make_buffer(ggml_backend_buffer_type_t type, size_t size) {
  void* memory = std::aligned_alloc(kAlignment, (size + kAlignment) / kAlignment * kAlignment);
  if (memory == nullptr) return nullptr;
  ggml_backend_buffer_i functions{};
  functions.free_buffer = free_buffer;
  functions.get_base = base_of;
  functions.memset_tensor = fill;
  functions.set_tensor = write_to;
  functions.get_tensor = read_from;
  functions.clear = clear_all;
  return ggml_backend_buffer_init(type, functions, memory, size);
}

}  // namespace

ggml_backend_buffer_type host_card_buffers() {
  ggml_backend_buffer_type type{};
  type.iface.get_name = name_of;
  type.iface.alloc_buffer = make_buffer;
  type.iface.get_alignment = alignment_of;
  return type;
}

}  // namespace keyhole::llama_cpp
