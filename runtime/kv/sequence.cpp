#include "runtime/kv/sequence.h"

#include <algorithm>
#include <string>

#include "cpu/row_access.h"
#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

// Rows of one head per task when a prompt goes straight to the host: about 100 us of work.
constexpr uint32_t kRowsPerTask = 1024;

std::vector<LayerShape> shapes_of(const ModelShape& model) {
  std::vector<LayerShape> shapes;
  for (uint32_t layer = 0; layer < model.layers; ++layer) shapes.push_back(model.of(layer));
  return shapes;
}

size_t largest_token(const ModelShape& model) {
  return model.most([&](const LayerShape& s) { return s.token_bytes(model.kv_dtype); });
}

}  // namespace

Sequence::Sequence(const Engine& engine, const SessionParams& params)
    : engine_(&engine),
      layers_(engine.model().layers),
      max_tokens_(params.max_tokens),
      sink_(params.sink),
      window_(params.window),
      flush_block_(params.flush_block),
      row_block_(params.row_block()),
      store_(shapes_of(engine.model()), params.offload_dtype(engine.model()), params.max_tokens,
             &engine.pool()),
      resident_(
          engine.make_resident(params.resident_shape(engine.model()), params.device_memory_limit)),
      rings_(engine, params.max_tokens, *resident_),
      staging_k_(checked_product({params.staging_tokens(), largest_token(engine.model())},
                                 "staged tokens"),
                 false),
      staging_v_(staging_k_.bytes(), false) {}

void Sequence::append(uint32_t layer, const RowsIn& k, const RowsIn& v) {
  if (slides(layer)) return append_to_ring(layer, k, v);
  const uint32_t n = k.tokens;
  uint32_t at = 0;
  while (at < n && sink(layer) < sink_) {
    const uint32_t piece = std::min({n - at, sink_ - sink(layer), window_capacity()});
    stage(layer, k, at, piece, staging_k_.data());
    stage(layer, v, at, piece, staging_v_.data());
    resident_->append_sink(layer, staging_k_.data(), staging_v_.data(), piece);
    at += piece;
  }

  const uint32_t held = window(layer);
  if (n - at > window_capacity() - held) {
    // The window falls back to its W newest tokens, and what makes no whole block with them: what is
    // older leaves, first from the window, then straight from the input.
    const uint32_t leaving = overflow(held + (n - at));
    const uint32_t from_window = std::min(leaving, held);
    // A block that begins in the window is filled up from the input, so that it is stored at once.
    const uint32_t whole = (from_window + row_block_ - 1) / row_block_ * row_block_;
    const uint32_t filling = whole - from_window;
    const size_t behind = from_window * token_bytes(layer);
    if (from_window != 0) {
      resident_->evict(layer, staging_k_.data(), staging_v_.data(), from_window);
      stage(layer, k, at, filling, staging_k_.data() + behind);
      stage(layer, v, at, filling, staging_v_.data() + behind);
      store_staged(layer, whole);
      at += filling;
    }
    offload_from_input(layer, k, v, at, leaving - whole);
    at += leaving - whole;
  }
  if (at < n) {
    stage(layer, k, at, n - at, staging_k_.data());
    stage(layer, v, at, n - at, staging_v_.data());
    resident_->append_window(layer, staging_k_.data(), staging_v_.data(), n - at);
  }
}

void Sequence::append_to_ring(uint32_t layer, const RowsIn& k, const RowsIn& v) {
  uint32_t at = rings_.first_kept(layer, k.tokens);
  rings_.skip(layer, at);
  while (at < k.tokens) {
    const uint32_t piece = std::min(k.tokens - at, window_capacity());
    stage(layer, k, at, piece, staging_k_.data());
    stage(layer, v, at, piece, staging_v_.data());
    rings_.append_window(layer, staging_k_.data(), staging_v_.data(), piece);
    at += piece;
  }
}

void Sequence::stage(uint32_t layer, const RowsIn& rows, uint32_t begin, uint32_t n,
                     std::byte* to) {
  float scratch[kMaxHeadDim];
  const LayerShape of = shape(layer);
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t h = 0; h < of.kv_heads; ++h) {
      store_row(engine_->kernels(), rows, begin + t, h, to, dtype(), of.head_dim, scratch);
      to += of.row_bytes(dtype());
    }
  }
}

