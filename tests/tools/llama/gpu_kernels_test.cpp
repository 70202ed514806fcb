// The GPU decoder's products and what lies between them against double precision.
#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tools/llama/cuda/gemm.h"
#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/cuda/step_kernels.h"

namespace keyhole::tools {
namespace {

using namespace testing;

/// Sums of up to 1024 products in fp32 of numbers with 16 bits.
constexpr double kTolerance = 2e-5;

double silu(double x) { return x / (1.0 + std::exp(-x)); }

std::vector<double> normed(const std::vector<float>& x, const std::vector<float>& weight,
                           double eps) {
  std::vector<double> out(x.size());
  const size_t width = weight.size();
  for (size_t row = 0; row < x.size(); row += width) {
    double squares = 0.0;
    for (size_t i = 0; i < width; ++i) squares += static_cast<double>(x[row + i]) * x[row + i];
    for (size_t i = 0; i < width; ++i) {
      out[row + i] = x[row + i] / std::sqrt(squares / static_cast<double>(width) + eps) * weight[i];
    }
  }
  return out;
}

/// y `[m, n]` = x `[m, k]` w^T.
std::vector<double> product(const std::vector<double>& x, const std::vector<double>& w, size_t m,
                            size_t n, size_t k) {
  std::vector<double> y(m * n, 0.0);
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      for (size_t c = 0; c < k; ++c) y[i * n + j] += x[i * k + c] * w[j * k + c];
    }
  }
  return y;
}

TEST(GpuGemm, IsThatOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(1);
  for (const uint32_t m : {1, 7, 128, 300}) {
    for (const uint32_t n : {8, 24, 136, 264}) {
      for (const uint32_t k : {8, 24, 40, 96, 384}) {
        for (const bool low : {false, true}) {
          for (const bool add : {false, true}) {
            SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
            const SplitArray x(random_floats(size_t{m} * k, 1.0F, random));
            const SplitArray w(random_floats(size_t{n} * k, 0.1F, random), low);
            const std::vector<float> before = random_floats(size_t{m} * n + 8, 1.0F, random);
            const GpuArray<float> c =
                add ? GpuArray<float>(before) : GpuArray<float>(before.size());
            cuda::gemm({x.in(), w.in(), c.get(), m, n, k, add}, nullptr);
            std::vector<double> expected = product(x.read(), w.read(), m, n, k);
            std::vector<float> got = c.read();
            for (size_t i = expected.size(); i < got.size(); ++i) {
              EXPECT_TRUE(add ? got[i] == before[i] : std::isnan(got[i]));
            }
            got.resize(expected.size());
            if (add) {
              for (size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
            }
            ASSERT_LT(relative_error(got, expected), kTolerance);
          }
        }
      }
    }
  }
}

TEST(GpuGemm, RefusesOddWidths) {
  EXPECT_THROW(cuda::gemm({{}, {}, nullptr, 1, 12, 16, false}, nullptr), std::runtime_error);
}

TEST(GpuPrefillKernels, EmbedNormaliseAndSilu) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(2);
  for (const uint32_t width : {24, 384, 1000}) {
    const uint32_t n = 37;
    const SplitArray table(random_floats(size_t{50} * width, 1.0F, random));
    std::vector<uint32_t> tokens(n);
    for (uint32_t& token : tokens) token = random() % 50;
    const GpuArray<uint32_t> device_tokens(tokens);
    const GpuArray<float> hidden(size_t{n} * width);
    cuda::embed_tokens(device_tokens.get(), n, table.in(), width, hidden.get(), nullptr);
    const std::vector<double> rows = table.read();
    std::vector<double> expected;
    for (const uint32_t token : tokens) {
      expected.insert(expected.end(), &rows[size_t{token} * width],
                      &rows[size_t{token} * width] + width);
    }
    EXPECT_LT(relative_error(hidden.read(), expected), 1e-7);

    const std::vector<float> weight = random_floats(width, 1.0F, random);
    const GpuArray<float> device_weight(weight);
    const SplitArray out(size_t{n} * width);
    cuda::normalise_tokens(hidden.get(), device_weight.get(), 1e-5F, n, width, out.out(), nullptr);
    EXPECT_LT(relative_error(out.read(), normed(hidden.read(), weight, 1e-5)), kTolerance);

    const std::vector<float> gate_up = random_floats(size_t{n} * 2 * width, 3.0F, random);
    const GpuArray<float> device_gate_up(gate_up);
    const SplitArray inner(size_t{n} * width);
    cuda::silu_multiply_tokens(device_gate_up.get(), n, width, inner.out(), nullptr);
    for (size_t i = 0; i < expected.size(); ++i) {
      const size_t row = i / width * 2 * width;
      expected[i] = silu(gate_up[row + i % width]) * gate_up[row + width + i % width];
    }
    EXPECT_LT(relative_error(inner.read(), expected), kTolerance);
  }
}

