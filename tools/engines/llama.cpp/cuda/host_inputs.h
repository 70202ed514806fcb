// Where the inputs of a graph lie in host memory. The scheduler copies them to the card just before it has the graph
// computed; what is known here spares reading them back.
#pragma once

#include <ggml-backend-impl.h>

namespace keyhole::llama_cpp {

/// Has a buffer of the CUDA backend tell which of its tensors were written from where. Of one kind of buffer: all that
/// are watched have the same functions.
void watch_inputs(ggml_backend_buffer_t buffer);
/// A tensor was written in another way: its place in host memory is not known.
void forget_input(const ggml_tensor* tensor);
/// The bytes of an input in host memory, as they were when they were copied to the card: valid until the graph under way
/// is computed. NULL: not known.
[[nodiscard]] const void* host_input(const ggml_tensor* tensor);

}  // namespace keyhole::llama_cpp
