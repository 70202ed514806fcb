// Devices KEYHOLE0, KEYHOLE1, ... around those of llama.cpp's CUDA backend. They are these devices but for the buffers
// of caches, and for graphs that attend over them.
#pragma once

#include <ggml-backend-impl.h>

#include <span>

namespace keyhole::llama_cpp {

/// One for each of the CUDA backend's devices; none where llama.cpp has no such backend, or no card. Made by the first
/// call. `registry`: whose devices they are.
[[nodiscard]] std::span<const ggml_backend_dev_t> proxy_devices(ggml_backend_reg_t registry);
/// What the CUDA backend's registry has under a name, and set_proxy_threads() as "ggml_backend_set_n_threads".
[[nodiscard]] void* proxy_address(const char* name);

/// A backend of a proxy: `cuda` is the CUDA backend's own, which it takes, `device` is the proxy.
[[nodiscard]] ggml_backend_t make_proxy_backend(ggml_backend_t cuda, ggml_backend_dev_t device);
/// ggml_backend_set_n_threads of a proxy's backend: with how many threads llama.cpp computes on the host.
void set_proxy_threads(ggml_backend_t backend, int threads);

}  // namespace keyhole::llama_cpp
