#include "tools/engines/llama.cpp/cpu_backend.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <stdexcept>

namespace keyhole::llama_cpp {

CpuBackend::CpuBackend() = default;

CpuBackend::~CpuBackend() {
  if (memory_ != nullptr) ggml_free(memory_);
  if (backend_ != nullptr) ggml_backend_free(backend_);
}

void CpuBackend::open() {
  if (backend_ != nullptr) return;
  backend_ = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  if (backend_ == nullptr) throw std::runtime_error("llama.cpp has no CPU backend");
  constexpr size_t kNodes = 8;
  memory_ = ggml_init({ggml_graph_overhead_custom(kNodes, false) + 1024, nullptr, true});
  graph_ = ggml_new_graph_custom(memory_, kNodes, false);
}

void CpuBackend::compute(ggml_tensor* node) {
  open();
  ggml_graph_clear(graph_);
  ggml_graph_add_node(graph_, node);
  compute(graph_);
}

void CpuBackend::compute(ggml_cgraph* graph) {
  open();
  if (threads_ > 0 && threads_ != told_) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_));
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
    if (set != nullptr) set(backend_, threads_);
    told_ = threads_;
  }
  if (ggml_backend_graph_compute(backend_, graph) != GGML_STATUS_SUCCESS) {
    throw std::runtime_error("llama.cpp's CPU backend has failed");
  }
}

}  // namespace keyhole::llama_cpp
