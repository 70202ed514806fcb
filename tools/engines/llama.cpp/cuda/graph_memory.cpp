#include "tools/engines/llama.cpp/cuda/graph_memory.h"

#include <ggml-impl.h>
#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "tools/engines/llama.cpp/cuda/card_memory.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {
namespace {

struct GraphBuffer {
  GraphBuffer(int ordinal, size_t size, const ggml_backend_buffer_i& own)
      : memory(ordinal, size, 0), cuda(own) {}
  CardMemory memory;
  ggml_backend_buffer_i cuda;  // the CUDA backend's functions
};

/// The CUDA backend's buffers have a context of its own, and no place for another one.
struct GraphBuffers {
  std::mutex mutex;
  std::map<const ggml_backend_buffer*, std::unique_ptr<GraphBuffer>> all;
};
GraphBuffers& buffers() {
  static auto* const all = new GraphBuffers;
  return *all;
}

/// Only of a buffer that is_graph_buffer(), which lives.
GraphBuffer& of(const ggml_backend_buffer* buffer) {
  const std::lock_guard lock(buffers().mutex);
  return *buffers().all.at(buffer);
}

void free_graph_buffer(ggml_backend_buffer_t buffer) {
  std::unique_ptr<GraphBuffer> own;
  {
    const std::lock_guard lock(buffers().mutex);
    own = std::move(buffers().all.at(buffer));
    buffers().all.erase(buffer);
  }
  buffer->iface = own->cuda;
  buffer->iface.free_buffer(buffer);
}

void* base_of_graph_buffer(ggml_backend_buffer_t buffer) { return of(buffer).memory.data(); }

void clear_graph_buffer(ggml_backend_buffer_t /*buffer*/, uint8_t value) {
  if (value != 0) log(Level::kWarning, "a graph's memory is cleared to another value than 0");
}

}  // namespace

bool is_mask(const ggml_tensor* tensor) {
  return tensor->op == GGML_OP_NONE && tensor->view_src == nullptr &&
         tensor->type == GGML_TYPE_F16 && std::strstr(tensor->name, "kq_mask") != nullptr;
}

ggml_backend_buffer_t make_graph_buffer(ggml_backend_buffer_type_t cuda, int ordinal, size_t size,
                                        size_t of_masks) {
  constexpr size_t kNothing = 256;  // the least of a buffer that the CUDA backend makes
  ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(cuda, kNothing);
  if (buffer == nullptr) return nullptr;
  try {
    auto own = std::make_unique<GraphBuffer>(ordinal, size, buffer->iface);
    if (!own->memory.prepare(size - std::min(of_masks, size))) {
      ggml_backend_buffer_free(buffer);
      return nullptr;
    }
    const std::lock_guard lock(buffers().mutex);
    buffers().all[buffer] = std::move(own);
  } catch (const std::exception& error) {
    log(Level::kError, std::string("memory of a graph: ") + error.what());
    ggml_backend_buffer_free(buffer);
    return nullptr;
  }
  buffer->size = size;
  buffer->iface.free_buffer = free_graph_buffer;
  buffer->iface.get_base = base_of_graph_buffer;
  buffer->iface.clear = clear_graph_buffer;
  // Strided rows go one by one, by the functions of one row.
  buffer->iface.set_tensor_2d = nullptr;
  buffer->iface.get_tensor_2d = nullptr;
  return buffer;
}

bool is_graph_buffer(const ggml_backend_buffer* buffer) {
  return buffer != nullptr && buffer->iface.free_buffer == free_graph_buffer;
}

void keep_masks(const ggml_tensor* node) {
  for (ggml_tensor* source : node->src) {
    // As the scheduler does with copies of inputs that are not to be written over.
    if (source != nullptr && is_mask(source)) ggml_set_output(source);
  }
}

void hold_tensor(const ggml_tensor* tensor) {
  const ggml_tensor* whole = root(tensor);
  if (!is_graph_buffer(whole->buffer)) return;
  CardMemory& memory = of(whole->buffer).memory;
  const auto begin =
      static_cast<size_t>(static_cast<const std::byte*>(whole->data) - memory.data());
  const size_t bytes = ggml_backend_buffer_get_alloc_size(whole->buffer, whole);
  if (memory.hold(begin, std::min(begin + bytes, memory.bytes()))) return;
  throw std::runtime_error("the card has no memory for the " + std::to_string(bytes >> 20U) +
                           " MiB of '" + whole->name + "'");
}

void hold_graph(const ggml_cgraph* graph) {
  const auto hold = [](const ggml_tensor* tensor) {
    if (!is_mask(root(tensor))) hold_tensor(tensor);
  };
  for (int i = 0; i < graph->n_nodes; ++i) {
    hold(graph->nodes[i]);
    for (const ggml_tensor* source : graph->nodes[i]->src) {
      if (source != nullptr) hold(source);
    }
  }
}

}  // namespace keyhole::llama_cpp
