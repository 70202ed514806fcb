#include "tools/engines/llama.cpp/cuda/host_inputs.h"

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {
namespace {

struct Known {
  std::mutex mutex;
  std::unordered_map<const void*, const void*> places;  // on the card, in host memory
  ggml_backend_buffer_i functions{};                    // of CUDA's buffers
};

Known& known() {
  static Known k;
  return k;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  Known& k = known();
  if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE && root(tensor)->op == GGML_OP_NONE) {
    const std::lock_guard lock(k.mutex);
    if (offset == 0 && size == ggml_nbytes(tensor)) {
      k.places[tensor->data] = data;
    } else {
      k.places.erase(tensor->data);
    }
  }
  k.functions.set_tensor(buffer, tensor, data, offset, size);
}

void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data,
                   size_t offset, size_t size, size_t copies, size_t stride_tensor,
                   size_t stride_data) {
  forget_input(tensor);
  known().functions.set_tensor_2d(buffer, tensor, data, offset, size, copies, stride_tensor,
                                  stride_data);
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t size) {
  forget_input(tensor);
  known().functions.memset_tensor(buffer, tensor, value, offset, size);
}

bool copy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* from, ggml_tensor* to) {
  forget_input(to);
  return known().functions.cpy_tensor(buffer, from, to);
}

}  // namespace

void watch_inputs(ggml_backend_buffer_t buffer) {
  Known& k = known();
  {
    const std::lock_guard lock(k.mutex);
    k.functions = buffer->iface;
  }
  buffer->iface.set_tensor = set_tensor;
  buffer->iface.memset_tensor = memset_tensor;
  if (k.functions.set_tensor_2d != nullptr) buffer->iface.set_tensor_2d = set_tensor_2d;
  if (k.functions.cpy_tensor != nullptr) buffer->iface.cpy_tensor = copy_tensor;
}

void forget_input(const ggml_tensor* tensor) {
  Known& k = known();
  const std::lock_guard lock(k.mutex);
  k.places.erase(tensor->data);
}

const void* host_input(const ggml_tensor* tensor) {
  const ggml_tensor* whole = root(tensor);
  if (whole->op != GGML_OP_NONE) return nullptr;  // made on the card
  Known& k = known();
  const std::lock_guard lock(k.mutex);
  const auto found = k.places.find(whole->data);
  if (found == k.places.end()) return nullptr;
  return static_cast<const std::byte*>(found->second) + (tensor == whole ? 0 : tensor->view_offs);
}

}  // namespace keyhole::llama_cpp
