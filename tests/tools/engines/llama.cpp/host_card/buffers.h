// Buffers like those of the CUDA backend: host memory that does not say that it is.
#pragma once

#include <ggml-backend-impl.h>

namespace keyhole::llama_cpp {

/// A type of such buffers, which says of itself that it is CUDA0's. Its device is the caller's to name.
[[nodiscard]] ggml_backend_buffer_type host_card_buffers();

}  // namespace keyhole::llama_cpp
