// llama.cpp's own CPU backend, for nodes that were given to this one and that it does not compute itself.
#pragma once

#include <memory>

struct ggml_tensor;
struct ggml_backend;
struct ggml_context;
struct ggml_cgraph;

namespace keyhole::llama_cpp {

class CpuBackend {
 public:
  CpuBackend();
  ~CpuBackend();
  CpuBackend(const CpuBackend&) = delete;
  CpuBackend& operator=(const CpuBackend&) = delete;

  void set_threads(int threads) { threads_ = threads; }
  /// Computes one node, whose sources are in host memory. Throws std::runtime_error where there is no CPU backend or it
  /// fails.
  void compute(ggml_tensor* node);
  /// compute() of a graph.
  void compute(ggml_cgraph* graph);

 private:
  /// Makes the backend.
  void open();

  int threads_ = 0, told_ = 0;       // as set, and as the backend knows
  ggml_backend* backend_ = nullptr;  // made when it is first needed
  ggml_context* memory_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
};

}  // namespace keyhole::llama_cpp
