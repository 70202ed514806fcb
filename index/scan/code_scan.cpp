#include "index/scan/code_scan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cpu/half.h"
#include "cpu/row_access.h"
#include "index/grow.h"

namespace keyhole::index {
namespace {

// Blocks still to come are taken to weigh as much as those before do on average, which multiplies what has been seen
// by at most this factor.
constexpr float kMostAhead = 4.0F;

/// A row is heavy if its share of all rows' weight reaches this.
constexpr float heavy_share(uint32_t bits) {
  return bits == 1 ? 1.0F / 4.0F : bits == 2 ? 1.0F / 8.0F : 1.0F / 32.0F;
}

/// Raises `to` to x if that is larger.
void raise(std::atomic<float>& to, float x) {
  float seen = to.load(std::memory_order_relaxed);
  while (seen < x && !to.compare_exchange_weak(seen, x, std::memory_order_relaxed)) {
  }
}

}  // namespace

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
  chosen_rows_.reserve(wanted);
  grow(value_, shape.dim);
  if (wanted != 0) best_.begin(group, wanted, SIZE_MAX / 2);
  group_ = group;
  wanted_ = wanted;
}

size_t CodeScan::bytes() const {
  return (rows_.size() + scores_.size() + value_sums_.size() + means_.size() + o_.size() +
          value_.size()) *
             sizeof(float) +
         parts_.size() + (candidates_.size() + spare_.size()) * sizeof(uint64_t) +
         (places_.capacity() + read_rows_.capacity()) * sizeof(uint32_t);
}

// ---- The pass ------------------------------------------------------------------------------------

void CodeScan::begin(const CodeSearch& s) {
  const CodeAsker alone{s.queries, s.group, nullptr};
  begin(s, {&alone, 1});
}

void CodeScan::begin(const CodeSearch& s, std::span<const CodeAsker> askers) {
  const CodeShape& shape = s.shape();
  reserve(shape, s.group, s.wanted);
  if (s.choice != nullptr) {
    std::copy_n(s.choice->rows(), size_t{s.group} * shape.dim, rows_.data());
    std::copy_n(s.choice->norms(), s.group, norms_);
    has_beyond_ = s.choice->has_beyond();
  } else {
    uint32_t head = 0;  // of all
    has_beyond_ = false;
    for (const CodeAsker& asker : askers) {
      has_beyond_ = rotate_queries(s.rows.balance(), asker.queries, asker.group,
                                   rows_.data() + size_t{head} * shape.dim, norms_ + head) ||
                    has_beyond_;
      head += asker.group;
    }
  }
  const size_t bytes = cpu::code_query_bytes(shape);
  for (uint32_t h = 0; h < s.group; ++h) {
    scales_[h] = cpu::prepare_code_query(shape, rows_.data() + size_t{h} * shape.dim,
                                         parts_.data() + h * bytes);
    tops_[h] = kMinusInf;
    sums_[h] = 0.0F;
  }
  widest_ = 0.0F;
}

void CodeScan::scan(const CodeSearch& s, uint32_t part, std::span<const uint32_t> skipped,
                    std::span<const CodeAsker> askers) {
  const CodeShape& shape = s.shape();
  begin(s, askers);
  std::fill_n(value_sums_.begin(), s.group * cpu::code_sum_size(shape), 0.0F);
  std::fill_n(means_.begin(), size_t{s.group} * shape.dim, 0.0F);
  if (s.rows.blocks != nullptr) {
    scan_blocks(s, part, skipped, askers);
  } else {
    scan_lists(s, part, skipped, askers);
  }

  uint32_t head = 0;  // of all
  for (const CodeAsker& asker : askers) {
    CodeParts& out = *asker.out;
    out.widest_[part] = widest_;
    for (uint32_t h = 0; h < asker.group; ++h, ++head) {
      float* o = out.o_.data() + part * out.o_stride_ + size_t{h} * shape.dim;
      const float* means = means_.data() + size_t{head} * shape.dim;
      if (shape.value_bits != 0) {
        cpu::fold_code_sum(shape, value_sums_.data() + head * cpu::code_sum_size(shape), o);
        for (uint32_t j = 0; j < shape.dim; ++j) o[j] += means[j];
      } else {
        std::copy_n(means, shape.dim, o);
      }
      const size_t at = out.at(part, h);
      out.tops_[at] = tops_[head];
      out.sums_[at] = sums_[head];
      out.counts_[at] = 0;
      if (s.wanted == 0) continue;
      const std::span<const uint64_t> best = best_.selected(head);
      std::copy(best.begin(), best.end(),
                out.best_.begin() + static_cast<std::ptrdiff_t>(at * out.wanted_));
      out.counts_[at] = static_cast<uint32_t>(best.size());
    }
  }
}

void CodeScan::scan_blocks(const CodeSearch& s, uint32_t part, std::span<const uint32_t> skipped,
                           std::span<const CodeAsker> askers) {
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
             skipped, askers);
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
  cpu::score_rows(*s.kernels, dense_rows(run.key_mean, 1, s.shape().dim, DType::f16), rows_.data(),
                  s.group, nullptr, 1, offsets, 1);
}

void CodeScan::weigh_tiles(const CodeSearch& s, const CodeRun& run, const float* offsets,
                           uint32_t tile, uint32_t n, uint32_t parts, uint32_t wanted,
                           float* maxima, float* floors) {
  const CodeShape& shape = s.shape();
  float noises[kMaxGroup], widest;
  for (uint32_t h = 0; h < s.group; ++h) noises[h] = norms_[h] * run.noise;
  s.kernels->score_codes({.bits = shape.key_bits,
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
                          .ahead_bytes = size_t{run.tiles()} * kCodeLanes * shape.value_words() * 4,
                          .widest = &widest});
  widest_ = std::max(widest_, run.noise < kUnknownNoise ? widest * widest * run.noise
                                                        : std::numeric_limits<float>::infinity());
}

