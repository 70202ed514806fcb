#include "index/scan/code_scan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/half.h"
#include "index/grow.h"

namespace keyhole::index {
namespace {

// Enough work (60 us for 2 bits and a group of 4) that a query's preparation, some 3 us, does not count.
constexpr uint32_t kLeastBlocks = 24;
// Where exact attention leaves less than this of what the codes weighed, what rounding has left of these would show.
constexpr float kLeastKept = 0.1F;
// Blocks still to come count as much as the mean of those before, but no more than so many times those.
constexpr float kMostAhead = 4.0F;

/// The share of all rows from which on a row is heavy.
constexpr float heavy_share(uint32_t bits) {
  return bits == 1 ? 1.0F / 4.0F : bits == 2 ? 1.0F / 8.0F : 1.0F / 32.0F;
}

constexpr auto kHalf = static_cast<size_t>(DType::f16);

const std::byte* factors_of(const CodeShape& shape, const std::byte* block, uint32_t tile) {
  return block + shape.factors_at() + size_t{tile} * kCodeTile * 4;
}

float noise_of(const CodeShape& shape, const std::byte* block) {
  float noise;
  std::memcpy(&noise, block + shape.noise_at(), sizeof noise);
  return noise;
}

uint32_t query_parts(const CodeShape& shape) { return shape.key_bits == 4 ? 2 : 1; }

/// To the larger of both.
void raise(std::atomic<float>& to, float x) {
  float seen = to.load(std::memory_order_relaxed);
  while (seen < x && !to.compare_exchange_weak(seen, x, std::memory_order_relaxed)) {
  }
}

}  // namespace

CodeCut code_cut(size_t blocks) {
  CodeCut cut;
  cut.blocks = std::max<uint32_t>(
      kLeastBlocks, static_cast<uint32_t>((blocks + kMostCodeParts - 1) / kMostCodeParts));
  cut.parts = static_cast<uint32_t>((blocks + cut.blocks - 1) / cut.blocks);
  return cut;
}

void CodeParts::reserve(const CodeShape& shape, uint32_t group, uint32_t wanted) {
  wanted = std::max(wanted_, std::min(wanted, kMostExactRows));
  const size_t o_stride = std::max(o_stride_, size_t{group} * shape.dim);
  group = std::max(group_, group);
  grow(o_, kMostCodeParts * o_stride);
  grow(tops_, size_t{kMostCodeParts} * group);
  grow(sums_, size_t{kMostCodeParts} * group);
  grow(counts_, size_t{kMostCodeParts} * group);
  grow(best_, size_t{kMostCodeParts} * group * wanted);
  if (floors_ == nullptr) floors_ = std::make_unique<std::atomic<float>[]>(kMaxGroup);
  // Last: nothing claims to have grown that has not.
  wanted_ = wanted;
  o_stride_ = o_stride;
  group_ = group;
  begin();
}

void CodeParts::begin() {
  for (uint32_t h = 0; h < group_; ++h) floors_[h].store(kMinusInf, std::memory_order_relaxed);
}

// ---- Memory --------------------------------------------------------------------------------------

bool CodeScan::fits(const CodeShape& shape, uint32_t group, uint32_t wanted) const {
  return group <= group_ && wanted <= wanted_ && value_.size() >= shape.dim &&
         parts_.size() >= group * cpu::code_query_bytes(shape) &&
         value_sums_.size() >= group * cpu::code_sum_size(shape);
}

void CodeScan::reserve(const CodeShape& shape, uint32_t group, uint32_t wanted) {
  if (fits(shape, group, wanted)) return;
  group = std::max(group, group_);
  wanted = std::max(wanted, wanted_);
  grow(rows_, size_t{group} * shape.dim);
  grow(parts_, group * cpu::code_query_bytes(shape));
  grow(scores_, size_t{group} * kCodeBlock);
  grow(value_sums_, group * cpu::code_sum_size(shape));
  grow(means_, size_t{group} * shape.dim);
  grow(o_, size_t{group} * shape.dim);
  grow(candidates_, size_t{group} * wanted);
  grow(spare_, size_t{group} * wanted);
  chosen_.reserve(wanted);
  sorted_.reserve(wanted);
  grow(value_, shape.dim);
  if (wanted != 0) best_.begin(group, wanted, SIZE_MAX / 2);
  group_ = group;
  wanted_ = wanted;
}

size_t CodeScan::bytes() const {
  return (rows_.size() + scores_.size() + value_sums_.size() + means_.size() + o_.size() +
          value_.size()) *
             sizeof(float) +
         parts_.size() + (candidates_.size() + spare_.size()) * sizeof(uint64_t);
}

// ---- The pass ------------------------------------------------------------------------------------

void CodeScan::begin(const CodeSearch& s) {
  const CodeShape& shape = s.codes->shape();
  reserve(shape, s.group, s.wanted);
  s.codes->rotate_queries(s.queries, s.group, rows_.data());
  const size_t bytes = cpu::code_query_bytes(shape);
  for (uint32_t h = 0; h < s.group; ++h) {
    const float* row = rows_.data() + size_t{h} * shape.dim;
    scales_[h] = cpu::prepare_code_query(shape, row, parts_.data() + h * bytes);
    double norm = 0.0;
    for (uint32_t j = 0; j < shape.dim; ++j) norm += double{row[j]} * row[j];
    norms_[h] = static_cast<float>(norm);
    tops_[h] = kMinusInf;
    sums_[h] = 0.0F;
  }
}

void CodeScan::scan(const CodeSearch& s, uint32_t part, std::span<const uint32_t> skipped,
                    CodeParts& out) {
  const CodeShape& shape = s.codes->shape();
  const CodeCut cut = code_cut(s.codes->blocks());
  const size_t first = size_t{part} * cut.blocks;
  const size_t end = std::min(s.codes->blocks(), first + cut.blocks);
  begin(s);
  std::fill_n(value_sums_.begin(), s.group * cpu::code_sum_size(shape), 0.0F);
  std::fill_n(means_.begin(), size_t{s.group} * shape.dim, 0.0F);
  if (s.wanted != 0) best_.begin(s.group, s.wanted, (end - first) * kCodeBlock);
  for (size_t b = first; b < end; ++b) scan_block(s, b, first, end, skipped, out.floors_.get());

  for (uint32_t h = 0; h < s.group; ++h) {
    float* o = out.o_.data() + part * out.o_stride_ + size_t{h} * shape.dim;
    const float* means = means_.data() + size_t{h} * shape.dim;
    if (shape.value_bits != 0) {
      cpu::fold_code_sum(shape, value_sums_.data() + h * cpu::code_sum_size(shape), o);
      for (uint32_t j = 0; j < shape.dim; ++j) o[j] += means[j];
    } else {
      std::copy_n(means, shape.dim, o);
    }
    const size_t at = out.at(part, h);
    out.tops_[at] = tops_[h];
    out.sums_[at] = sums_[h];
    out.counts_[at] = 0;
    if (s.wanted == 0) continue;
    const std::span<const uint64_t> best = best_.selected(h);
    std::copy(best.begin(), best.end(),
              out.best_.begin() + static_cast<std::ptrdiff_t>(at * out.wanted_));
    out.counts_[at] = static_cast<uint32_t>(best.size());
  }
}

void CodeScan::weigh_tiles(const CodeSearch& s, size_t number, uint32_t tile, uint32_t n,
                           uint32_t parts, float* maxima, float* floors) {
  const CodeShape& shape = s.codes->shape();
  const std::byte* block = s.codes->block(number);
  const bool whole = n == kCodeTiles;
  const float noise = noise_of(shape, block);
  float offsets[kMaxGroup], noises[kMaxGroup];
  for (uint32_t h = 0; h < s.group; ++h) noises[h] = norms_[h] * noise;
  s.kernels->score[kHalf]({.queries = rows_.data(),
                           .group = s.group,
                           .dim = shape.dim,
                           .keys = block + shape.key_mean_at(),
                           .key_stride = 0,
                           .ids = nullptr,
                           .count = 1,
                           .scores = offsets,
                           .score_stride = 1});
  s.kernels->score_codes({.bits = shape.key_bits,
                          .words = shape.key_words(),
                          .codes = block + size_t{tile} * kCodeLanes * shape.key_words() * 4,
                          .factors = factors_of(shape, block, tile),
                          .tiles = n,
                          .parts = parts,
                          .queries = parts_.data(),
                          .scales = scales_,
                          .group = s.group,
                          .offsets = offsets,
                          .noises = noises,
                          .logits = s.logits,
                          .scores = scores_.data(),
                          .stride = kCodeBlock,
                          .maxima = maxima,
                          .floors = floors,
                          .wanted = s.wanted,
                          .above = above_,
                          .ahead = whole ? block + shape.values_at() : nullptr,
                          .ahead_bytes = shape.value_bytes()});
}

const float* CodeScan::score(const CodeSearch& s, size_t block) {
  // A score is the log weight of a logit that is scaled by 1 and has no noise.
  CodeSearch plain = s;
  plain.logits = {1.0F, 0.0F};
  std::fill_n(norms_, s.group, 0.0F);
  float maxima[kMaxGroup];
  weigh_tiles(plain, block, 0, kCodeTiles, cpu::kCodeParts, maxima);
  return scores_.data();
}

bool CodeScan::is_heavy(const CodeSearch& s, size_t number, size_t blocks, const float* maxima) {
  const CodeShape& shape = s.codes->shape();
  if (number == 0) return true;
  const float ahead = std::min(static_cast<float>(blocks) / static_cast<float>(number), kMostAhead);
  const float share = heavy_share(std::max(shape.key_bits, shape.value_bits)) * ahead;
  for (uint32_t h = 0; h < s.group; ++h) {
    const float log_share = maxima[h] - tops_[h];
    // Weights of e^-20 and less are light beside the one that weighs 1.
    if (log_share < -20.0F) continue;
    if (!(std::exp(log_share) < share * sums_[h])) return true;
  }
  return false;
}

void CodeScan::offer_block(uint32_t group, uint32_t first) {
  for (uint32_t h = 0; h < group; ++h) {
    const float* scores = scores_.data() + h * kCodeBlock;
    for (uint32_t i = 0; i < kCodeBlock; i += 64) {
      uint64_t rows = 0;  // of four tiles
      for (uint32_t t = 0; t < 4; ++t) {
        rows |= uint64_t{above_[(h * kCodeBlock + i) / kCodeTile + t]} << (t * kCodeTile);
      }
      for (; rows != 0; rows &= rows - 1) {
        const uint32_t row = i + static_cast<uint32_t>(std::countr_zero(rows));
        best_.offer_rank(h, pack_rank(scores[row], first + row));
      }
    }
  }
}

void CodeScan::scan_block(const CodeSearch& s, size_t number, size_t begin, size_t end,
                          std::span<const uint32_t> skipped, std::atomic<float>* shared) {
  const CodeShape& shape = s.codes->shape();
  const std::byte* block = s.codes->block(number);
  const std::byte* factors = factors_of(shape, block, 0);
  const auto first = static_cast<uint32_t>(number * kCodeBlock);
  float maxima[kMaxGroup], rescales[kMaxGroup], weights[kMaxGroup];
  float floors[kMaxGroup];
  const bool finds_best = s.wanted != 0;
  for (uint32_t h = 0; h < s.group && finds_best; ++h) {
    floors[h] = std::max(best_.floor(h), shared[h].load(std::memory_order_relaxed));
  }
  weigh_tiles(s, number, 0, kCodeTiles, query_parts(shape), maxima, finds_best ? floors : nullptr);
  const bool heavy = is_heavy(s, number - begin, end - begin, maxima);
  auto skip = std::lower_bound(skipped.begin(), skipped.end(), first);
  const bool skips = skip != skipped.end() && *skip < first + kCodeBlock;
  for (; skip != skipped.end() && *skip < first + kCodeBlock; ++skip) {
    for (uint32_t h = 0; h < s.group; ++h) scores_[h * kCodeBlock + *skip - first] = kMinusInf;
  }
  if (finds_best) {
    offer_block(s.group, first);
    for (uint32_t h = 0; h < s.group; ++h) raise(shared[h], floors[h]);
  }
  bool some = false;
  for (uint32_t h = 0; h < s.group; ++h) {
    const float* of_head = scores_.data() + h * kCodeBlock;
    if (skips) maxima[h] = *std::max_element(of_head, of_head + kCodeBlock);
    rescales[h] = 1.0F;
    if (maxima[h] > tops_[h]) {
      rescales[h] = tops_[h] == kMinusInf ? 0.0F : std::exp(tops_[h] - maxima[h]);
      tops_[h] = maxima[h];
    }
    some = some || tops_[h] != kMinusInf;
  }
  if (!some) return;
  if (number + 1 < end) {
    // The kernel asks for the next block's keys. What is read before them lies at the block's end.
    const std::byte* next = s.codes->block(number + 1);
    for (size_t i = shape.factors_at(); i < shape.block_bytes(); i += 64) {
      __builtin_prefetch(next + i);
    }
  }
  s.kernels->sum_codes({.bits = shape.value_bits,
                        .words = shape.value_words(),
                        .codes = block + shape.values_at(),
                        .factors = factors,
                        .tiles = kCodeTiles,
                        .parts = heavy ? 2U : 1U,
                        .log_weights = scores_.data(),
                        .stride = kCodeBlock,
                        .group = s.group,
                        .tops = tops_,
                        .rescales = rescales,
                        .sums = value_sums_.data(),
                        .sum_size = cpu::code_sum_size(shape),
                        .weight_sums = weights,
                        .ahead = number + 1 < end ? s.codes->block(number + 1) : nullptr,
                        .ahead_bytes = shape.key_bytes()});
  for (uint32_t h = 0; h < s.group; ++h) {
    sums_[h] = sums_[h] * rescales[h] + weights[h];
    if (rescales[h] == 1.0F) continue;
    float* means = means_.data() + size_t{h} * shape.dim;
    for (uint32_t j = 0; j < shape.dim; ++j) means[j] *= rescales[h];
  }
  s.kernels->weighted_sum[kHalf]({.weights = weights,
                                  .weight_stride = 1,
                                  .group = s.group,
                                  .dim = shape.dim,
                                  .values = block + shape.value_mean_at(),
                                  .value_stride = 0,
                                  .ids = nullptr,
                                  .count = 1,
                                  .o = means_.data()});
}

// ---- The end -------------------------------------------------------------------------------------

void CodeScan::merge(const CodeSearch& s, const CodeParts& parts) {
  const uint32_t dim = s.codes->shape().dim;
  const uint32_t n = code_cut(s.codes->blocks()).parts;
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
  const size_t wanted = std::min<size_t>(s.wanted, s.codes->count());
  if (wanted == 0) return {};
  const uint32_t n = code_cut(s.codes->blocks()).parts;
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
    for (const uint64_t rank : best_.selected(h)) {
      candidates_[candidates++] = pack_rank(rank_score(rank) - lse, rank_row(rank));
    }
  }
  sort_ranks(candidates_.data(), spare_.data(), candidates);
  for (size_t i = 0; i < candidates && chosen_.size() < wanted; ++i) {
    const uint32_t row = rank_row(candidates_[i]);
    if (std::find(chosen_.begin(), chosen_.end(), row) == chosen_.end()) chosen_.push_back(row);
  }
  return chosen_;
}

