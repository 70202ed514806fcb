// Copies of codes: what is shared, and that neither of two sees what the other one writes.
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/common/paged_memory.h"
#include "tests/gpu/codes_fixture.h"

namespace keyhole::gpu::test {
namespace {

constexpr uint32_t kBlocks = 80, kEncoded = 64;  // of 138 KB: 9 MB a layer of 4 KV heads

class CopiedCodes : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
    shape_.layers = 2;
    shape_.q_heads = 8;
    shape_.kv_heads = 4;
    shape_.code = {128, 4, 4};
    shape_.dtype = GetParam();
    shape_.blocks = kBlocks;
    shape_.exact_rows = 4;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      rows_.push_back(std::make_unique<OffloadedLayer>(shape_, kBlocks * kCodeBlock));
      append(*rows_[layer], kEncoded);
      rows_[layer]->learn(random_floats(rng_, size_t{shape_.q_heads} * shape_.code.dim));
    }
  }

  void append(OffloadedLayer& to, uint32_t blocks) {
    const size_t row = size_t{shape_.kv_heads} * shape_.code.dim;
    // Few different rows: making random ones takes most of the time.
    std::vector<std::vector<float>> some;
    for (int i = 0; i < 37; ++i) some.push_back(random_floats(rng_, row));
    for (uint32_t i = 0; i < blocks * kCodeBlock; ++i) {
      to.append(some[i % some.size()], some[(i * 7 + 3) % some.size()]);
    }
  }
  /// Codes that share nothing, of the rows as they are now.
  [[nodiscard]] std::unique_ptr<CudaCodes> encoded(const std::vector<uint32_t>& blocks) {
    auto codes = std::make_unique<CudaCodes>(shape_);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      rows_[layer]->tell(*codes, layer);
      codes->encode(layer, 0, blocks[layer], nullptr);
    }
    return codes;
  }
  [[nodiscard]] std::unique_ptr<CudaCodes> copy_of(Codes& from) {
    CodesShape later = shape_;
    later.blocks_later = true;
    auto codes = std::make_unique<CudaCodes>(later);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      codes->set_rows(layer, rows_[layer]->all());
      codes->copy_layer(layer, from);
    }
    codes->complete();
    return codes;
  }
  using Bytes = std::vector<std::byte>;
  [[nodiscard]] Bytes blocks_of(const Codes& codes, uint32_t layer) const {
    const size_t bytes = shape_.code.block_bytes();
    Bytes all(size_t{codes.count(layer)} * shape_.kv_heads * bytes);
    std::byte* to = all.data();
    for (uint32_t b = 0; b < codes.count(layer); ++b) {
      for (uint32_t h = 0; h < shape_.kv_heads; ++h, to += bytes) codes.read(layer, h, b, to);
    }
    return all;
  }

  CodesShape shape_;
  std::mt19937 rng_{7};
  std::vector<std::unique_ptr<OffloadedLayer>> rows_;
};

