// In a build without CUDA.
#include "tools/engines/llama.cpp/cuda/proxy.h"

namespace keyhole::llama_cpp {

std::span<const ggml_backend_dev_t> proxy_devices(ggml_backend_reg_t /*registry*/) { return {}; }
void* proxy_address(const char* /*name*/) { return nullptr; }

}  // namespace keyhole::llama_cpp
