#include "index/scan/component_blocks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/row_access.h"
#include "index/grow.h"
#include "index/progress.h"

namespace keyhole::index {
namespace {

constexpr size_t kMostChunks = 48;    // chunks double: more rows than an index can have
constexpr size_t kFirstBlocks = 2;    // blocks of the first chunk
constexpr size_t kBlocksPerTask = 2;  // 4096 rows: about a millisecond
// Rows copied at a time: what is read of them stays in the L1 cache until their last component is written.
constexpr size_t kStrip = 16;

/// Rows are `stride` elements apart.
template <class T>
void transpose(const std::byte* rows, ptrdiff_t stride, size_t n, uint32_t dim, std::byte* out) {
  for (size_t begin = 0; begin < n; begin += kStrip) {
    const size_t end = std::min(begin + kStrip, n);
    for (uint32_t j = 0; j < dim; ++j) {
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(out + (j * ComponentBlocks::kRows + i) * sizeof(T),
                    rows + (static_cast<ptrdiff_t>(i) * stride + j) * ptrdiff_t{sizeof(T)},
                    sizeof(T));
      }
    }
  }
}

}  // namespace

ComponentBlocks::ComponentBlocks(const cpu::Kernels& kernels, uint32_t dim, DType dtype, bool coded)
    : kernels_(&kernels), dim_(dim), element_(coded ? DType::i8 : dtype), codes_(kernels, dim) {
  chunks_.reserve(kMostChunks);  // take() must not throw
}

ComponentBlocks::ComponentBlocks(const ComponentBlocks& o)
    : kernels_(o.kernels_), dim_(o.dim_), element_(o.element_), count_(o.count_), codes_(o.codes_) {
  chunks_.reserve(kMostChunks);
  const size_t used = blocks_of(count_);
  for (const Chunk& c : o.chunks_) {
    const size_t blocks = used > c.first_block ? std::min(used - c.first_block, c.blocks) : 0;
    chunks_.push_back({c.memory.copy(blocks * block_bytes()), c.first_block, c.blocks});
  }
}

std::byte* ComponentBlocks::block(size_t b) const {
  size_t c = chunks_.size() - 1;
  while (chunks_[c].first_block > b) --c;
  return chunks_[c].memory.data() + (b - chunks_[c].first_block) * block_bytes();
}

void ComponentBlocks::transpose_rows(const std::byte* rows, ptrdiff_t stride, size_t n,
                                     std::byte* out) const {
  if (element_ == DType::f32) return transpose<uint32_t>(rows, stride, n, dim_, out);
  transpose<uint16_t>(rows, stride, n, dim_, out);
}

void ComponentBlocks::copy_rows(const KeyCodes& codes, const RowsView& keys, size_t first,
                                size_t end, std::byte* out) const {
  const size_t n = end - first;
  out += first % kRows * element_bytes();
  if (!coded() && keys.dtype == element_) {
    return transpose_rows(keys.row(first), keys.token_stride, n, out);
  }
  if (!coded()) {  // keys are int8, which no scale makes comparable between blocks
    const size_t row_bytes = dim_ * element_bytes();
    alignas(8) std::byte strip[kStrip * kMaxHeadDim * sizeof(float)];
    for (size_t i = 0; i < n; i += kStrip) {
      const size_t some = std::min(kStrip, n - i);
      for (size_t s = 0; s < some; ++s) {
        cpu::copy_row(*kernels_, keys, first + i + s, element_, strip + s * row_bytes);
      }
      transpose_rows(strip, dim_, some, out + i * element_bytes());
    }
    return;
  }
  int8_t strip[kStrip * kMaxHeadDim];
  for (size_t i = 0; i < n; i += kStrip) {
    const size_t some = std::min(kStrip, n - i);
    codes.encode_rows(keys, first + i, some, strip);
    transpose<int8_t>(reinterpret_cast<const std::byte*>(strip),
                      static_cast<ptrdiff_t>(codes.stride()), some, dim_, out + i);
  }
}

void ComponentBlocks::copy_blocks(const KeyCodes& codes, const RowsView& keys, size_t first,
                                  size_t end, std::byte* out, cpu::Pool* pool,
                                  const Progress& progress) const {
  ProgressMeter meter(progress, static_cast<double>(end - first));
  const size_t first_block = first / kRows;
  const size_t blocks = blocks_of(end) - first_block;
  const auto task = [&](uint32_t t, uint32_t) {
    const size_t begin = t * kBlocksPerTask;
    const size_t last = std::min(begin + kBlocksPerTask, blocks);
    size_t rows = 0;
    for (size_t b = begin; b < last; ++b) {
      const size_t from = std::max(first, (first_block + b) * kRows);
      const size_t to = std::min(end, (first_block + b + 1) * kRows);
      copy_rows(codes, keys, from, to, out + b * block_bytes());
      rows += to - from;
    }
    meter.advance(static_cast<double>(rows));
  };
  cpu::run_on(pool, (blocks + kBlocksPerTask - 1) / kBlocksPerTask, task);
}

