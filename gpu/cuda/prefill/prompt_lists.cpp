#include "gpu/cuda/prefill/prompt_lists.h"

#include <algorithm>
#include <utility>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/prefill/group_weights.h"

namespace keyhole::gpu {
namespace {

uint32_t blocks_of(uint32_t rows) { return (rows + kListRows - 1) / kListRows; }

bool has_lines(const PromptPattern& p) {
  return !p.dense && p.choice == PromptChoice::vertical_slash;
}
/// One query in this many has weights; 0: none has.
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

struct PromptLists::Sizes {
  uint32_t tiles = 0;                 ///< of a slice
  uint32_t columns = 0, slashes = 0;  ///< 0: no head has any
  uint32_t line_heads = 0;
  std::array<size_t, kBuffers> bytes{};  ///< in the order of buffers_of()
};

PromptLists::Sizes PromptLists::sizes_of(uint32_t n, uint32_t rows, DType dtype,
                                         std::span<const PatternHeads> patterns) const {
  Sizes s;
  uint32_t samples = 0;
  bool pools = false;
  for (const PatternHeads& g : patterns) {
    const PromptPattern& p = g.pattern;
    if (has_lines(p)) {
      s.columns = std::max({s.columns, kListRows, blocks_of(p.columns) * kListRows});
      s.slashes = std::max({s.slashes, 1U, p.slashes});
    }
    if (const uint32_t stride = stride_of(p); stride != 0)
      samples = std::max(samples, sampled_queries(kListQueries, stride));
    pools = pools || (!p.dense && p.choice == PromptChoice::pooled);
  }
  const bool has_columns = s.columns != 0;
  const uint32_t blocks = blocks_of(rows);
  const size_t list = blocks * (samples * sizeof(float) + sizeof(uint16_t));
  const size_t state = kListQueries * (shape_.head_dim * sizeof(float) + sizeof(float2));
  const size_t of_tile = shape_.q_heads * (list + (has_columns ? state + s.columns / 8 : 0));
  s.tiles = limits_.tiles(of_tile, (n + kListQueries - 1) / kListQueries);

  const size_t lists = size_t{s.tiles} * shape_.q_heads;
  const size_t row = shape_.head_dim * dtype_size(dtype);
  size_t weights = lists * samples * blocks * sizeof(float);
  if (has_columns) {
    const size_t of_head = LineWeights::bytes_of_head(rows);
    s.line_heads = limits_.heads(of_head, shape_.q_heads);
    weights = std::max(weights, s.line_heads * of_head);
  }
  const size_t columns = size_t{shape_.q_heads} * s.columns;
  const size_t states = has_columns ? lists * kListQueries : 0;
  s.bytes = {weights,
             pools ? lists * (kListQueries / kMeanQueries) * row : 0,
             pools ? size_t{shape_.kv_heads} * blocks * row : 0,
             lists * sizeof(uint32_t),
             lists * blocks * sizeof(uint16_t),
             patterns.size() == 1 ? 0 : shape_.q_heads * sizeof(float),
             has_columns ? size_t{2} * shape_.q_heads * sizeof(uint32_t) : 0,
             columns * sizeof(uint32_t),
             size_t{shape_.q_heads} * s.slashes * sizeof(uint32_t),
             columns * row,
             columns * row,
             has_columns ? lists * sizeof(uint32_t) : 0,
             lists * (s.columns / kListRows) * sizeof(uint16_t),
             lists * (s.columns / 32) * sizeof(uint32_t),
             states * shape_.head_dim * sizeof(float),
             states * sizeof(float2)};
  return s;
}

template <class Self>
auto PromptLists::buffers_of(Self& self) {
  return std::array{
      &self.weights_,      &self.query_means_, &self.row_means_,   &self.counts_,
      &self.lists_,        &self.skips_,       &self.line_counts_, &self.line_rows_,
      &self.distances_,    &self.keys_,        &self.values_,      &self.column_counts_,
      &self.column_lists_, &self.chosen_,      &self.outputs_,     &self.sums_};
}

uint32_t PromptLists::begin(const BlockedParams& stretch, DType dtype,
                            std::span<const PatternHeads> patterns, cudaStream_t stream) {
  reserve(stretch.n, stretch.rows, dtype, patterns);
  const Sizes sizes = sizes_of(stretch.n, stretch.rows, dtype, patterns);
  dtype_ = dtype;
  groups_.assign(patterns.begin(), patterns.end());
  column_capacity_ = sizes.columns;
  slash_capacity_ = sizes.slashes;
  line_heads_ = sizes.line_heads;
  const uint32_t tiles = sizes.tiles;
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

void PromptLists::reserve(uint32_t n, uint32_t rows, DType dtype,
                          std::span<const PatternHeads> patterns) {
  const Sizes sizes = sizes_of(n, rows, dtype, patterns);
  const auto held = buffers_of(*this);
  const BesideCapture beside;
  bool grows = false;
  for (size_t i = 0; i < kBuffers; ++i) grows = grows || held[i]->bytes() < sizes.bytes[i];
  if (grows) finished_->wait("attention of a prompt");
  for (size_t i = 0; i < kBuffers; ++i) (void)held[i]->reserve(sizes.bytes[i]);
  if (totals_.bytes() != 0) return;
  totals_ = DeviceBuffer(totals_bytes());
  totals_.clear(0, totals_.bytes());
}

size_t PromptLists::totals_bytes() const {
  return (2 + size_t{shape_.q_heads}) * sizeof(unsigned long long);
}

size_t PromptLists::bytes_for(uint32_t n, uint32_t rows, DType dtype,
                              std::span<const PatternHeads> patterns) const {
  const Sizes sizes = sizes_of(n, rows, dtype, patterns);
  const auto held = buffers_of(*this);
  size_t sum = totals_bytes();
  for (size_t i = 0; i < kBuffers; ++i) sum += std::max(held[i]->bytes(), sizes.bytes[i]);
  return sum;
}

size_t PromptLists::bytes() const {
  size_t sum = totals_.bytes();
  for (const ScratchBuffer* b : buffers_of(*this)) sum += b->bytes();
  return sum;
}

}  // namespace keyhole::gpu
