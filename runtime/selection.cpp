#include "runtime/selection.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>

#include "index/scan/collector.h"
#include "index/scan/topk.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// The inner product whose logit is `logit`. Logits grow with it, so that keys can be told apart by their
/// scores alone; a logit that a soft-cap c never reaches gives +-inf.
float score_of(double logit, const LogitParams& p) {
  if (p.softcap > 0.0F) {
    const double share = logit / p.softcap;
    logit = share >= 1.0    ? std::numeric_limits<double>::infinity()
            : share <= -1.0 ? -std::numeric_limits<double>::infinity()
                            : p.softcap * std::atanh(share);
  }
  return static_cast<float>(logit / p.scale);
}

float logit_of(float score, const LogitParams& p) {
  const float x = score * p.scale;
  return p.softcap > 0.0F ? p.softcap * std::tanh(x / p.softcap) : x;
}

/// Keeps the rows that weigh more than min_weight for a head of the group: logit > lse + ln(min_weight).
/// All of them where scores have overflowed, as then nothing can be said of the weights.
void keep_heavy(const cpu::Kernels& kernels, index::Scored& scored, uint32_t group,
                float min_weight, const LogitParams& logits) {
  const size_t n = scored.rows.size();
  if (n == 0) return;
  float thresholds[kMaxGroup];
  for (uint32_t h = 0; h < group; ++h) {
    const float lse = kernels.log_sum_exp(scored.scores + h * scored.stride, n, logits);
    if (!std::isfinite(lse)) return;
    thresholds[h] = score_of(double{lse} + std::log(double{min_weight}), logits);
  }
  scored.rows = scored.rows.first(kernels.keep_above({.scores = scored.scores,
                                                      .score_stride = scored.stride,
                                                      .group = group,
                                                      .ids = scored.rows.data(),
                                                      .count = n,
                                                      .thresholds = thresholds}));
}

}  // namespace

void Selection::prepare(std::span<const Use> uses, uint32_t group, uint32_t k) {
  std::vector<Room> rooms;
  for (const Use& use : uses) {
    const index::Index& index = *use.index;
    auto found = std::find_if(rooms.begin(), rooms.end(),
                              [&](const Room& r) { return r.type == &index.type(); });
    if (found == rooms.end()) {
      rooms.push_back({&index.type(), index.make_scratch(group, k), 0});
      found = rooms.end() - 1;
    } else {
      index.reserve_search(*found->scratch);
    }
    if (use.tail != nullptr) tail_reader_.prepare(*use.tail, group);
    if (use.attend == KEYHOLE_ATTEND_TOPK || use.attend == KEYHOLE_ATTEND_NONE) continue;
    index.reserve_explore(*found->scratch);
    found->log_bytes =
        std::max(found->log_bytes, index::Collector::log_bytes(group, index.count()));
  }
  attended_ = {};
  rooms_.swap(rooms);
  if (group == room_group_ && k == room_k_) return;
  const size_t n = size_t{group} * k;
  ids_.resize(n);
  scores_.resize(n);
  counts_.resize(group);
  union_.resize(n);
  seen_.assign(std::bit_ceil(2 * n), 0);
  generation_ = 0;
  room_group_ = group;
  room_k_ = k;
}

bool Selection::has_room(const Use& use) const {
  if (use.tail != nullptr && !tail_reader_.has_room(*use.tail, room_group_)) return false;
  const bool explores = use.attend == KEYHOLE_ATTEND_SCORED || use.attend == KEYHOLE_ATTEND_WEIGHT;
  return std::any_of(rooms_.begin(), rooms_.end(), [&](const Room& r) {
    return r.type == &use.index->type() && (!explores || r.log_bytes != 0);
  });
}

Selection::Room& Selection::room(const index::Index& index) {
  size_t i = 0;  // one or two, so that a walk is the fastest look-up
  while (rooms_[i].type != &index.type()) ++i;
  return rooms_[i];
}

const index::Hits& Selection::search(const index::Index& index, const float* queries,
                                     uint32_t group, const SearchParams& params) {
  hits_ = {ids_.data(), scores_.data(), counts_.data(), 0, 0};
  if (params.tail.tree != nullptr && params.tail.mode == index::TailMode::mean) {
    std::fill_n(coverage_, kMaxGroup, -1.0F);
    hits_.coverage = coverage_;
  }
  index.search({.queries = queries,
                .group = group,
                .k = params.k,
                .position = params.position,
                .part = params.part,
                .parts = params.parts},
               *room(index).scratch, hits_);
  return hits_;
}

Selection::Cost Selection::search_and_attend(const index::Index& index, const cpu::Kernels& kernels,
                                             const KvView& kv, const float* queries, uint32_t group,
                                             const SearchParams& params, const LogitParams& logits,
                                             StateView out, StateView tail) {
  const auto start = Clock::now();
  Cost cost;
  index::Scored scored;
  const bool explores =
      params.attend == KEYHOLE_ATTEND_SCORED || params.attend == KEYHOLE_ATTEND_WEIGHT;
  if (params.attend == KEYHOLE_ATTEND_NONE) {
    attended_ = {};
  } else if (!explores) {
    (void)search(index, queries, group, params);
    unite(group, params.k);
    cost.keys_scored = hits_.keys_scored;
    cost.bytes_read = hits_.bytes_read;
  } else {
    Room& space = room(index);
    index.explore({.queries = queries,
                   .group = group,
                   .k = params.k,
                   .position = params.position,
                   .part = params.part,
                   .parts = params.parts},
                  *space.scratch, scored);
    if (params.attend == KEYHOLE_ATTEND_WEIGHT) {
      keep_heavy(kernels, scored, group, params.min_weight, logits);
    }
    attended_ = scored.rows;
    space.log_bytes = scored.stride * (group + 1) * sizeof(float);
    cost.keys_scored = scored.keys_scored;
    cost.bytes_read = scored.bytes_read;
  }
  cost.search_seconds = seconds(start, Clock::now());
  attend(kernels, kv, queries, group, params, logits, explores && scored.exact ? &scored : nullptr,
         out, tail, cost);
  return cost;
}

