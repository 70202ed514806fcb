// The GPU's causal attention against a plain one in double precision.
#include <cuda_fp16.h>

#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tools/llama/cuda/attention.h"

namespace keyhole::tools {
namespace {

using namespace testing;

struct Shape {
  uint32_t q_heads, kv_heads, d, first, queries;
  float spread;
};

std::vector<__half> halves(const std::vector<float>& values) {
  std::vector<__half> out;
  out.reserve(values.size());
  for (const float x : values) out.push_back(__float2half_rn(x));
  return out;
}

std::vector<double> reference(const Shape& s, const std::vector<__half>& q,
                              const std::vector<__half>& k, const std::vector<__half>& v) {
  std::vector<double> out(q.size(), 0.0);
  const size_t group = s.q_heads / s.kv_heads;
  for (size_t t = 0; t < s.queries; ++t) {
    const size_t keys = s.first + t + 1;
    for (size_t h = 0; h < s.q_heads; ++h) {
      const __half* const query = &q[(t * s.q_heads + h) * s.d];
      const auto row = [&](const std::vector<__half>& rows, size_t key) {
        return &rows[(key * s.kv_heads + h / group) * s.d];
      };
      std::vector<double> logits(keys, 0.0);
      double best = -1e300;
      for (size_t key = 0; key < keys; ++key) {
        for (size_t i = 0; i < s.d; ++i) {
          logits[key] += static_cast<double>(__half2float(query[i])) * __half2float(row(k, key)[i]);
        }
        logits[key] /= std::sqrt(static_cast<double>(s.d));
        best = std::max(best, logits[key]);
      }
      double sum = 0.0;
      double* const to = &out[(t * s.q_heads + h) * s.d];
      for (size_t key = 0; key < keys; ++key) {
        const double weight = std::exp(logits[key] - best);
        sum += weight;
        for (size_t i = 0; i < s.d; ++i) to[i] += weight * __half2float(row(v, key)[i]);
      }
      for (size_t i = 0; i < s.d; ++i) to[i] /= sum;
    }
  }
  return out;
}

class GpuAttention : public ::testing::TestWithParam<uint32_t> {};

TEST_P(GpuAttention, IsThatOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  const uint32_t d = GetParam();
  std::mt19937 random(d);
  const Shape shapes[] = {
      {1, 1, d, 0, 1, 1.0F},    {2, 1, d, 0, 64, 1.0F},   {4, 1, d, 0, 129, 3.0F},
      {6, 2, d, 77, 150, 1.0F}, {3, 3, d, 1000, 1, 2.0F}, {16, 1, d, 513, 128, 1.0F},
      {8, 2, d, 0, 333, 0.3F},  {2, 2, d, 63, 65, 30.0F},
  };
  for (const Shape& s : shapes) {
    SCOPED_TRACE(std::to_string(s.q_heads) + " heads, first " + std::to_string(s.first) + ", " +
                 std::to_string(s.queries) + " queries");
    const size_t width = size_t{s.kv_heads} * d;
    const auto q = halves(random_floats(size_t{s.queries} * s.q_heads * d, s.spread, random));
    const auto k = halves(random_floats((s.first + s.queries) * width, 1.0F, random));
    const auto v = halves(random_floats((s.first + s.queries) * width, 1.0F, random));
    const GpuArray<__half> device_q(q), device_k(k), device_v(v);
    // Rows beyond the last must stay as they are.
    const SplitArray out(q.size() + 2 * size_t{s.q_heads} * d);
    cuda::AttentionArgs args;
    args.q = device_q.get();
    args.k = device_k.get();
    args.v = device_v.get();
    args.out = out.out();
    args.first = s.first;
    args.queries = s.queries;
    args.q_heads = s.q_heads;
    args.kv_heads = s.kv_heads;
    args.scale = 1.0F / std::sqrt(static_cast<float>(d));
    cuda::causal_attention(args, d, nullptr);
    std::vector<double> got = out.read();
    for (size_t i = q.size(); i < got.size(); ++i) EXPECT_TRUE(std::isnan(got[i]));
    got.resize(q.size());
    const std::vector<double> expected = reference(s, q, k, v);
    EXPECT_LT(relative_error(got, expected), 1e-3);
    double largest = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
      largest = std::max(largest, std::abs(got[i] - expected[i]));
    }
    EXPECT_LT(largest, 1e-2);
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, GpuAttention, ::testing::Values(64, 80, 96, 128, 256));

TEST(GpuAttentionRefuses, OtherHeadDims) {
  EXPECT_FALSE(cuda::attention_has(112));
  EXPECT_THROW(cuda::causal_attention({}, 112, nullptr), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