void CodeScan::weigh_run(const CodeSearch& s, const CodeRun& run, const float* offsets,
                         uint32_t parts, float* maxima, float* floors) {
  const uint32_t tiles = run.tiles(), over = tiles * kCodeTile - run.rows;
  // Rows that do not exist score like the mean: the kernel must not count them among those that reach a floor. The
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

bool CodeScan::is_heavy(const CodeShape& shape, uint32_t head, uint32_t heads, size_t number,
                        size_t runs, const float* maxima) {
  if (number == 0) return true;
  const float ahead = std::min(static_cast<float>(runs) / static_cast<float>(number), kMostAhead);
  const float share = heavy_share(std::max(shape.key_bits, shape.value_bits)) * ahead;
  for (uint32_t h = head; h < head + heads; ++h) {
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
                        std::span<const uint32_t> skipped, std::span<const CodeAsker> askers) {
  const CodeShape& shape = s.shape();
  float maxima[kMaxGroup], rescales[kMaxGroup];
  float floors[kMaxGroup];
  const bool finds_best = s.wanted != 0;
  const auto for_all_floors = [&](auto&& body) {
    uint32_t head = 0;
    for (const CodeAsker& asker : askers) {
      for (uint32_t h = 0; h < asker.group && finds_best; ++h) body(asker.out->floors_[h], head++);
    }
  };
  for_all_floors([&](const std::atomic<float>& shared, uint32_t h) {
    floors[h] = std::max(best_.floor(h), shared.load(std::memory_order_relaxed));
  });
  weigh_run(s, run, offsets, s.query_parts(), maxima, finds_best ? floors : nullptr);
  // How finely an asker's weights are rounded depends on its own heads.
  bool heavy[kMaxGroup];
  uint32_t head = 0;
  for (size_t i = 0; i < askers.size(); ++i) {
    heavy[i] = is_heavy(shape, head, askers[i].group, done, runs, maxima);
    head += askers[i].group;
  }
  auto skip = std::lower_bound(skipped.begin(), skipped.end(), first);
  const bool skips = skip != skipped.end() && *skip < first + kCodeBlock;
  for (; skip != skipped.end() && *skip < first + kCodeBlock; ++skip) {
    for (uint32_t h = 0; h < s.group; ++h) scores_[h * kCodeBlock + *skip - first] = kMinusInf;
  }
  if (finds_best) {
    offer_run(s.group, run.tiles(), first);
    for_all_floors([&](std::atomic<float>& shared, uint32_t h) { raise(shared, floors[h]); });
  }
  for (uint32_t h = 0; h < s.group && skips; ++h) {
    const float* of_head = scores_.data() + h * kCodeBlock;
    maxima[h] = *std::max_element(of_head, of_head + run.tiles() * kCodeTile);
  }
  raise_tops(s.group, maxima, rescales);
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
  // Takes neighbouring askers whose weights are rounded alike in one call, and leaves out those with nothing but
  // skipped rows.
  const auto parts_of = [&](size_t i, uint32_t from) {
    const bool some = std::any_of(tops_ + from, tops_ + from + askers[i].group,
                                  [](float top) { return top != kMinusInf; });
    return !some ? 0U : heavy[i] ? 2U : 1U;
  };
  head = 0;
  for (size_t i = 0; i < askers.size();) {
    const uint32_t from = head, parts = parts_of(i, head);
    do {
      head += askers[i++].group;
    } while (i < askers.size() && parts_of(i, head) == parts);
    if (parts != 0) sum_run(shape, *s.kernels, run, next, from, head - from, parts, rescales);
  }
}

void CodeScan::sum_run(const CodeShape& shape, const cpu::Kernels& kernels, const CodeRun& run,
                       const CodeRun* next, uint32_t head, uint32_t heads, uint32_t parts,
                       const float* rescales) {
  float weights[kMaxGroup];
  kernels.sum_codes(
      {.bits = shape.value_bits,
       .words = shape.value_words(),
       .codes = run.values,
       .factors = run.factors,
       .tiles = run.tiles(),
       .parts = parts,
       .log_weights = scores_.data() + size_t{head} * kCodeBlock,
       .stride = kCodeBlock,
       .group = heads,
       .tops = tops_ + head,
       .rescales = rescales + head,
       .sums = value_sums_.data() + head * cpu::code_sum_size(shape),
       .sum_size = cpu::code_sum_size(shape),
       .weight_sums = weights,
       .ahead = next != nullptr ? next->keys : nullptr,
       .ahead_bytes =
           next == nullptr ? 0 : size_t{next->tiles()} * kCodeLanes * shape.key_words() * 4});
  float* const means = means_.data() + size_t{head} * shape.dim;
  for (uint32_t h = 0; h < heads; ++h) {
    const float rescale = rescales[head + h];
    sums_[head + h] = sums_[head + h] * rescale + weights[h];
    if (rescale == 1.0F) continue;
    for (uint32_t j = 0; j < shape.dim; ++j) means[size_t{h} * shape.dim + j] *= rescale;
  }
  kernels.weighted_sum[kHalf]({.weights = weights,
                               .weight_stride = 1,
                               .group = heads,
                               .values = dense_rows(run.value_mean, 1, shape.dim, DType::f16),
                               .ids = nullptr,
                               .count = 1,
                               .o = means});
}

}  // namespace keyhole::index
