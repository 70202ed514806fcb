// Attention of prompts in f32 beside double precision: all that each query sees, windows, soft-caps; and by patterns
// that choose.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/gpu/exact_attention.h"
#include "tests/gpu/prompt_layer.h"
#include "tests/scoped_variable.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

struct Shape {
  uint32_t q_heads, kv_heads, first, queries;
  float spread;  ///< of the queries
  uint32_t window = 0;
  float softcap = 0.0F;
};

/// The parameter is the head dimension.
class PromptF32Test : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override { KEYHOLE_NEEDS_GPU(); }
  [[nodiscard]] uint32_t dim() const { return GetParam(); }

  void fill(const Shape& s) {
    q_ = random_floats(rng_, size_t{s.queries} * s.q_heads * dim(), s.spread);
    k_ = random_floats(rng_, size_t{s.first + s.queries} * s.kv_heads * dim());
    v_ = random_floats(rng_, k_.size());
  }
  /// A tensor `[n, heads, dim]`.
  TensorOut tensor(const std::vector<float>& x, uint32_t heads) {
    return dense_tensor(reinterpret_cast<std::byte*>(upload(x)), x.size() / heads / dim(), heads,
                        dim(), DType::f32, Memory::device);
  }
  std::vector<float> attend(PromptAttention& prompt, const Shape& s,
                            const PromptPattern& pattern = {}) {
    // Rows behind the last must stay as they are.
    const std::vector<float> poison(q_.size() + 2 * size_t{s.q_heads} * dim(), NAN);
    PromptStretch stretch;
    stretch.q = tensor(q_, s.q_heads);
    stretch.k = tensor(k_, s.kv_heads);
    stretch.v = tensor(v_, s.kv_heads);
    stretch.out = tensor(poison, s.q_heads);
    stretch.n = s.queries;
    stretch.rows = s.first + s.queries;
    stretch.logits.scale = 1.0F / std::sqrt(static_cast<float>(dim()));
    stretch.logits.softcap = s.softcap;
    stretch.window = s.window;
    prompt.attend(stretch, pattern, nullptr);
    auto out = download(reinterpret_cast<const float*>(stretch.out.data), poison.size());
    for (size_t i = q_.size(); i < out.size(); ++i) EXPECT_TRUE(std::isnan(out[i]));
    out.resize(q_.size());
    return out;
  }
  [[nodiscard]] std::vector<double> truth(const Shape& s) const {
    std::vector<double> out;
    const size_t d = dim(), group = s.q_heads / s.kv_heads;
    const LogitParams logits{1.0F / std::sqrt(static_cast<float>(d)), s.softcap};
    for (size_t t = 0; t < s.queries; ++t) {
      const size_t end = s.first + t + 1;
      for (size_t h = 0; h < s.q_heads; ++h) {
        ExactAttention exact(logits, &q_[(t * s.q_heads + h) * d], d);
        for (size_t i = s.window != 0 && end > s.window ? end - s.window : 0; i < end; ++i) {
          const size_t row = (i * s.kv_heads + h / group) * d;
          exact.add(&k_[row], &v_[row]);
        }
        const std::vector<double> o = exact.o();
        out.insert(out.end(), o.begin(), o.end());
      }
    }
    return out;
  }
  void expect_truth(const Shape& s) {
    SCOPED_TRACE(std::to_string(s.q_heads) + " heads, first " + std::to_string(s.first) + ", " +
                 std::to_string(s.queries) + " queries, window " + std::to_string(s.window) +
                 ", soft-cap " + std::to_string(s.softcap));
    fill(s);
    const auto prompt = make_cuda_prompt(0, {s.q_heads, s.kv_heads, dim()});
    const std::vector<float> got = attend(*prompt, s);
    const std::vector<double> expected = truth(s);
    double largest = 0.0;
    for (size_t i = 0; i < got.size(); ++i)
      largest = std::max(largest, std::abs(double{got[i]} - expected[i]));
    // Large logits are sums of large products, which fp32 rounds.
    const bool large = s.spread > 10.0F;
    EXPECT_LT(relative_error(got.data(), expected), large ? 2e-4 : 2e-5);
    EXPECT_LT(largest, large ? 1e-2 : 1e-3);
  }

  std::mt19937 rng_{testing::UnitTest::GetInstance()->random_seed() + 13U};
  std::vector<float> q_, k_, v_;
  Uploads upload;
};

