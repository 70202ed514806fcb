#include "runtime/prefill/host_prompt.h"

#include <algorithm>
#include <string>

#include "runtime/prefill/block_choice.h"

namespace keyhole::runtime {
namespace {

constexpr gpu::SliceLimits kLimits;
constexpr size_t kListBytes = 2;  // of a block's number on a device
constexpr uint32_t kMostLines = 16384;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::invalid_argument, "attention of a prompt: " + text);
}

uint32_t blocks_of(uint32_t rows) {
  return rows / cpu::kPromptRows + (rows % cpu::kPromptRows != 0 ? 1 : 0);
}

bool is_dense(const cpu::PromptPiece& p, const gpu::PromptPattern& pattern) {
  return pattern.dense || p.window != 0 || p.rows <= pattern.dense_rows;
}

bool has_lines(const gpu::PromptPattern& p) {
  return p.choice == gpu::PromptChoice::vertical_slash;
}

/// One query, or group of queries, in so many has weights; 0: none has.
uint32_t stride_of(const gpu::PromptPattern& p) {
  if (has_lines(p)) return 0;
  return p.choice == gpu::PromptChoice::pooled ? cpu::kMeanQueries : p.stride;
}

LineRule line_rule(const gpu::PromptPattern& p) {
  return {p.columns, p.slashes, blocks_of(p.first_rows), blocks_of(p.near_rows)};
}

void check_pattern(const gpu::PromptPattern& p) {
  if (p.dense) return;
  if (!(p.mass >= 0.0F && p.mass <= 1.0F)) {
    refuse("a mass of " + std::to_string(p.mass) + ", allowed: 0..1");
  }
  if (p.block_rows != cpu::kPromptRows && p.block_rows != 2 * cpu::kPromptRows) {
    refuse("blocks of " + std::to_string(p.block_rows) + " rows, allowed: 64, 128");
  }
  switch (p.choice) {
    case gpu::PromptChoice::sampled:
      if (p.stride <= cpu::kPromptQueries) return;
      refuse("a stride of " + std::to_string(p.stride) + ", allowed: 0.." +
             std::to_string(cpu::kPromptQueries));
    case gpu::PromptChoice::pooled: return;
    case gpu::PromptChoice::vertical_slash:
      if (p.columns <= kMostLines && p.slashes <= kMostLines && p.queries >= 1 &&
          p.queries <= cpu::kMostLineQueries) {
        return;
      }
      refuse(std::to_string(p.columns) + " columns and " + std::to_string(p.slashes) +
             " diagonals of " + std::to_string(p.queries) + " queries, allowed: 0.." +
             std::to_string(kMostLines) + " of both and 1.." +
             std::to_string(cpu::kMostLineQueries));
  }
}

/// Columns and diagonals of a head, and what is kept beside them.
size_t line_bytes(uint32_t rows) { return size_t{4} * rows * sizeof(float); }

/// All blocks that a tile sees.
uint32_t list_all(const cpu::PromptPiece& piece, uint32_t tile, uint32_t* list) {
  const cpu::PromptPiece::Span seen = piece.seen(tile);
  for (uint32_t b = seen.begin; b < seen.end; ++b) list[b - seen.begin] = b;
  return seen.end - seen.begin;
}

}  // namespace

HostPrompt::HostPrompt(const gpu::PromptShape& shape, const cpu::Kernels& kernels, cpu::Pool& pool)
    : shape_(shape),
      pool_(&pool),
      attention_(kernels, pool),
      samples_(kernels, pool),
      groups_(kernels, pool),
      line_weights_(kernels, pool) {}

cpu::PromptPiece HostPrompt::piece_of(const gpu::PromptStretch& s) const {
  cpu::PromptPiece p;
  p.q = s.q;
  p.k = RowsView{s.k};
  p.v = RowsView{s.v};
  p.out = s.out;
  p.lse = s.lse;
  p.sinks = s.sinks;
  p.n = s.n;
  p.rows = s.rows;
  p.q_heads = shape_.q_heads;
  p.kv_heads = shape_.kv_heads;
  p.head_dim = shape_.head_dim;
  p.window = s.window;
  p.logits = s.logits;
  return p;
}

void HostPrompt::attend(const gpu::PromptStretch& s, std::span<const gpu::PromptPattern> patterns,
                        gpu::Stream) {
  for (const DType dtype : {s.q.dtype, s.k.dtype, s.v.dtype, s.out.dtype}) {
    if (dtype == DType::i8) refuse("numbers in i8, allowed: f32, f16, bf16");
  }
  attend(piece_of(s), patterns);
}

