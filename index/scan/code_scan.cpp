#include "index/scan/code_scan.h"

#include <algorithm>
#include <bit>
#include <cmath>

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

// Mean values of lists that are added in one go: weights of a group of 4 are 4 KiB.
constexpr size_t kListsAtOnce = 256;

/// Of the rows of block or list `number`, see CodeSearch::run().
uint32_t first_place(size_t number) { return static_cast<uint32_t>(number * kCodeBlock); }

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
  grow(list_weights_, group * kListsAtOnce);
  grow(candidates_, size_t{group} * wanted);
  grow(spare_, size_t{group} * wanted);
  chosen_.reserve(wanted);
  sorted_.reserve(wanted);
  chosen_rows_.reserve(wanted);
  grow(value_, shape.dim);
  if (wanted != 0) best_.begin(group, wanted, SIZE_MAX / 2);
  group_ = group;
  wanted_ = wanted;
}

size_t CodeScan::bytes() const {
  return (rows_.size() + scores_.size() + value_sums_.size() + means_.size() + o_.size() +
          value_.size() + list_weights_.size()) *
             sizeof(float) +
         parts_.size() + (candidates_.size() + spare_.size()) * sizeof(uint64_t);
}

// ---- The pass ------------------------------------------------------------------------------------

void CodeScan::begin(const CodeSearch& s) {
  const CodeShape& shape = s.shape();
  reserve(shape, s.group, s.wanted);
  if (s.choice != nullptr) {
    std::copy_n(s.choice->rows(), size_t{s.group} * shape.dim, rows_.data());
    std::copy_n(s.choice->norms(), s.group, norms_);
  } else {
    rotate_queries(s.rows.balance(), s.queries, s.group, rows_.data(), norms_);
  }
  const size_t bytes = cpu::code_query_bytes(shape);
  for (uint32_t h = 0; h < s.group; ++h) {
    scales_[h] = cpu::prepare_code_query(shape, rows_.data() + size_t{h} * shape.dim,
                                         parts_.data() + h * bytes);
    tops_[h] = kMinusInf;
    sums_[h] = 0.0F;
  }
}

