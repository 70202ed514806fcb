// What was written into cells from outside, as cells are written, copied and turned.
#include "tools/engines/llama.cpp/restored_rows.h"

#include <ggml.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "tools/engines/llama.cpp/random_rows.h"
#include "tools/engines/llama.cpp/read_back.h"

namespace keyhole::llama_cpp {
namespace {

constexpr int64_t kComponents = 4, kCells = 8, kStreams = 2;

struct FreeContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};

/// Keys and values of a layer, of `kStreams` streams of `kCells` cells.
class LlamaCppRestoredRows : public testing::Test {
 protected:
  std::unique_ptr<ggml_context, FreeContext> memory{
      ggml_init({4 * ggml_tensor_overhead(), nullptr, true})};
  const ggml_tensor* keys =
      ggml_new_tensor_3d(memory.get(), GGML_TYPE_F16, kComponents, kCells, kStreams);
  const ggml_tensor* values =
      ggml_new_tensor_3d(memory.get(), GGML_TYPE_F16, kComponents, kCells, kStreams);
  RestoredRows rows;

  void put(const ggml_tensor* tensor, size_t id, int number) {
    std::memset(rows.write(tensor, id * tensor->nb[1], tensor->nb[1]), number, tensor->nb[1]);
  }
  [[nodiscard]] int at(const ggml_tensor* tensor, size_t id) const {
    return std::to_integer<int>(*rows.row(tensor, id));
  }
};

TEST_F(LlamaCppRestoredRows, AStreamThatIsCopiedOverAnotherTakesTheOthersRowsAway) {
  for (const ggml_tensor* tensor : {keys, values}) {
    put(tensor, 2, 7);           // of the first stream
    put(tensor, kCells + 2, 8);  // of the second one
    put(tensor, kCells + 5, 9);  // where the first one has something else, in a session
  }
  for (const ggml_tensor* tensor : {keys, values}) rows.copy(tensor, 0, kCells, kCells);
  EXPECT_EQ(at(keys, kCells + 2), 7);
  EXPECT_EQ(at(values, kCells + 2), 7);
  EXPECT_FALSE(rows.has(kCells + 5));
  EXPECT_TRUE(rows.has(2));
  rows.forget(2);
  rows.forget(kCells + 2);
  EXPECT_FALSE(rows.any());
}

/// Pages of [begin, begin + bytes) that have memory.
size_t resident_pages(std::byte* begin, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(bytes / page);
  if (mincore(begin, bytes, pages.data()) != 0) throw std::runtime_error("mincore");
  return static_cast<size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char one) { return (one & 1U) != 0; }));
}

TEST(LlamaCppRestoredRowsMemory, GoesBackBlockByBlock) {
  constexpr int64_t kWide = 96;  // numbers of a row: blocks are twelve pages
  constexpr size_t kRows = 4 * RestoredRows::kBlock, kPages = 12;
  const std::unique_ptr<ggml_context, FreeContext> context(
      ggml_init({4 * ggml_tensor_overhead(), nullptr, true}));
  const ggml_tensor* tensor = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, kWide, kRows, 1);
  RestoredRows restored;
  std::byte* data = restored.write(tensor, 0, ggml_nbytes(tensor));
  std::memset(data, 7, ggml_nbytes(tensor));
  EXPECT_EQ(resident_pages(data, ggml_nbytes(tensor)), 4 * kPages);
  for (size_t id = RestoredRows::kBlock; id < 2 * RestoredRows::kBlock; ++id) {
    EXPECT_EQ(resident_pages(data, ggml_nbytes(tensor)), 4 * kPages);
    restored.forget(id);
  }
  EXPECT_EQ(resident_pages(data, ggml_nbytes(tensor)), 3 * kPages);
  EXPECT_EQ(*restored.row(tensor, RestoredRows::kBlock - 1), std::byte{7});
  EXPECT_EQ(*restored.row(tensor, 2 * RestoredRows::kBlock), std::byte{7});
}