HostPrompt::Plan HostPrompt::plan(const cpu::PromptPiece& piece,
                                  std::span<const gpu::PromptPattern> patterns) const {
  if (patterns.size() != 1 && patterns.size() != shape_.q_heads) {
    refuse(std::to_string(patterns.size()) + " patterns, needed: one, or one for each of " +
           std::to_string(shape_.q_heads) + " query heads");
  }
  if (piece.n > piece.rows) {
    refuse(std::to_string(piece.n) + " queries of " + std::to_string(piece.rows) +
           " tokens, allowed: no more than these");
  }
  for (const gpu::PromptPattern& p : patterns) check_pattern(p);
  Plan plan;
  bool all_dense = true;
  for (uint32_t h = 0; h < shape_.q_heads; ++h) {
    const gpu::PromptPattern* pattern = &patterns[patterns.size() == 1 ? 0 : h];
    if (is_dense(piece, *pattern)) pattern = nullptr;
    const auto same = std::find_if(plan.groups.begin(), plan.groups.end(), [&](const Heads& g) {
      return pattern == nullptr || g.pattern == nullptr ? pattern == g.pattern
                                                        : *pattern == *g.pattern;
    });
    if (same == plan.groups.end()) {
      plan.groups.push_back({pattern, {h}});
    } else {
      same->heads.push_back(h);
    }
    if (pattern == nullptr) continue;
    all_dense = false;
    plan.has_lines = plan.has_lines || has_lines(*pattern);
    if (has_lines(*pattern))
      plan.columns = std::max(plan.columns, std::min(pattern->columns, piece.rows));
    if (const uint32_t stride = stride_of(*pattern); stride != 0) {
      plan.samples =
          std::max(plan.samples, cpu::SampledQueries{cpu::kPromptQueries, stride}.count());
    }
  }
  if (all_dense) return plan;
  const size_t of_tile = size_t{shape_.q_heads} *
                         (blocks_of(piece.rows) * (plan.samples * sizeof(float) + kListBytes) +
                          plan.columns * sizeof(uint32_t));
  plan.tiles = kLimits.tiles(of_tile, piece.tiles());
  return plan;
}

void HostPrompt::attend(const cpu::PromptPiece& piece,
                        std::span<const gpu::PromptPattern> patterns) {
  const Plan plan = this->plan(piece, patterns);
  if (piece.n == 0) return;
  if (plan.tiles == 0) return attention_.attend(piece, {});
  const uint32_t at_once = plan.tiles * cpu::kPromptQueries, slice = std::min(at_once, piece.n);
  row_capacity_ = plan.columns;
  find_lines(piece, piece.n - slice + (slice - 1) / cpu::kPromptQueries * cpu::kPromptQueries,
             plan.groups);
  // From the end back, so that all but the first take whole tiles of queries.
  for (uint32_t end = piece.n; end > 0;) {
    const uint32_t n = std::min(at_once, end), begin = end - n;
    attend_slice(piece, begin, n, plan.groups);
    end = begin;
  }
}

size_t HostPrompt::bytes_for(const cpu::PromptPiece& piece,
                             std::span<const gpu::PromptPattern> patterns) const {
  const Plan plan = this->plan(piece, patterns);
  if (plan.tiles == 0) return 0;
  const size_t lists = size_t{plan.tiles} * shape_.q_heads, blocks = blocks_of(piece.rows);
  const uint32_t line_heads =
      plan.has_lines ? kLimits.heads(line_bytes(piece.rows), shape_.q_heads) : 0;
  const size_t weights =
      std::max(lists * plan.samples * blocks, size_t{2} * line_heads * piece.rows);
  return weights * sizeof(float) + lists * (blocks + plan.columns + 2) * sizeof(uint32_t) +
         lists * sizeof(uint64_t);
}

void HostPrompt::find_lines(const cpu::PromptPiece& piece, uint32_t last_tile,
                            std::span<const Heads> groups) {
  const size_t of_head = line_bytes(piece.rows);
  const size_t at_once = kLimits.heads(of_head, shape_.q_heads);
  for (const Heads& group : groups) {
    if (group.pattern == nullptr || !has_lines(*group.pattern)) continue;
    lines_.resize(shape_.q_heads);
    const LineRule rule = line_rule(*group.pattern);
    const uint32_t queries = std::min(group.pattern->queries, piece.n);
    for (size_t first = 0; first < group.heads.size(); first += at_once) {
      const auto heads =
          std::span(group.heads).subspan(first, std::min(at_once, group.heads.size() - first));
      const size_t count = heads.size() * piece.rows;
      weights_.resize(std::max(weights_.size(), 2 * count));
      float* const slashes = weights_.data() + count;
      line_weights_.compute(piece, queries, heads, weights_.data(), slashes);
      pool_->run(static_cast<uint32_t>(heads.size()), [&](uint32_t i, uint32_t) {
        const size_t at = size_t{i} * piece.rows;
        lines_[heads[i]] = choose_lines(piece, last_tile, rule, weights_.data() + at, slashes + at);
      });
    }
  }
}