TEST_P(CopiedCodes, ShareMemoryUntilOneOfBothWrites) {
  auto first = encoded({kEncoded, kEncoded});
  const Bytes of_layer[2] = {blocks_of(*first, 0), blocks_of(*first, 1)};
  auto second = copy_of(*first);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    ASSERT_EQ(second->count(layer), kEncoded);
    EXPECT_TRUE(blocks_of(*second, layer) == of_layer[layer]) << "layer " << layer;
  }
  const PagedMemory some(1);
  const size_t page = some.page();
  EXPECT_EQ(first->bytes(), codes_bytes(shape_));
  // All pages but those at the ends of what a layer has.
  if (page != 0) {
    EXPECT_LE(second->bytes() + 2 * page, first->bytes());
  }
  size_t claimed = codes_bytes(shape_);
  second->set_account(
      {[&](size_t more) { claimed += more; }, [&](size_t less) { claimed -= less; }}, claimed);
  EXPECT_EQ(claimed, second->bytes());

  // The one that was copied writes other rows in the place of blocks that both have.
  rows_[0]->cut(5 * kCodeBlock);
  append(*rows_[0], 12);
  first->truncate(0, 5, nullptr);
  first->encode(0, 5, 12, nullptr);
  const auto alone = encoded({17, kEncoded});
  EXPECT_TRUE(blocks_of(*first, 0) == blocks_of(*alone, 0));
  EXPECT_TRUE(blocks_of(*second, 0) == of_layer[0]);
  EXPECT_TRUE(blocks_of(*first, 1) == of_layer[1]);

  // So does the copy, and grows beyond what it shared.
  rows_[1]->cut(2 * kCodeBlock);
  append(*rows_[1], kBlocks - 2);
  second->truncate(1, 2, nullptr);
  second->encode(1, 2, kBlocks - 2, nullptr);
  const auto grown = encoded({17, kBlocks});
  EXPECT_TRUE(blocks_of(*second, 1) == blocks_of(*grown, 1));
  EXPECT_TRUE(blocks_of(*first, 1) == of_layer[1]);
  EXPECT_EQ(claimed, second->bytes());

  // A copy outlives what it was made of, and copies of copies outlive both.
  first.reset();
  EXPECT_TRUE(blocks_of(*second, 0) == of_layer[0]);
  auto third = copy_of(*second);
  second.reset();
  EXPECT_EQ(claimed, 0U);
  EXPECT_TRUE(blocks_of(*third, 0) == of_layer[0]);
  EXPECT_TRUE(blocks_of(*third, 1) == blocks_of(*grown, 1));
}

TEST_P(CopiedCodes, RefuseOtherShapesAndLayersThatHaveBlocks) {
  auto first = encoded({3, 2});
  auto second = encoded({1, 0});
  EXPECT_THROW(second->copy_layer(0, *first), Error);
  CodesShape other = shape_;
  other.code.key_bits = other.code.value_bits = 2;
  CudaCodes coarse(other);
  EXPECT_THROW(coarse.copy_layer(0, *first), Error);
  second->copy_layer(1, *first);
  EXPECT_EQ(second->count(1), 2U);
  EXPECT_TRUE(blocks_of(*second, 1) == blocks_of(*first, 1));
}

INSTANTIATE_TEST_SUITE_P(Rows, CopiedCodes, ::testing::Values(DType::f16, DType::i8),
                         [](const auto& test) {
                           return std::string(test.param == DType::i8 ? "int8" : "f16");
                         });

TEST(PagedMemory, CountsWhatItHolds) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  const PagedMemory probe(1);
  const size_t page = probe.page();
  if (page == 0) GTEST_SKIP() << "the device does not map pages";
  PagedMemory a(4 * page), b(4 * page);
  EXPECT_EQ(a.held_bytes(), 0U);
  EXPECT_FALSE(a.owns(0, 1));
  a.own(0, 4 * page);
  EXPECT_EQ(a.held_bytes(), 4 * page);
  ASSERT_EQ(cudaMemset(a.data(), 0x5A, 4 * page), cudaSuccess);
  const PagedMemory::Stretch s = b.share(a, page / 2, 3 * page + 1);
  EXPECT_EQ(s.begin, page);
  EXPECT_EQ(s.end, 3 * page);
  EXPECT_EQ(b.held_bytes(), 0U);
  EXPECT_FALSE(a.owns(page, page + 1));
  EXPECT_TRUE(a.owns(0, page));
  EXPECT_EQ(b.missing_bytes(0, 4 * page), 4 * page);
  b.own(page, page + 1);
  EXPECT_EQ(b.held_bytes(), page);
  ASSERT_EQ(cudaMemset(b.data() + page, 0, page), cudaSuccess);
  std::vector<unsigned char> seen(2 * page);
  ASSERT_EQ(cudaMemcpy(seen.data(), a.data() + page, seen.size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(seen[0], 0x5A);
  ASSERT_EQ(cudaMemcpy(seen.data(), b.data() + page, seen.size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(seen[page - 1], 0);
  EXPECT_EQ(seen[page], 0x5A);
}

}  // namespace
}  // namespace keyhole::gpu::test