bool CodeScan::take_out(const CodeSearch& s, const float* exact_lse) {
  const CodeShape& shape = s.codes->shape();
  float before[kMaxGroup];
  std::copy_n(sums_, s.group, before);
  for (const uint32_t row : chosen_) {
    // The same kernels over the row's tile: the same log weights.
    float maxima[kMaxGroup];
    weigh_tiles(s, row / kCodeBlock, row % kCodeBlock / kCodeTile, 1, query_parts(shape), maxima);
    s.codes->rotated_value(row, value_.data());
    for (uint32_t h = 0; h < s.group; ++h) {
      const float weight = std::exp(scores_[h * kCodeBlock + row % kCodeTile] - tops_[h]);
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
  const uint32_t dim = s.codes->shape().dim;
  const bool none = chosen_.size() == s.codes->count();
  if (!none && !chosen_.empty() && !take_out(s, exact_lse)) {
    sorted_.assign(chosen_.begin(), chosen_.end());
    std::sort(sorted_.begin(), sorted_.end());
    CodeSearch others = s;
    others.wanted = 0;
    const uint32_t n = code_cut(s.codes->blocks()).parts;
    for (uint32_t p = 0; p < n; ++p) scan(others, p, sorted_, parts);
    merge(others, parts);
  }
  for (uint32_t h = 0; h < s.group; ++h) {
    float* o = out.o + size_t{h} * dim;
    // What is left of the weights where all rows are exact is rounding.
    const bool empty = none || !(sums_[h] > 0.0F);
    out.lse[h] = empty ? kMinusInf : tops_[h] + std::log(sums_[h]);
    std::fill_n(o, dim, 0.0F);
    if (empty) continue;
    const float unit = s.codes->balance().value_scale / sums_[h];
    for (uint32_t j = 0; j < dim; ++j) o[j] = unit * o_[size_t{h} * dim + j];
    rotate_codes_back(o, dim);
  }
}

}  // namespace keyhole::index