void Sequence::offload_from_window(uint32_t layer, uint32_t n) {
  if (n == 0) return;
  resident_->evict(layer, staging_k_.data(), staging_v_.data(), n);
  store_staged(layer, n);
}

void Sequence::store_staged(uint32_t layer, uint32_t n) {
  store_.prepare(layer, n);
  const uint32_t row = store_.rows(layer);
  const LayerShape of = shape(layer);
  const size_t row_bytes = of.row_bytes(dtype());
  if (store_.dtype() == DType::i8) {
    write_blocks(layer, n, [&](uint32_t which, uint32_t t, uint32_t h, float* to) {
      const std::byte* staged = (which == 0 ? staging_k_ : staging_v_).data();
      read_stored(staged + (size_t{t} * of.kv_heads + h) * row_bytes, of.head_dim, to);
    });
    return store_.grow(layer, n);
  }
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t h = 0; h < of.kv_heads; ++h) {
      const size_t at = (size_t{t} * of.kv_heads + h) * row_bytes;
      std::copy_n(staging_k_.data() + at, row_bytes, store_.key(layer, h, row + t));
      std::copy_n(staging_v_.data() + at, row_bytes, store_.value(layer, h, row + t));
    }
  }
  store_.grow(layer, n);
}

void Sequence::read_stored(const std::byte* row, uint32_t dim, float* to) const {
  engine_->kernels().to_f32[static_cast<size_t>(dtype())](row, to, dim);
}

template <class Read>
void Sequence::write_blocks(uint32_t layer, uint32_t n, const Read& read) {
  const uint32_t row = store_.rows(layer);
  if (row % kScaleRows != 0 || n % kScaleRows != 0) {
    throw Error(Status::internal, "rows " + std::to_string(row) + " to " +
                                      std::to_string(uint64_t{row} + n) +
                                      " in int8, which come in whole blocks");
  }
  const float most = engine_->model().largest_element();
  const uint32_t blocks = n / kScaleRows;
  engine_->pool().run(2 * shape(layer).kv_heads * blocks, [&](uint32_t task, uint32_t) {
    const uint32_t which = task % 2;
    const uint32_t h = task / 2 / blocks;
    const uint32_t first = task / 2 % blocks * kScaleRows;
    store_.write_block(layer, h, which, row + first, most,
                       [&](uint32_t i, float* to) { read(which, first + i, h, to); });
  });
}

void Sequence::offload_from_input(uint32_t layer, const RowsIn& k, const RowsIn& v, uint32_t begin,
                                  uint32_t n) {
  if (n == 0) return;
  const uint32_t row = store_.rows(layer);
  const uint32_t per_head = (n + kRowsPerTask - 1) / kRowsPerTask;
  const LayerShape of = shape(layer);
  store_.prepare(layer, n);
  if (store_.dtype() == DType::i8) {
    // By way of the model's dtype, like the tokens that come through the window.
    write_blocks(layer, n, [&](uint32_t which, uint32_t t, uint32_t h, float* to) {
      const RowsIn& rows = which == 0 ? k : v;
      std::byte stored[kMaxHeadDim * sizeof(float)];
      store_row(engine_->kernels(), rows, begin + t, h, stored, dtype(), of.head_dim, to);
      read_stored(stored, of.head_dim, to);
    });
    return store_.grow(layer, n);
  }
  engine_->pool().run(of.kv_heads * per_head, [&](uint32_t task, uint32_t) {
    float scratch[kMaxHeadDim];
    const uint32_t h = task / per_head;
    const uint32_t first = task % per_head * kRowsPerTask;
    for (uint32_t t = first; t < std::min(n, first + kRowsPerTask); ++t) {
      store_row(engine_->kernels(), k, begin + t, h, store_.key(layer, h, row + t), dtype(),
                of.head_dim, scratch);
      store_row(engine_->kernels(), v, begin + t, h, store_.value(layer, h, row + t), dtype(),
                of.head_dim, scratch);
    }
  });
  store_.grow(layer, n);
}

void Sequence::drop_newest(uint32_t layer) {
  if (slides(layer)) return rings_.truncate_to(layer, tokens(layer) - 1);
  if (window(layer) != 0) {
    resident_->truncate(layer, sink(layer), window(layer) - 1);
  } else {
    resident_->truncate(layer, sink(layer) - 1, 0);
  }
}

