#include "tools/engines/llama.cpp/cuda/half_queries.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {

HalfQueries::~HalfQueries() {
  if (context_ != nullptr) ggml_free(context_);
  if (memory_ != nullptr) (void)cudaFree(memory_);
}

Rows HalfQueries::convert(ggml_backend_t cuda, const ggml_tensor* attention, ggml_type type) {
  const ggml_tensor* q = attention->src[0];  // [components, rows, heads, streams]
  const auto bytes = static_cast<size_t>(ggml_nelements(q)) * ggml_type_size(type);
  if (bytes > bytes_) {
    if (memory_ != nullptr) (void)cudaFree(memory_);  // waits for what uses it
    memory_ = nullptr;
    bytes_ = 0;
    if (cudaMalloc(&memory_, bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      memory_ = nullptr;
      throw std::runtime_error("the card has no memory for queries in 16 bits");
    }
    bytes_ = bytes;
  }
  // A context holds few tensors, and those of a graph are used when they are enqueued: each call has new ones.
  constexpr size_t kNodes = 4;
  if (context_ != nullptr) ggml_free(context_);
  context_ = ggml_init(
      {ggml_graph_overhead_custom(kNodes, false) + 8 * ggml_tensor_overhead(), nullptr, true});
  graph_ = ggml_new_graph_custom(context_, kNodes, false);
  const auto place = [](ggml_tensor* t, void* data, ggml_backend_buffer_t buffer) {
    t->data = data;
    t->buffer = buffer;
    t->flags |= GGML_TENSOR_FLAG_COMPUTE;
  };
  ggml_tensor* from = ggml_new_tensor_4d(context_, q->type, q->ne[0], q->ne[2], q->ne[1], q->ne[3]);
  from->nb[1] = q->nb[2];
  from->nb[2] = q->nb[1];
  from->nb[3] = q->nb[3];
  place(from, q->data, root(q)->buffer);
  ggml_tensor* to = ggml_new_tensor_4d(context_, type, q->ne[0], q->ne[2], q->ne[1], q->ne[3]);
  place(to, memory_, root(q)->buffer);
  ggml_tensor* copy = ggml_cpy(context_, from, to);
  place(copy, memory_, root(q)->buffer);
  ggml_graph_add_node(graph_, copy);
  if (ggml_backend_graph_compute_async(cuda, graph_) != GGML_STATUS_SUCCESS) {
    throw std::runtime_error("llama.cpp's CUDA backend has failed");
  }
  const int64_t head = q->ne[0] * 2;
  return {memory_,
          type == GGML_TYPE_BF16 ? Number::kBf16 : Number::kF16,
          q->ne[1] * q->ne[3],
          q->ne[2],
          q->ne[0],
          head * q->ne[2],
          head,
          true};
}

}  // namespace keyhole::llama_cpp
