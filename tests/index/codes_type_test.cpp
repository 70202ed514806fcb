// The index type `codes`: every key scored by its code, with and without values, as rows come and go. What all types
// promise is tested with theirs.
#include "index/types/codes.h"

#include <sstream>

#include "index/scan/kv_codes.h"
#include "tests/index/keys.h"
#include "tests/sanitized.h"

namespace keyhole::index::test {
namespace {

/// Keys and values of one head in memory that stays where it is.
struct GrowingHead {
  GrowingHead(size_t capacity, uint32_t dim, DType dtype, uint32_t seed)
      : random(seed), keys(capacity, dim, dtype), values(capacity, dim, dtype) {}
  void grow(size_t n) {
    keys.put(keys.count(), attention_keys(n, keys.dim(), random));
    values.put(values.count(), gaussian(n, keys.dim(), random));
  }
  [[nodiscard]] KvView kv() const { return {keys.view(), values.view()}; }
  [[nodiscard]] BuildInput input() const {
    BuildInput in;
    in.keys = keys.view();
    in.values = values.view();
    return in;
  }
  std::mt19937 random;
  Keys keys, values;
};

TEST(CodesType, FindsTheBestKeys) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  std::mt19937 random(1);
  for (const uint32_t dim : head_dims()) {
    Keys keys(3000, dim, DType::f16);
    keys.put(0, attention_keys(3000, dim, random));
    double previous = 0.0;
    for (const char* spec : {"codes:k=1,v=0", "codes:k=2,v=0", "codes:k=4,v=0"}) {
      std::mt19937 same(2);
      const double recall = mean_recall(*built(spec, keys), keys, 40, 6, same);
      EXPECT_GE(recall, previous - 0.02) << spec << " d " << dim;
      previous = recall;
    }
    EXPECT_GT(previous, 0.97) << dim;
  }
}

TEST(CodesType, HasCodesOfExactlyItsRowsAfterAnyOperation) {
  for (uint32_t seed = 0; seed < cases(8); ++seed) {
    GrowingHead head(3000, 64, key_dtypes()[seed % 3], seed);
    auto index = make_index("codes:k=2,v=4", 64, key_dtypes()[seed % 3], context());
    std::unique_ptr<Index> parent;
    std::string parent_saved;
    head.grow(700);
    index->build(head.input(), {});
    for (int i = 0; i < 20; ++i) {
      const uint32_t kind = head.random() % 7;
      SCOPED_TRACE("seed " + std::to_string(seed) + " operation " + std::to_string(i));
      if (kind < 3) {
        head.grow(std::min<size_t>(head.random() % 400, 3000 - head.keys.count()));
        index->append_kv(head.kv(), {});
      } else if (kind == 3) {
        const size_t n = head.random() % (head.keys.count() + 1);
        head.keys.poison(n);
        head.values.poison(n);
        index->truncate(n);
      } else if (kind == 4) {
        std::stringstream bytes(saved_bytes(*index));
        index = make_index("codes:k=2,v=4", 64, key_dtypes()[seed % 3], context());
        index->load(bytes, head.keys.view());
      } else if (kind == 6) {  // a copy goes on with what it shares
        parent = std::move(index);
        parent_saved = saved_bytes(*parent);
        index = parent->share(head.keys.view());
      } else if (head.keys.count() != 0) {
        index->build(head.input(), {});
      }
      ASSERT_EQ(index->count(), head.keys.count());
      ASSERT_EQ(parent == nullptr ? "" : saved_bytes(*parent), parent_saved);
      const KvCodes* codes = index->codes();
      if (head.keys.count() == 0) continue;
      ASSERT_NE(codes, nullptr);
      ASSERT_EQ(codes->count(), head.keys.count() / kCodeBlock * kCodeBlock);
      KvCodes fresh(codes->shape(), codes->balance());
      fresh.extend(*context().kernels, head.kv());
      ASSERT_EQ(fresh.blocks(), codes->blocks());
      for (size_t b = 0; b < codes->blocks(); ++b) {
        ASSERT_EQ(std::memcmp(fresh.block(b), codes->block(b), codes->shape().block_bytes()), 0);
      }
    }
  }
}

TEST(CodesType, WithoutValuesThereIsNoTail) {
  GrowingHead head(600, 64, DType::f16, 3);
  head.grow(600);
  const auto index = built("codes", head.keys);
  EXPECT_EQ(index->codes(), nullptr);
  BuildInput input = head.input();
  input.keys.tokens = 590;
  index->build(input, {});
  ASSERT_NE(index->codes(), nullptr);
  EXPECT_EQ(index->codes()->count(), 512U);
  EXPECT_THROW(index->append(head.keys.view(), {}), Error);
  input.keys.tokens = 600;
  input.values.tokens = 599;
  EXPECT_THROW(index->build(input, {}), Error);
  input.values = Keys(600, 80, DType::f16).view(600);
  EXPECT_THROW(index->build(input, {}), Error);
  EXPECT_EQ(index->codes()->count(), 512U);
}

TEST(CodesType, TakesTheBalanceThatItIsGiven) {
  GrowingHead head(512, 64, DType::f16, 4);
  head.grow(512);
  Balance balance = learn_balance(*context().kernels, head.kv(), {});
  balance.key_scale[7] *= 3.0F;
  BuildInput input = head.input();
  input.balance = &balance;
  const auto index = make_index("codes", 64, DType::f16, context());
  index->build(input, {});
  EXPECT_EQ(index->codes()->balance().key_scale, balance.key_scale);
  head.keys.poison(0);
  head.values.poison(0);
  index->truncate(0);
  head.grow(400);
  index->append_kv(head.kv(), {});
  EXPECT_EQ(index->codes()->balance().key_scale, balance.key_scale);
}

TEST(CodesType, TrainingQueriesBalanceTheChannels) {
  GrowingHead head(2048, 64, DType::f32, 5);
  head.grow(2048);
  std::vector<float> queries = gaussian(64, 64, head.random);
  for (size_t i = 0; i < 64; ++i) queries[i * 64 + 9] *= 16.0F;
  BuildInput input = head.input();
  input.queries.rows = dense_rows(queries.data(), 64, 64, DType::f32);
  const auto index = make_index("codes", 64, DType::f32, context());
  index->build(input, {});
  const auto& scale = index->codes()->balance().key_scale;
  EXPECT_GT(scale[9], 2.0F * scale[10]);
  EXPECT_GT(diagnostic(*index, "balance"), 2.0);
}

TEST(CodesType, BytesAreWhatTheEstimateSays) {
  for (const char* spec : {"codes:k=1,v=1", "codes", "codes:k=4,v=4", "codes:k=2,v=0"}) {
    for (const size_t n : {size_t{0}, size_t{700}, size_t{5000}}) {
      GrowingHead head(n + 1, 96, DType::f16, 6);
      head.grow(n);
      const auto index = make_index(spec, 96, DType::f16, context());
      index->build(head.input(), {});
      const auto estimate = static_cast<double>(estimate_bytes(spec, n, 96, DType::f16));
      EXPECT_NEAR(static_cast<double>(index->info().bytes), estimate, 0.1 * estimate) << spec;
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test