void Sequence::read(uint32_t layer, std::span<const uint32_t> tokens, std::byte* k,
                    std::byte* v) const {
  if (slides(layer)) {
    for (const uint32_t token : tokens) {
      rings_.read_token(layer, token, k, v);
      k += token_bytes(layer);
      v += token_bytes(layer);
    }
    return;
  }
  const LayerShape of = shape(layer);
  const size_t row_bytes = of.row_bytes(dtype());
  std::vector<std::byte> resident_k((sink(layer) + window(layer)) * token_bytes(layer));
  std::vector<std::byte> resident_v(resident_k.size());
  resident_->read(layer, resident_k.data(), resident_v.data());
  const uint32_t first_row = sink(layer), first_of_window = first_row + rows(layer);
  for (const uint32_t token : tokens) {
    const bool offloaded = token >= first_row && token < first_of_window;
    const size_t at = (token < first_row ? token : token - rows(layer)) * token_bytes(layer);
    for (uint32_t h = 0; h < of.kv_heads; ++h, k += row_bytes, v += row_bytes) {
      if (offloaded) {
        const KvView kv = view(layer, h);
        cpu::copy_row(engine_->kernels(), kv.keys, token - first_row, dtype(), k);
        cpu::copy_row(engine_->kernels(), kv.values, token - first_row, dtype(), v);
      } else {
        std::copy_n(resident_k.data() + at + h * row_bytes, row_bytes, k);
        std::copy_n(resident_v.data() + at + h * row_bytes, row_bytes, v);
      }
    }
  }
}

Sequence::Split Sequence::split(uint32_t layer, uint32_t tokens) const {
  Split s;
  if (slides(layer)) return s;
  s.sink = std::min(tokens, sink(layer));
  const uint32_t others = tokens - s.sink;
  if (others >= rows(layer)) {
    s.rows = rows(layer);
    s.window = std::min(others - s.rows, window(layer));
  } else {
    s.rows = others / row_block_ * row_block_;
    s.window = others - s.rows;
  }
  return s;
}

void Sequence::truncate(uint32_t layer, uint32_t tokens) {
  if (slides(layer)) return rings_.truncate_to(layer, tokens);
  const Split kept = split(layer, tokens);
  if (kept.rows == rows(layer)) return resident_->truncate(layer, kept.sink, kept.window);
  resident_->truncate(layer, kept.sink, 0);
  if (kept.window != 0) return_to_window(layer, kept.rows, kept.window);
  store_.truncate(layer, kept.rows);
}

void Sequence::return_to_window(uint32_t layer, uint32_t row, uint32_t n) {
  const LayerShape of = shape(layer);
  for (uint32_t h = 0; h < of.kv_heads; ++h) {
    const KvView kv = store_.view(layer, h);
    for (uint32_t t = 0; t < n; ++t) {
      const size_t at = (size_t{t} * of.kv_heads + h) * of.row_bytes(dtype());
      cpu::copy_row(engine_->kernels(), kv.keys, row + t, dtype(), staging_k_.data() + at);
      cpu::copy_row(engine_->kernels(), kv.values, row + t, dtype(), staging_v_.data() + at);
    }
  }
  resident_->append_window(layer, staging_k_.data(), staging_v_.data(), n);
}

void Sequence::fill(uint32_t layer, const Split& counts, const std::byte* k, const std::byte* v) {
  resident_->append_sink(layer, k, v, counts.sink);
  const size_t sink_bytes = counts.sink * token_bytes(layer);
  resident_->append_window(layer, k + sink_bytes, v + sink_bytes, counts.window);
}

void Sequence::copy_from(const Sequence& from) {
  row_block_ = from.row_block_;
  rings_.copy_from(from.rings_);
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    if (slides(layer)) continue;
    const Split counts = from.split(layer, from.tokens(layer));
    std::vector<std::byte> k((counts.sink + counts.window) * token_bytes(layer)), v(k.size());
    from.resident_->read(layer, k.data(), v.data());
    fill(layer, counts, k.data(), v.data());
    store_.share(layer, from.store_);
  }
}