void HostPrompt::attend_slice(cpu::PromptPiece p, uint32_t begin, uint32_t n,
                              std::span<const Heads> groups) {
  p.rows = p.position(begin) + n;
  p.n = n;
  p.q = p.q.slice(begin, n);
  p.out = p.out.slice(begin, n);
  if (p.lse != nullptr) p.lse += size_t{begin} * p.q_heads;
  counts_.resize(size_t{p.q_heads} * p.tiles());
  lists_.resize(counts_.size() * p.blocks());
  row_counts_.assign(counts_.size(), 0);
  rows_.resize(counts_.size() * row_capacity_);
  for (const Heads& group : groups) choose(p, group);
  attention_.attend(p, {counts_.data(), lists_.data(), p.blocks(), row_counts_.data(), rows_.data(),
                        row_capacity_});
  for (uint32_t tile = 0; tile < p.tiles(); ++tile) {
    const cpu::PromptPiece::Span seen = p.seen(tile);
    totals_.seen += uint64_t{p.q_heads} * (seen.end - seen.begin);
  }
  for (const uint32_t count : counts_) totals_.attended += count;
  for (const uint32_t count : row_counts_) totals_.attended += blocks_of(count);
}

uint32_t HostPrompt::weigh(const cpu::PromptPiece& p, const Heads& group) {
  const gpu::PromptPattern& pattern = *group.pattern;
  const uint32_t stride = stride_of(pattern);
  if (stride == 0) return 0;
  const cpu::SampledQueries samples{p.n, stride};
  const size_t count = group.heads.size() * samples.count() * p.blocks();
  weights_.resize(std::max(weights_.size(), count));
  switch (pattern.choice) {
    case gpu::PromptChoice::pooled: groups_.means(p, group.heads, weights_.data()); break;
    default: samples_.compute(p, samples, group.heads, weights_.data());
  }
  return stride;
}

void HostPrompt::choose(const cpu::PromptPiece& p, const Heads& group) {
  const uint32_t tiles = p.tiles();
  const auto heads = static_cast<uint32_t>(group.heads.size());
  const auto list_of = [&](size_t at) { return lists_.data() + at * p.blocks(); };
  if (group.pattern == nullptr) {
    for (const uint32_t head : group.heads) {
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const size_t at = size_t{head} * tiles + tile;
        counts_[at] = list_all(p, tile, list_of(at));
      }
    }
    return;
  }
  const gpu::PromptPattern& pattern = *group.pattern;
  if (has_lines(pattern)) return choose_lines_of(p, group);
  const uint32_t stride = weigh(p, group);
  // Groups of queries are as many as queries would be, and those of a tile have the same numbers.
  const cpu::SampledQueries samples{p.n, stride};
  const BlockRule rule{blocks_of(pattern.first_rows), blocks_of(pattern.near_rows), pattern.mass,
                       pattern.choice == gpu::PromptChoice::pooled ? pattern.blocks : 0,
                       pattern.block_rows / cpu::kPromptRows};
  looked_up_.assign(size_t{heads} * tiles, 0);
  pool_->run(heads * tiles, [&](uint32_t task, uint32_t) {
    const uint32_t i = task / tiles, tile = task % tiles;
    TileWeights weights;
    if (stride != 0) {
      const uint32_t first = tile * cpu::kPromptQueries;
      const uint32_t from = samples.from(first);
      const uint32_t to = samples.from(std::min(first + cpu::kPromptQueries, p.n));
      weights = {weights_.data() + (size_t{i} * samples.count() + from) * p.blocks(), to - from,
                 p.blocks()};
    }
    const size_t at = size_t{group.heads[i]} * tiles + tile;
    const TileChoice choice = choose_blocks(p, tile, rule, weights, list_of(at));
    counts_[at] = choice.count;
    looked_up_[task] = choice.looked_up;
  });
  const bool is_sampled = pattern.choice == gpu::PromptChoice::sampled && stride != 0;
  if (!is_sampled || pattern.lookups >= 1.0F) return;
  for (uint32_t i = 0; i < heads; ++i) {
    uint64_t looked_up = 0;
    for (uint32_t tile = 0; tile < tiles; ++tile) looked_up += looked_up_[i * tiles + tile];
    const auto allowed = static_cast<uint64_t>(double{pattern.lookups} * kShareUnits) * tiles;
    if (looked_up <= allowed) continue;
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const size_t at = size_t{group.heads[i]} * tiles + tile;
      counts_[at] = list_all(p, tile, list_of(at));
    }
  }
}

void HostPrompt::choose_lines_of(const cpu::PromptPiece& p, const Heads& group) {
  const uint32_t tiles = p.tiles();
  const LineRule rule = line_rule(*group.pattern);
  pool_->run(static_cast<uint32_t>(group.heads.size()) * tiles, [&](uint32_t task, uint32_t) {
    const uint32_t head = group.heads[task / tiles], tile = task % tiles;
    const size_t at = size_t{head} * tiles + tile;
    const TileLines lines = list_lines(p, tile, rule, lines_[head], lists_.data() + at * p.blocks(),
                                       rows_.data() + at * row_capacity_);
    counts_[at] = lines.blocks;
    row_counts_[at] = lines.rows;
  });
}

size_t HostPrompt::bytes() const {
  return weights_.capacity() * sizeof(float) +
         (counts_.capacity() + lists_.capacity() + row_counts_.capacity() + rows_.capacity()) *
             sizeof(uint32_t) +
         looked_up_.capacity() * sizeof(uint64_t);
}

}  // namespace keyhole::runtime