ComponentBlocks::Growth ComponentBlocks::first_rows(KeyCodes codes, const RowsView& keys,
                                                    cpu::Pool* pool,
                                                    const Progress& progress) const {
  Growth growth;
  growth.count = keys.tokens;
  growth.codes = std::move(codes);
  // Address space for twice as many rows; memory is taken as it fills.
  growth.chunk =
      cpu::ReservedBuffer(std::max(2 * blocks_of(keys.tokens), kFirstBlocks) * block_bytes());
  growth.chunk.advise_huge(0, blocks_of(keys.tokens) * block_bytes());
  copy_blocks(growth.codes, keys, 0, keys.tokens, growth.chunk.data(), pool, progress);
  return growth;
}

ComponentBlocks::Growth ComponentBlocks::grow(const RowsView& keys, cpu::Pool* pool,
                                              const Progress& progress) const {
  if (count_ == 0) {
    KeyCodes codes(*kernels_, dim_);
    if (coded()) codes.learn(keys);
    return first_rows(std::move(codes), keys, pool, progress);
  }
  Growth growth;
  growth.first = count_;
  growth.count = keys.tokens;
  const size_t first_block = count_ / kRows;
  const size_t end = blocks_of(keys.tokens);
  growth.blocks.resize((end - first_block) * block_bytes());
  copy_blocks(codes_, keys, count_, keys.tokens, growth.blocks.data(), pool, progress);
  if (end > reserved_blocks()) {
    growth.chunk = cpu::ReservedBuffer(std::max(end, reserved_blocks()) * block_bytes());
  }
  return growth;
}

void ComponentBlocks::take(Growth& growth) noexcept {
  if (growth.first == 0) {
    codes_ = std::move(growth.codes);
    chunks_.clear();
  }
  if (growth.chunk.bytes() > 0) {
    const size_t blocks = growth.chunk.bytes() / block_bytes();
    chunks_.push_back({std::move(growth.chunk), reserved_blocks(), blocks});
  }
  count_ = growth.count;
  if (growth.blocks.empty()) return;
  const size_t first_block = growth.first / kRows;
  for (size_t b = first_block; b < blocks_of(count_); ++b) {
    const std::byte* from = growth.blocks.data() + (b - first_block) * block_bytes();
    // In the first block only the new rows are copied, because the others are there already.
    const size_t skipped = b == first_block ? growth.first % kRows : 0;
    const size_t offset = skipped * element_bytes();
    const size_t row = kRows * element_bytes();
    for (uint32_t j = 0; j < dim_; ++j) {
      std::memcpy(block(b) + j * row + offset, from + j * row + offset, row - offset);
    }
  }
}

void ComponentBlocks::encode_queries(const float* queries, Queries& out) const {
  index::grow(out.elements, size_t{out.group} * out.chosen);
  for (uint32_t h = 0; h < out.group; ++h) {
    double shift = 0.0;
    for (uint32_t c = 0; c < out.chosen; ++c) {
      const uint32_t j = out.components[c];
      const float q = queries[size_t{h} * dim_ + j];
      if (coded()) shift += double{q} * codes_.center(j);
      out.elements[size_t{h} * out.chosen + c] = coded() ? q * codes_.scale(j) : q;
    }
    out.shift[h] = static_cast<float>(shift);
  }
}

void ComponentBlocks::score(const Queries& queries, size_t first, size_t n, float* scores,
                            size_t stride) const {
  const size_t b = first / kRows;
  kernels_->score_components[static_cast<size_t>(element_)](
      {.queries = queries.elements.data(),
       .group = queries.group,
       .components = queries.components,
       .component_count = queries.chosen,
       .block = block(b),
       .block_rows = kRows,
       .next = (b + 1) * kRows < count_ ? block(b + 1) : nullptr,
       .first = first % kRows,
       .count = n,
       .scores = scores,
       .score_stride = stride});
}

void ComponentBlocks::save(Writer& out) const {
  if (coded() && count_ > 0) codes_.save(out);
}

void ComponentBlocks::load(Reader& in, const RowsView& keys, cpu::Pool* pool) {
  KeyCodes codes(*kernels_, dim_);
  if (coded() && keys.tokens > 0) codes.load_scales(in);
  in.finish();
  if (keys.tokens == 0) return;
  Growth growth = first_rows(std::move(codes), keys, pool, {});
  take(growth);
}

}  // namespace keyhole::index