void Sequence::save(ChecksumWriter& out) const {
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    if (slides(layer)) continue;
    const Split counts = split(layer, tokens(layer));
    out.value(counts.sink);
    out.value(counts.rows);
    out.value(counts.window);
    std::vector<std::byte> k((counts.sink + counts.window) * token_bytes(layer)), v(k.size());
    resident_->read(layer, k.data(), v.data());
    out.bytes(k.data(), k.size());
    out.bytes(v.data(), v.size());
    std::vector<std::span<const std::byte>> rows;
    for (uint32_t h = 0; h < shape(layer).kv_heads; ++h) {
      const KvView kv = view(layer, h);
      rows.emplace_back(kv.keys.data, counts.rows * store_.row_bytes(layer));
      rows.emplace_back(kv.values.data, counts.rows * store_.row_bytes(layer));
    }
    out.arrays(rows);
    out.bytes(reinterpret_cast<const std::byte*>(store_.scales(layer)),
              store_.scale_count(layer, counts.rows) * sizeof(uint16_t));
  }
  rings_.save(out);
}

void Sequence::check_finite(uint32_t layer, const std::byte* elements, size_t n,
                            DType dtype) const {
  if (engine_->kernels().all_finite[static_cast<size_t>(dtype)](elements, n)) return;
  throw Error(Status::corrupt,
              "layer " + std::to_string(layer) + " has an element of K or V that is not finite");
}

void Sequence::load(ChecksumReader& in) {
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    if (slides(layer)) continue;
    Split counts;
    counts.sink = in.value<uint32_t>("token counts");
    counts.rows = in.value<uint32_t>("token counts");
    counts.window = in.value<uint32_t>("token counts");
    if (counts.sink > sink_ || counts.window > window_capacity() ||
        (counts.sink < sink_ && (counts.rows != 0 || counts.window != 0)) ||
        uint64_t{counts.sink} + counts.rows + counts.window > max_tokens_) {
      throw Error(Status::corrupt, "layer " + std::to_string(layer) +
                                       " has token counts that no session has: sink " +
                                       std::to_string(counts.sink) + ", offloaded " +
                                       std::to_string(counts.rows) + ", window " +
                                       std::to_string(counts.window));
    }
    if (counts.rows % row_block_ != 0) {
      if (store_.dtype() == DType::i8) {
        throw Error(Status::corrupt,
                    "layer " + std::to_string(layer) + " has " + std::to_string(counts.rows) +
                        " rows in int8, which come in blocks of " + std::to_string(kScaleRows));
      }
      row_block_ = 1;  // codes were chosen after there were rows
    }
    const uint64_t resident = uint64_t{counts.sink} + counts.window;
    const auto k = in.array<std::byte>(resident * token_bytes(layer), "resident keys");
    const auto v = in.array<std::byte>(resident * token_bytes(layer), "resident values");
    const size_t elements = k.size() / dtype_size(dtype());
    check_finite(layer, k.data(), elements, dtype());
    check_finite(layer, v.data(), elements, dtype());
    fill(layer, counts, k.data(), v.data());
    store_.prepare(layer, counts.rows);
    store_.grow(layer, counts.rows);
    std::vector<std::span<std::byte>> rows;
    for (uint32_t h = 0; h < shape(layer).kv_heads; ++h) {
      rows.emplace_back(store_.key(layer, h, 0), counts.rows * store_.row_bytes(layer));
      rows.emplace_back(store_.value(layer, h, 0), counts.rows * store_.row_bytes(layer));
    }
    // Of int8 the scales are looked at.
    const bool is_int8 = store_.dtype() == DType::i8;
    in.arrays(rows, "keys and values", [&](size_t, const std::byte* data, size_t n) {
      if (!is_int8) check_finite(layer, data, n / dtype_size(store_.dtype()), store_.dtype());
    });
    uint16_t* scales = store_.scales(layer);
    const size_t n = store_.scale_count(layer, counts.rows);
    in.bytes(reinterpret_cast<std::byte*>(scales), n * sizeof *scales, "scales");
    constexpr uint16_t kInfinity = 0x7F80;  // what is above it is NaN, or negative
    if (std::any_of(scales, scales + n, [](uint16_t s) { return s >= kInfinity; })) {
      throw Error(Status::corrupt,
                  "layer " + std::to_string(layer) + " has a scale that is no finite number >= 0");
    }
  }
  rings_.load(in);
}

}  // namespace keyhole::runtime
