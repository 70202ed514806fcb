// Attention over codes on the device against the host's double-precision reference over the same codes.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/device.h"
#include "index/scan/kv_codes.h"

namespace keyhole::gpu {
namespace {

template <class T>
class Device {
 public:
  explicit Device(size_t n) : n_(n) { EXPECT_EQ(cudaMalloc(&data_, n * sizeof(T)), cudaSuccess); }
  explicit Device(const std::vector<T>& from) : Device(from.size()) {
    EXPECT_EQ(cudaMemcpy(data_, from.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  [[nodiscard]] T* get() const { return static_cast<T*>(data_); }
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> out(n_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t n_;
};

struct Case {
  uint32_t dim, bits, group, blocks;
  float scale;  ///< of logits, times 1 / sqrt(dim)
};

class CodesOnDevice : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  }
};

TEST_P(CodesOnDevice, StatesAreThoseOfTheHost) {
  const Case c = GetParam();
  constexpr uint32_t kKvHeads = 2;
  const size_t rows = size_t{c.blocks} * kCodeBlock;
  const CodeShape shape{c.dim, c.bits, c.bits};
  const cpu::Kernels& kernels = cpu::select_kernels();
  const LogitParams logits{c.scale / std::sqrt(static_cast<float>(c.dim)), 0.0F};
  std::mt19937_64 rng(c.dim * 131 + c.bits * 17 + c.group + c.blocks);
  std::normal_distribution<float> normal;
  std::vector<std::byte> blocks;
  std::vector<float> key_scale, value_scale, q, o, lse, best;
  const uint32_t padded = (c.group + 3) / 4 * 4;
  const uint32_t padded_heads = padded == 12 ? 16 : padded;
  for (uint32_t kv = 0; kv < kKvHeads; ++kv) {
    std::vector<float> keys(rows * c.dim), values(keys.size()), heads(c.group * c.dim);
    for (float& x : keys) x = normal(rng);
    for (float& x : values) x = 3.0F * normal(rng) + 1.0F;
    for (float& x : heads) x = normal(rng);
    const auto view = [&](const std::vector<float>& x) {
      return RowsView{reinterpret_cast<const std::byte*>(x.data()), c.dim * sizeof(float),
                      x.size() / c.dim, c.dim, DType::f32};
    };
    const KvView view_kv{view(keys), view(values)};
    index::KvCodes codes(shape, index::learn_balance(kernels, view_kv, view(heads)));
    codes.extend(kernels, view_kv);
    blocks.insert(blocks.end(), codes.block(0), codes.block(0) + c.blocks * shape.block_bytes());
    key_scale.insert(key_scale.end(), codes.balance().key_scale.begin(),
                     codes.balance().key_scale.end());
    value_scale.push_back(codes.balance().value_scale);
    q.insert(q.end(), heads.begin(), heads.end());
    const index::CodeQueries queries = codes.queries(heads.data(), c.group);
    o.resize(o.size() + heads.size());
    lse.resize(lse.size() + c.group);
    codes.attend(queries, logits, {}, {o.data() + kv * heads.size(), lse.data() + kv * c.group});
    std::vector<float> scores(rows * c.group);
    codes.score(queries, scores.data(), rows);
    for (size_t m = 0; m < rows / kMaximumRows; ++m) {
      for (uint32_t h = 0; h < padded_heads; ++h) {
        float top = kMinusInf;
        for (size_t i = 0; h < c.group && i < kMaximumRows; ++i) {
          top = std::max(top, scores[h * rows + m * kMaximumRows + i] * logits.scale);
        }
        best.push_back(top);
      }
    }
  }
  CodesStep s;
  s.shape = shape;
  s.kv_heads = kKvHeads;
  s.group = c.group;
  s.block_count = c.blocks;
  s.splits = code_splits(shape, kKvHeads, c.group, c.blocks, 16);
  s.logit_scale = logits.scale;
  s.head_stride = c.blocks * shape.block_bytes();
  const Device<std::byte> d_blocks(blocks);
  const Device<float> d_key_scale(key_scale), d_value_scale(value_scale), d_q(q);
  const Device<float> d_o(o.size()), d_lse(lse.size()), d_maxima(best.size());
  const Device<float> d_part_o(size_t{kKvHeads} * s.splits * c.group * c.dim);
  const Device<float2> d_part_sum(size_t{kKvHeads} * s.splits * c.group);
  s.blocks = d_blocks.get();
  s.key_scale = d_key_scale.get();
  s.value_scale = d_value_scale.get();
  s.q = d_q.get();
  s.o = d_o.get();
  s.lse = d_lse.get();
  s.maxima = d_maxima.get();
  s.part_o = d_part_o.get();
  s.part_sum = d_part_sum.get();
  ASSERT_EQ(attend_codes(s, nullptr), cudaSuccess);
  ASSERT_EQ(merge_codes(s, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> seen_o = d_o.read(), seen_lse = d_lse.read(),
                           seen_best = d_maxima.read();
  for (size_t h = 0; h < lse.size(); ++h) {
    // A quarter of q's components has 9 bits: 0.2 % of |q|, far below the codes' own noise.
    EXPECT_NEAR(seen_lse[h], lse[h], 2e-3 + 2e-3 * c.scale) << "head " << h;
    double difference = 0.0, norm = 0.0;
    for (uint32_t j = 0; j < c.dim; ++j) {
      const double d = double{seen_o[h * c.dim + j]} - o[h * c.dim + j];
      difference += d * d;
      norm += double{o[h * c.dim + j]} * o[h * c.dim + j];
    }
    EXPECT_LT(std::sqrt(difference / norm), 2e-3 + 1e-3 * c.scale) << "head " << h;
  }
  // The device's maxima are those of the logits that it weighs by, which the noise has made smaller.
  size_t far = 0;
  for (size_t i = 0; i < best.size(); ++i) {
    if (i % padded_heads >= c.group) continue;
    const double logit = double{seen_best[i]} * 0.6931471805599453;
    far += logit > best[i] + 5e-3 * (1.0 + std::abs(best[i])) || !std::isfinite(logit) ? 1 : 0;
  }
  EXPECT_EQ(far, 0U);
}

TEST_P(CodesOnDevice, TheHeaviestRowsAreExact) {
  const Case c = GetParam();
  constexpr uint32_t kKvHeads = 2, kExact = 16;
  const size_t rows = size_t{c.blocks} * kCodeBlock;
  const CodeShape shape{c.dim, c.bits, c.bits};
  const cpu::Kernels& kernels = cpu::select_kernels();
  const LogitParams logits{c.scale / std::sqrt(static_cast<float>(c.dim)), 0.0F};
  std::mt19937_64 rng(c.dim * 137 + c.bits * 19 + c.group + c.blocks);
  std::normal_distribution<float> normal;
  const size_t row_bytes = size_t{c.dim} * 2;
  std::vector<std::byte> blocks, keys(kKvHeads * rows * row_bytes), values(keys.size());
  std::vector<float> key_scale, value_scale, q;
  std::vector<index::KvCodes> heads_codes;
  for (uint32_t kv = 0; kv < kKvHeads; ++kv) {
    std::vector<float> k(rows * c.dim), v(k.size()), heads(c.group * c.dim);
    for (float& x : k) x = normal(rng);
    for (float& x : v) x = 3.0F * normal(rng) + 1.0F;
    for (float& x : heads) x = normal(rng);
    std::byte* head_k = keys.data() + kv * rows * row_bytes;
    std::byte* head_v = values.data() + kv * rows * row_bytes;
    kernels.from_f32[static_cast<size_t>(DType::f16)](k.data(), head_k, k.size());
    kernels.from_f32[static_cast<size_t>(DType::f16)](v.data(), head_v, v.size());
    const KvView kv_view{{head_k, row_bytes, rows, c.dim, DType::f16},
                         {head_v, row_bytes, rows, c.dim, DType::f16}};
    const RowsView queries{reinterpret_cast<const std::byte*>(heads.data()), c.dim * sizeof(float),
                           c.group, c.dim, DType::f32};
    index::KvCodes codes(shape, index::learn_balance(kernels, kv_view, queries));
    codes.extend(kernels, kv_view);
    blocks.insert(blocks.end(), codes.block(0), codes.block(0) + c.blocks * shape.block_bytes());
    key_scale.insert(key_scale.end(), codes.balance().key_scale.begin(),
                     codes.balance().key_scale.end());
    value_scale.push_back(codes.balance().value_scale);
    q.insert(q.end(), heads.begin(), heads.end());
    heads_codes.push_back(std::move(codes));
  }
  CodesStep s;
  s.shape = shape;
  s.kv_heads = kKvHeads;
  s.group = c.group;
  s.block_count = c.blocks;
  s.splits = code_splits(shape, kKvHeads, c.group, c.blocks, 16);
  s.logit_scale = logits.scale;
  s.head_stride = c.blocks * shape.block_bytes();
  s.exact_rows = kExact;
  s.kv_head_stride = rows * row_bytes;
  s.row_stride = row_bytes;
  const Device<std::byte> d_blocks(blocks), d_keys(keys), d_values(values);
  const Device<float> d_key_scale(key_scale), d_value_scale(value_scale), d_q(q);
  const Device<float> d_o(q.size()), d_lse(kKvHeads * c.group);
  const Device<float> d_maxima(size_t{kKvHeads} * rows / kMaximumRows * 16);
  const Device<float> d_part_o(size_t{kKvHeads} * s.splits * c.group * c.dim);
  const Device<float2> d_part_sum(size_t{kKvHeads} * s.splits * c.group);
  const Device<uint32_t> d_chosen(size_t{kKvHeads} * kExact);
  s.blocks = d_blocks.get();
  s.keys = d_keys.get();
  s.values = d_values.get();
  s.key_scale = d_key_scale.get();
  s.value_scale = d_value_scale.get();
  s.q = d_q.get();
  s.o = d_o.get();
  s.lse = d_lse.get();
  s.maxima = d_maxima.get();
  s.part_o = d_part_o.get();
  s.part_sum = d_part_sum.get();
  s.chosen = d_chosen.get();
  ASSERT_EQ(attend_codes(s, nullptr), cudaSuccess);
  ASSERT_EQ(finish_codes(s, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> seen_o = d_o.read(), seen_lse = d_lse.read();
  const std::vector<uint32_t> seen = d_chosen.read();
  for (uint32_t kv = 0; kv < kKvHeads; ++kv) {
    const index::KvCodes& codes = heads_codes[kv];
    const index::CodeQueries queries = codes.queries(q.data() + kv * c.group * c.dim, c.group);
    std::vector<uint32_t> chosen(seen.begin() + kv * kExact, seen.begin() + (kv + 1) * kExact);
    std::sort(chosen.begin(), chosen.end());
    ASSERT_EQ(std::adjacent_find(chosen.begin(), chosen.end()), chosen.end()) << "a row twice";
    // Their weights by code are the largest there are, up to the rounding of q and what the noise takes off.
    std::vector<float> scores(rows * c.group), o(c.group * c.dim), lse(c.group);
    codes.score(queries, scores.data(), rows);
    codes.attend(queries, logits, {}, {o.data(), lse.data()});
    std::vector<float> weights(rows, kMinusInf);
    for (size_t i = 0; i < rows; ++i) {
      for (uint32_t h = 0; h < c.group; ++h) {
        weights[i] = std::max(weights[i], scores[h * rows + i] * logits.scale - lse[h]);
      }
    }
    std::vector<float> sorted = weights;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const float last = sorted[kExact - 1];
    for (const uint32_t row : chosen) {
      EXPECT_GT(weights[row], last - 0.15F - 0.25F * c.scale * c.scale) << "row " << row;
    }
    // The state: all others by code, these exactly.
    codes.attend(queries, logits, chosen, {o.data(), lse.data()});
    for (uint32_t h = 0; h < c.group; ++h) {
      const float* head_q = q.data() + (kv * c.group + h) * c.dim;
      std::vector<double> exact;
      double top = lse[h];
      for (const uint32_t row : chosen) {
        std::vector<float> k(c.dim);
        kernels.to_f32[static_cast<size_t>(DType::f16)](keys.data() + (kv * rows + row) * row_bytes,
                                                        k.data(), c.dim);
        double dot = 0.0;
        for (uint32_t j = 0; j < c.dim; ++j) dot += double{head_q[j]} * k[j];
        exact.push_back(dot * logits.scale);
        top = std::max(top, exact.back());
      }
      double sum = std::exp(lse[h] - top);
      std::vector<double> truth(c.dim);
      for (uint32_t j = 0; j < c.dim; ++j) truth[j] = sum * o[h * c.dim + j];
      for (size_t r = 0; r < chosen.size(); ++r) {
        const double w = std::exp(exact[r] - top);
        std::vector<float> v(c.dim);
        kernels.to_f32[static_cast<size_t>(DType::f16)](
            values.data() + (kv * rows + chosen[r]) * row_bytes, v.data(), c.dim);
        for (uint32_t j = 0; j < c.dim; ++j) truth[j] += w * v[j];
        sum += w;
      }
      double difference = 0.0, norm = 0.0;
      for (uint32_t j = 0; j < c.dim; ++j) {
        const double d = seen_o[(kv * c.group + h) * c.dim + j] - truth[j] / sum;
        difference += d * d;
        norm += truth[j] / sum * (truth[j] / sum);
      }
      EXPECT_LT(std::sqrt(difference / norm), 2e-3 + 1e-3 * c.scale) << "head " << h;
      EXPECT_NEAR(seen_lse[kv * c.group + h], top + std::log(sum), 2e-3 + 2e-3 * c.scale);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CodesOnDevice,
    testing::Values(Case{128, 2, 4, 1, 1.0F}, Case{128, 2, 4, 40, 1.0F}, Case{128, 2, 4, 300, 4.0F},
                    Case{128, 2, 1, 17, 1.0F}, Case{128, 2, 3, 9, 2.0F}, Case{128, 2, 8, 33, 1.0F},
                    Case{128, 2, 16, 10, 1.0F}, Case{128, 2, 12, 10, 1.0F},
                    Case{128, 4, 4, 33, 1.0F}, Case{128, 1, 4, 33, 1.0F}, Case{64, 2, 4, 21, 1.0F},
                    Case{64, 4, 8, 5, 1.0F}, Case{64, 1, 1, 5, 1.0F}, Case{80, 2, 4, 21, 1.0F},
                    Case{80, 4, 2, 5, 1.0F}, Case{80, 1, 16, 5, 1.0F}, Case{96, 2, 4, 21, 1.0F},
                    Case{96, 4, 5, 5, 1.0F}, Case{96, 1, 4, 5, 1.0F}),
    [](const auto& test) {
      const Case& c = test.param;
      return "dim" + std::to_string(c.dim) + "bits" + std::to_string(c.bits) + "group" +
             std::to_string(c.group) + "blocks" + std::to_string(c.blocks);
    });

}  // namespace
}  // namespace keyhole::gpu
