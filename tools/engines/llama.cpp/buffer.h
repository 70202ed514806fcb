// The device's buffers: address space in host memory, of which the system gives pages where something is written.
// llama.cpp puts its cache into one, and intermediate results into others.
#pragma once

#include <ggml-backend-impl.h>

namespace keyhole::llama_cpp {

class Cache;

/// The one type of the device's buffers.
[[nodiscard]] ggml_backend_buffer_type_t buffer_type();

/// The cache that a tensor, or what it is a view of, lies in; NULL for tensors in other buffers, in buffers without a
/// cache and in those of size 0 with which llama.cpp measures a model.
[[nodiscard]] Cache* cache_of(const ggml_tensor* tensor);
/// Whether it is a tensor of the cache by its name, and lies in a buffer of this type, be it one to measure with.
[[nodiscard]] bool in_cache(const ggml_tensor* tensor);

}  // namespace keyhole::llama_cpp
