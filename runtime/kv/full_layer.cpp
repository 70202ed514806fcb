#include "runtime/kv/full_layer.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/row_access.h"

namespace keyhole::runtime {
namespace {

// Rows of one head per task when a prompt goes straight to the host: about 100 us of work.
constexpr uint32_t kRowsPerTask = 1024;
// Tokens of a task when those of a window go there before it, and up to how many go by one thread, as a step's do.
constexpr uint32_t kStagedPerTask = 64, kLargestFlush = 256;

}  // namespace

std::optional<uint64_t> FullLayer::more_bytes(uint32_t n) const {
  const uint64_t slots = uint64_t{all_->sink} + all_->window_capacity();
  if (uint64_t{tokens()} + n <= slots) return std::nullopt;
  return store().bytes_of(layer_, std::max(n, all_->flush_block));
}

uint32_t FullLayer::leaving(const Split& from, uint32_t n) const {
  const uint32_t others = n - std::min(n, all_->sink - from.sink);
  return others > all_->window_capacity() - from.window ? overflow(from.window + others) : 0;
}

void FullLayer::prepare_append(uint32_t n) {
  const uint32_t rows_more = leaving({sink(), rows(), window()}, n);
  if (rows_more != 0) store().prepare(layer_, rows_more);
}

bool FullLayer::replaces_shared(const Split& kept, uint32_t n) const {
  return leaving(kept, n) != 0 && store().is_shared(layer_, kept.rows);
}

void FullLayer::prepare_replacement(const Split& kept, uint32_t n) {
  const uint32_t rows_more = leaving(kept, n);
  if (rows_more != 0) store().prepare_in_place(layer_, kept.rows, rows_more);
}

void FullLayer::append(const TensorView& k, const TensorView& v) {
  const uint32_t n = k.tokens;
  // What may fail comes first: rows that have left the window would be lost where the store has no pages for them.
  prepare_append(n);
  uint32_t at = 0;
  while (at < n && sink() < all_->sink) {
    const uint32_t piece = std::min({n - at, all_->sink - sink(), all_->window_capacity()});
    stage(k, at, piece, staged_k());
    stage(v, at, piece, staged_v());
    all_->resident->append_sink(layer_, staged_k(), staged_v(), piece);
    at += piece;
  }

  const uint32_t held = window();
  if (n - at > all_->window_capacity() - held) {
    // The window falls back to its W newest tokens, and what makes no whole block with them: what is
    // older leaves, first from the window, then straight from the input.
    const uint32_t leaving = overflow(held + (n - at));
    const uint32_t from_window = std::min(leaving, held);
    // A block that begins in the window is filled up from the input, so that it is stored at once.
    const uint32_t whole = (from_window + all_->row_block - 1) / all_->row_block * all_->row_block;
    const uint32_t filling = whole - from_window;
    const size_t behind = from_window * token_bytes();
    if (from_window != 0) {
      all_->resident->evict(layer_, staged_k(), staged_v(), from_window);
      stage(k, at, filling, staged_k() + behind);
      stage(v, at, filling, staged_v() + behind);
      store_staged(whole);
      at += filling;
    }
    offload_from_input(k, v, at, leaving - whole);
    at += leaving - whole;
  }
  if (at < n) {
    stage(k, at, n - at, staged_k());
    stage(v, at, n - at, staged_v());
    all_->resident->append_window(layer_, staged_k(), staged_v(), n - at);
  }
}

void FullLayer::offload_from_window(uint32_t n) {
  if (n == 0) return;
  store().prepare(layer_, n);  // before they are nowhere else
  all_->resident->evict(layer_, staged_k(), staged_v(), n);
  store_staged(n);
}

void FullLayer::store_staged(uint32_t n) {
  store().prepare(layer_, n);
  const uint32_t row = store().rows(layer_);
  const LayerShape of = shape();
  const size_t row_bytes = of.row_bytes(dtype());
  if (store().dtype() == DType::i8) {
    write_blocks(n, [&](uint32_t which, uint32_t t, uint32_t h, float* to) {
      const std::byte* staged = which == 0 ? staged_k() : staged_v();
      read_stored(staged + (size_t{t} * of.kv_heads + h) * row_bytes, of.head_dim, to);
    });
    return store().grow(layer_, n);
  }
  const auto store_some = [&](uint32_t task, uint32_t) {
    const uint32_t first = task * kStagedPerTask;
    for (uint32_t t = first; t < std::min(n, first + kStagedPerTask); ++t) {
      for (uint32_t h = 0; h < of.kv_heads; ++h) {
        const size_t at = (size_t{t} * of.kv_heads + h) * row_bytes;
        std::copy_n(staged_k() + at, row_bytes, store().key(layer_, h, row + t));
        std::copy_n(staged_v() + at, row_bytes, store().value(layer_, h, row + t));
      }
    }
  };
  const uint32_t tasks = (n + kStagedPerTask - 1) / kStagedPerTask;
  if (n <= kLargestFlush) {
    for (uint32_t task = 0; task < tasks; ++task) store_some(task, 0);
  } else {
    all_->engine->pool().run(tasks, store_some);
  }
  store().grow(layer_, n);
}

void FullLayer::read_stored(const std::byte* row, uint32_t dim, float* to) const {
  kernels().to_f32[static_cast<size_t>(dtype())](row, to, dim);
}

template <class Read>
void FullLayer::write_blocks(uint32_t n, const Read& read) {
  const uint32_t row = store().rows(layer_);
  if (row % kScaleRows != 0 || n % kScaleRows != 0) {
    throw Error(Status::internal, "rows " + std::to_string(row) + " to " +
                                      std::to_string(uint64_t{row} + n) +
                                      " in int8, which come in whole blocks");
  }
  const float most = all_->engine->model().largest_element();
  const uint32_t blocks = n / kScaleRows;
  all_->engine->pool().run(2 * shape().kv_heads * blocks, [&](uint32_t task, uint32_t) {
    const uint32_t which = task % 2;
    const uint32_t h = task / 2 / blocks;
    const uint32_t first = task / 2 % blocks * kScaleRows;
    store().write_block(layer_, h, which, row + first, most,
                        [&](uint32_t i, float* to) { read(which, first + i, h, to); });
  });
}

void FullLayer::offload_from_input(const TensorView& k, const TensorView& v, uint32_t begin,
                                   uint32_t n) {
  if (n == 0) return;
  const uint32_t row = store().rows(layer_);
  const uint32_t per_head = (n + kRowsPerTask - 1) / kRowsPerTask;
  const LayerShape of = shape();
  store().prepare(layer_, n);
  if (store().dtype() == DType::i8) {
    // By way of the model's dtype, like the tokens that come through the window.
    write_blocks(n, [&](uint32_t which, uint32_t t, uint32_t h, float* to) {
      const TensorView& rows = which == 0 ? k : v;
      std::byte stored[kMaxHeadDim * sizeof(float)];
      store_row(kernels(), rows, begin + t, h, stored, dtype(), of.head_dim, to);
      read_stored(stored, of.head_dim, to);
    });
    return store().grow(layer_, n);
  }
  all_->engine->pool().run(of.kv_heads * per_head, [&](uint32_t task, uint32_t) {
    float scratch[kMaxHeadDim];
    const uint32_t h = task / per_head;
    const uint32_t first = task % per_head * kRowsPerTask;
    for (uint32_t t = first; t < std::min(n, first + kRowsPerTask); ++t) {
      store_row(kernels(), k, begin + t, h, store().key(layer_, h, row + t), dtype(), of.head_dim,
                scratch);
      store_row(kernels(), v, begin + t, h, store().value(layer_, h, row + t), dtype(), of.head_dim,
                scratch);
    }
  });
  store().grow(layer_, n);
}

void FullLayer::drop_newest() {
  if (window() != 0) {
    all_->resident->truncate(layer_, sink(), window() - 1);
  } else {
    all_->resident->truncate(layer_, sink() - 1, 0);
  }
}

void FullLayer::read(std::span<const uint32_t> tokens, std::byte* k, std::byte* v) const {
  const LayerShape of = shape();
  const size_t row_bytes = of.row_bytes(dtype());
  const uint32_t first_row = sink(), first_of_window = first_row + rows();
  const auto is_offloaded = [&](uint32_t token) {
    return token >= first_row && token < first_of_window;
  };
  std::vector<std::byte> resident_k, resident_v;
  if (!std::all_of(tokens.begin(), tokens.end(), is_offloaded)) {
    resident_k.resize((sink() + window()) * token_bytes());
    resident_v.resize(resident_k.size());
    all_->resident->read(layer_, resident_k.data(), resident_v.data());
  }
  for (const uint32_t token : tokens) {
    const bool offloaded = is_offloaded(token);
    const size_t at = (token < first_row ? token : token - rows()) * token_bytes();
    for (uint32_t h = 0; h < of.kv_heads; ++h, k += row_bytes, v += row_bytes) {
      if (offloaded) {
        const KvView kv = store().view(layer_).head(h);
        cpu::copy_row(kernels(), kv.keys, token - first_row, dtype(), k);
        cpu::copy_row(kernels(), kv.values, token - first_row, dtype(), v);
      } else {
        std::copy_n(resident_k.data() + at + h * row_bytes, row_bytes, k);
        std::copy_n(resident_v.data() + at + h * row_bytes, row_bytes, v);
      }
    }
  }
}

KvLayer::Split FullLayer::split(uint32_t tokens) const {
  Split s;
  s.sink = std::min(tokens, sink());
  const uint32_t others = tokens - s.sink;
  if (others >= rows()) {
    s.rows = rows();
    s.window = std::min(others - s.rows, window());
  } else {
    s.rows = others / all_->row_block * all_->row_block;
    s.window = others - s.rows;
  }
  return s;
}

void FullLayer::truncate(uint32_t tokens) {
  const Split kept = split(tokens);
  if (kept.rows == rows()) return all_->resident->truncate(layer_, kept.sink, kept.window);
  all_->resident->truncate(layer_, kept.sink, 0);
  if (kept.window != 0) return_to_window(kept.rows, kept.window);
  store().truncate(layer_, kept.rows);
}

void FullLayer::return_to_window(uint32_t row, uint32_t n) {
  const LayerShape of = shape();
  for (uint32_t h = 0; h < of.kv_heads; ++h) {
    const KvView kv = store().view(layer_).head(h);
    for (uint32_t t = 0; t < n; ++t) {
      const size_t at = (size_t{t} * of.kv_heads + h) * of.row_bytes(dtype());
      cpu::copy_row(kernels(), kv.keys, row + t, dtype(), staged_k() + at);
      cpu::copy_row(kernels(), kv.values, row + t, dtype(), staged_v() + at);
    }
  }
  all_->resident->append_window(layer_, staged_k(), staged_v(), n);
}

void FullLayer::fill(const Split& counts, const std::byte* k, const std::byte* v) {
  all_->resident->append_sink(layer_, k, v, counts.sink);
  const size_t sink_bytes = counts.sink * token_bytes();
  all_->resident->append_window(layer_, k + sink_bytes, v + sink_bytes, counts.window);
}

// ---- Copies ---------------------------------------------------------------------------------------

void FullLayer::copy_from(const FullLayer& from) {
  const Split counts = from.split(from.tokens());
  std::vector<std::byte> k((counts.sink + counts.window) * token_bytes()), v(k.size());
  from.all_->resident->read(layer_, k.data(), v.data());
  fill(counts, k.data(), v.data());
  store().share(layer_, from.store());
}

void FullLayer::save(ChecksumWriter& out) const {
  const Split counts = split(tokens());
  out.value(counts.sink);
  out.value(counts.rows);
  out.value(counts.window);
  std::vector<std::byte> k((counts.sink + counts.window) * token_bytes()), v(k.size());
  all_->resident->read(layer_, k.data(), v.data());
  out.bytes(k.data(), k.size());
  out.bytes(v.data(), v.size());
  std::vector<std::span<const std::byte>> rows;
  for (uint32_t h = 0; h < shape().kv_heads; ++h) {
    const KvView kv = store().view(layer_).head(h);
    rows.emplace_back(kv.keys.data, counts.rows * store().row_bytes(layer_));
    rows.emplace_back(kv.values.data, counts.rows * store().row_bytes(layer_));
  }
  out.arrays(rows);
  out.bytes(reinterpret_cast<const std::byte*>(store().scales(layer_)),
            store().scale_count(layer_, counts.rows) * sizeof(uint16_t));
}

void FullLayer::check_finite(const std::byte* elements, size_t n, DType dtype) const {
  if (kernels().all_finite[static_cast<size_t>(dtype)](elements, n)) return;
  throw Error(Status::corrupt,
              "layer " + std::to_string(layer_) + " has an element of K or V that is not finite");
}

KvLayer::Split FullLayer::read_counts(ChecksumReader& in) {
  Split counts;
  counts.sink = in.value<uint32_t>("token counts");
  counts.rows = in.value<uint32_t>("token counts");
  counts.window = in.value<uint32_t>("token counts");
  if (counts.sink > all_->sink || counts.window > all_->window_capacity() ||
      (counts.sink < all_->sink && (counts.rows != 0 || counts.window != 0)) ||
      uint64_t{counts.sink} + counts.rows + counts.window > all_->max_tokens) {
    throw Error(Status::corrupt,
                "layer " + std::to_string(layer_) + " has token counts that no session has: sink " +
                    std::to_string(counts.sink) + ", offloaded " + std::to_string(counts.rows) +
                    ", window " + std::to_string(counts.window));
  }
  if (counts.rows % all_->row_block != 0) {
    if (store().dtype() == DType::i8) {
      throw Error(Status::corrupt,
                  "layer " + std::to_string(layer_) + " has " + std::to_string(counts.rows) +
                      " rows in int8, which come in blocks of " + std::to_string(kScaleRows));
    }
    all_->row_block = 1;  // codes were chosen after there were rows
  }
  return counts;
}

void FullLayer::load(ChecksumReader& in) {
  const Split counts = read_counts(in);
  const uint64_t resident = uint64_t{counts.sink} + counts.window;
  const auto k = in.array<std::byte>(resident * token_bytes(), "resident keys");
  const auto v = in.array<std::byte>(resident * token_bytes(), "resident values");
  const size_t elements = k.size() / dtype_size(dtype());
  check_finite(k.data(), elements, dtype());
  check_finite(v.data(), elements, dtype());
  fill(counts, k.data(), v.data());
  read_rows(in, counts.rows);
}

void FullLayer::read_rows(ChecksumReader& in, uint32_t count) {
  store().prepare(layer_, count);
  store().grow(layer_, count);
  std::vector<std::span<std::byte>> rows;
  for (uint32_t h = 0; h < shape().kv_heads; ++h) {
    rows.emplace_back(store().key(layer_, h, 0), count * store().row_bytes(layer_));
    rows.emplace_back(store().value(layer_, h, 0), count * store().row_bytes(layer_));
  }
  // Of int8 the scales are looked at.
  const bool is_int8 = store().dtype() == DType::i8;
  in.arrays(rows, "keys and values", [&](size_t, const std::byte* data, size_t n) {
    if (!is_int8) check_finite(data, n / dtype_size(store().dtype()), store().dtype());
  });
  uint16_t* scales = store().scales(layer_);
  const size_t n = store().scale_count(layer_, count);
  in.bytes(reinterpret_cast<std::byte*>(scales), n * sizeof *scales, "scales");
  constexpr uint16_t kInfinity = 0x7F80;  // what is above it is NaN, or negative
  if (std::any_of(scales, scales + n, [](uint16_t s) { return s >= kInfinity; })) {
    throw Error(Status::corrupt,
                "layer " + std::to_string(layer_) + " has a scale that is no finite number >= 0");
  }
}

}  // namespace keyhole::runtime
