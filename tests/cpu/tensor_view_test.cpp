// The view of rows: where its rows lie, what parts of it are, and what lies beside it.
#include "cpu/tensor_view.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace keyhole {
namespace {

constexpr uint32_t kDim = 16;

template <class View>
ptrdiff_t elements(const View& view, const std::byte* from) {
  return (view.data - from) / static_cast<ptrdiff_t>(dtype_size(view.dtype));
}

TEST(TensorView, RowsLieAtStridesOfElements) {
  std::vector<std::byte> memory(size_t{64} * 1024);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i8}) {
    const auto size = static_cast<ptrdiff_t>(dtype_size(dtype));
    const std::byte* const middle = memory.data() + 32 * 1024;
    for (const ptrdiff_t token_stride : {-96, -48, 0, 16, 48, 100}) {
      for (const ptrdiff_t head_stride : {-1000, -16, 0, 16, 1000}) {
        const TensorView view{middle, token_stride, head_stride, 5, 3, kDim, dtype};
        EXPECT_EQ(view.row_bytes(), size_t{kDim} * dtype_size(dtype));
        for (ptrdiff_t t = 0; t < 5; ++t) {
          for (ptrdiff_t h = 0; h < 3; ++h) {
            const std::byte* const row = view.row(t, h);
            ASSERT_EQ(row - middle, (t * token_stride + h * head_stride) * size);
            ASSERT_EQ(view.slice(t, 5 - t).row(0, h), row);
            ASSERT_EQ(view.some_heads(static_cast<uint32_t>(h), 1).row(t), row);
            ASSERT_EQ(view.head(static_cast<uint32_t>(h)).slice(t, 1).data, row);
          }
        }
        EXPECT_EQ(view.slice(1, 3).tokens, 3U);
        EXPECT_EQ(view.slice(1, 3).heads, 3U);
        EXPECT_EQ(view.some_heads(1, 2).heads, 2U);
        EXPECT_EQ(view.some_heads(1, 2).tokens, 5U);
      }
    }
  }
}

TEST(TensorView, WithoutGapsTokensHaveTheirHeadsSideBySide) {
  std::array<std::byte, 512> memory{};
  const TensorOut out = dense_tensor(memory.data(), 4, 2, kDim, DType::f16, Memory::pinned);
  EXPECT_EQ(elements(out.slice(3, 1), memory.data()), 3 * 2 * kDim);
  EXPECT_EQ(elements(out.head(1), memory.data()), ptrdiff_t{kDim});
  EXPECT_FALSE(out.on_device());
  const TensorView read = out;  // what may be written may be read
  EXPECT_EQ(read.row(2, 1), out.row(2, 1));
  EXPECT_EQ(read.memory, Memory::pinned);
  const RowsView rows = dense_rows(memory.data(), 8, kDim, DType::f16);
  EXPECT_EQ(elements(rows.slice(5, 3), memory.data()), 5 * ptrdiff_t{kDim});
  EXPECT_EQ(rows.heads, 1U);
  EXPECT_EQ(rows.scales.data, nullptr);
  EXPECT_EQ(rows.slice(5, 3).scales.data, nullptr);
}

// Kernels of a device take views by value.
TEST(TensorView, IsPlain) {
  EXPECT_TRUE(std::is_trivially_copyable_v<TensorView>);
  EXPECT_TRUE(std::is_trivially_copyable_v<TensorOut>);
  EXPECT_TRUE(std::is_standard_layout_v<TensorView>);
  EXPECT_FALSE((std::is_convertible_v<TensorView, TensorOut>));
}

// `[blocks, heads, 2 (K, V), dim]`, as a session has them.
TEST(TensorView, PartsTakeTheirScalesWithThem) {
  constexpr uint32_t kHeads = 3, kRows = 700, kBlocks = 3;
  const std::vector<std::byte> numbers(size_t{2} * kHeads * kRows * kDim);
  const std::vector<uint16_t> scales(size_t{kBlocks} * kHeads * 2 * kDim);
  const auto rows = [&](uint32_t which) {
    return RowsView{{.data = numbers.data() + which * numbers.size() / 2,
                     .token_stride = kDim,
                     .head_stride = ptrdiff_t{kRows} * kDim,
                     .tokens = kRows,
                     .heads = kHeads,
                     .dim = kDim,
                     .dtype = DType::i8},
                    {scales.data() + which * kDim, size_t{kHeads} * 2 * kDim, 0, 2 * kDim}};
  };
  const KvView kv{rows(0), rows(1)};
  for (uint32_t h = 0; h < kHeads; ++h) {
    for (const size_t begin : {0U, 100U, 256U, 399U, 512U}) {
      const KvView part = kv.slice(begin, kRows - begin).head(h);
      const KvView same = kv.head(h).slice(begin, kRows - begin);
      for (size_t i = 0; i < part.keys.tokens; i += 50) {
        const size_t block = (begin + i) / kScaleRows;
        const uint16_t* const of_keys = scales.data() + (block * kHeads + h) * 2 * kDim;
        ASSERT_EQ(part.keys.scales.row(i), of_keys);
        ASSERT_EQ(part.values.scales.row(i), of_keys + kDim);
        ASSERT_EQ(same.keys.scales.row(i), of_keys);
        ASSERT_EQ(kv.values.scales.row(begin + i, h), of_keys + kDim);
        ASSERT_EQ(part.keys.row(i), kv.keys.row(begin + i, h));
        ASSERT_EQ(part.values.row(i), same.values.row(i));
      }
    }
  }
  const KvPieces pieces{{kv.slice(0, 300), kv.slice(300, 400)}, 2};
  const KvPieces one = pieces.head(2);
  EXPECT_EQ(one.count, 2U);
  EXPECT_EQ(one.pieces[1].keys.data, kv.keys.row(300, 2));
  EXPECT_EQ(one.pieces[1].keys.tokens, 400U);
}

}  // namespace
}  // namespace keyhole
