#include "tools/engines/llama.cpp/cuda/host_inputs.h"

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "tools/engines/llama.cpp/cuda/graph_memory.h"
#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {
namespace {

struct Known {
  std::mutex mutex;
  std::unordered_map<const void*, const void*> places;  // on the card, in host memory
  std::unordered_set<const void*> only_there;           // of these: not copied to the card
  ggml_backend_buffer_i functions{};                    // of CUDA's buffers
};

Known& known() {
  static Known k;
  return k;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  Known& k = known();
  const bool is_whole = offset == 0 && size == ggml_nbytes(tensor);
  if (!is_whole || buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE ||
      root(tensor)->op != GGML_OP_NONE) {
    forget_input(tensor);
    return k.functions.set_tensor(buffer, tensor, data, offset, size);
  }
  {
    const std::lock_guard lock(k.mutex);
    k.places[tensor->data] = data;
    k.only_there.erase(tensor->data);
    if (is_graph_buffer(buffer) && is_mask(tensor)) {
      k.only_there.insert(tensor->data);
      return;
    }
  }
  bring_or_end(tensor);
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

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, size_t offset,
                size_t size) {
  bring_or_end(tensor);
  known().functions.get_tensor(buffer, tensor, data, offset, size);
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
    if (!is_graph_buffer(buffer) || k.functions.set_tensor == nullptr) k.functions = buffer->iface;
  }
  buffer->iface.set_tensor = set_tensor;
  buffer->iface.memset_tensor = memset_tensor;
  if (is_graph_buffer(buffer)) buffer->iface.get_tensor = get_tensor;
  if (buffer->iface.set_tensor_2d != nullptr) buffer->iface.set_tensor_2d = set_tensor_2d;
  if (k.functions.cpy_tensor != nullptr) buffer->iface.cpy_tensor = copy_tensor;
}

void forget_input(const ggml_tensor* tensor) {
  bring_or_end(tensor);  // a part of it may stay what it was
  Known& k = known();
  const std::lock_guard lock(k.mutex);
  k.places.erase(root(tensor)->data);
  k.only_there.erase(root(tensor)->data);
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

void bring_input(const ggml_tensor* tensor) {
  const ggml_tensor* whole = root(tensor);
  // Other tensors may lie where a mask did: the allocator uses its memory again once its last reader is behind.
  if (!is_graph_buffer(whole->buffer) || !is_mask(whole)) return;
  Known& k = known();
  const void* host = nullptr;
  {
    const std::lock_guard lock(k.mutex);
    if (k.only_there.erase(whole->data) == 0) return;
    host = k.places.at(whole->data);
  }
  hold_tensor(whole);
  k.functions.set_tensor(whole->buffer, const_cast<ggml_tensor*>(whole), host, 0,
                         ggml_nbytes(whole));
}

void bring_or_end(const ggml_tensor* tensor) {
  try {
    hold_tensor(tensor);
    bring_input(tensor);
  } catch (const std::exception& error) {
    GGML_ABORT("keyhole: '%s': %s\n", tensor->name, error.what());
  }
}

}  // namespace keyhole::llama_cpp
