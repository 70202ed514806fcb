// What a step does, and what families have between their products, against double precision.
#include <array>
#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tests/tools/llama/gpu_references.h"
#include "tools/llama/cuda/family_kernels.h"
#include "tools/llama/cuda/step_kernels.h"

namespace keyhole::tools {
namespace {

using namespace testing;

TEST(GpuFamilyKernels, AreThoseOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(6);
  for (const auto& [n, width] : {std::array<uint32_t, 2>{1, 24}, {1, 4096}, {37, 1000}}) {
    SCOPED_TRACE(std::to_string(n) + " of " + std::to_string(width));
    const size_t size = size_t{n} * width;
    const std::vector<float> rows = random_floats(size, 2.0F, random);
    const std::vector<float> bias = random_floats(width, 1.0F, random);
    const std::vector<float> weight = random_floats(width, 1.0F, random);
    const std::vector<float> before = random_floats(size, 1.0F, random);
    const GpuArray<float> device_rows(rows), device_bias(bias), device_weight(weight);
    for (const bool biased : {false, true}) {
      for (const bool norm : {false, true}) {
        const GpuArray<float> hidden(before);
        cuda::add_update({device_rows.get(), biased ? device_bias.get() : nullptr,
                          norm ? device_weight.get() : nullptr, 1e-5F, n, width},
                         hidden.get(), nullptr);
        std::vector<float> update = rows;
        for (size_t i = 0; biased && i < size; ++i) update[i] += bias[i % width];
        std::vector<double> expected(update.begin(), update.end());
        if (norm) expected = normed(update, weight, 1e-5);
        for (size_t i = 0; i < size; ++i) expected[i] += before[i];
        EXPECT_LT(relative_error(hidden.read(), expected), 1e-6) << biased << norm;
      }
    }
    const std::vector<float> gate_up = random_floats(2 * size, 3.0F, random);
    const std::vector<float> both = random_floats(2 * size_t{width}, 1.0F, random);
    const GpuArray<float> device_gate_up(gate_up), device_both(both);
    for (const bool gelu : {false, true}) {
      for (const bool biased : {false, true}) {
        const GpuArray<float> out(size);
        cuda::activate_rows(
            {device_gate_up.get(), biased ? device_both.get() : nullptr, n, width, gelu}, out.get(),
            nullptr);
        std::vector<double> expected(size);
        for (size_t i = 0; i < size; ++i) {
          const auto number = [&](size_t column) {
            return double{gate_up[i / width * 2 * width + column]} + (biased ? both[column] : 0.0F);
          };
          const double gate = number(i % width);
          expected[i] = (gelu ? gelu_tanh(gate) : silu(gate)) * number(width + i % width);
        }
        EXPECT_LT(relative_error(out.read(), expected), 5e-6) << gelu << biased;
      }
    }
    for (const float cap : {2.0F, 30.0F}) {
      std::vector<float> x = rows;
      x.front() = 1e6F;
      x.back() = -1e6F;
      const GpuArray<float> capped(x);
      cuda::soft_cap(cap, static_cast<uint32_t>(size), capped.get(), nullptr);
      const std::vector<float> got = capped.read();
      for (size_t i = 0; i < size; ++i) {
        ASSERT_NEAR(got[i], cap * std::tanh(double{x[i]} / cap), 2e-6 * cap) << i;
      }
    }
  }

  std::vector<double> frequencies(37);
  for (size_t i = 0; i < 37; ++i) frequencies[i] = std::pow(10000.0, -static_cast<double>(i) / 37);
  const GpuArray<double> device_frequencies(frequencies);
  const GpuArray<cuda::StepInput> in(std::vector<cuda::StepInput>{{5, 70001}});
  const GpuArray<float2> turns(37);
  cuda::step_turns(in.get(), device_frequencies.get(), 37, 1.5, turns.get(), nullptr);
  const std::vector<float2> got = turns.read();
  for (size_t i = 0; i < 37; ++i) {
    EXPECT_NEAR(got[i].x, 1.5 * std::cos(70001 * frequencies[i]), 1e-6);
    EXPECT_NEAR(got[i].y, 1.5 * std::sin(70001 * frequencies[i]), 1e-6);
  }
}

/// More columns than a thread block of any GPU has shared memory for, and as many as are left over from even parts.
TEST(GpuStepKernels, DivideTheColumnsOfWideProducts) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 random(5);
  for (const bool low : {false, true}) {
    for (const uint32_t width : {24576U, 24584U, 28672U, 61448U}) {
      SCOPED_TRACE(width);
      const uint32_t rows = 37;
      const std::vector<float> x = random_floats(width, 1.0F, random);
      const std::vector<float> before = random_floats(rows, 1.0F, random);
      const SplitArray matrix(random_floats(size_t{rows} * width, 0.1F, random), low);
      const GpuArray<float> device_x(x), sum(before);
      cuda::step_add({matrix.in(), rows, width}, device_x.get(), sum.get(), nullptr);
      std::vector<double> expected = product({x.begin(), x.end()}, matrix.read(), 1, rows, width);
      for (uint32_t i = 0; i < rows; ++i) expected[i] += before[i];
      EXPECT_LT(relative_error(sum.read(), expected), kTolerance);
    }
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
