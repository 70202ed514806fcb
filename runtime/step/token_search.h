// The offloaded tokens that a search chooses, as numbers, for callers that attend to them by themselves.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/tensor_view.h"
#include "index/scan/topk.h"
#include "runtime/engine/engine.h"
#include "runtime/step/cost.h"
#include "runtime/step/query.h"
#include "runtime/step/selection.h"

namespace keyhole::runtime {

/// Searches for tokens. Keeps its memory from call to call. One thread at a time.
class TokenSearch {
 public:
  explicit TokenSearch(const Engine& engine);

  /// The rows of one KV head: [0, index->count()) are searched in the index, where there is one; all others are
  /// scored.
  struct Head {
    const index::Index* index = nullptr;
    KvView kv;
    uint32_t position = index::kUnknownPosition;  ///< of the queries
    LogitParams logits{};                         ///< of the layer
  };
  /// Whether search() of k keys in indexes like these needs no reserve().
  [[nodiscard]] bool fits(std::span<const Head> heads, uint32_t k) const;
  /// Takes the memory for searches of k keys in indexes like these. Strong guarantee.
  void reserve(std::span<const Selection::Use> uses, uint32_t k);

  /// The results: the best rows of every query head, `[q_heads, top_k]`, best first, moved by `first_token`; their
  /// scores, where these are not null; and how many there are, `[q_heads]`. `k` is the smaller of top_k and the
  /// number of rows.
  struct Found {
    uint32_t* ids = nullptr;
    float* scores = nullptr;
    uint32_t* counts = nullptr;
    uint32_t top_k = 0;
    uint32_t first_token = 0;
  };
  StepCost search(uint32_t layer, std::span<const Head> heads, uint32_t k, const float* queries,
                  const Found& found);

  [[nodiscard]] size_t bytes() const;

 private:
  struct alignas(64) Worker {
    Selection selection;
    index::TopK best;
    std::vector<float> scores;  ///< of some rows, for all heads of the group; then of the best
    std::vector<uint32_t> ids;
    StepCost cost;
  };
  void search_head(uint32_t kv_head, const Head& head, uint32_t k, const float* queries,
                   const Found& found, Worker& worker);

  const Engine* engine_;
  uint32_t group_ = 0, dim_ = 0;  // of the call under way
  uint32_t capacity_k_ = 0;
  std::vector<Worker> workers_;
};

}  // namespace keyhole::runtime