TEST(GpuPrefillKernels, RotatesAndHandsOutHeads) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(3);
  for (const uint32_t d : {64, 80, 128}) {
    const uint32_t n = 9, q_heads = 6, kv_heads = 2, first = 131000;
    const uint32_t half = d / 2;
    std::vector<double> frequencies(half);
    for (uint32_t i = 0; i < half; ++i) frequencies[i] = std::pow(500000.0, -2.0 * i / d);
    const GpuArray<double> device_frequencies(frequencies);
    const GpuArray<float2> table(size_t{first + n} * half);
    cuda::rope_table(device_frequencies.get(), half, first + n, table.get(), nullptr);

    const uint32_t width = (q_heads + 2 * kv_heads) * d;
    const std::vector<float> qkv = random_floats(size_t{n} * width, 1.0F, random);
    const GpuArray<float> device_qkv(qkv);
    const GpuArray<float> q(size_t{n} * q_heads * d), k(size_t{n} * kv_heads * d),
        v(size_t{n} * kv_heads * d);
    const GpuArray<__half> q16(size_t{n} * q_heads * d), k16(size_t{n} * kv_heads * d),
        v16(size_t{n} * kv_heads * d);
    cuda::Heads heads;
    heads.qkv = device_qkv.get();
    heads.table = table.get() + size_t{first} * half;
    heads.n = n;
    heads.q_heads = q_heads;
    heads.kv_heads = kv_heads;
    heads.head_dim = d;
    heads.q = q16.get();
    heads.k = k16.get();
    heads.v = v16.get();
    heads.q_out = q.get();
    heads.k_out = k.get();
    heads.v_out = v.get();
    cuda::rotate_heads(heads, nullptr);

    std::vector<double> expected_q, expected_k, expected_v;
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < q_heads + 2 * kv_heads; ++h) {
        auto& to = h < q_heads ? expected_q : h < q_heads + kv_heads ? expected_k : expected_v;
        const float* const x = &qkv[size_t{t} * width + h * d];
        for (uint32_t i = 0; i < d; ++i) {
          const double angle = h < q_heads + kv_heads ? (first + t) * frequencies[i % half] : 0.0;
          const double other = i < half ? -x[i + half] : x[i - half];
          to.push_back(x[i] * std::cos(angle) + other * std::sin(angle));
        }
      }
    }
    EXPECT_LT(relative_error(q.read(), expected_q), 1e-6);
    EXPECT_LT(relative_error(k.read(), expected_k), 1e-6);
    EXPECT_LT(relative_error(v.read(), expected_v), 1e-7);
    EXPECT_LT(relative_error(q16.read(), expected_q), 5e-4);
    EXPECT_LT(relative_error(k16.read(), expected_k), 5e-4);
    EXPECT_LT(relative_error(v16.read(), expected_v), 5e-4);
  }
}

