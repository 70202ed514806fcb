#include "tools/engines/llama.cpp/cuda/token_graph.h"

#include <cuda_runtime_api.h>
#include <ggml-impl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_cache.h"
#include "tools/engines/llama.cpp/cuda/card_stream.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/nodes.h"

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

/// Products over experts wait for the card, which no capture allows, but for few tokens by quantised weights.
bool waits_for_card(const ggml_tensor* node) {
  constexpr int64_t kFew = 5;  // by the kinds of weights of which it is the fewest
  return node->op == GGML_OP_MUL_MAT_ID &&
         (node->ne[2] > kFew || !ggml_is_quantized(node->src[0]->type));
}

void tell(std::vector<uint64_t>& told, const ggml_tensor* t) {
  told.push_back(static_cast<uint64_t>(t->type));
  told.push_back(reinterpret_cast<uintptr_t>(t->data));
  for (int i = 0; i < GGML_MAX_DIMS; ++i) {
    told.push_back(static_cast<uint64_t>(t->ne[i]));
    told.push_back(t->nb[i]);
  }
}

/// Of all nodes of a step that is cut. Which cells are used is no part of it: no kernel reads them.
std::vector<uint64_t> all_told(const CutGraph& found, const ggml_cgraph* graph) {
  std::vector<uint64_t> told;
  for (const Piece& piece : found.pieces) {
    for (const ggml_tensor* node : piece.nodes) {
      if (is_view_node(node)) continue;
      told.push_back(static_cast<uint64_t>(node->op) << 32U | static_cast<uint32_t>(node->flags));
      tell(told, node);
      for (size_t i = 0; i < GGML_MAX_OP_PARAMS / sizeof(int32_t); ++i) {
        told.push_back(static_cast<uint32_t>(node->op_params[i]));
      }
      for (const ggml_tensor* source : node->src) {
        if (source != nullptr) tell(told, source);
      }
    }
  }
  for (const Mark& mark : found.marks) {
    const ggml_tensor* node = graph->nodes[mark.node];
    tell(told, node->src[0]);  // new rows, or queries
    if (mark.kind == Mark::Kind::kAttend) tell(told, node);
  }
  return told;
}

}  // namespace

TokenGraph::~TokenGraph() {
  for (Kept& kept : kept_) drop(kept);
}

void TokenGraph::drop(Kept& kept) {
  if (kept.executable != nullptr) {
    (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(kept.executable));
  }
  kept.executable = nullptr;
}

/// The kind of the step; NULL: it is a new one, and noted.
TokenGraph::Kept* TokenGraph::find(const CutGraph& found, ggml_cgraph* graph,
                                   const GraphStep& step) {
  std::vector<uint64_t> sessions;
  for (const LazySession* session : step.sessions) sessions.push_back(session->serial());
  // The same graph may be of other numbers of tokens of the same sequences.
  const auto is_of = [&](const Kept& kept) {
    return kept.sessions == sessions && kept.tokens == step.tokens;
  };
  ++now_;
  for (Kept& kept : kept_) {
    if (kept.uid != graph->uid || !is_of(kept)) continue;
    kept.used = now_;
    return &kept;
  }
  Told told = all_told(found, graph);
  for (Kept& kept : kept_) {
    if (kept.told != told || !is_of(kept)) continue;
    kept.uid = graph->uid;
    kept.used = now_;
    return &kept;
  }
  constexpr size_t kMost = 8;  // a session knows 16 graphs
  if (kept_.size() == kMost) {
    const auto oldest = std::min_element(
        kept_.begin(), kept_.end(), [](const Kept& a, const Kept& b) { return a.used < b.used; });
    drop(*oldest);
    kept_.erase(oldest);
  }
  kept_.push_back(
      {std::move(told), std::move(sessions), step.tokens, graph->uid, now_, 0, nullptr, false});
  return nullptr;
}

bool TokenGraph::compute(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda) {
  size_t attentions = 0;
  CardCache* cache = graph->uid != 0 ? only_cache(found, attentions) : nullptr;
  const GraphStep step = cache != nullptr ? cache->graph_step(attentions) : GraphStep{};
  if (step.sessions.empty() ||
      std::any_of(graph->nodes, graph->nodes + graph->n_nodes, waits_for_card)) {
    return false;
  }
  check(cudaSetDevice(cache->stream().ordinal()), "choosing the card");
  Kept* kept = find(found, graph, step);
  if (kept == nullptr || kept->is_refused) return false;
  if (kept->executable == nullptr) {
    for (LazySession* session : step.sessions) session->settle();
    try {
      capture(found, graph, cuda, *cache, *kept);
    } catch (const std::runtime_error& error) {
      // Nothing of a capture has happened: the step goes piece by piece, and so do all others of its kind, as long as
      // the kind is among the newest. Those of other kinds have graphs of their own, which may take less memory.
      kept->is_refused = true;
      log(Level::kWarning, "steps of " + std::to_string(step.sessions.size()) +
                               " sequences are no CUDA graph: " + error.what());
      return false;
    }
    kept->number = step.sessions.front()->graph();
  }
  if (!cache->announce(step, kept->number)) {
    drop(*kept);
    return false;
  }
  CardStream& stream = cache->stream();
  stream.follow(cuda);
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(kept->executable), stream_of(stream)),
        "launching a step's graph");
  stream.lead(cuda);
  cache->launched(step);
  return true;
}

void TokenGraph::capture(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda,
                         CardCache& cache, Kept& kept) {
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
  kept.executable = executable;
}

}  // namespace keyhole::llama_cpp
