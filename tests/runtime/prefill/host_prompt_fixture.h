// A prompt on an engine on the host, its tokens, and attention by the definition.
#pragma once

#include <keyhole/prefill.h>

#include <algorithm>

#include "cpu/block_attention.h"
#include "tests/normal.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

using cpu::kPromptQueries;
using cpu::kPromptRows;

struct Prompt {
  explicit Prompt(keyhole_engine* engine, const char* pattern) {
    EXPECT_OK(keyhole_prompt_create(engine, pattern, &p));
  }
  ~Prompt() { keyhole_prompt_destroy(p); }
  Prompt(const Prompt&) = delete;
  Prompt& operator=(const Prompt&) = delete;
  keyhole_prompt* p = nullptr;
};

inline keyhole_tensor tensor_of(float* x, int64_t n, int64_t heads, int64_t dim) {
  keyhole_tensor t{};
  t.data = x;
  t.dtype = KEYHOLE_F32;
  t.memory = KEYHOLE_HOST;
  t.rank = 3;
  t.shape[0] = n, t.shape[1] = heads, t.shape[2] = dim;
  t.strides[0] = heads * dim, t.strides[1] = dim, t.strides[2] = 1;
  return t;
}

inline constexpr uint32_t kHeads = 4, kKvHeads = 2, kDim = 64;

/// The tokens q, k and v `[tokens, heads, 64]`, in which every 37th key is large.
struct Tokens {
  Tokens(uint32_t tokens, uint64_t seed, float large = 3.0F) : n(tokens) {
    std::mt19937_64 rng(seed);
    keyhole::test::Normal<float> normal;
    for (auto [x, heads] : {std::pair{&q, kHeads}, {&k, kKvHeads}, {&v, kKvHeads}}) {
      x->resize(size_t{n} * heads * kDim);
      for (float& y : *x) y = normal(rng);
    }
    for (size_t i = 0; i < n; i += 37) {
      for (size_t j = 0; j < kKvHeads * kDim; ++j) k[i * kKvHeads * kDim + j] *= large;
    }
  }
  [[nodiscard]] double logit(uint32_t query, uint32_t head, uint32_t row) const {
    double x = 0;
    for (uint32_t j = 0; j < kDim; ++j) {
      x += double{q[(size_t{query} * kHeads + head) * kDim + j]} *
           double{k[(size_t{row} * kKvHeads + head / 2) * kDim + j]};
    }
    return x / 8.0;
  }
  uint32_t n;
  std::vector<float> q, k, v;
};

struct Output {
  std::vector<float> o, lse;
  bool operator==(const Output&) const = default;
};

/// Attends the newest `queries` of the tokens in chunks.
inline Output attend(keyhole_prompt* prompt, Tokens& t, uint32_t queries, uint32_t chunk,
                     uint32_t layer = 0) {
  Output out{std::vector<float>(size_t{queries} * kHeads * kDim, NAN),
             std::vector<float>(size_t{queries} * kHeads, NAN)};
  for (uint32_t first = 0; first < queries; first += chunk) {
    const uint32_t n = std::min(chunk, queries - first), end = t.n - queries + first + n;
    const keyhole_tensor q = tensor_of(&t.q[size_t{end - n} * kHeads * kDim], n, kHeads, kDim),
                         k = tensor_of(t.k.data(), end, kKvHeads, kDim),
                         v = tensor_of(t.v.data(), end, kKvHeads, kDim),
                         o = tensor_of(&out.o[size_t{first} * kHeads * kDim], n, kHeads, kDim);
    EXPECT_OK(keyhole_prompt_attend(prompt, layer, &q, &k, &v, &o, &out.lse[size_t{first} * kHeads],
                                    nullptr));
  }
  return out;
}

/// Output and lse, by the definition, of one query and head over the rows that `attends` names.
template <class Attends>
void expect_truth(const Tokens& t, const Output& out, uint32_t queries, uint32_t query,
                  uint32_t head, double sink, Attends&& attends) {
  const uint32_t position = t.n - queries + query;
  double sum = std::exp(sink);
  std::vector<double> o(kDim);
  for (uint32_t row = 0; row <= position; ++row) {
    if (!attends(row)) continue;
    const double w = std::exp(t.logit(position, head, row));
    sum += w;
    for (uint32_t j = 0; j < kDim; ++j) {
      o[j] += w * double{t.v[(size_t{row} * kKvHeads + head / 2) * kDim + j]};
    }
  }
  const size_t at = size_t{query} * kHeads + head;
  ASSERT_NEAR(out.lse[at], std::log(sum), 2e-5 * (1 + std::fabs(std::log(sum))))
      << query << ", " << head;
  for (uint32_t j = 0; j < kDim; ++j) {
    ASSERT_NEAR(out.o[at * kDim + j], o[j] / sum, 2e-5 * (1 + std::fabs(o[j] / sum)))
        << query << ", " << head << ", " << j;
  }
}

}  // namespace keyhole::test
