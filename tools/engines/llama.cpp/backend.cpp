// Which nodes of a graph are computed here, and their computation.
#include <ggml-backend-impl.h>
#include <ggml.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "tools/engines/llama.cpp/buffer.h"
#include "tools/engines/llama.cpp/cache.h"
#include "tools/engines/llama.cpp/cpu_backend.h"
#include "tools/engines/llama.cpp/device.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/nodes.h"

namespace keyhole::llama_cpp {
namespace {

struct Backend {
  CpuBackend cpu;
  int threads = 0, most_threads = 0;  // as llama.cpp computes with now, and has ever said
};

Backend& of(ggml_backend_t backend) { return *static_cast<Backend*>(backend->context); }

const char* get_name(ggml_backend_t /*backend*/) { return "KEYHOLE"; }

void free_backend(ggml_backend_t backend) {
  delete &of(backend);
  delete backend;
}

void compute_node(Backend& backend, ggml_tensor* node) {
  if (is_view_node(node)) return;
  if (Cache* cache = cache_of(node); cache != nullptr && node->op != GGML_OP_SET_ROWS) {
    return cache->shifted(node, backend.cpu);
  }
  const ggml_tensor* tensor = node->op == GGML_OP_SET_ROWS ? node : node->src[1];
  const auto name = cache_name(tensor);
  Cache* cache = name ? cache_of(tensor) : nullptr;
  if (cache == nullptr) throw std::runtime_error("it is none of Keyhole's");
  bool done = false;
  if (node->op == GGML_OP_SET_ROWS) {
    done = cache->write(node, *name);
  } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
    cache->set_threads(backend.threads, backend.most_threads);
    done = cache->attend(node, *name);
  } else {
    throw std::runtime_error("it is none of Keyhole's");
  }
  if (!done) backend.cpu.compute(node);
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    try {
      compute_node(of(backend), node);
    } catch (const std::exception& error) {
      log(Level::kError, node_text(node) + ": " + error.what());
      return GGML_STATUS_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

}  // namespace

ggml_backend_t make_backend(ggml_backend_dev_t device) {
  static ggml_guid guid = {'k', 'e', 'y', 'h', 'o', 'l', 'e', 0, 'g', 'g', 'm', 'l', 0, 0, 0, 1};
  auto result = std::make_unique<ggml_backend>();
  *result = {};
  result->guid = &guid;
  result->iface.get_name = get_name;
  result->iface.free = free_backend;
  result->iface.graph_compute = graph_compute;
  result->device = device;
  result->context = new Backend;
  return result.release();
}

void set_backend_threads(ggml_backend_t backend, int threads) {
  of(backend).threads = threads;
  of(backend).most_threads = std::max(of(backend).most_threads, threads);
  of(backend).cpu.set_threads(threads);
}

bool takes(const ggml_tensor* node) {
  if (is_view_node(node)) return true;
  if (node->op == GGML_OP_SET_ROWS) {
    // Whole rows; without flash attention values are written element by element, which is llama.cpp's to do.
    return in_cache(node) && node->src[0]->ne[0] == root(node)->ne[0] && node->src[0]->ne[2] == 1 &&
           node->src[0]->ne[3] == 1;
  }
  if (node->op == GGML_OP_FLASH_ATTN_EXT) {
    if (!in_cache(node->src[1])) return false;
    if (Cache* cache = cache_of(node->src[1])) {
      cache->announce(node, *cache_name(node->src[1]));
    }
    return true;
  }
  if (Cache* cache = cache_of(node)) {
    if (!cache->complete()) return true;  // nobody can change what is not there
    cache->changed_by_others();
    return false;
  }
  for (const ggml_tensor* source : node->src) {
    if (Cache* cache = cache_of(source)) cache->read_by_others(node);
  }
  return false;
}

}  // namespace keyhole::llama_cpp
