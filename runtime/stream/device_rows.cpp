#include "runtime/stream/device_rows.h"

#include <algorithm>
#include <string>

namespace keyhole::runtime {

TensorView DeviceRowsReader::read(const TensorView& rows, const char* name, gpu::Stream stream,
                                  RowBuffer& buffer) {
  if (!rows.on_device()) return rows;
  // One copy takes pieces that are equally far apart, at least as far as they are long: a token's heads together, or
  // every row by itself.
  const ptrdiff_t dim = rows.dim, heads = rows.heads;
  const ptrdiff_t head_stride = rows.heads == 1 ? dim : rows.head_stride;
  const ptrdiff_t token_stride = rows.tokens <= 1 ? head_stride * heads : rows.token_stride;
  const bool by_token = head_stride == dim && token_stride >= dim * heads;
  const bool by_row = head_stride >= dim && token_stride == head_stride * heads;
  if (!by_token && !by_row) {
    throw Error(Status::invalid_argument,
                std::string("tensor ") + name + " in device memory has a token stride of " +
                    std::to_string(token_stride) + " and a head stride of " +
                    std::to_string(head_stride) + " elements, allowed: head stride " +
                    std::to_string(rows.dim) + " with a token stride of at least " +
                    std::to_string(uint64_t{rows.heads} * rows.dim) +
                    ", or a larger head stride with token stride = heads * head stride");
  }
  const size_t row = rows.row_bytes(), token = row * rows.heads;
  std::byte* const to = buffer.room(token * rows.tokens);
  const size_t bytes = by_token ? token : row;
  const size_t pitch = (by_token ? token_stride : head_stride) * dtype_size(rows.dtype);
  const size_t count = by_token ? rows.tokens : rows.tokens * rows.heads;
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
  return dense_tensor<const std::byte>(to, rows.tokens, rows.heads, rows.dim, rows.dtype);
}

}  // namespace keyhole::runtime
