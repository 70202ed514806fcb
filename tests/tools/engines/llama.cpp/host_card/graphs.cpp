#include "tests/tools/engines/llama.cpp/host_card/graphs.h"

#include <cuda_runtime_api.h>
#include <ggml-impl.h>
#include <ggml.h>

#include <exception>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {

/// What was enqueued during one capture.
struct Captured {
  uint64_t number = 0;
  std::vector<std::function<void()>> work;
};

namespace {

uint64_t last_capture = 0;
std::unique_ptr<Captured> under_way;  // one thread captures at a time

/// A ggml graph that holds its own tensors: copies of nodes, and of what these read.
class CopiedGraph {
 public:
  explicit CopiedGraph(const ggml_cgraph* graph) {
    const auto most = static_cast<size_t>(graph->n_nodes) + 1;
    context_ = ggml_init({ggml_graph_overhead_custom(most, false) + 1024, nullptr, true});
    graph_ = ggml_new_graph_custom(context_, most, false);
    for (int i = 0; i < graph->n_nodes; ++i) {
      ggml_tensor* node = graph->nodes[i];
      if (is_view_node(node)) continue;
      ggml_tensor* own = copy(node);
      for (ggml_tensor*& source : own->src) {
        if (source != nullptr) source = copy(source);
      }
      if (own->view_src != nullptr) own->view_src = copy(own->view_src);
      graph_->nodes[graph_->n_nodes++] = own;
    }
  }
  ~CopiedGraph() { ggml_free(context_); }
  CopiedGraph(const CopiedGraph&) = delete;
  CopiedGraph& operator=(const CopiedGraph&) = delete;
  [[nodiscard]] ggml_cgraph* graph() const { return graph_; }

 private:
  ggml_tensor* copy(const ggml_tensor* tensor) {
    std::unique_ptr<ggml_tensor>& own = copies_[tensor];
    if (own == nullptr) own = std::make_unique<ggml_tensor>(*tensor);
    return own.get();
  }

  ggml_context* context_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  std::map<const ggml_tensor*, std::unique_ptr<ggml_tensor>> copies_;
};

}  // namespace

uint64_t host_capture() { return under_way != nullptr ? under_way->number : 0; }

void keep_for_launches(std::function<void()> work) { under_way->work.push_back(std::move(work)); }

void keep_for_launches(const ggml_cgraph* graph, const std::function<void(ggml_cgraph*)>& compute) {
  const auto copied = std::make_shared<CopiedGraph>(graph);
  keep_for_launches([copied, compute] { compute(copied->graph()); });
}

}  // namespace keyhole::llama_cpp

using keyhole::llama_cpp::Captured;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  using namespace keyhole::llama_cpp;  // NOLINT
  if (under_way != nullptr) return cudaErrorIllegalState;
  under_way = std::make_unique<Captured>();
  under_way->number = ++last_capture;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(keyhole::llama_cpp::under_way.release());
  return *graph != nullptr ? cudaSuccess : cudaErrorIllegalState;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Captured(*reinterpret_cast<Captured*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  try {
    for (const auto& work : reinterpret_cast<Captured*>(graph)->work) work();
    return cudaSuccess;
  } catch (const std::exception& error) {
    keyhole::llama_cpp::log(keyhole::llama_cpp::Level::kError, error.what());
    return cudaErrorUnknown;
  }
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Captured*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Captured*>(graph);
  return cudaSuccess;
}

}  // extern "C"
