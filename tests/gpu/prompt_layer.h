// For tests of prompt attention: queries, keys and values of a stretch in device memory, and its logits in double
// precision.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "gpu/cuda/prefill/block_choice.h"
#include "gpu/cuda/prefill/prompt_lists.h"
#include "gpu/prompt.h"
#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu::test {

struct PromptCase {
  uint32_t dim, kv_heads, group;
  DType dtype;
  float softcap = 0.0F;
};

inline std::string name_of(const testing::TestParamInfo<PromptCase>& info) {
  const PromptCase& c = info.param;
  return "dim" + std::to_string(c.dim) + "heads" + std::to_string(c.kv_heads) + "group" +
         std::to_string(c.group) + dtype_name(c.dtype) + (c.softcap > 0.0F ? "capped" : "");
}

/// A pattern for a choice of blocks, with numbers that fit small prompts.
inline PromptPattern pattern_of(PromptChoice choice) {
  PromptPattern p;
  p.dense = false;
  p.choice = choice;
  p.first_rows = p.near_rows = 64;
  p.mass = 0.8F;
  p.stride = choice == PromptChoice::sampled ? 16 : 0;
  p.columns = 100;
  p.slashes = 4;
  return p;
}

class PromptLayerTest : public testing::TestWithParam<PromptCase> {
 protected:
  void SetUp() override { KEYHOLE_NEEDS_GPU(); }
  [[nodiscard]] uint32_t heads() const { return GetParam().kv_heads * GetParam().group; }

  /// Fills in queries and keys of a prompt: some keys are near some queries, so that weights differ.
  void fill(uint32_t n, uint32_t rows, float large = 2.5F) {
    const PromptCase& c = GetParam();
    q_ = random_floats(rng_, size_t{n} * heads() * c.dim);
    k_ = random_floats(rng_, size_t{rows} * c.kv_heads * c.dim);
    v_ = random_floats(rng_, k_.size());
    for (uint32_t i = 0; i < rows; i += 37) {
      for (uint32_t j = 0; j < c.kv_heads * c.dim; ++j)
        k_[size_t{i} * c.kv_heads * c.dim + j] *= large;
    }
    for (auto* x : {&q_, &k_, &v_}) {
      for (float& y : *x) y = rounded(y, c.dtype);
    }
    p_ = {};
    p_.q = upload(as_bytes(q_, c.dtype));
    p_.q_token_stride = size_t{heads()} * c.dim;
    p_.q_head_stride = c.dim;
    p_.n = n;
    p_.q_heads = heads();
    p_.kv_heads = c.kv_heads;
    p_.logits.scale = 1.0F / std::sqrt(static_cast<float>(c.dim));
    p_.logits.softcap = c.softcap;
    p_.keys = upload(as_bytes(k_, c.dtype));
    p_.values = upload(as_bytes(v_, c.dtype));
    p_.row_stride = size_t{c.kv_heads} * c.dim;
    p_.head_stride = c.dim;
    p_.rows = rows;
    p_.causal = true;
    p_.first = rows - n;
    p_.is_first = true;
  }
  [[nodiscard]] double logit(uint32_t token, uint32_t head, uint32_t row) const {
    const PromptCase& c = GetParam();
    double x = 0;
    for (uint32_t j = 0; j < c.dim; ++j) {
      x += double{q_[(size_t{token} * heads() + head) * c.dim + j]} *
           double{k_[(size_t{row} * c.kv_heads + head / c.group) * c.dim + j]};
    }
    x *= double{p_.logits.scale};
    const double cap = double{c.softcap};
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }
  /// The weights of the blocks for a query: sums of exp(logit).
  [[nodiscard]] std::vector<double> weights_of(uint32_t token, uint32_t head) const {
    std::vector<double> w((p_.rows + kListRows - 1) / kListRows);
    for (uint32_t i = 0; i <= p_.first + token; ++i)
      w[i / kListRows] += std::exp(logit(token, head, i));
    return w;
  }

  /// The stretch of `n` queries from number `first` on, whose outputs in fp32 lie as the queries do.
  [[nodiscard]] PromptStretch stretch(uint32_t first, uint32_t n, float* out) const {
    const DType dtype = GetParam().dtype;
    PromptStretch s;
    s.n = n;
    s.rows = p_.first + first + n;
    const auto fill = [&](auto& view, size_t token_stride, size_t head_stride, uint32_t tokens,
                          uint32_t heads) {
      view.token_stride = static_cast<ptrdiff_t>(token_stride);
      view.head_stride = static_cast<ptrdiff_t>(head_stride);
      view.tokens = tokens;
      view.heads = heads;
      view.dim = GetParam().dim;
      view.memory = Memory::device;
    };
    s.q.data = static_cast<const std::byte*>(p_.q);
    s.k.data = static_cast<const std::byte*>(p_.keys);
    s.v.data = static_cast<const std::byte*>(p_.values);
    s.out.data = reinterpret_cast<std::byte*>(out);
    s.q.dtype = s.k.dtype = s.v.dtype = dtype;
    fill(s.q, p_.q_token_stride, p_.q_head_stride, p_.n, heads());
    fill(s.k, p_.row_stride, p_.head_stride, s.rows, GetParam().kv_heads);
    fill(s.v, p_.row_stride, p_.head_stride, s.rows, GetParam().kv_heads);
    fill(s.out, p_.q_token_stride, p_.q_head_stride, p_.n, heads());
    s.q = s.q.slice(first, n);
    s.out = s.out.slice(first, n);
    s.logits = p_.logits;
    return s;
  }
  /// The outputs of all queries, attended `chunk` at a time.
  std::vector<float> attend(PromptAttention& prompt, std::span<const PromptPattern> patterns,
                            uint32_t chunk) const {
    const DeviceBuffer out(q_.size() * sizeof(float));
    for (uint32_t first = 0; first < p_.n; first += chunk)
      prompt.attend(stretch(first, std::min(chunk, p_.n - first), out.as<float>()), patterns,
                    nullptr);
    return download(out.as<float>(), q_.size());
  }
  std::vector<float> attend(PromptAttention& prompt, const PromptPattern& pattern,
                            uint32_t chunk) const {
    return attend(prompt, std::span(&pattern, 1), chunk);
  }
  /// The relative error in the 2-norm.
  static double error(const std::vector<float>& x, const std::vector<float>& truth) {
    EXPECT_EQ(x.size(), truth.size());
    return relative_error(x.data(), truth);
  }

  std::mt19937 rng_{testing::UnitTest::GetInstance()->random_seed() + 11U};
  std::vector<float> q_, k_, v_;
  BlockedParams p_;
  Uploads upload;
};

}  // namespace keyhole::gpu::test
