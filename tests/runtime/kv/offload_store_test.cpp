// Memory of offloaded K and V: what is pinned stays, what is neither pinned nor held goes back.
#include "runtime/kv/offload_store.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace keyhole::runtime {
namespace {

constexpr uint32_t kStoreHeads = 2, kStoreDim = 64;

class OffloadStoreTest : public testing::TestWithParam<DType> {
 protected:
  /// Touches rows [from, to), as writing them does, or pinning their memory.
  void fill(size_t from, size_t to) {
    for (uint32_t h = 0; h < kStoreHeads; ++h) {
      std::fill(store_.key(1, h, from), store_.key(1, h, to), std::byte{7});
      std::fill(store_.value(1, h, from), store_.value(1, h, to), std::byte{7});
    }
    if (GetParam() != DType::i8) return;
    std::fill(store_.scales(1) + store_.scale_count(1, from),
              store_.scales(1) + store_.scale_count(1, to), uint16_t{7});
  }
  /// Whether rows [from, to) of every array still hold what was written: memory that was given back reads as zeros.
  [[nodiscard]] bool holds(size_t from, size_t to, std::byte what = std::byte{7}) {
    const auto is = [&](std::byte b) { return b == what; };
    for (uint32_t h = 0; h < kStoreHeads; ++h) {
      if (!std::all_of(store_.key(1, h, from), store_.key(1, h, to), is)) return false;
      if (!std::all_of(store_.value(1, h, from), store_.value(1, h, to), is)) return false;
    }
    return true;
  }

  OffloadStore store_{2, kStoreHeads, kStoreDim, GetParam(), 100'000};
};

TEST_P(OffloadStoreTest, GivesBackWhatWasPinnedAheadOfRows) {
  store_.set_pinned(1, 8192);
  store_.prepare(1, 4096);
  fill(0, 8192);
  store_.grow(1, 4096);
  store_.set_pinned(1, 5120);
  EXPECT_TRUE(holds(0, 5120));
  EXPECT_TRUE(holds(5120, 8192, std::byte{0}));
  store_.set_pinned(1, 0);
  EXPECT_TRUE(holds(0, 4096));
  EXPECT_TRUE(holds(4096, 8192, std::byte{0}));
}

TEST_P(OffloadStoreTest, KeepsWhatIsPinnedUntilItIsNot) {
  store_.prepare(1, 4096);
  fill(0, 4096);
  store_.grow(1, 4096);
  store_.set_pinned(1, 2048);
  store_.truncate(1, 1024);
  EXPECT_TRUE(holds(0, 2048)) << "pinned";
  EXPECT_TRUE(holds(2048, 4096, std::byte{0}));
  store_.set_pinned(1, 0);
  EXPECT_TRUE(holds(0, 1024));
  EXPECT_TRUE(holds(1024, 4096, std::byte{0}));
}

INSTANTIATE_TEST_SUITE_P(DTypes, OffloadStoreTest,
                         testing::Values(DType::f16, DType::f32, DType::i8));

}  // namespace
}  // namespace keyhole::runtime
