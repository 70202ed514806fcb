// A backend around the CUDA backend's: graphs that attend over a cache are cut at what Keyhole computes.
#include <ggml-backend-impl.h>
#include <ggml-impl.h>
#include <ggml.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_buffer.h"
#include "tools/engines/llama.cpp/cuda/card_cache.h"
#include "tools/engines/llama.cpp/cuda/graph_cut.h"
#include "tools/engines/llama.cpp/cuda/graph_memory.h"
#include "tools/engines/llama.cpp/cuda/host_inputs.h"
#include "tools/engines/llama.cpp/cuda/proxy.h"
#include "tools/engines/llama.cpp/cuda/token_graph.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {
namespace {

/// Begins as a copy of the CUDA backend's own object, with its identity and its context, so that all of that backend's
/// functions take it for one of theirs.
struct ProxyBackend : ggml_backend {
  ggml_backend_t cuda = nullptr;
  std::string name;
  GraphCuts cuts;
  TokenGraph token;
  uint64_t graphs = 0;  // that were computed
  int threads = 0;      // with which llama.cpp computes on the host
};

ProxyBackend& of(ggml_backend_t backend) { return *static_cast<ProxyBackend*>(backend); }

const char* get_name(ggml_backend_t backend) { return of(backend).name.c_str(); }

void free_backend(ggml_backend_t backend) {
  ggml_backend_free(of(backend).cuda);
  delete &of(backend);
}

// Cells are not in CUDA's own buffers, which these functions insist on.
void set_tensor_async(ggml_backend_t backend, ggml_tensor* tensor, const void* data, size_t offset,
                      size_t size) {
  ggml_backend_t cuda = of(backend).cuda;
  forget_input(tensor);
  if (!card_place(tensor)) return cuda->iface.set_tensor_async(backend, tensor, data, offset, size);
  ggml_backend_synchronize(cuda);
  ggml_backend_tensor_set(tensor, data, offset, size);
}

void get_tensor_async(ggml_backend_t backend, const ggml_tensor* tensor, void* data, size_t offset,
                      size_t size) {
  ggml_backend_t cuda = of(backend).cuda;
  if (!card_place(tensor)) {
    if (is_graph_buffer(root(tensor)->buffer)) bring_or_end(tensor);
    return cuda->iface.get_tensor_async(backend, tensor, data, offset, size);
  }
  ggml_backend_synchronize(cuda);
  ggml_backend_tensor_get(tensor, data, offset, size);
}

bool copy_tensor_async(ggml_backend_t from_backend, ggml_backend_t to_backend,
                       const ggml_tensor* from, ggml_tensor* to) {
  forget_input(to);
  return of(to_backend).cuda->iface.cpy_tensor_async(from_backend, to_backend, from, to);
}

/// Tells the caches what is about to be computed, node by node. Returns the nodes that have nothing to do.
std::vector<const ggml_tensor*> meet(CutGraph& found, ggml_cgraph* graph, ProxyBackend& proxy,
                                     const ggml_tensor*& at) {
  std::vector<const ggml_tensor*> idle;
  ++proxy.graphs;
  for (const Mark& mark : found.marks) {
    ggml_tensor* node = graph->nodes[mark.node];
    at = node;
    mark.cache->begin(proxy.cuda, proxy.graphs, graph->uid, proxy.threads);
    switch (mark.kind) {
      case Mark::Kind::kWrite: mark.cache->meet_write(node, mark.name); break;
      case Mark::Kind::kAttend: mark.cache->meet_attention(node, mark.name); break;
      case Mark::Kind::kRead: mark.cache->meet_read(mark.touched, mark.name); break;
      case Mark::Kind::kChange:
        if (!mark.cache->meet_change(node, mark.touched, mark.name)) idle.push_back(node);
        break;
    }
  }
  return idle;
}

/// The graph without some of its nodes, which no other node reads.
ggml_status compute_without(const std::vector<const ggml_tensor*>& idle, ggml_cgraph* graph,
                            ggml_backend_t cuda) {
  Piece rest;
  std::copy_if(graph->nodes, graph->nodes + graph->n_nodes, std::back_inserter(rest.nodes),
               [&](const ggml_tensor* node) {
                 return std::find(idle.begin(), idle.end(), node) == idle.end();
               });
  return rest.nodes.empty() ? GGML_STATUS_SUCCESS : compute(cuda, graph, rest);
}

void bring_inputs(const std::vector<const ggml_tensor*>& tensors) {
  for (const ggml_tensor* tensor : tensors) bring_input(tensor);
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  ProxyBackend& proxy = of(backend);
  CutGraph& found = proxy.cuts.find(graph);
  const ggml_tensor* at = nullptr;
  ggml_status status = GGML_STATUS_SUCCESS;
  try {
    if (!found.is_held) hold_graph(graph);
    found.is_held = true;
    const std::vector<const ggml_tensor*> idle = meet(found, graph, proxy, at);
    at = nullptr;
    const bool is_whole = !idle.empty() || !GraphCuts::cut(found, graph);
    bring_inputs(is_whole ? found.masks : found.masks_of_pieces);
    if (!idle.empty()) {
      status = compute_without(idle, graph, proxy.cuda);
    } else if (is_whole) {
      status = ggml_backend_graph_compute_async(proxy.cuda, graph);
    } else if (!proxy.token.compute(found, graph, proxy.cuda)) {
      for (Piece& piece : found.pieces) {
        status = compute(proxy.cuda, graph, piece);
        if (status != GGML_STATUS_SUCCESS) break;
        if (piece.attention == nullptr) continue;
        at = graph->nodes[piece.attention->node];
        piece.attention->cache->attend(at, piece.attention->name);
      }
    }
  } catch (const std::exception& error) {
    log(Level::kError, (at != nullptr ? node_text(at) + ": " : "") + error.what());
    status = GGML_STATUS_FAILED;
  }
  if (status != GGML_STATUS_SUCCESS) {
    for (const Mark& mark : found.marks) mark.cache->failed();
  }
  return status;
}

void graph_optimize(ggml_backend_t backend, ggml_cgraph* graph,
                    ggml_backend_graph_optimize_params* params) {
  // With this variable the CUDA backend puts branches of a graph on streams of their own, which meet in attention: such
  // graphs cannot be cut there.
  static const bool reorders = [] {
    const char* value = std::getenv("GGML_CUDA_GRAPH_OPT");
    return value != nullptr && std::atoi(value) == 1;
  }();
  ggml_backend_t cuda = of(backend).cuda;
  if (!reorders && cuda->iface.graph_optimize != nullptr) {
    cuda->iface.graph_optimize(cuda, graph, params);
  }
  keep_new_rows(graph, params);
}

}  // namespace

ggml_backend_t make_proxy_backend(ggml_backend_t cuda, ggml_backend_dev_t device) {
  auto proxy = std::make_unique<ProxyBackend>();
  static_cast<ggml_backend&>(*proxy) = *cuda;
  proxy->cuda = cuda;
  proxy->name = ggml_backend_dev_name(device);
  proxy->device = device;
  proxy->iface.get_name = get_name;
  proxy->iface.free = free_backend;
  proxy->iface.set_tensor_async = set_tensor_async;
  proxy->iface.get_tensor_async = get_tensor_async;
  // Strided rows go one by one, by the functions above.
  proxy->iface.set_tensor_2d_async = nullptr;
  proxy->iface.get_tensor_2d_async = nullptr;
  proxy->iface.cpy_tensor_async = copy_tensor_async;
  proxy->iface.graph_compute = graph_compute;
  proxy->iface.graph_optimize = graph_optimize;
  return proxy.release();
}

void set_proxy_threads(ggml_backend_t backend, int threads) { of(backend).threads = threads; }

}  // namespace keyhole::llama_cpp
