#include "runtime/stream/device_rows.h"

#include <algorithm>
#include <string>

namespace keyhole::runtime {
namespace {

/// A stride in bytes as elements. Strides are kept as unsigned numbers: the division must see the sign.
size_t in_elements(size_t stride_bytes, DType dtype) {
  const auto bytes = static_cast<ptrdiff_t>(stride_bytes);
  return static_cast<size_t>(bytes / static_cast<ptrdiff_t>(dtype_size(dtype)));
}

}  // namespace

gpu::DeviceRows device_rows(const RowsIn& rows) {
  return {const_cast<std::byte*>(rows.data), in_elements(rows.head_stride, rows.dtype), rows.dtype};
}

gpu::DeviceRows device_rows(const RowsOut& rows) {
  return {rows.data, in_elements(rows.head_stride, rows.dtype), rows.dtype};
}

gpu::DeviceTokens device_tokens(const RowsIn& rows) {
  return {const_cast<std::byte*>(rows.data), in_elements(rows.token_stride, rows.dtype),
          in_elements(rows.head_stride, rows.dtype), rows.dtype};
}

gpu::DeviceTokens device_tokens(const RowsOut& rows) {
  return {rows.data, in_elements(rows.token_stride, rows.dtype),
          in_elements(rows.head_stride, rows.dtype), rows.dtype};
}

RowsIn DeviceRowsReader::read(const RowsIn& rows, const char* name, gpu::Stream stream,
                              RowBuffer& buffer) {
  if (!rows.on_device) return rows;
  const size_t row = size_t{rows.dim} * dtype_size(rows.dtype);
  const size_t token = row * rows.heads;
  // One copy takes pieces that are equally far apart, at least as far as they are long: a token's heads together, or
  // every row by itself.
  const auto head_stride = static_cast<ptrdiff_t>(rows.heads == 1 ? row : rows.head_stride);
  const auto token_stride = static_cast<ptrdiff_t>(
      rows.tokens <= 1 ? static_cast<size_t>(head_stride) * rows.heads : rows.token_stride);
  const auto row_bytes = static_cast<ptrdiff_t>(row);
  const bool by_token = head_stride == row_bytes && token_stride >= static_cast<ptrdiff_t>(token);
  const bool by_row =
      head_stride >= row_bytes && token_stride == head_stride * static_cast<ptrdiff_t>(rows.heads);
  if (!by_token && !by_row) {
    const auto elements = [&](ptrdiff_t bytes) {
      return std::to_string(bytes / static_cast<ptrdiff_t>(dtype_size(rows.dtype)));
    };
    throw Error(Status::invalid_argument,
                std::string("tensor ") + name + " in device memory has a token stride of " +
                    elements(token_stride) + " and a head stride of " + elements(head_stride) +
                    " elements, allowed: head stride " + std::to_string(rows.dim) +
                    " with a token stride of at least " +
                    std::to_string(uint64_t{rows.heads} * rows.dim) +
                    ", or a larger head stride with token stride = heads * head stride");
  }
  std::byte* const to = buffer.room(token * rows.tokens);
  const size_t bytes = by_token ? token : row;
  const auto pitch = static_cast<size_t>(by_token ? token_stride : head_stride);
  const size_t count = by_token ? rows.tokens : size_t{rows.tokens} * rows.heads;
  copies_->read(
      rows.data, bytes, pitch, count, stream, [&](size_t first, size_t n, const std::byte* data) {
        std::byte* out = to + first * bytes;
        constexpr size_t kPiece = size_t{1} << 20;
        const size_t all = n * bytes;
        pool_->run(static_cast<uint32_t>((all + kPiece - 1) / kPiece), [&](uint32_t i, uint32_t) {
          const size_t at = i * kPiece;
          std::copy_n(data + at, std::min(kPiece, all - at), out + at);
        });
      });
  RowsIn host = rows;
  host.data = to;
  host.head_stride = row;
  host.token_stride = token;
  host.on_device = false;
  return host;
}

}  // namespace keyhole::runtime
