// The end of a pass over codes: the rows to be read exactly, and the state of all others.
#include <algorithm>
#include <cmath>

#include "cpu/code_doubt.h"
#include "index/scan/code_scan.h"

namespace keyhole::index {

void CodeScan::merge(const CodeSearch& s, const CodeParts& parts) {
  const uint32_t dim = s.shape().dim;
  const uint32_t n = s.rows.parts();
  for (uint32_t h = 0; h < s.group; ++h) {
    tops_[h] = kMinusInf;
    sums_[h] = 0.0F;
    for (uint32_t p = 0; p < n; ++p) tops_[h] = std::max(tops_[h], parts.tops_[parts.at(p, h)]);
    float* o = o_.data() + size_t{h} * dim;
    std::fill_n(o, dim, 0.0F);
    for (uint32_t p = 0; p < n; ++p) {
      const size_t at = parts.at(p, h);
      if (parts.tops_[at] == kMinusInf) continue;
      const float weight = std::exp(parts.tops_[at] - tops_[h]);
      if (weight == 0.0F) continue;
      sums_[h] += weight * parts.sums_[at];
      const float* from = parts.o_.data() + p * parts.o_stride_ + size_t{h} * dim;
      for (uint32_t j = 0; j < dim; ++j) o[j] += weight * from[j];
    }
  }
}

std::span<const uint32_t> CodeScan::choose(const CodeSearch& s, const CodeParts& parts) {
  begin(s);
  merge(s, parts);
  chosen_.clear();
  cut_ = kMinusInf;
  const size_t wanted = std::min<size_t>(s.wanted, s.rows.count());
  if (wanted == 0) return {};
  const uint32_t n = s.rows.parts();
  best_.begin(s.group, s.wanted, size_t{n} * s.wanted);
  size_t candidates = 0;
  for (uint32_t h = 0; h < s.group; ++h) {
    for (uint32_t p = 0; p < n; ++p) {
      const size_t at = parts.at(p, h);
      for (uint32_t i = 0; i < parts.counts_[at]; ++i) {
        best_.offer_rank(h, parts.best_[at * parts.wanted_ + i]);
      }
    }
    const float lse = tops_[h] + std::log(sums_[h]);
    coded_lses_[h] = lse;
    for (const uint64_t rank : best_.selected(h)) {
      candidates_[candidates++] = pack_rank(rank_score(rank) - lse, rank_row(rank));
    }
  }
  sort_ranks(candidates_.data(), spare_.data(), candidates);
  for (size_t i = 0; i < candidates && chosen_.size() < wanted; ++i) {
    const uint32_t row = rank_row(candidates_[i]);
    if (std::find(chosen_.begin(), chosen_.end(), row) != chosen_.end()) continue;
    chosen_.push_back(row);
    cut_ = rank_score(candidates_[i]);
  }
  chosen_rows_.clear();
  for (const uint32_t place : chosen_) chosen_rows_.push_back(s.row_at(place));
  return chosen_rows_;
}

bool CodeScan::take_out(const CodeSearch& s, const float* exact_lse) {
  const CodeShape& shape = s.shape();
  float before[kMaxGroup];
  std::copy_n(sums_, s.group, before);
  for (const uint32_t row : chosen_) {
    // The same kernels over the row's tile give the same log weights.
    float maxima[kMaxGroup], offsets[kMaxGroup];
    const CodeRun run = s.run(row / kCodeBlock);
    const uint32_t tile = row % kCodeBlock / kCodeTile;
    score_mean(s, run, offsets);
    weigh_tiles(s, run, offsets, tile, 1, s.query_parts(), 0, maxima, nullptr);
    CodeRunReader(shape, run).rotated_value(row % kCodeBlock, value_.data());
    for (uint32_t h = 0; h < s.group; ++h) {
      const float weight = std::exp(scores_[h * kCodeBlock + row % kCodeBlock] - tops_[h]);
      sums_[h] -= weight;
      float* o = o_.data() + size_t{h} * shape.dim;
      for (uint32_t j = 0; j < shape.dim; ++j) o[j] -= weight * value_[j];
    }
  }
  for (uint32_t h = 0; h < s.group; ++h) {
    if (before[h] == 0.0F) continue;
    const float kept = std::max(sums_[h], 0.0F) + std::exp(exact_lse[h] - tops_[h]);
    if (!(kLeastKept * before[h] <= kept)) return false;
  }
  return true;
}

void CodeScan::finish(const CodeSearch& s, const float* exact_lse, CodeParts& parts,
                      StateView out) {
  const bool none = chosen_.size() == s.rows.count();
  if (!none && !chosen_.empty() && !take_out(s, exact_lse)) {
    sorted_.assign(chosen_.begin(), chosen_.end());
    std::sort(sorted_.begin(), sorted_.end());
    scan_others(s, sorted_, parts);
  }
  put_state(s, none, out);
}

void CodeScan::scan_others(const CodeSearch& s, std::span<const uint32_t> places,
                           CodeParts& parts) {
  CodeSearch others = s;
  others.wanted = 0;
  const uint32_t n = s.rows.parts();
  for (uint32_t p = 0; p < n; ++p) scan(others, p, places, parts);
  merge(others, parts);
}

void CodeScan::put_state(const CodeSearch& s, bool none, StateView out) const {
  const uint32_t dim = s.shape().dim;
  for (uint32_t h = 0; h < s.group; ++h) {
    float* o = out.o + size_t{h} * dim;
    // Where all rows are exact, what is left of the weights is rounding.
    const bool empty = none || !(sums_[h] > 0.0F);
    out.lse[h] = empty ? kMinusInf : tops_[h] + std::log(sums_[h]);
    std::fill_n(o, dim, 0.0F);
    if (empty) continue;
    const float unit = s.rows.balance().value_scale / sums_[h];
    for (uint32_t j = 0; j < dim; ++j) o[j] = unit * o_[size_t{h} * dim + j];
    rotate_codes_back(o, dim);
  }
}

}  // namespace keyhole::index
