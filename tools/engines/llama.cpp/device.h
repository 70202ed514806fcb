// The device KEYHOLE, which keeps a cache in host memory, as llama.cpp's registry of backends sees it. Where llama.cpp
// has cards, the registry has those of cuda/proxy.h in its place.
#pragma once

#include <string>

#include <ggml-backend-impl.h>

#include "tools/engines/llama.cpp/settings.h"

namespace keyhole::llama_cpp {

/// The settings, and why they cannot be used ("": they can). Read once, when llama.cpp loads the backend.
struct Configuration {
  Settings settings;
  std::string error;
};
[[nodiscard]] const Configuration& configuration();

[[nodiscard]] ggml_backend_dev_t device();

/// A backend (ggml's word for a stream of work) of the device.
[[nodiscard]] ggml_backend_t make_backend(ggml_backend_dev_t device);
/// Whether the device takes a node. It takes SET_ROWS into its cache and FLASH_ATTN_EXT over it. Notes what else
/// happens to the cache, as the scheduler asks for every node of a graph before it computes it.
[[nodiscard]] bool takes(const ggml_tensor* node);
/// ggml_backend_set_n_threads of the backend.
void set_backend_threads(ggml_backend_t backend, int threads);

}  // namespace keyhole::llama_cpp
