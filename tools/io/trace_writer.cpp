#include <cmath>
#include <stdexcept>
#include <utility>

#include "runtime/files/element.h"
#include "tools/io/trace_format.h"

namespace keyhole::tools {
namespace {

using Declaration = SafetensorsWriter::Declaration;

// Bytes converted at a time: rows come strided, pieces go to the file contiguous.
constexpr size_t kPieceElements = 1U << 16U;

std::vector<Declaration> declare(const TraceInfo& info, const TraceWriter::Options& options) {
  const size_t n = info.tokens;
  const size_t d = info.head_dim;
  const size_t g = info.group();
  const size_t m = options.query_positions.size();
  const size_t t = options.training_positions.size();
  std::vector<Declaration> layout = {{kQueryPositions, ElementType::u32, {m}},
                                     {kTrainingPositions, ElementType::u32, {t}}};
  for (const uint32_t layer : info.layers) {
    for (uint32_t kv = 0; kv < info.kv_heads; ++kv) {
      const auto add = [&](const char* part, ElementType type, std::vector<size_t> shape) {
        layout.push_back({trace_tensor_name(layer, kv, part), type, std::move(shape)});
      };
      add("keys", options.kv_type, {n, d});
      add("values", options.kv_type, {n, d});
      add("queries", options.query_type, {m, g, d});
      if (t != 0) add("training_queries", options.query_type, {t, g, d});
    }
  }
  return layout;
}

// The largest value that the type holds after rounding.
float largest(ElementType type) {
  return type == ElementType::f16    ? 65504.0F
         : type == ElementType::bf16 ? 0x1.fep127F
                                     : 0x1.fffffep127F;
}

}  // namespace

struct TraceWriter::Impl {
  Impl(const std::filesystem::path& path, TraceInfo trace_info, Options trace_options)
      : info(std::move(trace_info)),
        options(std::move(trace_options)),
        file(path, declare(info, options), to_metadata(info)) {}

  void write_rows(const char* what, const StridedRows& rows, size_t count, size_t width,
                  ElementType type) {
    const auto name = [&] {
      const size_t layer = heads_written / info.kv_heads;
      return trace_tensor_name(info.layers[layer],
                               static_cast<uint32_t>(heads_written % info.kv_heads), what);
    };
    if (rows.count != count) {
      throw std::runtime_error("\"" + name() + "\" was given " + std::to_string(rows.count) +
                               " rows; declared are " + std::to_string(count));
    }
    piece.clear();
    for (size_t r = 0; r < count; ++r) {
      const float* row = rows.data + r * rows.stride;
      for (size_t i = 0; i < width; ++i) {
        if (!(std::abs(row[i]) <= largest(type))) {
          throw std::runtime_error("\"" + name() + "\" row " + std::to_string(r) + " holds " +
                                   std::to_string(row[i]) + "; needed is a finite number within " +
                                   element_name(type));
        }
      }
      piece.insert(piece.end(), row, row + width);
      if (piece.size() >= kPieceElements || r + 1 == count) flush_piece(type);
    }
  }

  void flush_piece(ElementType type) {
    converted.resize(piece.size() * element_size(type));
    elements_from_f32(type, piece, converted);
    file.write(converted);
    piece.clear();
  }

  TraceInfo info;
  Options options;
  SafetensorsWriter file;
  size_t heads_written = 0;
  std::vector<float> piece;
  std::vector<std::byte> converted;
};

TraceWriter::TraceWriter(const std::filesystem::path& path, TraceInfo info, Options options) {
  check_trace_info(info);
  check_trace_positions(info, options.query_positions, options.training_positions);
  impl_ = std::make_unique<Impl>(path, std::move(info), std::move(options));
  impl_->file.write(std::as_bytes(std::span(impl_->options.query_positions)));
  impl_->file.write(std::as_bytes(std::span(impl_->options.training_positions)));
}

TraceWriter::~TraceWriter() = default;

void TraceWriter::write_head(const StridedRows& keys, const StridedRows& values,
                             const StridedRows& queries, const StridedRows& training_queries) {
  const TraceInfo& info = impl_->info;
  const Options& options = impl_->options;
  if (impl_->heads_written == info.layers.size() * info.kv_heads) {
    throw std::runtime_error("the trace has " + std::to_string(impl_->heads_written) +
                             " heads, and all are written already");
  }
  const size_t d = info.head_dim;
  const size_t group_width = info.group() * d;
  impl_->write_rows("keys", keys, info.tokens, d, options.kv_type);
  impl_->write_rows("values", values, info.tokens, d, options.kv_type);
  impl_->write_rows("queries", queries, options.query_positions.size(), group_width,
                    options.query_type);
  impl_->write_rows("training_queries", training_queries, options.training_positions.size(),
                    group_width, options.query_type);
  ++impl_->heads_written;
}

void TraceWriter::finish() { impl_->file.finish(); }

}  // namespace keyhole::tools
