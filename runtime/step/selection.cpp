#include "runtime/step/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/attention_state.h"
#include "index/scan/collector.h"
#include "index/scan/topk.h"
#include "runtime/step/part_hits.h"

namespace keyhole::runtime {
namespace {

/// Keeps the rows that weigh more than min_weight for a head of the group: logit > lse + ln(min_weight); where no row
/// does, the heaviest of the head. Keeps all where scores have overflowed, because nothing can be said of the weights
/// then.
void keep_heavy(const GroupQuery& query, index::Scored& scored, float min_weight) {
  const size_t n = scored.rows.size();
  if (n == 0) return;
  float thresholds[kMaxGroup];
  for (uint32_t h = 0; h < query.group; ++h) {
    const float lse =
        query.kernels->log_sum_exp(scored.scores + h * scored.stride, n, query.logits);
    if (!std::isfinite(lse)) return;
    // Logits grow with scores, so that keys can be told apart by their scores alone.
    thresholds[h] = cpu::score_of(double{lse} + std::log(double{min_weight}), query.logits);
    // The heaviest of n weighs at least 1/n, so with a smaller bound it need not be searched for. The factor of two
    // is for rounding.
    if (min_weight * static_cast<float>(n) < 0.5F) continue;
    const float* const scores = scored.scores + h * scored.stride;
    const float heaviest = *std::max_element(scores, scores + n);
    thresholds[h] = std::min(thresholds[h], std::nextafter(heaviest, -INFINITY));
  }
  scored.rows = scored.rows.first(query.kernels->keep_above({.scores = scored.scores,
                                                             .score_stride = scored.stride,
                                                             .group = query.group,
                                                             .ids = scored.rows.data(),
                                                             .count = n,
                                                             .thresholds = thresholds}));
}

index::SearchArgs search_args(const GroupQuery& query, const SearchParams& params,
                              SearchPart part) {
  return {.queries = query.queries,
          .group = query.group,
          .k = params.k,
          .position = query.position,
          .part = part.number,
          .parts = part.count};
}

}  // namespace

index::CodeSearch code_search(const GroupQuery& query, const SearchParams& params,
                              index::ListChoice* choice) {
  return {.kernels = query.kernels,
          .rows = params.codes,
          .queries = query.queries,
          .group = query.group,
          .logits = query.logits,
          .wanted = params.exact_rows(),
          .choice = choice};
}

StepCost scan_codes(index::CodeScan& scan, const GroupQuery& query, const SearchParams& params,
                    uint32_t part, index::ListChoice* choice, index::CodeParts& parts) {
  const Stopwatch watch;
  StepCost cost;
  scan.scan(code_search(query, params, choice), part, {}, parts);
  if (choice != nullptr) {
    const index::CodeLists& lists = *params.codes.lists;
    const uint32_t n = params.codes.parts();
    const size_t means = lists.lists() * (part + 1) / n - lists.lists() * part / n;
    // The part's share of what was read of the chosen lists is an equal one, because looking it up would take a walk
    // over them.
    const size_t rows = choice->chosen_rows() * (part + 1) / n - choice->chosen_rows() * part / n;
    cost.keys_scored = uint64_t{query.group} * rows;
    cost.bytes_read = 2 * means * lists.shape().dim * 2 +
                      rows * index::CodeLists::tile_bytes(lists.shape()) / kCodeTile;
  } else {
    const index::KvCodes& codes = *params.codes.blocks;
    const index::CodeCut cut = index::code_cut(codes.blocks());
    const size_t blocks = std::min<size_t>(cut.blocks, codes.blocks() - size_t{part} * cut.blocks);
    cost.keys_scored = uint64_t{query.group} * blocks * kCodeBlock;
    cost.bytes_read = blocks * codes.shape().block_bytes();
  }
  cost.tail_bytes_read = cost.bytes_read;
  cost.search_seconds = cost.tail_seconds = watch.seconds();
  return cost;
}

void Selection::reserve(std::span<const Use> uses, uint32_t group, uint32_t k) {
  // 70 KiB: a caller's thread may have a stack of 128.
  const auto made = std::make_unique<Selection>();
  Selection& next = *made;
  for (const Use& use : uses) {
    const index::Index& index = *use.index;
    auto found = std::find_if(next.scratches_.begin(), next.scratches_.end(),
                              [&](const TypeScratch& s) { return s.is_of(index); });
    if (found == next.scratches_.end()) {
      next.scratches_.push_back({&index.type(), index.dim(), index.make_scratch(group, k), 0});
      found = next.scratches_.end() - 1;
    } else {
      index.reserve_search(*found->scratch);
    }
    if (use.codes) {
      const uint32_t exact_rows = std::min(k, index::kMostExactRows);
      next.code_scan_.reserve(use.codes.shape(), group, exact_rows);
      next.code_scan_.reserve_doubt(exact_rows);
    }
    if (use.tail != nullptr) next.tail_reader_.reserve(*use.tail, group);
    if (use.attend == KEYHOLE_ATTEND_TOPK || use.attend == KEYHOLE_ATTEND_NONE) continue;
    index.reserve_explore(*found->scratch);
    found->log_bytes =
        std::max(found->log_bytes, index::Collector::log_bytes(group, index.count()));
  }
  for (const TypeScratch& s : next.scratches_) next.log_bytes_ += s.log_bytes;
  const size_t n = size_t{group} * k;
  next.ids_.resize(n);
  next.scores_.resize(n);
  next.counts_.resize(group);
  next.union_.reserve(n);
  next.group_ = group;
  *this = std::move(next);
}

bool Selection::fits(const Use& use) const {
  if (use.tail != nullptr && !tail_reader_.fits(*use.tail, group_)) return false;
  if (use.codes && !code_scan_.fits(use.codes.shape(), group_, 0)) return false;
  const bool explores = use.attend == KEYHOLE_ATTEND_SCORED || use.attend == KEYHOLE_ATTEND_WEIGHT;
  return std::any_of(scratches_.begin(), scratches_.end(), [&](const TypeScratch& s) {
    return s.is_of(*use.index) && (!explores || s.log_bytes != 0);
  });
}

Selection::TypeScratch& Selection::scratch_of(const index::Index& index) {
  size_t i = 0;  // one or two, so that a walk is the fastest look-up
  while (!scratches_[i].is_of(index)) ++i;
  return scratches_[i];
}

const index::Hits& Selection::search(const index::Index& index, const GroupQuery& query,
                                     const SearchParams& params, SearchPart part) {
  clear_hits();
  if (params.tail.tree != nullptr && params.tail.mode == index::TailMode::mean) {
    std::fill_n(coverage_, kMaxGroup, -1.0F);
    hits_.coverage = coverage_;
  }
  index.search(search_args(query, params, part), *scratch_of(index).scratch, hits_);
  return hits_;
}

void Selection::explore(const index::Index& index, const GroupQuery& query,
                        const SearchParams& params, SearchPart part, index::Scored& scored) {
  TypeScratch& s = scratch_of(index);
  index.explore(search_args(query, params, part), *s.scratch, scored);
  if (params.attend == KEYHOLE_ATTEND_WEIGHT) keep_heavy(query, scored, params.min_weight);
  const size_t bytes = scored.stride * (query.group + 1) * sizeof(float);
  log_bytes_ += bytes - s.log_bytes;
  s.log_bytes = bytes;
}

StepCost Selection::search_and_attend(const index::Index& index, const GroupQuery& query,
                                      const SearchParams& params, SearchPart part,
                                      SearchStates out) {
  if (params.codes) {
    StepCost sum;
    index::ListChoice* choice = nullptr;
    if (params.codes.lists != nullptr) {
      const Stopwatch ranking;
      list_choice_.begin(*params.codes.lists, *query.kernels, query.queries, query.group,
                         query.logits);
      const uint32_t ranks = index::ListChoice::rank_parts(params.codes.lists->lists());
      for (uint32_t p = 0; p < ranks; ++p) list_choice_.rank(p);
      list_choice_.choose(params.codes.goal);
      choice = &list_choice_;
      sum.search_seconds = ranking.seconds();
    }
    code_parts_.reserve(params.codes.shape(), query.group, params.exact_rows());
    for (uint32_t p = 0; p < params.codes.parts(); ++p) {
      sum += scan_codes(query, params, p, choice, code_parts_);
    }
    return sum += attend_codes(query, params, choice, code_parts_, out);
  }
  const Stopwatch watch;
  StepCost cost;
  index::Scored scored;
  if (params.attend == KEYHOLE_ATTEND_NONE) {
    attended_ = {};
  } else if (params.explores()) {
    explore(index, query, params, part, scored);
    attended_ = scored.rows;
    cost.keys_scored = scored.keys_scored;
    cost.bytes_read = scored.bytes_read;
  } else {
    (void)search(index, query, params, part);
    attended_ = union_.of(hits_, query.group, params.k);
    cost.keys_scored = hits_.keys_scored;
    cost.bytes_read = hits_.bytes_read;
  }
  cost.search_seconds = watch.seconds();
  attend(query, params, params.explores() && scored.exact ? &scored : nullptr, out, cost);
  return cost;
}

StepCost Selection::attend_codes(const GroupQuery& query, const SearchParams& params,
                                 index::ListChoice* choice, index::CodeParts& parts,
                                 SearchStates out) {
  const Stopwatch watch;
  StepCost cost;
  const index::CodeSearch search = code_search(query, params, choice);
  attended_ = code_scan_.choose(search, parts);
  cost.search_seconds = watch.seconds();
  query.attend(attended_, out.read);
  cost.offload_seconds = watch.seconds() - cost.search_seconds;
  code_scan_.finish(search, out.read.lse, parts, out.tail);
  const size_t chosen = attended_.size();
  const index::CodeDoubt doubt = code_scan_.settle(search, query.kv, parts, out.read, out.tail);
  attended_all_ = doubt.all;
  if (doubt.any && !doubt.all) attended_ = code_scan_.read_rows();
  cost.tail_seconds = watch.seconds() - cost.offload_seconds;
  cost.search_seconds = cost.tail_seconds;
  cost.keys_attended = uint64_t{query.group} * (chosen + doubt.more);
  cost.keys_opened = doubt.more;
  cost.codes_doubted = doubt.any ? 1 : 0;
  cost.codes_given_up = doubt.all ? 1 : 0;
  cost.bytes_read = 2 * (chosen + doubt.more) * query.row_bytes();
  return cost;
}

StepCost Selection::attend_parts(std::span<const index::Hits> hits, const GroupQuery& query,
                                 const SearchParams& params, SearchStates out) {
  const Stopwatch watch;
  StepCost cost;
  clear_hits();
  merge_hits(hits, query.group, params.k, hits_);
  attended_ = union_.of(hits_, query.group, params.k);
  cost.search_seconds = watch.seconds();
  attend(query, params, nullptr, out, cost);
  return cost;
}

void Selection::attend(const GroupQuery& query, const SearchParams& params,
                       const index::Scored* scored, SearchStates out, StepCost& cost) {
  const Stopwatch watch;
  const uint64_t values = attended_.size() * query.row_bytes();
  if (params.tail.tree != nullptr) {
    attend_with_tail(query, params, scored, out, cost);
    cost.bytes_read += scored != nullptr ? values : 2 * values;
  } else {
    if (scored != nullptr) cost.bytes_read += values;
    if (scored == nullptr ||
        !query.attend_scored(attended_, scored->scores, scored->stride, out.read)) {
      query.attend(attended_, out.read);
      cost.bytes_read += 2 * values;
    }
  }
  cost.keys_attended += uint64_t{query.group} * attended_.size();
  cost.offload_seconds = watch.seconds() - cost.tail_seconds;  // all but the estimates
}

void Selection::attend_with_tail(const GroupQuery& query, const SearchParams& params,
                                 const index::Scored* scored, SearchStates out, StepCost& cost) {
  TailReader::Found found{.rows = attended_};
  if (scored != nullptr) {
    found.scores = scored->scores;
    found.stride = scored->stride;
  }
  // Keys that a search for the best k did not return are taken to be no better than the k-th.
  float caps[kMaxGroup];
  if (params.attend == KEYHOLE_ATTEND_TOPK) {
    for (uint32_t h = 0; h < query.group; ++h) {
      const uint32_t n = hits_.counts[h];
      caps[h] = n < params.k
                    ? std::numeric_limits<float>::infinity()
                    : cpu::logit_of(hits_.scores[size_t{h} * params.k + n - 1], query.logits);
    }
    found.caps = caps;
    if (hits_.coverage != nullptr && coverage_[0] >= 0.0F) found.coverage = coverage_;
  }
  cost += tail_reader_.attend(query, params.tail, found, out);
  attended_ = tail_reader_.rows();
}

size_t Selection::bytes() const {
  return log_bytes_ + tail_reader_.bytes() + union_.bytes() + code_scan_.bytes() +
         code_parts_.bytes() + list_choice_.bytes() +
         (ids_.size() + counts_.size()) * sizeof(uint32_t) + scores_.size() * sizeof(float);
}

}  // namespace keyhole::runtime
