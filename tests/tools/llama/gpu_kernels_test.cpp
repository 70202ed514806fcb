// The GPU decoder's products and what lies between them against double precision.
#include <array>
#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tests/tools/llama/gpu_references.h"
#include "tools/llama/cuda/blas_lt.h"
#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/cuda/products.h"

namespace keyhole::tools {
namespace {

using namespace testing;

TEST(GpuProducts, AreThoseOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(1);
  cuda::Products products;
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
            products.multiply({x.in(), w.in(), c.get(), m, n, k, add}, nullptr);
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

/// Products of shapes as models have them, where the library takes its largest kernels and splits sums: a few rows
/// are compared with double precision, and the bits are the same each time.
TEST(GpuProducts, OfLargeMatricesToo) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(9);
  cuda::Products products;
  for (const auto& [m, n, k] :
       {std::array<uint32_t, 3>{1, 4096, 4096}, {128, 512, 14336}, {2048, 6144, 1024}}) {
    SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
    const SplitArray x(random_floats(size_t{m} * k, 1.0F, random));
    const SplitArray w(random_floats(size_t{n} * k, 0.1F, random), false);
    const GpuArray<float> c(size_t{m} * n);
    products.multiply({x.in(), w.in(), c.get(), m, n, k, false}, nullptr);
    const std::vector<float> got = c.read();
    products.multiply({x.in(), w.in(), c.get(), m, n, k, false}, nullptr);
    EXPECT_TRUE(c.read() == got);
    const std::vector<double> all = x.read();
    const std::vector<double> weights = w.read();
    for (const uint32_t row : {0U, m / 2, m - 1}) {
      const std::vector<double> one(&all[size_t{row} * k], &all[size_t{row} * k] + k);
      const std::vector<float> of_row(&got[size_t{row} * n], &got[size_t{row} * n] + n);
      EXPECT_LT(relative_error(of_row, product(one, weights, 1, n, k)), 4 * kTolerance);
    }
  }
}

/// One rounding beside the same product in fp32, whose kernels another call may have loaded before.
TEST(GpuProducts, MayBeRounded) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(3);
  cuda::Products products;
  for (const auto& [m, n, k] :
       {std::array<uint32_t, 3>{1, 8, 8}, {300, 264, 96}, {512, 1024, 512}}) {
    SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
    const SplitArray x(random_floats(size_t{m} * k, 1.0F, random), false);
    const SplitArray w(random_floats(size_t{n} * k, 0.1F, random), false);
    const GpuArray<__nv_bfloat16> rounded(size_t{m} * n);
    products.load(m, n, k, false, true);
    products.multiply({x.in(), w.in(), nullptr, m, n, k, false, rounded.get()}, nullptr);
    std::vector<float> got;
    for (const __nv_bfloat16 number : rounded.read()) got.push_back(__bfloat162float(number));
    const double error = relative_error(got, product(x.read(), w.read(), m, n, k));
    EXPECT_LT(error, 1.0 / 512);
    EXPECT_GT(error, 1.0 / 4096);
    EXPECT_THROW(
        products.multiply({x.in(), w.in(), nullptr, m, n, k, true, rounded.get()}, nullptr),
        std::runtime_error);
  }
}

TEST(GpuProducts, RefuseOddWidthsAndPlaces) {
  KEYHOLE_NEEDS_GPU();
  cuda::Products products;
  EXPECT_THROW(products.multiply({{}, {}, nullptr, 1, 12, 16, false}, nullptr), std::runtime_error);
  const GpuArray<float> c(64);
  EXPECT_THROW(products.multiply({{}, {}, c.get() + 1, 1, 8, 8, false}, nullptr),
               std::runtime_error);
}

/// Needs no GPU: the library is either there, or the answer says what is missing.
TEST(BlasLt, IsThereOrSaysWhy) {
  const std::string refusal = cuda::blas_lt_refusal();
  if (refusal.empty()) {
    EXPECT_NE(cuda::blas_lt().matmul, nullptr);
  } else {
    EXPECT_NE(refusal.find("cublasLt"), std::string::npos) << refusal;
    EXPECT_THROW((void)cuda::blas_lt(), std::runtime_error);
  }
}

TEST(GpuPrefillKernels, EmbedNormaliseAndActivate) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(2);
  for (const uint32_t width : {24, 384, 1000, 4096}) {
    SCOPED_TRACE(width);
    const uint32_t n = 37;
    const SplitArray table(random_floats(size_t{50} * width, 1.0F, random));
    std::vector<uint32_t> tokens(n);
    for (uint32_t& token : tokens) token = random() % 50;
    const GpuArray<uint32_t> device_tokens(tokens);
    const GpuArray<float> hidden(size_t{n} * width);
    cuda::embed_tokens(device_tokens.get(), n, table.in(), width, 8.0F, hidden.get(), nullptr);
    const std::vector<double> rows = table.read();
    std::vector<double> expected;
    for (const uint32_t token : tokens) {
      for (uint32_t i = 0; i < width; ++i)
        expected.push_back(8.0 * rows[size_t{token} * width + i]);
    }
    EXPECT_LT(relative_error(hidden.read(), expected), 1e-7);

    const std::vector<float> weight = random_floats(width, 1.0F, random);
    const GpuArray<float> device_weight(weight);
    const SplitArray out(size_t{n} * width);
    cuda::normalise_tokens(hidden.get(), device_weight.get(), 1e-5F, n, width, out.out(), nullptr);
    EXPECT_LT(relative_error(out.read(), normed(hidden.read(), weight, 1e-5)), kTolerance);

    const std::vector<float> gate_up = random_floats(size_t{n} * 2 * width, 3.0F, random);
    const std::vector<float> bias = random_floats(2 * size_t{width}, 1.0F, random);
    const GpuArray<float> device_gate_up(gate_up), device_bias(bias);
    for (const bool gelu : {false, true}) {
      for (const bool biased : {false, true}) {
        const SplitArray inner(size_t{n} * width);
        cuda::activate_tokens(
            {device_gate_up.get(), biased ? device_bias.get() : nullptr, n, width, gelu},
            inner.out(), nullptr);
        for (size_t i = 0; i < expected.size(); ++i) {
          const auto number = [&](size_t column) {
            return double{gate_up[i / width * 2 * width + column]} + (biased ? bias[column] : 0.0F);
          };
          const double gate = number(i % width);
          expected[i] = (gelu ? gelu_tanh(gate) : silu(gate)) * number(width + i % width);
        }
        EXPECT_LT(relative_error(inner.read(), expected), kTolerance) << gelu << biased;
        // Numbers that have been rounded are what they were rounded to.
        std::vector<float> values;
        std::vector<__nv_bfloat16> numbers;
        for (const float x : gate_up) {
          numbers.push_back(__float2bfloat16_rn(x));
          values.push_back(__bfloat162float(numbers.back()));
        }
        const GpuArray<float> same(values);
        const GpuArray<__nv_bfloat16> rounded(numbers);
        const SplitArray of_floats(size_t{n} * width), of_rounded(size_t{n} * width);
        const float* const own_bias = biased ? device_bias.get() : nullptr;
        cuda::activate_tokens({same.get(), own_bias, n, width, gelu}, of_floats.out(), nullptr);
        cuda::activate_tokens({nullptr, own_bias, n, width, gelu, rounded.get()}, of_rounded.out(),
                              nullptr);
        EXPECT_TRUE(of_rounded.read() == of_floats.read()) << gelu << biased;
      }
    }
  }
}

