// The GPU's causal attention against a plain one in double precision.
#include <cuda_fp16.h>

#include <algorithm>
#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tools/llama/cuda/attention.h"

namespace keyhole::tools {
namespace {

using namespace testing;

struct Shape {
  uint32_t q_heads, kv_heads, d, first, queries;
  float spread;
  uint32_t window = 0;
  float softcap = 0.0F;
};

/// Numbers in fp16, and what these lack of them.
struct Halves {
  std::vector<__half> high, low;
  std::vector<double> values;  ///< of both
  explicit Halves(const std::vector<float>& numbers) {
    for (const float x : numbers) {
      high.push_back(__float2half_rn(x));
      low.push_back(__float2half_rn(x - __half2float(high.back())));
      values.push_back(static_cast<double>(__half2float(high.back())) + __half2float(low.back()));
    }
  }
};

std::vector<double> gpu_reference(const Shape& s, const std::vector<double>& q,
                                  const std::vector<double>& k, const std::vector<double>& v) {
  std::vector<double> out(q.size(), 0.0);
  const size_t group = s.q_heads / s.kv_heads;
  for (size_t t = 0; t < s.queries; ++t) {
    const size_t keys = s.first + t + 1;
    const size_t begin = s.window != 0 && keys > s.window ? keys - s.window : 0;
    for (size_t h = 0; h < s.q_heads; ++h) {
      const double* const query = &q[(t * s.q_heads + h) * s.d];
      const auto row = [&](const std::vector<double>& rows, size_t key) {
        return &rows[(key * s.kv_heads + h / group) * s.d];
      };
      std::vector<double> logits(keys, 0.0);
      double best = -1e300;
      for (size_t key = begin; key < keys; ++key) {
        for (size_t i = 0; i < s.d; ++i) logits[key] += query[i] * row(k, key)[i];
        logits[key] /= std::sqrt(static_cast<double>(s.d));
        if (s.softcap > 0.0F) logits[key] = s.softcap * std::tanh(logits[key] / s.softcap);
        best = std::max(best, logits[key]);
      }
      double sum = 0.0;
      double* const to = &out[(t * s.q_heads + h) * s.d];
      for (size_t key = begin; key < keys; ++key) {
        const double weight = std::exp(logits[key] - best);
        sum += weight;
        for (size_t i = 0; i < s.d; ++i) to[i] += weight * row(v, key)[i];
      }
      for (size_t i = 0; i < s.d; ++i) to[i] /= sum;
    }
  }
  return out;
}

void expect_gpu_attention(const Shape& s) {
  SCOPED_TRACE(std::to_string(s.q_heads) + " heads, first " + std::to_string(s.first) + ", " +
               std::to_string(s.queries) + " queries, window " + std::to_string(s.window) +
               ", soft-cap " + std::to_string(s.softcap));
  std::mt19937 random(s.d + s.queries);
  const size_t width = size_t{s.kv_heads} * s.d;
  const Halves q(random_floats(size_t{s.queries} * s.q_heads * s.d, s.spread, random));
  const Halves k(random_floats((s.first + s.queries) * width, 1.0F, random));
  const Halves v(random_floats((s.first + s.queries) * width, 1.0F, random));
  const GpuArray<__half> device_q(q.high), device_k(k.high), device_v(v.high);
  const GpuArray<__half> low_q(q.low), low_k(k.low), low_v(v.low);
  // Rows beyond the last must stay as they are.
  const SplitArray out(q.high.size() + 2 * size_t{s.q_heads} * s.d);
  cuda::AttentionArgs args;
  args.q = device_q.get();
  args.k = device_k.get();
  args.v = device_v.get();
  args.q_low = low_q.get();
  args.k_low = low_k.get();
  args.v_low = low_v.get();
  args.out = out.out();
  args.first = s.first;
  args.queries = s.queries;
  args.q_heads = s.q_heads;
  args.kv_heads = s.kv_heads;
  args.scale = 1.0F / std::sqrt(static_cast<float>(s.d));
  args.softcap = s.softcap;
  args.window = s.window;
  cuda::causal_attention(args, s.d, nullptr);
  std::vector<double> got = out.read();
  for (size_t i = q.high.size(); i < got.size(); ++i) EXPECT_TRUE(std::isnan(got[i]));
  got.resize(q.high.size());
  const std::vector<double> expected = gpu_reference(s, q.values, k.values, v.values);
  // Large logits are sums of large products, which fp32 rounds.
  const bool large = s.spread > 10.0F;
  EXPECT_LT(relative_error(got, expected), large ? 2e-4 : 5e-5);
  double largest = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs(got[i] - expected[i]));
  }
  EXPECT_LT(largest, !large ? 1e-3 : 1e-2);
}

class GpuAttention : public ::testing::TestWithParam<uint32_t> {};

std::vector<Shape> shapes(uint32_t d) {
  return {
      {1, 1, d, 0, 1, 1.0F},    {2, 1, d, 0, 64, 1.0F},   {4, 1, d, 0, 129, 3.0F},
      {6, 2, d, 77, 150, 1.0F}, {3, 3, d, 1000, 1, 2.0F}, {16, 1, d, 513, 128, 1.0F},
      {8, 2, d, 0, 333, 0.3F},  {2, 2, d, 63, 65, 30.0F},
  };
}

/// Windows that are shorter than a tile, than a block's rows, and as long as all; windows that end in the middle of tiles.
std::vector<Shape> bounded_shapes(uint32_t d) {
  std::vector<Shape> all;
  for (const Shape& s : shapes(d)) {
    for (const uint32_t window : {1, 50, 64, 200}) {
      all.push_back(s);
      all.back().window = window;
      all.back().softcap = window % 4 == 0 ? 2.0F : 0.0F;
    }
    all.push_back(s);
    all.back().softcap = 1.5F;
  }
  return all;
}

TEST_P(GpuAttention, IsThatOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  for (const Shape& s : shapes(GetParam())) expect_gpu_attention(s);
}

TEST_P(GpuAttention, OverAWindowAndWithASoftCapToo) {
  KEYHOLE_NEEDS_GPU();
  for (const Shape& s : bounded_shapes(GetParam())) expect_gpu_attention(s);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, GpuAttention, ::testing::Values(64, 80, 96, 128, 256));

TEST(GpuAttentionRefuses, OtherHeadDims) {
  EXPECT_FALSE(cuda::attention_has(112));
  EXPECT_THROW(cuda::causal_attention({}, 112, nullptr), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
