#include "cpu/block_attention.h"

#include <algorithm>
#include <cmath>

namespace keyhole::cpu {
namespace {

// Queries and outputs of a task's heads: 128 x 512 floats each stay in the second level of cache.
constexpr uint32_t kMostWidth = 512;

/// The place in a head's list, while the blocks of all heads of a task are walked together.
struct Cursor {
  const uint32_t* at;
  const uint32_t* end;
};

}  // namespace

PromptPiece::Span PromptPiece::seen(uint32_t tile) const {
  const uint32_t first = tile * kPromptQueries;
  const uint32_t last = std::min(first + kPromptQueries, n) - 1;
  const uint32_t before = position(first);
  const uint32_t oldest = window == 0 || before < window ? 0 : before + 1 - window;
  return {oldest / kPromptRows, position(last) / kPromptRows + 1};
}

void RowUnpacker::copy(const RowRuns& rows, uint32_t head, uint32_t first, uint32_t count,
                       uint32_t dim, float* out) const {
  for (uint32_t i = 0; i < count; ++i) {
    rows.read(*kernels_, size_t{first} + i, head, 0, dim, out + size_t{i} * dim);
  }
  std::fill(out + size_t{count} * dim, out + size_t{kPromptRows} * dim, 0.0F);
}

void RowUnpacker::copy(const RowRuns& rows, uint32_t head, const uint32_t* numbers, uint32_t count,
                       uint32_t dim, float* out) const {
  for (uint32_t i = 0; i < count; ++i) {
    rows.read(*kernels_, numbers[i], head, 0, dim, out + size_t{i} * dim);
  }
  std::fill(out + size_t{count} * dim, out + size_t{kPromptRows} * dim, 0.0F);
}

void RowUnpacker::transpose(const RowRuns& rows, uint32_t head, const uint32_t* numbers,
                            uint32_t count, uint32_t dim, float* out) {
  rows_.resize(size_t{kPromptRows} * dim);
  copy(rows, head, numbers, count, dim, rows_.data());
  turn(dim, out);
}

void RowUnpacker::transpose(const RowRuns& rows, uint32_t head, uint32_t first, uint32_t count,
                            uint32_t dim, float* out) {
  rows_.resize(size_t{kPromptRows} * dim);
  copy(rows, head, first, count, dim, rows_.data());
  turn(dim, out);
}

void RowUnpacker::turn(uint32_t dim, float* out) const {
  // Squares of 16: a cache line of each side at a time.
  constexpr uint32_t kSquare = 16;
  for (uint32_t j0 = 0; j0 < dim; j0 += kSquare) {
    for (uint32_t i0 = 0; i0 < kPromptRows; i0 += kSquare) {
      for (uint32_t j = j0; j < j0 + kSquare; ++j) {
        for (uint32_t i = i0; i < i0 + kSquare; ++i) {
          out[size_t{j} * kPromptRows + i] = rows_[size_t{i} * dim + j];
        }
      }
    }
  }
}

void BlockAttention::attend(const PromptPiece& piece, const PromptLists& lists) {
  if (piece.n == 0) return;
  const uint32_t width = std::clamp(kMostWidth / piece.head_dim, 1U, piece.group());
  const uint32_t parts = (piece.group() + width - 1) / width;
  const size_t rows = size_t{width} * std::min(piece.n, kPromptQueries);
  while (scratch_.size() < pool_->threads()) scratch_.emplace_back(*kernels_);
  for (Scratch& s : scratch_) {
    for (auto* x : {&s.q, &s.o}) x->resize(std::max(x->size(), rows * piece.head_dim));
    for (auto* x : {&s.largest, &s.sums}) x->resize(std::max(x->size(), rows));
    s.x.resize(size_t{kPromptQueries} * kPromptRows);
    for (auto* x : {&s.keys, &s.values}) x->resize(size_t{kPromptRows} * piece.head_dim);
  }
  const uint32_t per_tile = piece.kv_heads * parts;
  pool_->run(piece.tiles() * per_tile, [&](uint32_t task, uint32_t worker) {
    // The last tiles have the most rows before them: starting with them evens out the threads' ends.
    const uint32_t tile = piece.tiles() - 1 - task / per_tile;
    const uint32_t kv_head = task % per_tile / parts, part = task % parts;
    const uint32_t first = kv_head * piece.group() + part * width;
    const Heads heads{first, std::min(width, piece.group() - part * width)};
    attend_tile(piece, lists, tile, heads, scratch_[worker]);
  });
}

void BlockAttention::attend_tile(const PromptPiece& piece, const PromptLists& lists, uint32_t tile,
                                 const Heads& heads, Scratch& s) const {
  const uint32_t d = piece.head_dim;
  const uint32_t first = tile * kPromptQueries, n = std::min(kPromptQueries, piece.n - first);
  const auto convert = kernels_->to_f32[static_cast<size_t>(piece.q.dtype)];
  for (uint32_t h = 0; h < heads.count; ++h) {
    for (uint32_t i = 0; i < n; ++i) {
      float* const row = s.q.data() + (size_t{h} * n + i) * d;
      convert(piece.q.row(size_t{first} + i, heads.first + h), row, d);
      for (uint32_t j = 0; j < d; ++j) row[j] *= piece.logits.scale;
    }
  }
  std::fill_n(s.o.begin(), size_t{heads.count} * n * d, 0.0F);
  std::fill_n(s.largest.begin(), size_t{heads.count} * n, kMinusInf);
  std::fill_n(s.sums.begin(), size_t{heads.count} * n, 0.0F);

  const uint32_t kv_head = heads.first / piece.group();
  const PromptPiece::Span seen = piece.seen(tile);
  Cursor cursors[kMaxGroup] = {};
  if (lists.counts != nullptr) {
    for (uint32_t h = 0; h < heads.count; ++h) {
      const size_t list = size_t{heads.first + h} * piece.tiles() + tile;
      const uint32_t* const begin = lists.blocks + list * lists.capacity;
      cursors[h] = {begin, begin + lists.counts[list]};
    }
  }
  for (uint32_t block = seen.begin; block < seen.end; ++block) {
    if (lists.counts != nullptr) {  // the next one that any head wants
      block = seen.end;
      for (uint32_t h = 0; h < heads.count; ++h) {
        if (cursors[h].at != cursors[h].end) block = std::min(block, *cursors[h].at);
      }
      if (block >= seen.end) break;
    }
    const uint32_t begin = block * kPromptRows;
    const uint32_t count = std::min(kPromptRows, piece.rows - begin);
    s.unpacker.transpose(piece.k, kv_head, begin, count, d, s.keys.data());
    s.unpacker.copy(piece.v, kv_head, begin, count, d, s.values.data());
    for (uint32_t h = 0; h < heads.count; ++h) {
      if (lists.counts != nullptr) {
        if (cursors[h].at == cursors[h].end || *cursors[h].at != block) continue;
        ++cursors[h].at;
      }
      attend_block(piece, block, first, n, h, s);
    }
  }
  for (uint32_t h = 0; h < heads.count && lists.row_counts != nullptr; ++h) {
    const size_t list = size_t{heads.first + h} * piece.tiles() + tile;
    const uint32_t* const rows = lists.rows + list * lists.row_capacity;
    for (uint32_t i = 0; i < lists.row_counts[list]; i += kPromptRows) {
      attend_rows(piece, rows + i, std::min(kPromptRows, lists.row_counts[list] - i), n, kv_head, h,
                  s);
    }
  }
  finish(piece, first, n, heads, s);
}

void BlockAttention::attend_block(const PromptPiece& piece, uint32_t block, uint32_t first,
                                  uint32_t n, uint32_t head, Scratch& s) const {
  const uint32_t begin = block * kPromptRows;
  attend_keys(piece, n, head, s, [&](uint32_t i, WeighRowArgs& weigh) {
    const uint32_t position = piece.position(first + i);
    const uint32_t oldest =
        piece.window == 0 || position < piece.window ? 0 : position + 1 - piece.window;
    weigh.to = position < begin ? 0 : std::min(kPromptRows, position + 1 - begin);
    weigh.from = oldest > begin ? std::min(oldest - begin, kPromptRows) : 0;
  });
}

void BlockAttention::attend_rows(const PromptPiece& piece, const uint32_t* rows, uint32_t count,
                                 uint32_t n, uint32_t kv_head, uint32_t head, Scratch& s) const {
  s.unpacker.transpose(piece.k, kv_head, rows, count, piece.head_dim, s.keys.data());
  s.unpacker.copy(piece.v, kv_head, rows, count, piece.head_dim, s.values.data());
  attend_keys(piece, n, head, s, [&](uint32_t /*i*/, WeighRowArgs& weigh) { weigh.to = count; });
}

template <class See>
void BlockAttention::attend_keys(const PromptPiece& piece, uint32_t n, uint32_t head, Scratch& s,
                                 See&& see) const {
  const uint32_t d = piece.head_dim;
  const size_t row = size_t{head} * n;
  kernels_->product(scores_of_rows(s.q.data() + row * d, n, d, s.keys.data(), s.x.data()));
  for (uint32_t i = 0; i < n; ++i) {
    WeighRowArgs weigh{};
    weigh.x = s.x.data() + size_t{i} * kPromptRows;
    see(i, weigh);
    weigh.softcap = piece.logits.softcap;
    weigh.largest = &s.largest[row + i];
    weigh.sum = &s.sums[row + i];
    weigh.o = s.o.data() + (row + i) * d;
    weigh.dim = d;
    kernels_->weigh_row(weigh);
  }
  kernels_->product({.a = s.x.data(),
                     .a_stride = kPromptRows,
                     .b = s.values.data(),
                     .b_stride = d,
                     .c = s.o.data() + row * d,
                     .c_stride = d,
                     .m = n,
                     .k = kPromptRows,
                     .n = d,
                     .adds = true});
}

void BlockAttention::finish(const PromptPiece& piece, uint32_t first, uint32_t n,
                            const Heads& heads, Scratch& s) const {
  const uint32_t d = piece.head_dim;
  const auto convert = kernels_->from_f32[static_cast<size_t>(piece.out.dtype)];
  for (uint32_t h = 0; h < heads.count; ++h) {
    const uint32_t head = heads.first + h;
    for (uint32_t i = 0; i < n; ++i) {
      const size_t row = size_t{h} * n + i;
      float* const o = s.o.data() + row * d;
      float largest = s.largest[row], sum = s.sums[row];
      float factor = 1.0F;
      if (piece.sinks != nullptr && piece.sinks[head] != kMinusInf) {
        const float sink = piece.sinks[head], top = std::max(largest, sink);
        factor = largest == kMinusInf ? 0.0F : std::exp(largest - top);
        sum = sum * factor + std::exp(sink - top);
        largest = top;
      }
      const bool is_empty = largest == kMinusInf && sum == 0.0F;
      factor = is_empty ? 0.0F : factor / sum;
      for (uint32_t j = 0; j < d; ++j) o[j] *= factor;
      convert(o, piece.out.row(size_t{first} + i, head), d);
      if (piece.lse == nullptr) continue;
      piece.lse[(size_t{first} + i) * piece.q_heads + head] =
          is_empty ? kMinusInf : largest + std::log(sum);
    }
  }
}

}  // namespace keyhole::cpu