/// Adds to each number of a key by how much it is turned.
class Adds final : public Rewriter {
 public:
  void rewrite(Session& /*session*/, const Rewriting& /*change*/) override {
    throw std::logic_error("nothing is to be rewritten");
  }
  void turn(uint32_t /*layer*/, const Rows& turned, std::span<const int32_t> by) override {
    ++calls;
    ASSERT_EQ(turned.tokens, static_cast<int64_t>(by.size()));
    auto* data = static_cast<std::byte*>(const_cast<void*>(turned.data));
    for (size_t i = 0; i < by.size(); ++i) {
      std::byte& first = data[static_cast<int64_t>(i) * turned.token_stride];
      first = std::byte(std::to_integer<int>(first) + by[i]);
    }
  }
  int calls = 0;
};

TEST_F(LlamaCppRestoredRows, TurnsWhatIsThereAndMovesStretchByStretch) {
  for (const size_t id : {0, 1, 2, 4, 5, 15}) put(keys, id, 10 + static_cast<int>(id));
  std::vector<int32_t> by(kCells * kStreams, 3);
  by[4] = 0;
  by[1] = 5;
  Adds adds;
  turn_restored(rows, adds, {0, false, Number::kF16, 2, 2}, keys, by);
  EXPECT_EQ(adds.calls, 3);
  EXPECT_EQ(at(keys, 0), 13);
  EXPECT_EQ(at(keys, 1), 16);
  EXPECT_EQ(at(keys, 2), 15);
  EXPECT_EQ(at(keys, 4), 14);
  EXPECT_EQ(at(keys, 5), 18);
  EXPECT_EQ(at(keys, 15), 28);
}

TEST(LlamaCppRandomRows, ShowNormalNumbersInThePlaceOfWhatWasSaved) {
  constexpr int64_t kMany = int64_t{1} << 18U;
  const std::unique_ptr<ggml_context, FreeContext> context(
      ggml_init({4 * ggml_tensor_overhead(), nullptr, true}));
  RestoredRows restored;
  set_random_rows(3.0F, 0.25F);
  EXPECT_TRUE(rows_are_random());
  for (const bool values : {false, true}) {
    // More than is there once, so that rows come again.
    ggml_tensor* tensor = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, 1024, kMany * 3 / 4, 1);
    ggml_set_name(tensor, values ? "cache_v_l3" : "cache_k_l3");
    (void)restored.write(tensor, 0, tensor->nb[1] * kMany * 3 / 4);
    EXPECT_TRUE(restored.has(0));
    EXPECT_TRUE(restored.has(kMany * 3 / 4 - 1));
    const auto* row = reinterpret_cast<const ggml_fp16_t*>(restored.row(tensor, 100));
    double sum = 0;
    double squares = 0;
    double fourth = 0;
    constexpr int kNumbers = 1 << 20;
    for (int i = 0; i < kNumbers; ++i) {
      const double x = ggml_fp16_to_fp32(row[i]) / (values ? 0.25 : 3.0);
      sum += x / kNumbers;
      squares += x * x / kNumbers;
      fourth += x * x * x * x / kNumbers;
    }
    EXPECT_NEAR(sum, 0, 0.01);
    EXPECT_NEAR(squares, 1, 0.01);
    EXPECT_NEAR(fourth, 2.7, 0.05);  // of the sum of four equal ones; a normal number's is 3
    EXPECT_EQ(std::memcmp(restored.row(tensor, 5), restored.row(tensor, 5 + kMany / 2), 4096), 0);
    EXPECT_NE(std::memcmp(restored.row(tensor, 5), restored.row(tensor, 6), 2048), 0);
  }
  set_random_rows(0, 0);
  EXPECT_FALSE(rows_are_random());
}

}  // namespace
}  // namespace keyhole::llama_cpp
