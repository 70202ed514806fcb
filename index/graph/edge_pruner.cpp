#include "index/graph/edge_pruner.h"

#include <algorithm>
#include <functional>

namespace keyhole::index {

// Marks the candidates from `from` on that are nearer to `chosen` than to the row as hidden. Those that are hidden
// already are not compared again: after the first few chosen ones they are most of all.
void EdgePruner::hide_behind(uint32_t chosen, size_t from) {
  seen_.clear();
  seen_ids_.clear();
  for (size_t i = from; i < ids_.size(); ++i) {
    if (hidden_[i] != 0) continue;
    seen_.push_back(static_cast<uint32_t>(i));
    seen_ids_.push_back(ids_[i]);
  }
  if (seen_.empty()) return;
  keys_->load(chosen, query_);
  keys_->similarity(query_, seen_ids_.data(), seen_.size(), to_chosen_.data());
  for (size_t s = 0; s < seen_.size(); ++s) {
    if (to_chosen_[s] > scores_[seen_[s]]) hidden_[seen_[s]] = 1;
  }
}

std::span<const uint32_t> EdgePruner::prune(uint32_t row, std::span<const uint32_t> candidates,
                                            size_t kept, size_t most, bool fill) {
  const size_t n = candidates.size();
  scores_.resize(n);
  keys_->load(row, query_);
  keys_->similarity(query_, candidates.data(), n, scores_.data());
  chosen_.assign(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(kept));
  order_.clear();
  for (size_t i = kept; i < n; ++i) order_.push_back(pack_rank(scores_[i], candidates[i] ^ flip_));
  std::sort(order_.begin(), order_.end(), std::greater<>());
  order_.erase(std::unique(order_.begin(), order_.end()), order_.end());
  ids_.clear();
  scores_.clear();
  for (const uint64_t rank : order_) {
    const uint32_t id = rank_row(rank) ^ flip_;
    if (id == row || std::find(chosen_.begin(), chosen_.end(), id) != chosen_.end()) continue;
    ids_.push_back(id);
    scores_.push_back(rank_score(rank));
  }
  to_chosen_.resize(ids_.size());
  hidden_.assign(ids_.size(), 0);
  for (size_t c = 0; c < chosen_.size(); ++c) hide_behind(chosen_[c], 0);
  for (size_t i = 0; i < ids_.size() && chosen_.size() < most; ++i) {
    if (hidden_[i] != 0) continue;
    hidden_[i] = 2;  // taken
    chosen_.push_back(ids_[i]);
    if (chosen_.size() < most) hide_behind(ids_[i], i + 1);
  }
  for (size_t i = 0; fill && i < ids_.size() && chosen_.size() < most; ++i) {
    if (hidden_[i] != 2) chosen_.push_back(ids_[i]);
  }
  return chosen_;
}

}  // namespace keyhole::index
