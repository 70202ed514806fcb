#include "gpu/code_lists.h"

#include <cmath>
#include <cstring>

namespace keyhole::gpu {

uint32_t pairs_of_lists(const HeadLists& lists) {
  uint32_t pairs = 0, begin = 0;
  for (uint32_t l = 0; l < lists.lists; ++l) {
    pairs += (lists.ends[l] - begin + kPairRows - 1) / kPairRows;
    begin = lists.ends[l];
  }
  return pairs;
}

void pack_lists(const CodeShape& shape, const HeadLists& lists, uint32_t first_pair,
                PackedLists& out) {
  const uint32_t pairs = pairs_of_lists(lists);
  const size_t key_tile = size_t{kCodeLanes} * shape.key_words() * 4;
  const size_t value_tile = size_t{kCodeLanes} * shape.value_words() * 4;
  const size_t factor_tile = size_t{kCodeTile} * 4;
  const size_t pair_bytes = list_pair_bytes(shape);
  out.pairs.assign(pairs * pair_bytes, std::byte{0});
  out.ids.assign(size_t{pairs} * kPairRows, 0);
  out.places.clear();
  out.figures.clear();
  uint32_t begin = 0, pair = 0;
  for (uint32_t l = 0; l < lists.lists; ++l) {
    const uint32_t rows = lists.ends[l] - begin;
    const uint32_t tiles = (rows + kCodeTile - 1) / kCodeTile;
    const std::byte* keys = lists.codes + lists.at[l];
    const std::byte* values = keys + tiles * key_tile;
    const std::byte* factors = values + tiles * value_tile;
    for (uint32_t t = 0; t < tiles; ++t) {
      std::byte* const to = out.pairs.data() + (pair + t / 2) * pair_bytes;
      std::memcpy(to + t % 2 * key_tile, keys + t * key_tile, key_tile);
      std::memcpy(to + 2 * key_tile + t % 2 * value_tile, values + t * value_tile, value_tile);
      std::memcpy(to + 2 * (key_tile + value_tile) + t % 2 * factor_tile, factors + t * factor_tile,
                  factor_tile);
    }
    std::memcpy(out.ids.data() + size_t{pair} * kPairRows, lists.ids + begin,
                rows * sizeof(uint32_t));
    out.places.push_back({first_pair + pair, rows});
    out.figures.push_back(
        {lists.spreads[l], lists.widest[l], lists.noises[l], std::log(static_cast<float>(rows))});
    pair += (rows + kPairRows - 1) / kPairRows;
    begin = lists.ends[l];
  }
}

}  // namespace keyhole::gpu