void CodeScan::scan(const CodeSearch& s, uint32_t part, std::span<const uint32_t> skipped,
                    CodeParts& out) {
  const CodeShape& shape = s.shape();
  begin(s);
  std::fill_n(value_sums_.begin(), s.group * cpu::code_sum_size(shape), 0.0F);
  std::fill_n(means_.begin(), size_t{s.group} * shape.dim, 0.0F);
  if (s.rows.blocks != nullptr) {
    scan_blocks(s, part, skipped, out.floors_.get());
  } else {
    scan_lists(s, part, skipped, out.floors_.get());
  }

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

void CodeScan::scan_blocks(const CodeSearch& s, uint32_t part, std::span<const uint32_t> skipped,
                           std::atomic<float>* floors) {
  const CodeCut cut = code_cut(s.rows.blocks->blocks());
  const size_t first = size_t{part} * cut.blocks;
  const size_t end = std::min(s.rows.blocks->blocks(), first + cut.blocks);
  if (s.wanted != 0) best_.begin(s.group, s.wanted, (end - first) * kCodeBlock);
  CodeRun run, next = s.run(first);
  for (size_t b = first; b < end; ++b) {
    run = next;
    if (b + 1 < end) next = s.run(b + 1);
    float offsets[kMaxGroup];
    score_mean(s, run, offsets);
    scan_run(s, run, first_place(b), offsets, b - first, end - first, b + 1 < end ? &next : nullptr,
             skipped, floors);
  }
}

void CodeScan::scan_lists(const CodeSearch& s, uint32_t part, std::span<const uint32_t> skipped,
                          std::atomic<float>* floors) {
  const ListChoice& choice = *s.choice;
  const uint32_t parts = s.rows.parts();
  const size_t lists = s.rows.lists->lists();
  add_means(s, lists * part / parts, lists * (part + 1) / parts);
  const std::span<const uint32_t> chosen = choice.chosen();
  const size_t first = chosen.size() * part / parts, end = chosen.size() * (part + 1) / parts;
  if (s.wanted != 0) best_.begin(s.group, s.wanted, (end - first) * kCodeBlock);
  if (first == end) return;
  CodeRun run, next = s.run(chosen[first]);
  for (size_t i = first; i < end; ++i) {
    run = next;
    if (i + 1 < end) next = s.run(chosen[i + 1]);
    float offsets[kMaxGroup];
    for (uint32_t h = 0; h < s.group; ++h) {
      offsets[h] = choice.scores()[h * choice.stride() + chosen[i]];
    }
    scan_run(s, run, first_place(chosen[i]), offsets, i - first, end - first,
             i + 1 < end ? &next : nullptr, skipped, floors);
  }
}

void CodeScan::add_means(const CodeSearch& s, size_t begin, size_t end) {
  const ListChoice& choice = *s.choice;
  const CodeLists& lists = *s.rows.lists;
  const uint32_t dim = s.shape().dim;
  std::copy_n(choice.tops(), s.group, tops_);
  for (size_t c = 0; c < lists.chunks(); ++c) {
    const CodeChunk& chunk = lists.chunk(c);
    const size_t first = lists.first_list(c);
    const size_t chunk_end = std::min(end, lists.first_list(c + 1));
    for (size_t from = std::max(begin, first); from < chunk_end; from += kListsAtOnce) {
      const size_t n = std::min(kListsAtOnce, chunk_end - from);
      const float* sizes = choice.left_sizes() + from;
      const float* spreads = chunk.spreads.data() + (from - first);
      s.kernels->weigh_partitions({.scores = choice.scores() + from,
                                   .score_stride = choice.stride(),
                                   .group = s.group,
                                   .count = n,
                                   .sizes = sizes,
                                   .variances = spreads,
                                   .square_norms = norms_,
                                   .logits = s.logits,
                                   .caps = choice.tops(),
                                   .shifts = choice.tops(),
                                   .weights = list_weights_.data(),
                                   .uncertainties = nullptr,
                                   .out_stride = kListsAtOnce});
      for (uint32_t h = 0; h < s.group; ++h) {
        float sum = 0.0F;
        for (size_t i = 0; i < n; ++i) sum += list_weights_[h * kListsAtOnce + i];
        sums_[h] += sum;
      }
      s.kernels->weighted_sum[kHalf]({.weights = list_weights_.data(),
                                      .weight_stride = kListsAtOnce,
                                      .group = s.group,
                                      .dim = dim,
                                      .values = lists.value_means(c) + (from - first) * dim * 2,
                                      .value_stride = size_t{dim} * 2,
                                      .ids = nullptr,
                                      .count = n,
                                      .o = means_.data()});
    }
  }
}

void CodeScan::raise_tops(uint32_t group, const float* tops, float* rescales) {
  for (uint32_t h = 0; h < group; ++h) {
    rescales[h] = 1.0F;
    if (tops[h] <= tops_[h]) continue;
    rescales[h] = tops_[h] == kMinusInf ? 0.0F : std::exp(tops_[h] - tops[h]);
    tops_[h] = tops[h];
  }
}

void CodeScan::score_mean(const CodeSearch& s, const CodeRun& run, float* offsets) const {
  s.kernels->score[kHalf]({.queries = rows_.data(),
                           .group = s.group,
                           .dim = s.shape().dim,
                           .keys = run.key_mean,
                           .key_stride = 0,
                           .ids = nullptr,
                           .count = 1,
                           .scores = offsets,
                           .score_stride = 1});
}

void CodeScan::weigh_tiles(const CodeSearch& s, const CodeRun& run, const float* offsets,
                           uint32_t tile, uint32_t n, uint32_t parts, uint32_t wanted,
                           float* maxima, float* floors) {
  const CodeShape& shape = s.shape();
  float noises[kMaxGroup];
  for (uint32_t h = 0; h < s.group; ++h) noises[h] = norms_[h] * run.noise;
  s.kernels->score_codes(
      {.bits = shape.key_bits,
       .words = shape.key_words(),
       .codes = run.keys + size_t{tile} * kCodeLanes * shape.key_words() * 4,
       .factors = run.factors + size_t{tile} * kCodeTile * 4,
       .tiles = n,
       .parts = parts,
       .queries = parts_.data(),
       .scales = scales_,
       .group = s.group,
       .offsets = offsets,
       .noises = noises,
       .logits = s.logits,
       .scores = scores_.data() + size_t{tile} * kCodeTile,
       .stride = kCodeBlock,
       .maxima = maxima,
       .floors = floors,
       .wanted = wanted,
       .above = above_,
       .ahead = n > 1 ? run.values : nullptr,
       .ahead_bytes = size_t{run.tiles()} * kCodeLanes * shape.value_words() * 4});
}

void CodeScan::weigh_run(const CodeSearch& s, const CodeRun& run, const float* offsets,
                         uint32_t parts, float* maxima, float* floors) {
  const uint32_t tiles = run.tiles(), over = tiles * kCodeTile - run.rows;
  // Rows that are none score as the mean does: the kernel must not count them among those that reach a floor. The
  // maximum may be theirs, which only makes the weights' unit larger.
  weigh_tiles(s, run, offsets, 0, tiles, parts, over == 0 ? s.wanted : kMostExactRows, maxima,
              floors);
  for (uint32_t h = 0; h < s.group && over != 0; ++h) {
    std::fill_n(scores_.data() + h * kCodeBlock + run.rows, over, kMinusInf);
    above_[h * tiles + tiles - 1] &= static_cast<uint16_t>(0xFFFFU >> over);
  }
}

const float* CodeScan::score(const CodeSearch& s, size_t number) {
  // A score is the log weight of a logit that is scaled by 1 and has no noise.
  CodeSearch plain = s;
  plain.logits = {1.0F, 0.0F};
  std::fill_n(norms_, s.group, 0.0F);
  float maxima[kMaxGroup], offsets[kMaxGroup];
  const CodeRun run = s.run(number);
  score_mean(s, run, offsets);
  weigh_run(plain, run, offsets, cpu::kCodeParts, maxima, nullptr);
  return scores_.data();
}

bool CodeScan::is_heavy(const CodeSearch& s, size_t number, size_t runs, const float* maxima) {
  const CodeShape& shape = s.shape();
  if (number == 0) return true;
  const float ahead = std::min(static_cast<float>(runs) / static_cast<float>(number), kMostAhead);
  const float share = heavy_share(std::max(shape.key_bits, shape.value_bits)) * ahead;
  for (uint32_t h = 0; h < s.group; ++h) {
    const float log_share = maxima[h] - tops_[h];
    // Weights of e^-20 and less are light beside the one that weighs 1.
    if (log_share < -20.0F) continue;
    if (!(std::exp(log_share) < share * sums_[h])) return true;
  }
  return false;
}

void CodeScan::offer_run(uint32_t group, uint32_t tiles, uint32_t first) {
  for (uint32_t h = 0; h < group; ++h) {
    const float* scores = scores_.data() + h * kCodeBlock;
    for (uint32_t tile = 0; tile < tiles; tile += 4) {
      uint64_t rows = 0;
      for (uint32_t t = tile; t < std::min(tile + 4, tiles); ++t) {
        rows |= uint64_t{above_[h * tiles + t]} << ((t - tile) * kCodeTile);
      }
      for (; rows != 0; rows &= rows - 1) {
        const uint32_t row = tile * kCodeTile + static_cast<uint32_t>(std::countr_zero(rows));
        best_.offer_rank(h, pack_rank(scores[row], first + row));
      }
    }
  }
}

void CodeScan::scan_run(const CodeSearch& s, const CodeRun& run, uint32_t first,
                        const float* offsets, size_t done, size_t runs, const CodeRun* next,
                        std::span<const uint32_t> skipped, std::atomic<float>* shared) {
  const CodeShape& shape = s.shape();
  float maxima[kMaxGroup], rescales[kMaxGroup], weights[kMaxGroup];
  float floors[kMaxGroup];
  const bool finds_best = s.wanted != 0;
  for (uint32_t h = 0; h < s.group && finds_best; ++h) {
    floors[h] = std::max(best_.floor(h), shared[h].load(std::memory_order_relaxed));
  }
  weigh_run(s, run, offsets, query_parts(shape), maxima, finds_best ? floors : nullptr);
  const bool heavy = is_heavy(s, done, runs, maxima);
  auto skip = std::lower_bound(skipped.begin(), skipped.end(), first);
  const bool skips = skip != skipped.end() && *skip < first + kCodeBlock;
  for (; skip != skipped.end() && *skip < first + kCodeBlock; ++skip) {
    for (uint32_t h = 0; h < s.group; ++h) scores_[h * kCodeBlock + *skip - first] = kMinusInf;
  }
  if (finds_best) {
    offer_run(s.group, run.tiles(), first);
    for (uint32_t h = 0; h < s.group; ++h) raise(shared[h], floors[h]);
  }
  for (uint32_t h = 0; h < s.group && skips; ++h) {
    const float* of_head = scores_.data() + h * kCodeBlock;
    maxima[h] = *std::max_element(of_head, of_head + run.tiles() * kCodeTile);
  }
  raise_tops(s.group, maxima, rescales);
  if (std::all_of(tops_, tops_ + s.group, [](float top) { return top == kMinusInf; })) return;
  if (next != nullptr) {
    // The kernel asks for the next run's keys. What is read before them lies at its end.
    for (size_t i = 0; i < size_t{next->tiles()} * kCodeTile * 4; i += 64) {
      __builtin_prefetch(next->factors + i);
    }
    for (size_t i = 0; i < size_t{shape.dim} * 2; i += 64) {
      __builtin_prefetch(next->key_mean + i);
      __builtin_prefetch(next->value_mean + i);
    }
  }
  s.kernels->sum_codes(
      {.bits = shape.value_bits,
       .words = shape.value_words(),
       .codes = run.values,
       .factors = run.factors,
       .tiles = run.tiles(),
       .parts = heavy ? 2U : 1U,
       .log_weights = scores_.data(),
       .stride = kCodeBlock,
       .group = s.group,
       .tops = tops_,
       .rescales = rescales,
       .sums = value_sums_.data(),
       .sum_size = cpu::code_sum_size(shape),
       .weight_sums = weights,
       .ahead = next != nullptr ? next->keys : nullptr,
       .ahead_bytes =
           next == nullptr ? 0 : size_t{next->tiles()} * kCodeLanes * shape.key_words() * 4});
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
                                  .values = run.value_mean,
                                  .value_stride = 0,
                                  .ids = nullptr,
                                  .count = 1,
                                  .o = means_.data()});
}

