// keyhole_merge_states through the C API: sizes are the caller's, so any of them must be safe.
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

TEST(MergeStates, AnyHeadDimIsMerged) {
  Numbers numbers(51);
  for (const uint32_t dim : {1U, 80U, 256U, 257U, 320U, 1000U, 100000U}) {
    const uint32_t heads = 2;
    const std::vector<float> a = numbers.many(size_t{heads} * dim);
    const std::vector<float> b = numbers.many(size_t{heads} * dim);
    const std::vector<float> a_lse = {0.5F, -INFINITY};
    const std::vector<float> b_lse = {1.5F, 2.0F};
    std::vector<float> out(a.size(), NAN), out_lse(heads, NAN);
    const float* o[] = {a.data(), b.data()};
    const float* lse[] = {a_lse.data(), b_lse.data()};
    ASSERT_OK(keyhole_merge_states(2, o, lse, heads, dim, out.data(), out_lse.data()));
    const double share = 1.0 / (1.0 + std::exp(1.0));  // of a in head 0
    EXPECT_NEAR(out_lse[0], 1.5 + std::log1p(std::exp(-1.0)), 1e-5);
    EXPECT_EQ(out_lse[1], 2.0F);
    for (uint32_t j = 0; j < dim; ++j) {
      ASSERT_NEAR(out[j], share * a[j] + (1.0 - share) * b[j], 1e-5) << "element " << j;
      ASSERT_EQ(out[dim + j], b[dim + j]) << "element " << j;
    }
  }
}

TEST(MergeStates, SizesThatOverflowAreRefused) {
  float o = 0.0F;
  float lse = 0.0F;
  const float* os[] = {&o};
  const float* lses[] = {&lse};
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_merge_states(1, os, lses, UINT32_MAX, UINT32_MAX, &o, &lse));
  EXPECT_NE(std::string(keyhole_last_error()).find("head_dim is 4294967295"), std::string::npos)
      << keyhole_last_error();
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_merge_states(1, os, lses, 0, 64, &o, &lse));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_merge_states(1, os, lses, 1, 0, &o, &lse));
}

}  // namespace
}  // namespace keyhole::test
