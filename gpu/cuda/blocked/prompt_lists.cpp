#include "gpu/cuda/blocked/prompt_lists.h"

#include <algorithm>
#include <utility>

#include "gpu/cuda/blocked/group_weights.h"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"

namespace keyhole::gpu {
namespace {

uint32_t blocks_of(uint32_t rows) { return (rows + kListRows - 1) / kListRows; }

bool has_lines(const PromptPattern& p) {
  return !p.dense && p.choice == PromptChoice::vertical_slash;
}
/// One query in so many has weights; 0: none has.
uint32_t stride_of(const PromptPattern& p) {
  if (p.dense || p.choice == PromptChoice::vertical_slash) return 0;
  return p.choice == PromptChoice::pooled ? kMeanQueries : p.stride;
}

}  // namespace

std::vector<PatternHeads> group_patterns(std::span<const PromptPattern> patterns, uint32_t rows) {
  std::vector<PatternHeads> groups;
  for (size_t i = 0; i < patterns.size(); ++i) {
    PromptPattern pattern = patterns[i];
    if (!pattern.dense && rows <= pattern.dense_rows) pattern = {};
    auto same = std::find_if(groups.begin(), groups.end(),
                             [&](const PatternHeads& g) { return g.pattern == pattern; });
    if (same == groups.end()) same = groups.insert(groups.end(), {pattern, {}});
    if (patterns.size() > 1) same->heads.add(static_cast<uint32_t>(i));
  }
  if (groups.size() == 1) groups[0].heads = {};
  return groups;
}

/// In bytes.
struct PromptLists::Sizes {
  size_t weights = 0, query_means = 0, row_means = 0;
  size_t tiles_and_heads = 0, blocks = 0;
};

uint32_t PromptLists::begin(const BlockedParams& stretch, DType dtype,
                            std::span<const PatternHeads> patterns, cudaStream_t stream) {
  dtype_ = dtype;
  groups_.assign(patterns.begin(), patterns.end());
  column_capacity_ = slash_capacity_ = 0;
  uint32_t samples = 0;
  bool pools = false;
  for (const PatternHeads& g : groups_) {
    const PromptPattern& p = g.pattern;
    if (has_lines(p)) {
      column_capacity_ = std::max({column_capacity_, kListRows, blocks_of(p.columns) * kListRows});
      slash_capacity_ = std::max({slash_capacity_, 1U, p.slashes});
    }
    if (const uint32_t stride = stride_of(p); stride != 0)
      samples = std::max(samples, sampled_queries(kListQueries, stride));
    pools = pools || (!p.dense && p.choice == PromptChoice::pooled);
  }
  const uint32_t blocks = blocks_of(stretch.rows);
  const size_t list = blocks * (samples * sizeof(float) + sizeof(uint16_t));
  const size_t state = kListQueries * (shape_.head_dim * sizeof(float) + sizeof(float2));
  const size_t of_tile =
      shape_.q_heads * (list + (column_capacity_ == 0 ? 0 : state + column_capacity_ / 8));
  const uint32_t tiles = limits_.tiles(of_tile, (stretch.n + kListQueries - 1) / kListQueries);

  Sizes sizes;
  sizes.tiles_and_heads = size_t{tiles} * shape_.q_heads;
  sizes.blocks = blocks;
  sizes.weights = sizes.tiles_and_heads * samples * blocks * sizeof(float);
  const size_t row = shape_.head_dim * dtype_size(dtype);
  if (pools) {
    sizes.query_means = sizes.tiles_and_heads * (kListQueries / kMeanQueries) * row;
    sizes.row_means = size_t{shape_.kv_heads} * blocks * row;
  }
  if (column_capacity_ != 0) {
    const size_t of_head = LineWeights::bytes_of_head(stretch.rows);
    line_heads_ = limits_.heads(of_head, shape_.q_heads);
    sizes.weights = std::max(sizes.weights, line_heads_ * of_head);
  }
  reserve(sizes);

  const uint32_t slice = std::min(tiles * kListQueries, stretch.n);
  last_tile_ = stretch.n - slice + (slice - 1) / kListQueries * kListQueries;
  if (column_capacity_ != 0) find_lines(stretch, stream);
  return tiles * kListQueries;
}

Lines PromptLists::lines_of(const PromptPattern& p, const HeadSet& heads) const {
  Lines l;
  l.columns = p.columns;
  l.slashes = p.slashes;
  l.first_blocks = blocks_of(p.first_rows);
  l.near_blocks = blocks_of(p.near_rows);
  l.last_tile = last_tile_;
  l.capacity = column_capacity_;
  l.slash_capacity = slash_capacity_;
  l.counts = line_counts_.as<uint32_t>();
  l.rows = line_rows_.as<uint32_t>();
  l.distances = distances_.as<uint32_t>();
  l.keys = keys_.as<std::byte>();
  l.values = values_.as<std::byte>();
  l.heads = heads;
  return l;
}

void PromptLists::find_lines(const BlockedParams& stretch, cudaStream_t stream) {
  for (const PatternHeads& g : groups_) {
    if (!has_lines(g.pattern)) continue;
    const Lines lines = lines_of(g.pattern, g.heads);
    for (uint32_t first = 0; first < shape_.q_heads; first += line_heads_) {
      LineWeights w;
      w.queries = std::min(g.pattern.queries, stretch.n);
      w.first_head = first;
      w.heads = std::min(line_heads_, shape_.q_heads - first);
      w.wanted = g.heads;
      bool is_wanted = false;
      for (uint32_t h = first; h < first + w.heads; ++h) is_wanted = is_wanted || g.heads.has(h);
      if (!is_wanted) continue;
      w.place(weights_.as<std::byte>(), stretch.rows);
      launch_line_weights(stretch, w, dtype_, shape_.head_dim, stream);
      launch_choose_lines(stretch, w, lines, stream);
    }
    launch_gather_columns(stretch, lines, dtype_, shape_.head_dim, stream);
  }
}

void PromptLists::weigh(const BlockedParams& slice, const PromptPattern& p, SampledWeights& w,
                        cudaStream_t stream) {
  w.stride = stride_of(p);
  if (w.stride == 0) return;
  w.samples = sampled_queries(slice.n, w.stride);
  w.weights = weights_.as<float>();
  switch (p.choice) {
    case PromptChoice::pooled:
      launch_mean_weights(slice, w, {query_means_.as<std::byte>(), row_means_.as<std::byte>()},
                          dtype_, shape_.head_dim, stream);
      break;
    case PromptChoice::antidiagonal:
      launch_antidiagonal_weights(slice, w, dtype_, shape_.head_dim, stream);
      break;
    default: launch_sample_weights(slice, w, dtype_, shape_.head_dim, has_hopper_, stream);
  }
}

BlockChoice PromptLists::choice_of(const PatternHeads& group) const {
  const PromptPattern& p = group.pattern;
  BlockChoice choice;
  choice.first_blocks = p.dense ? blocks_of(kMostPromptRows) : blocks_of(p.first_rows);
  choice.near_blocks = blocks_of(p.near_rows);
  choice.mass = p.mass;
  choice.most_blocks = p.choice == PromptChoice::pooled ? p.blocks : 0;
  choice.unit = p.dense ? 1 : p.block_rows / kListRows;
  choice.counts = counts_.as<uint32_t>();
  choice.lists = lists_.as<uint16_t>();
  choice.totals = totals_.as<unsigned long long>();
  choice.heads = group.heads;
  choice.skip = p.skip;
  choice.skips = groups_.size() == 1 ? nullptr : skips_.as<float>();
  if (!p.dense && p.choice == PromptChoice::sampled && p.stride != 0) choice.lookups = p.lookups;
  return choice;
}

std::optional<BlockedParams> PromptLists::choose(BlockedParams& slice, cudaStream_t stream) {
  const uint32_t blocks = blocks_of(slice.rows);
  const bool has_columns = column_capacity_ != 0;
  const size_t lists = size_t{(slice.n + kListQueries - 1) / kListQueries} * shape_.q_heads;
  const ColumnLists columns{column_counts_.as<uint32_t>(), column_lists_.as<uint16_t>(),
                            chosen_.as<uint32_t>()};
  if (has_columns) {
    check(cudaMemsetAsync(columns.counts, 0, lists * sizeof(uint32_t), stream), "lists of columns");
  }
  bool skips = false;
  for (const PatternHeads& g : groups_) {
    skips = skips || g.pattern.skip > 0.0F;
    BlockChoice choice = choice_of(g);
    if (has_lines(g.pattern)) {
      launch_line_lists(slice, lines_of(g.pattern, g.heads), columns, choice, blocks, stream);
      continue;
    }
    SampledWeights w;
    w.blocks = blocks;
    w.heads = g.heads;
    weigh(slice, g.pattern, w, stream);
    if (choice.lookups < 1.0F) {
      choice.looked_up = choice.totals + 2;
      check(
          cudaMemsetAsync(choice.looked_up, 0, shape_.q_heads * sizeof(unsigned long long), stream),
          "the choice of blocks");
    }
    launch_choose_blocks(slice, w, choice, stream);
  }
  slice.lists = {counts_.as<uint32_t>(), lists_.as<uint16_t>(), blocks};
  if (groups_.size() == 1) {
    slice.skip = groups_[0].pattern.skip;
  } else if (skips) {
    slice.skips = skips_.as<float>();
  }
  if (!has_columns) return {};
  BlockedParams second = slice;
  slice.final = {};
  slice.o = second.o = outputs_.as<float>();
  slice.sums = second.sums = sums_.as<float2>();
  second.is_first = false;
  // Each query head has rows of its own.
  second.kv_heads = shape_.q_heads;
  second.keys = keys_.as<std::byte>();
  second.values = values_.as<std::byte>();
  second.row_stride = shape_.head_dim;
  second.head_stride = size_t{column_capacity_} * shape_.head_dim;
  second.rows = column_capacity_;
  second.causal = false;
  second.lists = {columns.counts, columns.blocks, column_capacity_ / kListRows};
  second.chosen = columns.chosen;
  return second;
}

void PromptLists::reserve(const Sizes& s) {
  const BesideCapture beside;
  const size_t columns = size_t{shape_.q_heads} * column_capacity_;
  const size_t row = shape_.head_dim * dtype_size(dtype_);
  const bool has_columns = column_capacity_ != 0;
  const size_t states = has_columns ? s.tiles_and_heads * kListQueries : 0;
  const std::pair<ScratchBuffer*, size_t> wanted[] = {
      {&weights_, s.weights},
      {&query_means_, s.query_means},
      {&row_means_, s.row_means},
      {&counts_, s.tiles_and_heads * sizeof(uint32_t)},
      {&lists_, s.tiles_and_heads * s.blocks * sizeof(uint16_t)},
      {&skips_, groups_.size() == 1 ? 0 : shape_.q_heads * sizeof(float)},
      {&line_counts_, has_columns ? size_t{2} * shape_.q_heads * sizeof(uint32_t) : 0},
      {&line_rows_, columns * sizeof(uint32_t)},
      {&distances_, size_t{shape_.q_heads} * slash_capacity_ * sizeof(uint32_t)},
      {&keys_, columns * row},
      {&values_, columns * row},
      {&column_counts_, has_columns ? s.tiles_and_heads * sizeof(uint32_t) : 0},
      {&column_lists_, s.tiles_and_heads * (column_capacity_ / kListRows) * sizeof(uint16_t)},
      {&chosen_, s.tiles_and_heads * (column_capacity_ / 32) * sizeof(uint32_t)},
      {&outputs_, states * shape_.head_dim * sizeof(float)},
      {&sums_, states * sizeof(float2)},
  };
  const bool grows = std::any_of(std::begin(wanted), std::end(wanted),
                                 [](const auto& w) { return w.first->bytes() < w.second; });
  if (grows) finished_->wait("attention of a prompt");
  for (const auto& [buffer, bytes] : wanted) (void)buffer->reserve(bytes);
  if (totals_.bytes() != 0) return;
  totals_ = DeviceBuffer((2 + size_t{shape_.q_heads}) * sizeof(unsigned long long));
  totals_.clear(0, totals_.bytes());
}

size_t PromptLists::bytes() const {
  size_t sum = totals_.bytes();
  for (const ScratchBuffer* b : {&weights_, &query_means_, &row_means_, &counts_, &lists_, &skips_,
                                 &line_counts_, &line_rows_, &distances_, &keys_, &values_,
                                 &column_counts_, &column_lists_, &chosen_, &outputs_, &sums_}) {
    sum += b->bytes();
  }
  return sum;
}

}  // namespace keyhole::gpu
