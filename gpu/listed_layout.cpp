#include "gpu/listed_layout.h"

#include "gpu/listed.h"

namespace keyhole::gpu {
namespace {

// A piece of 4 MiB takes 80 us over the bus: enough to hide what starting its copy costs.
constexpr size_t kListedPieceBytes = size_t{4} << 20U;

size_t whole(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

ListedLayout::ListedLayout(const BlockedShape& s, uint32_t n, uint32_t rows, bool has_low,
                           size_t lot_bytes) {
  size_t end = 0;
  const auto take = [&](size_t size) {
    const size_t at = end;
    end += whole(size);
    return at;
  };
  const size_t element = dtype_size(s.dtype), row = s.head_dim * element;
  head_bytes = whole(rows * row);
  heads = 1;
  for (uint32_t some = 2; some <= s.kv_heads; ++some) {
    if (s.kv_heads % some == 0 && 2 * some * head_bytes <= lot_bytes) heads = some;
  }
  const size_t queries = size_t{n} * heads * (s.q_heads / s.kv_heads);
  piece_rows = static_cast<uint32_t>(kListedPieceBytes / row / kScaleRows * kScaleRows);
  piece_bytes = piece_rows * row;
  q = take(queries * row);
  q_low = take(has_low ? queries * row : 0);
  lse = take(queries * sizeof(float));
  bad = take(sizeof(uint32_t));
  lots = take(size_t{2} * 2 * heads * head_bytes);
  raw = take(s.rows_in_int8 ? size_t{piece_rows} * s.head_dim : 0);
  // Each place may end in a block that is not whole.
  const size_t scale_blocks = s.rows_in_int8 ? rows / kScaleRows + kMostListedPlaces : 0;
  scales = take(scale_blocks * s.kv_heads * 2 * s.head_dim * sizeof(uint16_t));
  bytes = end;
}

}  // namespace keyhole::gpu
