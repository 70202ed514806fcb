#include "runtime/step/token_search.h"

#include <algorithm>

#include "cpu/row_access.h"

namespace keyhole::runtime {
namespace {

// Rows that are scored at a time.
constexpr size_t kRows = 512;

}  // namespace

TokenSearch::TokenSearch(const Engine& engine)
    : engine_(&engine), workers_(engine.pool().threads()) {}

bool TokenSearch::fits(std::span<const Head> heads, uint32_t k) const {
  return std::all_of(heads.begin(), heads.end(), [&](const Head& head) {
    return head.index == nullptr ||
           (k <= capacity_k_ && workers_.front().selection.fits({head.index, KEYHOLE_ATTEND_TOPK}));
  });
}

void TokenSearch::reserve(std::span<const Selection::Use> uses, uint32_t k) {
  std::vector<Selection> selections(workers_.size());
  for (Selection& s : selections)
    s.reserve(uses, engine_->model().largest_group(), std::max(k, capacity_k_));
  for (size_t i = 0; i < workers_.size(); ++i) workers_[i].selection = std::move(selections[i]);
  capacity_k_ = std::max(k, capacity_k_);
}

size_t TokenSearch::bytes() const {
  size_t bytes = 0;
  for (const Worker& w : workers_) {
    bytes += w.selection.bytes() + w.scores.capacity() * sizeof(float) +
             w.ids.capacity() * sizeof(uint32_t);
  }
  return bytes;
}

StepCost TokenSearch::search(uint32_t layer, std::span<const Head> heads, uint32_t k,
                             const float* queries, const Found& found) {
  group_ = engine_->model().of(layer).group();
  dim_ = engine_->model().of(layer).head_dim;
  for (Worker& w : workers_) w.cost = {};
  engine_->pool().run(static_cast<uint32_t>(heads.size()), [&](uint32_t h, uint32_t worker) {
    search_head(h, heads[h], k, queries + size_t{h} * group_ * dim_, found, workers_[worker]);
  });
  StepCost sum;
  for (const Worker& w : workers_) sum += w.cost;
  return sum;
}

void TokenSearch::search_head(uint32_t kv_head, const Head& head, uint32_t k, const float* queries,
                              const Found& found, Worker& worker) {
  const Stopwatch watch;
  const cpu::Kernels& kernels = engine_->kernels();
  const RowsView& keys = head.kv.keys;
  const uint32_t first_head = kv_head * group_;
  if (k == 0) {
    std::fill_n(found.counts + first_head, group_, 0U);
    return;
  }
  const size_t held = group_ * std::max<size_t>(k, kRows);
  if (worker.scores.size() < held) worker.scores.resize(held);
  if (worker.ids.size() < size_t{group_} * k) worker.ids.resize(size_t{group_} * k);
  worker.best.begin(group_, k, keys.tokens);

  const size_t indexed = head.index == nullptr ? 0 : head.index->count();
  if (head.index != nullptr) {
    const GroupQuery query{.kernels = &kernels,
                           .kv = head.kv,
                           .queries = queries,
                           .group = group_,
                           .logits = head.logits,
                           .position = head.position};
    const index::Hits& hits = worker.selection.search(*head.index, query, {.k = k});
    // Indexes may score codes: the keys themselves decide which come first, among pending ones too.
    for (uint32_t h = 0; h < group_; ++h) {
      const uint32_t* rows = hits.ids + size_t{h} * k;
      cpu::score_rows(kernels, keys, queries + size_t{h} * dim_, 1, rows, hits.counts[h],
                      worker.scores.data(), k);
      worker.best.offer(h, worker.scores.data(), rows, hits.counts[h]);
    }
    worker.cost.keys_offered += uint64_t{group_} * indexed;
    worker.cost.keys_scored += hits.keys_scored;
    worker.cost.bytes_read += hits.bytes_read;
  }
  for (size_t at = indexed; at < keys.tokens; at += kRows) {
    const size_t n = std::min(kRows, keys.tokens - at);
    cpu::score_rows(kernels, keys.slice(at, n), queries, group_, nullptr, n, worker.scores.data(),
                    kRows);
    for (uint32_t h = 0; h < group_; ++h) {
      worker.best.offer(h, worker.scores.data() + h * kRows, static_cast<uint32_t>(at), n);
    }
  }
  worker.cost.bytes_read += (keys.tokens - indexed) * keys.row_bytes();

  uint32_t* counts = found.counts + first_head;
  index::Hits best{.ids = worker.ids.data(), .scores = worker.scores.data(), .counts = counts};
  worker.best.finish(best);
  for (uint32_t h = 0; h < group_; ++h) {
    const size_t to = size_t{first_head + h} * found.top_k;
    for (uint32_t i = 0; i < counts[h]; ++i) {
      found.ids[to + i] = found.first_token + worker.ids[size_t{h} * k + i];
    }
    if (found.scores == nullptr) continue;
    std::copy_n(worker.scores.data() + size_t{h} * k, counts[h], found.scores + to);
  }
  worker.cost.search_seconds += watch.seconds();
}

}  // namespace keyhole::runtime