void Selection::attend(const cpu::Kernels& kernels, const KvView& kv, const float* queries,
                       uint32_t group, const SearchParams& params, const LogitParams& logits,
                       const index::Scored* scored, StateView out, StateView tail, Cost& cost) {
  const auto start = Clock::now();
  const uint64_t bytes = attended_.size() * kv.keys.dim * dtype_size(kv.keys.dtype);
  if (params.tail.tree != nullptr) {
    TailReader::Found found{.rows = attended_};
    if (scored != nullptr) {
      found.scores = scored->scores;
      found.stride = scored->stride;
    }
    // Of the keys that a search for the best k did not return, none is taken to be better than the k-th.
    float caps[kMaxGroup];
    if (params.attend == KEYHOLE_ATTEND_TOPK) {
      for (uint32_t h = 0; h < group; ++h) {
        const uint32_t n = hits_.counts[h];
        caps[h] = n < params.k ? std::numeric_limits<float>::infinity()
                               : logit_of(hits_.scores[size_t{h} * params.k + n - 1], logits);
      }
      found.caps = caps;
      if (hits_.coverage != nullptr && coverage_[0] >= 0.0F) found.coverage = coverage_;
    }
    TailWork work = params.tail;
    work.goal.max_rows += static_cast<uint32_t>(attended_.size());
    cost.tail = tail_reader_.attend(kernels, kv, queries, group, logits, work, found, out, tail);
    attended_ = tail_reader_.rows();
    cost.bytes_read +=
        (scored != nullptr ? bytes : 2 * bytes) + cost.tail.bytes_read + cost.tail.key_bytes_read;
    cost.search_seconds += cost.tail.seconds;
  } else {
    if (scored != nullptr) cost.bytes_read += bytes;
    if (scored == nullptr || !cpu::attend_scored(kernels, kv.values, attended_, scored->scores,
                                                 scored->stride, group, logits, out)) {
      cpu::attend_ids(kernels, kv, attended_, queries, group, logits, out);
      cost.bytes_read += 2 * bytes;
    }
  }
  cost.keys_attended = static_cast<uint32_t>(attended_.size());
  cost.attend_seconds = seconds(start, Clock::now()) - cost.tail.seconds;
}

Selection::Cost Selection::attend_parts(std::span<const index::Hits> hits,
                                        const cpu::Kernels& kernels, const KvView& kv,
                                        const float* queries, uint32_t group,
                                        const SearchParams& params, const LogitParams& logits,
                                        StateView out, StateView tail) {
  const auto start = Clock::now();
  Cost cost;
  hits_ = {ids_.data(), scores_.data(), counts_.data(), 0, 0};
  merge(hits, group, params.k);
  unite(group, params.k);
  cost.search_seconds = seconds(start, Clock::now());
  attend(kernels, kv, queries, group, params, logits, nullptr, out, tail, cost);
  return cost;
}

void Selection::merge(std::span<const index::Hits> parts, uint32_t group, uint32_t k) {
  for (uint32_t h = 0; h < group; ++h) {
    uint32_t* ids = ids_.data() + size_t{h} * k;
    float* scores = scores_.data() + size_t{h} * k;
    uint32_t taken[kMaxParts] = {};
    uint32_t count = 0;
    while (count < k) {
      uint64_t best = 0;
      size_t from = 0;
      for (size_t p = 0; p < parts.size(); ++p) {
        if (taken[p] == parts[p].counts[h]) continue;
        const size_t at = size_t{h} * k + taken[p];
        const uint64_t rank = index::pack_rank(parts[p].scores[at], parts[p].ids[at]);
        if (rank <= best) continue;
        best = rank;
        from = p;
      }
      if (best == 0) break;
      ++taken[from];
      const uint32_t id = index::rank_row(best);
      // Parts that share heads may both have found it: with the same score, so next to each other.
      if (count > 0 && ids[count - 1] == id) continue;
      ids[count] = id;
      scores[count++] = index::rank_score(best);
    }
    counts_[h] = count;
  }
}

void Selection::unite(uint32_t group, uint32_t k) {
  // A hash set and not a sort: it is linear, and first come first kept puts the best keys in front.
  if (++generation_ == 0) {
    std::fill(seen_.begin(), seen_.end(), 0);
    generation_ = 1;
  }
  const uint64_t stamp = uint64_t{generation_} << 32;
  const size_t mask = seen_.size() - 1;
  size_t size = 0;
  for (uint32_t h = 0; h < group; ++h) {
    for (uint32_t i = 0; i < counts_[h]; ++i) {
      const uint32_t id = ids_[size_t{h} * k + i];
      const uint64_t entry = stamp | id;
      size_t slot = (id * 0x9E3779B97F4A7C15ULL >> 32) & mask;
      while (seen_[slot] >> 32 == generation_ && seen_[slot] != entry) slot = (slot + 1) & mask;
      if (seen_[slot] == entry) continue;
      seen_[slot] = entry;
      union_[size++] = id;
    }
  }
  attended_ = {union_.data(), size};
}

size_t Selection::bytes() const {
  size_t logs = 0;
  for (const Room& r : rooms_) logs += r.log_bytes;
  return logs + tail_reader_.bytes() +
         (ids_.size() + counts_.size() + union_.size()) * sizeof(uint32_t) +
         scores_.size() * sizeof(float) + seen_.size() * sizeof(uint64_t);
}

}  // namespace keyhole::runtime
