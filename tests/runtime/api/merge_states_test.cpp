// Merges of states through the C API: sizes are the caller's, so any of them must be safe.
#include <algorithm>
#include <array>

#include "keyhole/attention.h"
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
    ASSERT_OK(keyhole_merge_states(2, o, lse, heads, dim, KEYHOLE_LSE_NATURAL, out.data(),
                                   out_lse.data()));
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
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_merge_states(1, os, lses, UINT32_MAX, UINT32_MAX,
                                                           KEYHOLE_LSE_NATURAL, &o, &lse));
  expect_error_text("head_dim is 4294967295");
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_merge_states(1, os, lses, 0, 64, KEYHOLE_LSE_NATURAL, &o, &lse));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_merge_states(1, os, lses, 1, 0, KEYHOLE_LSE_NATURAL, &o, &lse));
}

TEST(MergeStates, TheBaseIsTheCallers) {
  Numbers numbers(52);
  const uint32_t heads = 5, dim = 70;
  for (const keyhole_lse_base base : {KEYHOLE_LSE_NATURAL, KEYHOLE_LSE_LOG2}) {
    const double unit = base == KEYHOLE_LSE_LOG2 ? std::log(2.0) : 1.0;
    for (const uint32_t n : {0U, 1U, 2U, 7U}) {
      std::vector<std::vector<float>> o, lse;
      for (uint32_t i = 0; i < n; ++i) {
        o.push_back(numbers.many(size_t{heads} * dim));
        lse.push_back(numbers.many(heads));
        for (float& x : lse.back()) x *= 3.0F;
        lse.back()[1] = -INFINITY;  // in all states
        lse.back()[i % heads] = -INFINITY;
        for (const uint32_t h : {1U, i % heads}) std::fill_n(o.back().begin() + h * dim, dim, NAN);
      }
      std::vector<const float*> os, lses;
      for (uint32_t i = 0; i < n; ++i) {
        os.push_back(o[i].data());
        lses.push_back(lse[i].data());
      }
      std::vector<float> out(size_t{heads} * dim, NAN), out_lse(heads, NAN);
      ASSERT_OK(keyhole_merge_states(n, os.data(), lses.data(), heads, dim, base, out.data(),
                                     out_lse.data()));
      for (uint32_t h = 0; h < heads; ++h) {
        double sum = 0.0;
        std::vector<double> o_sum(dim, 0.0);
        for (uint32_t i = 0; i < n; ++i) {
          if (lse[i][h] == -INFINITY) continue;
          const double w = std::exp(unit * double{lse[i][h]});
          sum += w;
          for (uint32_t j = 0; j < dim; ++j) o_sum[j] += w * double{o[i][h * dim + j]};
        }
        if (sum == 0.0) {
          EXPECT_EQ(out_lse[h], -INFINITY);
        } else {
          EXPECT_NEAR(out_lse[h], std::log(sum) / unit, 1e-5);
        }
        for (uint32_t j = 0; j < dim; ++j) {
          ASSERT_NEAR(out[h * dim + j], sum == 0.0 ? 0.0 : o_sum[j] / sum, 2e-5);
        }
      }
    }
  }
}

TEST(MergeStates, ANaNIsNotHidden) {
  const std::vector<float> o(4, 1.0F);
  const std::vector<float> a = {NAN, 1.0F}, b = {-INFINITY, 2.0F};
  const float* os[] = {o.data(), o.data()};
  const float* lses[] = {a.data(), b.data()};
  for (const keyhole_lse_base base : {KEYHOLE_LSE_NATURAL, KEYHOLE_LSE_LOG2}) {
    std::vector<float> out(4), out_lse(2);
    ASSERT_OK(keyhole_merge_states(2, os, lses, 2, 2, base, out.data(), out_lse.data()));
    EXPECT_TRUE(std::isnan(out_lse[0]) && std::isnan(out[0]) && std::isnan(out[1]));
    EXPECT_FALSE(std::isnan(out_lse[1]) || std::isnan(out[2]) || std::isnan(out[3]));
  }
}

TEST(MergeStates, ArgumentsAreNamed) {
  std::array<float, 4> x{};
  const float* os[] = {x.data()};
  const void* device_os[] = {x.data()};
  const auto refused = [](keyhole_status status, const char* name) {
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, status);
    expect_error_text(name);
  };
  refused(keyhole_merge_states(1, os, os, 1, 4, 2, x.data(), x.data()), "base is 2");
  refused(keyhole_merge_states(1, os, os, 0, 4, 0, x.data(), x.data()), "heads is 0");
  refused(keyhole_merge_states(1, os, nullptr, 1, 4, 0, x.data(), x.data()), "lse");
  const auto on_device = [&](uint32_t n, uint32_t rows, int o_dtype, int base, int out_dtype) {
    return keyhole_merge_states_device(n, device_os, os, rows, 4, o_dtype, base, x.data(),
                                       out_dtype, x.data(), nullptr);
  };
  refused(on_device(1, 0, 0, 0, 0), "rows is 0");
  refused(on_device(1, 1, 3, 0, 0), "o_dtype is 3");
  refused(on_device(1, 1, 0, 7, 0), "base is 7");
  refused(on_device(1, 1, 0, 0, -1), "out_dtype is -1");
  std::vector<const void*> many(2001, x.data());
  std::vector<const float*> lses(2001, x.data());
  refused(keyhole_merge_states_device(2001, many.data(), lses.data(), 1, 4, 0, 0, x.data(), 0,
                                      x.data(), nullptr),
          "n is 2001, allowed: 0..2000");
}

TEST(MergeStates, WithoutADeviceItIsUnsupported) {
  keyhole_engine_config config = small_engine();
  config.device = KEYHOLE_DEVICE_CUDA;
  keyhole_engine* engine = nullptr;
  const keyhole_status status = keyhole_engine_create(&config, &engine);
  keyhole_engine_destroy(engine);
  if (status != KEYHOLE_UNSUPPORTED) GTEST_SKIP() << "there is a device";
  std::array<float, 4> x{};
  const void* os[] = {x.data()};
  const float* lses[] = {x.data()};
  EXPECT_EQ(KEYHOLE_UNSUPPORTED,
            keyhole_merge_states_device(1, os, lses, 1, 4, KEYHOLE_F32, KEYHOLE_LSE_NATURAL,
                                        x.data(), KEYHOLE_F32, x.data(), nullptr));
  expect_error_text("CUDA");
}

}  // namespace
}  // namespace keyhole::test