/// Everything of a step, on one random layer.
TEST(GpuStepKernels, AreThoseOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(4);
  for (const bool low : {false, true}) {
    for (const uint32_t width : {24, 384, 14336}) {
      SCOPED_TRACE(width);
      const uint32_t half = 40, heads = 5, rotated = 3;
      const std::vector<float> x = random_floats(width, 1.0F, random);
      const std::vector<float> weight = random_floats(width, 1.0F, random);
      const GpuArray<float> device_x(x), device_weight(weight);
      const cuda::Norm norm{device_weight.get(), 1e-5F};
      const auto matrix = [&](uint32_t rows) {
        return SplitArray(random_floats(size_t{rows} * width, 0.1F, random), low);
      };
      const std::vector<double> input = normed(x, weight, 1e-5);

      // RoPE's turns come from the step's beginning.
      const SplitArray table(random_floats(size_t{7} * width, 1.0F, random), low);
      std::vector<double> frequencies(half);
      for (uint32_t i = 0; i < half; ++i) frequencies[i] = std::pow(10000.0, -1.0 * i / half);
      const GpuArray<double> device_frequencies(frequencies);
      const GpuArray<cuda::StepInput> in(std::vector<cuda::StepInput>{{5, 70001}});
      const GpuArray<float> hidden(width);
      const GpuArray<float2> turns(half);
      cuda::begin_step(in.get(), table.in(), width, device_frequencies.get(), half, hidden.get(),
                       turns.get(), nullptr);
      const std::vector<double> rows = table.read();
      EXPECT_LT(relative_error(hidden.read(), {&rows[5 * width], &rows[5 * width] + width}), 1e-7);

      const uint32_t qkv_rows = heads * 2 * half;
      const SplitArray qkv = matrix(qkv_rows);
      const GpuArray<float> y(qkv_rows);
      cuda::step_qkv({qkv.in(), qkv_rows, width}, device_x.get(), norm, turns.get(), half, rotated,
                     y.get(), nullptr);
      std::vector<double> expected = product(input, qkv.read(), 1, qkv_rows, width);
      for (uint32_t h = 0; h < rotated; ++h) {
        for (uint32_t i = 0; i < half; ++i) {
          const double angle = 70001 * frequencies[i];
          double& a = expected[h * 2 * half + i];
          double& b = expected[h * 2 * half + i + half];
          const double turned = a * std::cos(angle) - b * std::sin(angle);
          b = b * std::cos(angle) + a * std::sin(angle);
          a = turned;
        }
      }
      EXPECT_LT(relative_error(y.read(), expected), kTolerance);

      const uint32_t odd = 37;
      const SplitArray output = matrix(odd);
      const std::vector<float> before = random_floats(odd, 1.0F, random);
      const GpuArray<float> sum(before);
      cuda::step_add({output.in(), odd, width}, device_x.get(), sum.get(), nullptr);
      expected = product({x.begin(), x.end()}, output.read(), 1, odd, width);
      for (uint32_t i = 0; i < odd; ++i) expected[i] += before[i];
      EXPECT_LT(relative_error(sum.read(), expected), kTolerance);

      const GpuArray<float> logits(odd);
      cuda::step_logits({output.in(), odd, width}, device_x.get(), norm, logits.get(), nullptr);
      EXPECT_LT(relative_error(logits.read(), product(input, output.read(), 1, odd, width)),
                kTolerance);

      const uint32_t inner = 23;
      const SplitArray gate_up = matrix(2 * inner);
      const GpuArray<float> gated(inner);
      cuda::step_gate_up({gate_up.in(), 2 * inner, width}, device_x.get(), norm, gated.get(),
                         nullptr);
      const std::vector<double> both = product(input, gate_up.read(), 1, 2 * inner, width);
      expected.resize(inner);
      for (uint32_t i = 0; i < inner; ++i) expected[i] = silu(both[i]) * both[inner + i];
      EXPECT_LT(relative_error(gated.read(), expected), kTolerance);
    }
  }
}

}  // namespace
}  // namespace keyhole::tools
