// The host's copy of resident tokens against lists that are kept as plainly as can be; and the layout of what host
// and device share. Needs no GPU.
#include "gpu/mirror.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>

#include "gpu/resident_layout.h"

namespace keyhole::gpu {
namespace {

constexpr size_t kRow = 24;

struct Lists {
  std::deque<std::vector<std::byte>> sink, window;
};

std::vector<std::byte> random_rows(std::mt19937& rng, size_t n) {
  std::vector<std::byte> bytes(n * kRow);
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng());
  return bytes;
}

/// K of a token and, negated, V.
std::vector<std::byte> negated(std::vector<std::byte> bytes) {
  for (std::byte& b : bytes) b = ~b;
  return bytes;
}

void check_same(const Mirror& mirror, uint32_t layer, const Lists& want) {
  ASSERT_EQ(mirror.state(layer).sink, want.sink.size());
  ASSERT_EQ(mirror.state(layer).window, want.window.size());
  std::vector<std::byte> all;
  for (const auto& list : {want.sink, want.window}) {
    for (const auto& row : list) all.insert(all.end(), row.begin(), row.end());
  }
  std::vector<std::byte> k(all.size()), v(all.size());
  mirror.read(layer, 0, mirror.state(layer).tokens(), k.data(), v.data());
  EXPECT_EQ(k, all);
  EXPECT_EQ(v, negated(all));
  // The same rows where they lie, as those of 4 heads of 3 elements of two bytes; one of the heads.
  const KvPieces rows = mirror.rows(layer, 4, 3, DType::f16);
  size_t token = 0;
  for (uint32_t i = 0; i < rows.count; ++i) {
    const KvView piece = rows.pieces[i].head(2);
    EXPECT_EQ(piece.keys.dim, 3U);
    EXPECT_EQ(piece.keys.tokens, piece.values.tokens);
    EXPECT_NE(piece.keys.tokens, 0U);
    for (size_t r = 0; r < piece.keys.tokens; ++r, ++token) {
      EXPECT_EQ(std::memcmp(piece.keys.row(r), k.data() + token * kRow + 12, 6), 0) << token;
      EXPECT_EQ(std::memcmp(piece.values.row(r), v.data() + token * kRow + 12, 6), 0) << token;
    }
  }
  EXPECT_EQ(token, want.sink.size() + want.window.size());
}

TEST(Mirror, AnyOrderOfOperations) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  const auto up_to = [&](size_t n) {
    return static_cast<uint32_t>(std::uniform_int_distribution<size_t>(0, n)(rng));
  };
  for (int round = 0; round < 200; ++round) {
    RingShape shape;
    shape.sink = up_to(4);
    shape.capacity = 1 + up_to(8);
    shape.keep = up_to(shape.capacity - 1);
    Mirror mirror(shape, 2, kRow);
    Lists lists[2];
    for (int i = 0; i < 100; ++i) {
      const uint32_t layer = up_to(1);
      Lists& l = lists[layer];
      switch (up_to(4)) {
        case 0: {
          const uint32_t n = l.window.empty() ? up_to(shape.sink - l.sink.size()) : 0;
          const auto rows = random_rows(rng, n);
          mirror.append_sink(layer, rows.data(), negated(rows).data(), n);
          for (uint32_t r = 0; r < n; ++r) {
            l.sink.emplace_back(rows.begin() + r * kRow, rows.begin() + (r + 1) * kRow);
          }
          break;
        }
        case 1: {
          if (l.sink.size() < shape.sink) break;
          const uint32_t n = up_to(shape.capacity - l.window.size());
          const auto rows = random_rows(rng, n);
          mirror.append_window(layer, rows.data(), negated(rows).data(), n);
          for (uint32_t r = 0; r < n; ++r) {
            l.window.emplace_back(rows.begin() + r * kRow, rows.begin() + (r + 1) * kRow);
          }
          break;
        }
        case 2: {
          const uint32_t n = up_to(l.window.size());
          std::vector<std::byte> k(n * kRow), v(n * kRow);
          mirror.evict(layer, k.data(), v.data(), n);
          for (uint32_t r = 0; r < n; ++r) {
            EXPECT_TRUE(std::equal(l.window[r].begin(), l.window[r].end(), k.begin() + r * kRow));
          }
          l.window.erase(l.window.begin(), l.window.begin() + n);
          break;
        }
        case 3: {
          const uint32_t window = up_to(l.window.size());
          const uint32_t sink =
              window == 0 ? up_to(l.sink.size()) : static_cast<uint32_t>(l.sink.size());
          mirror.truncate(layer, sink, window);
          l.window.resize(window);
          l.sink.resize(sink);
          break;
        }
        default: {
          const auto row = random_rows(rng, 1);
          std::vector<std::byte> k(shape.capacity * kRow), v(k.size());
          const uint32_t n =
              mirror.update_host_copy(layer, row.data(), negated(row).data(), k.data(), v.data());
          if (l.sink.size() < shape.sink) {
            EXPECT_EQ(n, 0U);
            l.sink.push_back(row);
            break;
          }
          uint32_t left = 0;
          if (l.window.size() == shape.capacity) {
            for (; l.window.size() > shape.keep; ++left) {
              EXPECT_TRUE(std::equal(l.window.front().begin(), l.window.front().end(),
                                     k.begin() + left * kRow));
              l.window.pop_front();
            }
          }
          EXPECT_EQ(n, left);
          l.window.push_back(row);
        }
      }
      check_same(mirror, layer, l);
    }
  }
}

