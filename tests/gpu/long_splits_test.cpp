// The passes over codes where one thread block has very many rows, against double precision over the same codes:
// values that cancel are a small part of what is summed up, and an error that grew with the number of rows would be
// large beside them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/half.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "tests/gpu/codes_layer.h"
#include "tests/gpu/cuda_fixture.h"
#include "tests/normal.h"

namespace keyhole::gpu::test {
namespace {

constexpr uint32_t kLongBlocks = 128;  // 32,768 rows
constexpr uint32_t kHeadsOfToken = 4;

struct LongCase {
  uint32_t dim, bits, tokens;
  float spread = 1.0F;  ///< of logits, in nats
  float values = 1.0F;  ///< multiplies what values are beside their means
};

/// The rotation of cpu/code_layout.h, or its inverse.
void rotate_row(std::vector<double>& x, bool back) {
  const auto dim = static_cast<uint32_t>(x.size());
  const uint32_t passes = hadamard_passes(dim);
  for (uint32_t i = 0; i < passes; ++i) {
    const uint32_t number = back ? passes - 1 - i : i;
    const HadamardPass pass = hadamard_pass(dim, number);
    double* const part = x.data() + pass.begin;
    for (uint32_t j = 0; !back && j < pass.size; ++j) part[j] *= code_sign(number, j);
    for (uint32_t step = 1; step < pass.size; step *= 2) {
      for (uint32_t j = 0; j < pass.size; ++j) {
        if ((j & step) != 0) continue;
        const double a = part[j], b = part[j + step];
        part[j] = a + b, part[j + step] = a - b;
      }
    }
    for (uint32_t j = 0; j < pass.size; ++j) {
      part[j] *= (back ? code_sign(number, j) : 1.0) / std::sqrt(static_cast<double>(pass.size));
    }
  }
}

/// Random codes of one KV head.
class LongLayer {
 public:
  LongLayer(const CodeShape& shape, float values, std::mt19937_64& rng)
      : shape_(shape), bytes_(kLongBlocks * shape.block_bytes()) {
    const float unit = shape.key_bits == 4 ? 0.16F : 0.49F;
    std::uniform_real_distribution<float> near(0.9F, 1.1F), mean(-0.05F, 0.05F);
    for (uint32_t b = 0; b < kLongBlocks; ++b) {
      std::byte* const block = bytes_.data() + b * shape.block_bytes();
      for (size_t i = 0; i < shape.factors_at(); i += 8) {
        const uint64_t x = rng();
        std::memcpy(block + i, &x, 8);
      }
      auto* to = reinterpret_cast<uint16_t*>(block + shape.factors_at());
      // Keys are the shorter, so that logits vary by 1 and many rows weigh.
      for (uint32_t i = 0; i < 2 * kCodeBlock; ++i) {
        to[i] = cpu::f32_to_f16((i % 2 == 0 ? 0.7F : values) * unit * near(rng));
      }
      to = reinterpret_cast<uint16_t*>(block + shape.key_mean_at());
      for (uint32_t i = 0; i < 2 * shape.dim; ++i) to[i] = cpu::f32_to_f16(mean(rng));
      const float noise = 0.02F;
      std::memcpy(block + shape.noise_at(), &noise, 4);
    }
  }
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }

  /// Attends a query as it comes.
  [[nodiscard]] std::vector<double> attend(const float* query, double scale) const {
    const uint32_t dim = shape_.dim;
    std::vector<double> q(query, query + dim), o(dim), level(dim);
    rotate_row(q, false);
    double square = 0.0, total = 0.0;
    for (const double x : q) square += x * x;
    for (uint32_t b = 0; b < kLongBlocks; ++b) {
      const std::byte* const block = bytes_.data() + b * shape_.block_bytes();
      const auto* const factors = reinterpret_cast<const uint16_t*>(block + shape_.factors_at());
      const auto* const means = reinterpret_cast<const uint16_t*>(block + shape_.key_mean_at());
      std::vector<double> mean(2 * dim);
      for (uint32_t j = 0; j < 2 * dim; ++j) mean[j] = cpu::f16_to_f32(means[j]);
      double middle = 0.0, of_block = 0.0;
      for (uint32_t j = 0; j < dim; ++j) middle += q[j] * mean[j];
      float noise;
      std::memcpy(&noise, block + shape_.noise_at(), 4);
      for (uint32_t row = 0; row < kCodeBlock; ++row) {
        const double f = cpu::f16_to_f32(factors[2 * row]);
        const double g = cpu::f16_to_f32(factors[2 * row + 1]);
        double dot = 0.0;
        for (uint32_t j = 0; j < dim; ++j) dot += q[j] * level_of(block, false, row, j);
        const double bias = std::min(0.5 * scale * scale * square * noise * f * f,
                                     static_cast<double>(kMostNoiseBias));
        const double weight = std::exp(scale * (middle + f * dot) - bias);
        of_block += weight;
        for (uint32_t j = 0; j < dim; ++j) o[j] += weight * g * level_of(block, true, row, j);
      }
      for (uint32_t j = 0; j < dim; ++j) o[j] += of_block * mean[dim + j];
      total += of_block;
    }
    for (double& x : o) x /= total;
    rotate_row(o, true);
    return o;
  }

