// Memory of a graph's tensors on a card: addresses for all that llama.cpp's allocator has planned, memory for what the
// CUDA backend reads and writes. That leaves out masks, which Keyhole reads where llama.cpp wrote them: of a batch of
// 2,048 tokens behind 1M they would take 4 GiB.
#pragma once

#include <ggml-backend-impl.h>

#include <cstddef>

namespace keyhole::llama_cpp {

/// Whether a tensor is the card's copy of a mask that llama.cpp has written in host memory.
[[nodiscard]] bool is_mask(const ggml_tensor* tensor);

/// A buffer that the CUDA backend's functions take for one of their own. Memory for all but `of_masks` bytes is taken
/// at once. NULL: the card has too little, or cannot map pages.
///   cuda  the CUDA backend's type of buffers on device `ordinal`
[[nodiscard]] ggml_backend_buffer_t make_graph_buffer(ggml_backend_buffer_type_t cuda, int ordinal,
                                                      size_t size, size_t of_masks);
[[nodiscard]] bool is_graph_buffer(const ggml_backend_buffer* buffer);

/// Has llama.cpp's allocator leave the masks that a node reads as they are until all of the graph is computed. Where a
/// part of it is computed on the CPU it would use their host memory again, once the scheduler has copied them to the
/// card: as it sees it, that is all that reads them there. The scheduler asks whether a device computes a node before
/// memory is planned.
void keep_masks(const ggml_tensor* node);

/// Gives memory to a tensor of such a buffer, or to what it is a view of; does nothing with others. Throws
/// std::runtime_error where the card has too little.
void hold_tensor(const ggml_tensor* tensor);
/// To all that a graph's nodes read and write, but for masks.
void hold_graph(const ggml_cgraph* graph);

}  // namespace keyhole::llama_cpp
