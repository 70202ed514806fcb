// Tensors in device memory, with host memory in the device's place.
#include "runtime/stream/device_rows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

namespace keyhole::runtime {
namespace {

constexpr uint32_t kHeads = 3, kRowDim = 8, kTokens = 5;

/// Copies as cudaMemcpy2DAsync would: refuses a pitch that is smaller than a row. Hands over pieces of two rows.
class FakeCopies final : public gpu::HostCopies {
 public:
  void read(const void* device, size_t row_bytes, size_t pitch, size_t rows, gpu::Stream,
            const Take& take) override {
    if (pitch < row_bytes || pitch > (size_t{1} << 31)) {
      throw Error(Status::device_error, "planted: invalid pitch");
    }
    for (size_t first = 0; first < rows; first += 2) {
      const size_t n = std::min<size_t>(2, rows - first);
      std::vector<std::byte> piece(n * row_bytes);
      for (size_t i = 0; i < n; ++i) {
        std::memcpy(piece.data() + i * row_bytes,
                    static_cast<const std::byte*>(device) + (first + i) * pitch, row_bytes);
      }
      take(first, n, piece.data());
    }
  }
  gpu::Stream beside(gpu::Stream stream) override { return stream; }
  void write(const std::byte* data, size_t row_bytes, size_t rows, void* device, size_t pitch,
             gpu::Stream) override {
    for (size_t i = 0; i < rows; ++i) {
      std::memcpy(static_cast<std::byte*>(device) + i * pitch, data + i * row_bytes, row_bytes);
    }
  }
};

class DeviceTensors : public testing::Test {
 protected:
  DeviceTensors() { std::iota(memory_.begin(), memory_.end(), 0.0F); }
  [[nodiscard]] TensorView rows(ptrdiff_t token_stride, ptrdiff_t head_stride, size_t first = 0,
                                uint32_t tokens = kTokens) const {
    return {reinterpret_cast<const std::byte*>(memory_.data() + first),
            token_stride,
            head_stride,
            tokens,
            kHeads,
            kRowDim,
            DType::f32,
            Memory::device};
  }
  /// What is read is what TensorView::row() says.
  void expect_read(const TensorView& from) {
    RowBuffer buffer;
    const TensorView host = reader_.read(from, "k", nullptr, buffer);
    EXPECT_FALSE(host.on_device());
    ASSERT_EQ(host.tokens, from.tokens);
    for (size_t t = 0; t < from.tokens; ++t) {
      for (size_t h = 0; h < kHeads; ++h) {
        ASSERT_EQ(0, std::memcmp(host.row(t, h), from.row(t, h), kRowDim * sizeof(float)))
            << "token " << t << ", head " << h;
      }
    }
  }
  void expect_refused(const TensorView& from) {
    RowBuffer buffer;
    try {
      (void)reader_.read(from, "k", nullptr, buffer);
      FAIL() << "not refused";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::invalid_argument);
      EXPECT_NE(std::string(e.what()).find("tensor k"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("stride"), std::string::npos) << e.what();
    }
  }

  std::vector<float> memory_ = std::vector<float>(4096);
  cpu::Pool pool_{cpu::PoolConfig{.threads = 2}};
  DeviceRowsReader reader_{std::make_unique<FakeCopies>(), pool_};
};

TEST_F(DeviceTensors, AreReadWithGapsBetweenTokensOrHeads) {
  expect_read(rows(kHeads * kRowDim, kRowDim));
  expect_read(rows(2 * kHeads * kRowDim, kRowDim));
  expect_read(rows(kHeads * 2 * kRowDim, 2 * kRowDim));
  expect_read(rows(0, kRowDim, 0, 1));
  expect_read(rows(0, 2 * kRowDim, 0, 1));
  expect_read(rows(kHeads * kRowDim, kRowDim, 0, 0));
}

TEST_F(DeviceTensors, ThatOneCopyCannotReadAreRefused) {
  expect_refused(rows(-ptrdiff_t{kHeads} * kRowDim, kRowDim, 1024));  // tokens run backwards
  expect_refused(rows(kHeads * kRowDim, -ptrdiff_t{kRowDim}, 1024));  // heads run backwards
  expect_refused(rows(-ptrdiff_t{kHeads} * kRowDim, -ptrdiff_t{kRowDim}, 1024));
  expect_refused(rows(0, -ptrdiff_t{kRowDim}, 1024, 1));
  expect_refused(rows(0, kRowDim));                  // every token the same
  expect_refused(rows(kRowDim, kRowDim));            // tokens overlap
  expect_refused(rows(kRowDim, kTokens * kRowDim));  // heads outermost
}

TEST_F(DeviceTensors, InHostMemoryAreLeftAlone) {
  TensorView from = rows(-ptrdiff_t{kHeads} * kRowDim, kRowDim, 1024);
  from.memory = Memory::host;
  RowBuffer buffer;
  const TensorView host = reader_.read(from, "k", nullptr, buffer);
  EXPECT_EQ(host.data, from.data);
  EXPECT_EQ(host.token_stride, from.token_stride);
}

}  // namespace
}  // namespace keyhole::runtime