/// Heads of a stretch of a prompt.
struct HeadsCase {
  uint32_t d, pairs;
  bool bias, norms;
  cuda::KvNumbers numbers;
};

void expect_heads(const HeadsCase& c) {
  SCOPED_TRACE(std::to_string(c.d) + " components, " + std::to_string(c.pairs) + " pairs");
  std::mt19937 random(3);
  const uint32_t n = 9, q_heads = 6, kv_heads = 2, first = 131000, heads = q_heads + 2 * kv_heads;
  const double factor = 1.25, eps = 1e-5;
  std::vector<double> frequencies(c.pairs);
  for (uint32_t i = 0; i < c.pairs; ++i) frequencies[i] = std::pow(500000.0, -1.0 * i / c.pairs);
  const GpuArray<double> device_frequencies(frequencies);
  const GpuArray<float2> table(size_t{n} * c.pairs);
  cuda::rope_table(device_frequencies.get(), c.pairs, factor, first, n, table.get(), nullptr);

  const uint32_t width = heads * c.d;
  const std::vector<float> qkv = random_floats(size_t{n} * width, 1.0F, random);
  const std::vector<float> bias = random_floats(width, 0.5F, random);
  const std::vector<float> q_norm = random_floats(c.d, 1.0F, random);
  const std::vector<float> k_norm = random_floats(c.d, 1.0F, random);
  const GpuArray<float> device_qkv(qkv), device_bias(bias), device_q_norm(q_norm),
      device_k_norm(k_norm);
  const size_t q_size = size_t{n} * q_heads * c.d, kv_size = size_t{n} * kv_heads * c.d;
  const GpuArray<__half> q16(q_size), k16(kv_size), v16(kv_size);
  const GpuArray<float> q32(q_size), k32(kv_size), v32(kv_size);
  const GpuArray<uint32_t> q(q_size), k(kv_size), v(kv_size);  // room for the widest numbers
  cuda::Heads args;
  args.qkv = device_qkv.get();
  args.table = table.get();
  args.n = n;
  args.q_heads = q_heads;
  args.kv_heads = kv_heads;
  args.head_dim = c.d;
  args.pairs = c.pairs;
  if (c.bias) args.bias = device_bias.get();
  if (c.norms) {
    args.q_norm = device_q_norm.get();
    args.k_norm = device_k_norm.get();
    args.eps = static_cast<float>(eps);
  }
  args.q = q16.get();
  args.k = k16.get();
  args.v = v16.get();
  args.numbers = c.numbers;
  args.q_out = q.get();
  args.k_out = k.get();
  args.v_out = v.get();
  cuda::finish_heads(args, nullptr);
  args.attended = cuda::KvNumbers::f32;
  args.q = q32.get();
  args.k = k32.get();
  args.v = v32.get();
  args.q_out = args.k_out = args.v_out = nullptr;
  cuda::finish_heads(args, nullptr);

  std::vector<double> expected_q, expected_k, expected_v;
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t h = 0; h < heads; ++h) {
      const bool value = h >= q_heads + kv_heads;
      std::vector<double> x(c.d);
      double squares = 0.0;
      for (uint32_t i = 0; i < c.d; ++i) {
        x[i] = qkv[size_t{t} * width + h * c.d + i] + (c.bias ? bias[h * c.d + i] : 0.0);
        squares += x[i] * x[i];
      }
      for (uint32_t i = 0; c.norms && !value && i < c.d; ++i) {
        x[i] *= (h < q_heads ? q_norm : k_norm)[i] / std::sqrt(squares / c.d + eps);
      }
      auto& to = h < q_heads ? expected_q : value ? expected_v : expected_k;
      for (uint32_t i = 0; i < c.d; ++i) {
        if (value || i >= 2 * c.pairs) {
          to.push_back(x[i]);
          continue;
        }
        const double angle = (first + t) * frequencies[i % c.pairs];
        const double other = i < c.pairs ? -x[i + c.pairs] : x[i - c.pairs];
        to.push_back(factor * (x[i] * std::cos(angle) + other * std::sin(angle)));
      }
    }
  }
  EXPECT_LT(relative_error(q16.read(), expected_q), 5e-4);
  EXPECT_LT(relative_error(k16.read(), expected_k), 5e-4);
  EXPECT_LT(relative_error(v16.read(), expected_v), 5e-4);
  EXPECT_LT(relative_error(q32.read(), expected_q), 2e-6);
  EXPECT_LT(relative_error(k32.read(), expected_k), 2e-6);
  EXPECT_LT(relative_error(v32.read(), expected_v), 2e-6);
  const auto numbers = [&](const GpuArray<uint32_t>& array, cuda::KvNumbers type) {
    const std::vector<uint32_t> words = array.read();
    std::vector<double> out(words.size());
    for (size_t i = 0; i < out.size(); ++i) {
      const auto at = [&](auto number) {
        std::memcpy(&number, reinterpret_cast<const char*>(words.data()) + i * sizeof number,
                    sizeof number);
        return static_cast<float>(number);
      };
      out[i] = type == cuda::KvNumbers::f32   ? at(float{})
               : type == cuda::KvNumbers::f16 ? at(__half{})
                                              : at(__nv_bfloat16{});
    }
    return out;
  };
  const bool exact = c.numbers == cuda::KvNumbers::f32;
  const double tolerance = exact ? 2e-6 : c.numbers == cuda::KvNumbers::f16 ? 5e-4 : 4e-3;
  EXPECT_LT(
      relative_error(numbers(q, exact ? cuda::KvNumbers::f32 : cuda::KvNumbers::f16), expected_q),
      exact ? tolerance : 5e-4);
  EXPECT_LT(relative_error(numbers(k, c.numbers), expected_k), tolerance);
  EXPECT_LT(relative_error(numbers(v, c.numbers), expected_v), tolerance);
}

TEST(GpuPrefillKernels, FinishAndHandOutHeads) {
  KEYHOLE_NEEDS_GPU();
  using cuda::KvNumbers;
  for (const uint32_t d : {64, 80, 128, 256}) {
    for (const KvNumbers numbers : {KvNumbers::f32, KvNumbers::f16, KvNumbers::bf16}) {
      expect_heads({d, d / 2, false, false, numbers});
    }
    expect_heads({d, d / 2, true, false, KvNumbers::f32});
    expect_heads({d, d / 2, true, true, KvNumbers::f32});
    expect_heads({d, d / 8 * 3, false, true, KvNumbers::f32});  // a part of the head
    expect_heads({d, 5, true, true, KvNumbers::bf16});          // an odd number of pairs
  }
}

}  // namespace
}  // namespace keyhole::tools
