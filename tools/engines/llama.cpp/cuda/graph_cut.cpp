#include "tools/engines/llama.cpp/cuda/graph_cut.h"

#include <ggml-impl.h>
#include <ggml.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_buffer.h"
#include "tools/engines/llama.cpp/cuda/graph_memory.h"

namespace keyhole::llama_cpp {
namespace {

/// Graphs that are remembered: llama.cpp has a few at a time, with as many splits as there are changes of devices.
constexpr size_t kMostGraphs = 512;

/// Unlike any of ggml's own, which count from 1.
uint64_t next_uid() {
  static std::atomic<uint64_t> last{uint64_t{1} << 63U};
  return ++last;
}

std::vector<Mark> find_marks(const ggml_cgraph* graph) {
  std::vector<Mark> marks;
  for (int i = 0; i < graph->n_nodes; ++i) {
    ggml_tensor* node = graph->nodes[i];
    if (is_view_node(node)) continue;
    const auto place = card_place(node);
    if (place && node->op == GGML_OP_SET_ROWS) {
      marks.push_back({i, Mark::Kind::kWrite, place->cache, place->name, node});
      continue;
    }
    if (node->op == GGML_OP_FLASH_ATTN_EXT) {
      if (const auto keys = card_place(node->src[1])) {
        marks.push_back({i, Mark::Kind::kAttend, keys->cache, keys->name, node->src[1]});
        continue;
      }
    }
    if (place) {
      marks.push_back({i, Mark::Kind::kChange, place->cache, place->name, node});
      if (node->op == GGML_OP_ROPE)
        continue;  // it reads what it changes, and nothing else of a cache
    }
    for (const ggml_tensor* source : node->src) {
      if (source == nullptr) continue;
      if (const auto read = card_place(source)) {
        marks.push_back({i, Mark::Kind::kRead, read->cache, read->name, source});
      }
    }
  }
  for (const Mark& mark : marks) {
    if (mark.kind == Mark::Kind::kAttend) {
      mark.cache->announce(graph->nodes[mark.node], mark.name);
    }
  }
  return marks;
}

/// Adds the masks that a node reads.
void add_masks(const ggml_tensor* node, std::vector<const ggml_tensor*>& masks) {
  for (const ggml_tensor* source : node->src) {
    if (source == nullptr || !is_mask(root(source))) continue;
    if (std::find(masks.begin(), masks.end(), root(source)) == masks.end()) {
      masks.push_back(root(source));
    }
  }
}

}  // namespace

CutGraph& GraphCuts::find(ggml_cgraph* graph) {
  if (known_.size() > kMostGraphs) known_.clear();
  const auto found = known_.find(graph->uid);
  if (found != known_.end() && graph->uid != 0) return found->second;
  CutGraph& result = known_[graph->uid];
  result = CutGraph{};
  result.marks = find_marks(graph);
  for (int i = 0; i < graph->n_nodes; ++i) add_masks(graph->nodes[i], result.masks);
  return result;
}

bool GraphCuts::cut(CutGraph& found, ggml_cgraph* graph) {
  std::vector<Way> ways;
  bool all_cards = true;
  for (const Mark& mark : found.marks) {
    Way way = Way::kCard;
    if (mark.kind == Mark::Kind::kAttend) way = mark.cache->way(mark.name);
    if (mark.kind == Mark::Kind::kWrite && !mark.cache->is_written(mark.name)) way = Way::kSession;
    all_cards = all_cards && way == Way::kCard;
    ways.push_back(way);
  }
  if (all_cards) return false;
  if (ways == found.ways) return true;

  found.ways = ways;
  found.pieces.clear();
  Piece piece;
  const auto close = [&](const Mark* attention) {
    piece.uid = next_uid();
    piece.attention = attention;
    found.pieces.push_back(std::exchange(piece, {}));
  };
  std::map<int, size_t> marked;  // nodes that Keyhole computes
  for (size_t i = 0; i < ways.size(); ++i) {
    if (ways[i] != Way::kCard) marked[found.marks[i].node] = i;
  }
  for (int i = 0; i < graph->n_nodes; ++i) {
    ggml_tensor* node = graph->nodes[i];
    const auto mark = marked.find(i);
    if (mark == marked.end()) {
      // Views of cells say how many cells are used, which makes pieces different that are not.
      const auto place = is_view_node(node) ? card_place(node) : std::nullopt;
      if (!place || place->cache->is_written(place->name)) piece.nodes.push_back(node);
    } else if (found.marks[mark->second].kind == Mark::Kind::kAttend) {
      close(&found.marks[mark->second]);
    }
  }
  close(nullptr);
  found.masks_of_pieces.clear();
  for (const Piece& each : found.pieces) {
    for (const ggml_tensor* node : each.nodes) add_masks(node, found.masks_of_pieces);
  }
  return true;
}

ggml_status compute(ggml_backend_t cuda, ggml_cgraph* graph, Piece& piece) {
  if (std::all_of(piece.nodes.begin(), piece.nodes.end(), is_view_node)) {
    return GGML_STATUS_SUCCESS;
  }
  ggml_cgraph part = *graph;
  part.size = 0;
  part.n_nodes = static_cast<int>(piece.nodes.size());
  part.n_leafs = 0;
  part.nodes = piece.nodes.data();
  part.grads = nullptr;
  part.grad_accs = nullptr;
  part.leafs = nullptr;
  part.uid = piece.uid;
  return ggml_backend_graph_compute_async(cuda, &part);
}

void keep_new_rows(ggml_cgraph* graph, ggml_backend_graph_optimize_params* params) {
  std::map<std::pair<CardCache*, int>, std::vector<ggml_tensor*>> fresh;
  for (int i = 0; i < graph->n_nodes; ++i) {
    ggml_tensor* node = graph->nodes[i];
    if (node->op == GGML_OP_SET_ROWS) {
      if (const auto place = card_place(node)) {
        fresh[{place->cache, place->name.layer}].push_back(node->src[0]);
      }
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
      const auto place = card_place(node->src[1]);
      if (!place) continue;
      for (ggml_tensor* rows : fresh[{place->cache, place->name.layer}]) {
        params->add_alloc_dep(params->user_data, rows, node);
      }
    }
  }
}

}  // namespace keyhole::llama_cpp