 private:
  [[nodiscard]] int level_of(const std::byte* block, bool value, uint32_t row, uint32_t j) const {
    const uint32_t in_tile = row % kCodeTile, bits = shape_.key_bits;
    const CodePlace place = value ? shape_.value_place(in_tile, j) : shape_.key_place(in_tile, j);
    const uint32_t words = value ? shape_.value_words() : shape_.key_words();
    const auto* const from =
        reinterpret_cast<const uint32_t*>(block + (value ? shape_.values_at() : 0)) +
        row / kCodeTile * kCodeLanes * words;
    const uint32_t most = (1U << bits) - 1;
    return static_cast<int>(2 * (from[place.word] >> place.shift & most)) - static_cast<int>(most);
  }

  CodeShape shape_;
  std::vector<std::byte> bytes_;
};

void check_long(const LongCase& c) {
  const CodeShape shape{c.dim, c.bits, c.bits};
  const uint32_t seed = c.dim + c.bits + c.tokens, heads = kHeadsOfToken * c.tokens;
  SCOPED_TRACE("d " + std::to_string(c.dim) + ", bits " + std::to_string(c.bits) + ", rows " +
               std::to_string(heads) + ", seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  const LongLayer layer(shape, c.values, rng);
  keyhole::test::Normal<float> normal;
  std::vector<float> q(size_t{heads} * c.dim);
  for (float& x : q) x = normal(rng);
  CodesStep step;
  step.shape = shape;
  step.kv_heads = 1;
  step.group = heads;
  step.tokens = c.tokens;
  step.block_capacity = kLongBlocks;
  step.splits = 1;
  step.wide = codes_are_wide(step.shape, heads, shared_memory_of(0).of_block, c.tokens);
  step.logits.scale = c.spread / std::sqrt(static_cast<float>(c.dim));
  step.cluster = has_clusters();
  ASSERT_EQ(prepare_codes(step, 0), cudaSuccess);
  const DeviceVector<std::byte> blocks(layer.bytes());
  const DeviceVector<uint32_t> count(std::vector<uint32_t>{kLongBlocks});
  const DeviceVector<float> ones(std::vector<float>(c.dim, 1.0F)), queries(q), out(q.size());
  step.blocks = blocks.get();
  step.block_count = count.get();
  step.block_stride = step.head_stride = shape.block_bytes();
  step.key_scale = step.value_scale = ones.get();
  const auto rows = [&](const DeviceVector<float>& x) {
    return dense_tensor(reinterpret_cast<std::byte*>(x.get()), c.tokens, kHeadsOfToken, c.dim,
                        DType::f32, Memory::device);
  };
  step.q = rows(queries);
  step.out = rows(out);
  const DeviceVector<std::byte> work(codes_work_bytes(step));
  step.work = work.get();
  ASSERT_EQ(attend_codes(step, nullptr, false), cudaSuccess);
  ASSERT_EQ(finish_codes(step, nullptr, false), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> seen = out.read();
  // Queries are integers of 15 bits, and of fewer where codes lie high in their bytes. That moves logits by 6.4e-4 of
  // what they spread with codes of 4 bits and by 1.3e-3 with 2 bits, and an output by no more than it moves these.
  const double spread = double{c.spread} - 1.0;
  const double allowed = c.bits == 4 ? 2e-3 + 6.4e-4 * spread : 4e-3 + 1.3e-3 * spread;
  for (const uint32_t h : {0U, heads - 1}) {
    const std::vector<double> truth = layer.attend(&q[size_t{h} * c.dim], step.logits.scale);
    EXPECT_LT(relative_error(&seen[size_t{h} * c.dim], truth), allowed) << "head " << h;
  }
}

TEST(LongSplits, KeepTheErrorOfShortOnes) {
  KEYHOLE_NEEDS_GPU();
  for (const LongCase& c : {LongCase{64, 2, 1},
                            {80, 4, 1},
                            {128, 2, 1},
                            {128, 4, 1},
                            {128, 4, 2},
                            {256, 4, 1},
                            {128, 4, 5},
                            {256, 2, 5},
                            {256, 4, 3},
                            {256, 4, 6},
                            {256, 4, 8},
                            {256, 4, 12},
                            {128, 2, 12},
                            {64, 4, 8},
                            {512, 4, 1},
                            {512, 2, 4}}) {
    check_long(c);
  }
}

// Running maxima move in the midst of a split, by more than weights may grow, and values are tens of times as long as
// the head's scale says.
TEST(LongSplits, OfLogitsThatSpreadFar) {
  KEYHOLE_NEEDS_GPU();
  for (const LongCase& c : {LongCase{128, 4, 5, 8.0F, 250.0F},
                            {128, 2, 8, 8.0F, 80.0F},
                            {256, 4, 6, 8.0F, 250.0F},
                            {64, 4, 12, 8.0F}}) {
    check_long(c);
  }
}

}  // namespace
}  // namespace keyhole::gpu::test