TEST(Mirror, HugeWindowsCostNothingUntilTheyFill) {
  RingShape shape;
  shape.capacity = 1U << 20U;
  Mirror mirror(shape, 32, 2048);  // 128 GiB of address space
  const std::vector<std::byte> row(2048, std::byte{7});
  mirror.append_window(31, row.data(), row.data(), 1);
  std::vector<std::byte> k(2048), v(2048);
  mirror.read(31, 0, 1, k.data(), v.data());
  EXPECT_EQ(k, row);
}

ResidentShape odd_shape() {
  ResidentShape shape;
  shape.layers = 3;
  shape.kv_heads = 5;
  shape.q_heads = 35;
  shape.head_dim = 80;
  shape.dtype = DType::bf16;
  shape.sink = 3;
  shape.window_capacity = 77;
  shape.window = 7;
  return shape;
}

TEST(PinnedLayout, NothingOverlaps) {
  ResidentShape shape = odd_shape();
  shape.keeps_answers = true;
  const PinnedLayout layout(shape);
  std::vector<int> owners(layout.bytes(), 0);
  int owner = 0;
  const auto take = [&](size_t at, size_t bytes) {
    ++owner;
    ASSERT_LE(at + bytes, owners.size());
    for (size_t i = at; i < at + bytes; ++i) {
      ASSERT_EQ(owners[i], 0) << "byte " << i << " of " << owner;
      owners[i] = owner;
    }
  };
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      take(layout.published(layer, h), kLine);
      take(layout.delivered(layer, h), kLine);
      take(layout.slot(layer, h), 7 * 81 * sizeof(float));
      take(layout.answered(layer, h), kLine);
      for (uint32_t sequence : {6U, 7U}) {
        take(layout.answer(layer, h, sequence), 7 * 81 * sizeof(float));
      }
      EXPECT_EQ(layout.answer(layer, h, 1), layout.answer(layer, h, 0) + layout.answer_bytes());
    }
    for (uint32_t sequence : {6U, 7U}) {
      take(layout.rows(layer, sequence), 35 * 80 * sizeof(float) + 2 * 5 * 80 * 2);
    }
    EXPECT_EQ(layout.rows(layer, 1), layout.rows(layer, 0xffffffffU));
  }
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    take(layout.host_done(h), kLine);
  }
  take(layout.failure(), kLine);
  take(layout.host_q(), 35 * 80 * sizeof(float));
  take(layout.host_o(), 35 * 80 * sizeof(float));
  take(layout.host_lse(), 35 * sizeof(float));
  take(layout.copied(), 5 * 16);
}

TEST(CudaBytes, AreThoseOfTokensAndALittleMore) {
  ResidentShape shape = odd_shape();
  EXPECT_GE(cuda_resident_bytes(shape), resident_bytes(shape));
  EXPECT_LT(cuda_resident_bytes(shape) - resident_bytes(shape), size_t{16} << 20U);
  const size_t little = cuda_pinned_bytes(shape);
  shape.window_capacity = 1U << 20U;
  EXPECT_GE(cuda_pinned_bytes(shape), little);
  EXPECT_LT(cuda_pinned_bytes(shape), size_t{16} << 20U);
}

}  // namespace
}  // namespace keyhole::gpu