// ---- The end -------------------------------------------------------------------------------------

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
    for (const uint64_t rank : best_.selected(h)) {
      candidates_[candidates++] = pack_rank(rank_score(rank) - lse, rank_row(rank));
    }
  }
  sort_ranks(candidates_.data(), spare_.data(), candidates);
  for (size_t i = 0; i < candidates && chosen_.size() < wanted; ++i) {
    const uint32_t row = rank_row(candidates_[i]);
    if (std::find(chosen_.begin(), chosen_.end(), row) == chosen_.end()) chosen_.push_back(row);
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
    // The same kernels over the row's tile: the same log weights.
    float maxima[kMaxGroup], offsets[kMaxGroup];
    const CodeRun run = s.run(row / kCodeBlock);
    const uint32_t tile = row % kCodeBlock / kCodeTile;
    score_mean(s, run, offsets);
    weigh_tiles(s, run, offsets, tile, 1, query_parts(shape), 0, maxima, nullptr);
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
  const uint32_t dim = s.shape().dim;
  const bool none = chosen_.size() == s.rows.count();
  if (!none && !chosen_.empty() && !take_out(s, exact_lse)) {
    sorted_.assign(chosen_.begin(), chosen_.end());
    std::sort(sorted_.begin(), sorted_.end());
    CodeSearch others = s;
    others.wanted = 0;
    const uint32_t n = s.rows.parts();
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
    const float unit = s.rows.balance().value_scale / sums_[h];
    for (uint32_t j = 0; j < dim; ++j) o[j] = unit * o_[size_t{h} * dim + j];
    rotate_codes_back(o, dim);
  }
}

}  // namespace keyhole::index
