#include "runtime/step/step_plan.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

// Searches a step aims at where the parts change the answer, so that their number may depend on the shape
// alone: a part repeats work of the others (a graph walk in two parts takes about a third more in sum), which has
// to pay on few threads too.
constexpr uint32_t kSearchesPerStep = 8;
// A part of fewer rows is not worth its hand-off.
constexpr size_t kRowsPerPart = 4096;
// Rows per exact task: enough to outweigh a hand-off.
constexpr uint32_t kMinChunk = 1024;

}  // namespace

StepPlan::StepPlan(uint32_t fewest, uint32_t most, uint32_t threads)
    : threads_(threads),
      most_parts_(std::clamp(std::max(kSearchesPerStep, threads) / fewest, 1U, kMaxParts)),
      heads_(most) {
  tasks_.reserve(size_t{most} *
                 (kMaxParts + index::ListChoice::kMostParts + index::kMostCodeParts + kMaxChunks));
}

uint32_t StepPlan::search_parts(const HeadWork& work) const {
  const index::Index& index = *work.index;
  if (work.search.attend == KEYHOLE_ATTEND_NONE) return 1;
  const bool top = work.search.attend == KEYHOLE_ATTEND_TOPK;
  uint32_t parts = kSearchesPerStep / kv_heads_;
  // The best k are merged before they are attended, so that the parts leave no trace in the result.
  if (top && index.same_in_parts()) parts = threads_ / kv_heads_;
  switch (index.sharing()) {
    case index::Sharing::none: parts = 1; break;
    // All that was scored is attended once: parts that may have scored the same keys cannot tell which.
    case index::Sharing::heads: parts = top ? std::min(parts, group_) : 1; break;
    // Weights are relative to all that was scored.
    case index::Sharing::rows:
      parts = work.search.attend == KEYHOLE_ATTEND_WEIGHT ? 1 : parts;
      break;
  }
  // An estimate of what was not read needs all that was read in one place.
  if (work.search.tail.tree != nullptr && !top) parts = 1;
  parts = std::min(parts, most_parts_);
  return static_cast<uint32_t>(
      std::clamp<size_t>(index.count() / kRowsPerPart, 1, std::max(parts, 1U)));
}

HeadPlan StepPlan::plan(const HeadWork& work) const {
  HeadPlan p;
  if (work.index != nullptr && work.search.codes) {
    const index::CodedRows& codes = work.search.codes;
    p.codes = codes.parts();
    if (codes.lists != nullptr && !work.common.has_chosen)
      p.ranks = index::ListChoice::rank_parts(codes.lists->lists());
  } else if (work.index != nullptr) {
    p.parts = search_parts(work);
    p.merges_hits = p.parts > 1 && work.search.attend == KEYHOLE_ATTEND_TOPK;
  }
  const auto rows = static_cast<uint32_t>(work.kv.keys.tokens) - work.exact_begin;
  // In sequences of nearly the same length the chunks have the same rows.
  p.chunk_rows = kMinChunk;
  while (uint64_t{p.chunk_rows} * kMaxChunks < rows) p.chunk_rows *= 2;
  p.chunks = (rows + p.chunk_rows - 1) / p.chunk_rows;
  p.first_code = p.codes == 0 ? 0 : std::min(work.common.codes, p.codes - 1);
  p.first_chunk = work.common.chunks;
  return p;
}

void StepPlan::make(std::span<const HeadWork> works, uint32_t group) {
  kv_heads_ = static_cast<uint32_t>(works.size());
  group_ = group;
  for (uint32_t h = 0; h < kv_heads_; ++h) heads_[h] = plan(works[h]);
  tasks_.clear();
  // Searches first: they take longest.
  for (uint32_t p = 0; p < kMaxParts; ++p) {
    for (uint32_t h = 0; h < kv_heads_; ++h) {
      if (p < heads_[h].parts) tasks_.push_back({StepTask::Kind::search, h, p});
    }
  }
  // A scan of lists waits for its head's choice, and all that it may wait for has begun before it. Heads come one
  // after the other, so that the first ones choose while others rank.
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    for (uint32_t p = 0; p < heads_[h].ranks; ++p) {
      tasks_.push_back({StepTask::Kind::ranks, h, p});
    }
  }
  // A few heads at a time: later parts of a head keep less where earlier ones have ended, and what a head does after
  // its last part runs beside parts of the next.
  constexpr uint32_t kHeadsAtATime = 4;
  for (uint32_t h = 0; h < kv_heads_; h += kHeadsAtATime) {
    for (uint32_t i = 0; i < kHeadsAtATime * index::kMostCodeParts; ++i) {
      const uint32_t head = h + i % kHeadsAtATime, p = i / kHeadsAtATime;
      if (head >= kv_heads_ || p < heads_[head].first_code || p >= heads_[head].codes) continue;
      tasks_.push_back({StepTask::Kind::codes, head, p});
    }
  }
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    for (uint32_t c = heads_[h].first_chunk; c < heads_[h].chunks; ++c) {
      tasks_.push_back({StepTask::Kind::exact, h, c});
    }
  }
}

}  // namespace keyhole::runtime
