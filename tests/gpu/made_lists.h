// For tests of lists of codes that the device has made: what lies on the device, as the host would have it.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "gpu/code_lists.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "index/scan/code_lists.h"

namespace keyhole::gpu::test {

/// The lists of a KV head as they lie on the device. Of a step with lists, which are in use.
struct MadeLists {
  MadeLists(const CodesStep& s, uint32_t kv_head) : shape(s.shape) {
    const CodesLists& l = s.lists;
    const auto read = [&](const auto* from, size_t n) {
      std::vector<std::remove_cv_t<std::remove_pointer_t<decltype(from)>>> to(n);
      EXPECT_EQ(cudaMemcpy(to.data(), from, n * sizeof *from, cudaMemcpyDefault), cudaSuccess);
      return to;
    };
    const uint32_t count = read(l.counts + kv_head, 1)[0];
    EXPECT_LE(count, l.list_capacity);
    const size_t first = size_t{kv_head} * l.list_capacity;
    places = read(l.places + first, count);
    figures = read(l.figures + first, count);
    key_means = read(l.key_means + first * shape.dim, size_t{count} * shape.dim);
    value_means = read(l.value_means + first * shape.dim, size_t{count} * shape.dim);
    const size_t tiles = mean_tiles_of(count) * MeanTiles::kLists * shape.dim / 2;
    mean_tiles = read(l.mean_tiles + first * shape.dim / 2, tiles);
    pair_count = 0;
    for (const ListPlace& place : places) pair_count += (place.rows + kPairRows - 1) / kPairRows;
    EXPECT_LE(pair_count, l.pair_capacity);
    const size_t pair = size_t{kv_head} * l.pair_capacity;
    ids = read(l.ids + pair * kPairRows, size_t{pair_count} * kPairRows);
    pairs = read(l.pairs + pair * list_pair_bytes(shape), pair_count * list_pair_bytes(shape));
  }
  [[nodiscard]] uint32_t lists() const { return static_cast<uint32_t>(places.size()); }
  [[nodiscard]] std::vector<uint32_t> rows_of(uint32_t list) const {
    const uint32_t* const from = ids.data() + size_t{places[list].first_pair} * kPairRows;
    return {from, from + places[list].rows};
  }
  /// The codes of a list as the host lays them out: `[tiles]` key codes, `[tiles]` value codes, `[tiles, 16, 2]`
  /// factors. What the device has beyond them is checked to be 0.
  [[nodiscard]] std::vector<std::byte> codes_of(uint32_t list) const {
    const size_t key_tile = size_t{kCodeLanes} * shape.key_words() * 4;
    const size_t value_tile = size_t{kCodeLanes} * shape.value_words() * 4;
    const size_t factor_tile = size_t{kCodeTile} * 4;
    const uint32_t tiles = (places[list].rows + kCodeTile - 1) / kCodeTile;
    std::vector<std::byte> codes(tiles * (key_tile + value_tile + factor_tile));
    for (uint32_t t = 0; t < (tiles + 1) / 2 * 2; ++t) {
      const std::byte* const from =
          pairs.data() + (places[list].first_pair + t / 2) * list_pair_bytes(shape);
      const auto take = [&](size_t part, size_t to, size_t bytes) {
        const std::byte* const tile = from + part + t % 2 * bytes;
        if (t < tiles) {
          std::memcpy(codes.data() + to + t * bytes, tile, bytes);
        } else {
          for (size_t i = 0; i < bytes; ++i) EXPECT_EQ(tile[i], std::byte{0}) << "list " << list;
        }
      };
      take(0, 0, key_tile);
      take(2 * key_tile, tiles * key_tile, value_tile);
      take(2 * (key_tile + value_tile), tiles * (key_tile + value_tile), factor_tile);
    }
    return codes;
  }
  /// Lists [first, lists()), of rows [begin, begin + rows), as a chunk of the host.
  [[nodiscard]] index::CodeChunk chunk(uint32_t first, size_t begin, size_t rows) const {
    index::CodeChunk chunk;
    chunk.begin = begin;
    chunk.rows = rows;
    std::vector<std::byte> all;
    for (uint32_t l = first; l < lists(); ++l) {
      for (const uint32_t id : rows_of(l)) chunk.ids.push_back(id);
      chunk.ends.push_back(static_cast<uint32_t>(chunk.ids.size()));
      chunk.at.push_back(all.size());
      const std::vector<std::byte> codes = codes_of(l);
      all.insert(all.end(), codes.begin(), codes.end());
      chunk.sizes.push_back(static_cast<float>(places[l].rows));
      chunk.log_sizes.push_back(std::log(chunk.sizes.back()));
      chunk.spreads.push_back(figures[l].spread);
      chunk.noises.push_back(figures[l].noise);
      chunk.widest.push_back(figures[l].widest);
    }
    EXPECT_EQ(chunk.ids.size(), rows);
    chunk.means_bytes = size_t{2} * chunk.lists() * shape.dim * 2;
    chunk.codes_bytes = all.size();
    chunk.memory = std::make_shared<cpu::LineVector<std::byte>>(chunk.means_bytes + all.size());
    chunk.means = chunk.memory->data();
    chunk.codes = chunk.means + chunk.means_bytes;
    const size_t half = chunk.means_bytes / 2, before = size_t{first} * shape.dim;
    std::memcpy(chunk.means, key_means.data() + before, half);
    std::memcpy(chunk.means + half, value_means.data() + before, half);
    if (!all.empty()) std::memcpy(chunk.codes, all.data(), all.size());
    return chunk;
  }

  CodeShape shape;
  std::vector<ListPlace> places;
  std::vector<ListFigures> figures;
  std::vector<uint16_t> key_means, value_means;  ///< `[lists, dim]`
  std::vector<uint32_t> mean_tiles;
  std::vector<uint32_t> ids;  ///< `[pairs, 32]`
  std::vector<std::byte> pairs;
  size_t pair_count = 0;
};

}  // namespace keyhole::gpu::test
