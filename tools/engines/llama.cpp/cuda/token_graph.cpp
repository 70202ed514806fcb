#include "tools/engines/llama.cpp/cuda/token_graph.h"

#include <cuda_runtime_api.h>
#include <ggml-impl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_cache.h"
#include "tools/engines/llama.cpp/cuda/card_stream.h"
#include "tools/engines/llama.cpp/log.h"

namespace keyhole::llama_cpp {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

cudaStream_t stream_of(const CardStream& stream) {
  return static_cast<cudaStream_t>(stream.handle());
}

/// The cache that all marks are of, where they are new rows and attention alone; else NULL.
CardCache* only_cache(const CutGraph& found, size_t& attentions) {
  CardCache* cache = found.marks.front().cache;
  attentions = 0;
  for (size_t i = 0; i < found.marks.size(); ++i) {
    const Mark& mark = found.marks[i];
    const bool attends = mark.kind == Mark::Kind::kAttend;
    if (mark.cache != cache || (!attends && mark.kind != Mark::Kind::kWrite)) return nullptr;
    if (attends && found.ways[i] == Way::kPrompt) return nullptr;
    attentions += attends && found.ways[i] == Way::kSession ? 1 : 0;
  }
  return cache;
}

/// Products over experts may wait for the card, which no capture allows.
bool has_experts(const ggml_cgraph* graph) {
  return std::any_of(graph->nodes, graph->nodes + graph->n_nodes,
                     [](const ggml_tensor* node) { return node->op == GGML_OP_MUL_MAT_ID; });
}

}  // namespace

TokenGraph::~TokenGraph() { drop(); }

void TokenGraph::drop() {
  if (executable_ != nullptr) {
    (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
  }
  executable_ = nullptr;
  seen_ = false;
}

bool TokenGraph::compute(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda) {
  size_t attentions = 0;
  CardCache* cache = graph->uid != 0 && !is_refused_ ? only_cache(found, attentions) : nullptr;
  LazySession* session = cache != nullptr ? cache->single_step(attentions) : nullptr;
  if (session == nullptr) return false;
  if (uid_ != graph->uid || session_ != session->serial()) {
    drop();
    uid_ = graph->uid;
    session_ = session->serial();
  }
  if (executable_ == nullptr) {
    if (!seen_ || has_experts(graph)) {
      seen_ = true;
      return false;
    }
    session->settle();
    try {
      capture(found, graph, cuda, *cache);
    } catch (const std::runtime_error& error) {
      // Nothing of a capture has happened: the step goes piece by piece, and so do all others.
      is_refused_ = true;
      log(Level::kWarning, std::string("steps are no CUDA graphs: ") + error.what());
      return false;
    }
  }
  if (!session->announce()) {
    drop();
    return false;
  }
  CardStream& stream = cache->stream();
  stream.follow(cuda);
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), stream_of(stream)),
        "launching a step's graph");
  stream.lead(cuda);
  session->launched();
  return true;
}

void TokenGraph::capture(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda,
                         CardCache& cache) {
  CardStream& stream = cache.stream();
  check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeRelaxed),
        "beginning a step's graph");
  cudaGraph_t captured = nullptr;
  try {
    stream.lead(cuda);  // the backend's stream joins the capture
    for (const Piece& piece : found.pieces) {
      Piece own;
      own.nodes.push_back(&first_);
      own.nodes.insert(own.nodes.end(), piece.nodes.begin(), piece.nodes.end());
      first_.op = GGML_OP_NONE;
      std::fill_n(first_.ne, GGML_MAX_DIMS, 1);
      ++first_.op_params[0];
      if (keyhole::llama_cpp::compute(cuda, graph, own) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("llama.cpp's CUDA backend has failed");
      }
      if (piece.attention == nullptr) continue;
      cache.capture(graph->nodes[piece.attention->node], piece.attention->name);
    }
    stream.follow(cuda);
  } catch (...) {
    (void)cudaStreamEndCapture(stream_of(stream), &captured);
    if (captured != nullptr) (void)cudaGraphDestroy(captured);
    throw;
  }
  check(cudaStreamEndCapture(stream_of(stream), &captured), "ending a step's graph");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&executable, captured, 0);
  (void)cudaGraphDestroy(captured);
  check(made, "making a step's graph");
  executable_ = executable;
}

}  // namespace keyhole::llama_cpp
