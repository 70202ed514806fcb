// Where the inputs of a graph lie in host memory. The scheduler copies them to the card just before it has the graph
// computed; what is known here spares reading them back.
#pragma once

#include <ggml-backend-impl.h>

namespace keyhole::llama_cpp {

/// Has a buffer of the CUDA backend tell which of its tensors were written from where. Of one kind of buffer: all that
/// are watched have the same functions.
void watch_inputs(ggml_backend_buffer_t buffer);
/// A tensor is about to be written in another way: its place in host memory is not known. Memory for it comes with that
/// (graph_memory.h).
void forget_input(const ggml_tensor* tensor);
/// The bytes of an input in host memory, as they were when they were copied to the card: valid until the graph under
/// way is computed. NULL: not known.
[[nodiscard]] const void* host_input(const ggml_tensor* tensor);
/// Masks of a graph buffer (graph_memory.h) are not copied before the CUDA backend, or somebody else, is to read them:
/// this copies a tensor, or what it is a view of, if it is one that was not. Throws std::runtime_error where the card
/// has no memory for it.
void bring_input(const ggml_tensor* tensor);
/// Memory for a tensor, and what it holds, for functions of ggml's that have no way to fail: ends the program where
/// there is none.
void bring_or_end(const ggml_tensor* tensor);

}  // namespace keyhole::llama_cpp