constexpr Shape kShapes[] = {
    {1, 1, 0, 1, 1.0F},    {2, 1, 0, 64, 1.0F},     {4, 1, 0, 129, 3.0F}, {6, 2, 77, 150, 1.0F},
    {3, 3, 1000, 1, 2.0F}, {16, 1, 513, 128, 1.0F}, {8, 2, 0, 333, 0.3F}, {2, 2, 63, 65, 30.0F},
};

TEST_P(PromptF32Test, IsThatOfDoublePrecision) {
  for (const Shape& s : kShapes) expect_truth(s);
}

/// Of heads of 512 with fewer queries in a thread block, as on GPUs for desktops.
TEST_P(PromptF32Test, In99KiBToo) {
  if (dim() <= 256) GTEST_SKIP() << "takes no more on any device";
  const keyhole::test::ScopedVariable forced("KEYHOLE_CUDA_CAPABILITY", "8.6");
  for (const Shape& s : kShapes) expect_truth(s);
}

/// Windows that are shorter than a tile, than a block's rows, and as long as all; windows that end in the middle of
/// tiles.
TEST_P(PromptF32Test, OverAWindowAndWithASoftCapToo) {
  for (Shape s : kShapes) {
    for (const uint32_t window : {1, 50, 64, 200}) {
      s.window = window;
      s.softcap = window % 4 == 0 ? 2.0F : 0.0F;
      expect_truth(s);
    }
    s.window = 0;
    s.softcap = 1.5F;
    expect_truth(s);
  }
}

/// The lost block has little weight, so that what is left is near the truth, as it is where all numbers are fp16.
TEST_P(PromptF32Test, ByPatternsThatChoose) {
  const Shape s{4, 2, 400, 300, 2.0F};
  fill(s);
  const auto prompt = make_cuda_prompt(0, {s.q_heads, s.kv_heads, dim()});
  const std::vector<float> dense = attend(*prompt, s);
  for (const PromptChoice choice :
       {PromptChoice::sampled, PromptChoice::pooled, PromptChoice::vertical_slash}) {
    SCOPED_TRACE("choice " + std::to_string(static_cast<int>(choice)));
    PromptPattern all = pattern_of(choice);
    all.mass = 1.0F;
    all.blocks = 11;
    all.columns = s.first + s.queries;
    EXPECT_LT(relative_error(attend(*prompt, s, all).data(), dense), all.stride != 0 ? 1e-2 : 1e-3);
  }
  // The shapes before and behind take no memory of each other's.
  EXPECT_EQ(attend(*prompt, s), dense);
}

TEST_P(PromptF32Test, WhatIsNotFiniteGivesOutputsThatAreNot) {
  const Shape s{2, 1, 3, 5, 1.0F};
  const auto prompt = make_cuda_prompt(0, {s.q_heads, s.kv_heads, dim()});
  for (const float bad : {INFINITY, NAN}) {
    fill(s);
    v_[2 * dim() + 3] = bad;
    const std::vector<float> out = attend(*prompt, s);
    for (size_t i = 3; i < out.size(); i += dim()) EXPECT_FALSE(std::isfinite(out[i])) << i;
    fill(s);
    q_[dim() + 1] = bad;
    k_[1] = 1.0F;
    EXPECT_FALSE(std::isfinite(attend(*prompt, s)[dim()]));
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, PromptF32Test, testing::Values(64, 80, 96, 128, 256, 512));

}  // namespace
}  // namespace keyhole::gpu
