// A prompt for the host's attention of many queries, and its truth in double precision.
#pragma once

#include <memory>

#include "cpu/block_attention.h"
#include "tests/cpu/reference.h"

namespace keyhole::cpu::test {

/// Tokens `[count, heads, dim]` of a dtype in guarded memory, with gaps between rows, and the same values in double.
class TestTokens {
 public:
  template <class Value>
  TestTokens(uint32_t count, uint32_t heads, uint32_t dim, DType dtype, Value&& value)
      : heads_(heads), dim_(dim) {
    bytes_ = std::make_unique<GuardedBytes>(size_t{count} * heads * (dim + 4) * dtype_size(dtype));
    rows = dense_tensor(bytes_->data(), count, heads, dim, dtype);
    rows.head_stride = dim + 4;
    rows.token_stride = heads * rows.head_stride;
    exact_.resize(size_t{count} * heads * dim);
    std::vector<float> row(dim);
    const auto encode = kernels_for(Level::scalar)->from_f32[index_of(dtype)];
    for (uint32_t t = 0; t < count; ++t) {
      for (uint32_t h = 0; h < heads; ++h) {
        for (uint32_t j = 0; j < dim; ++j) row[j] = static_cast<float>(value(t, h, j));
        encode(row.data(), rows.row(t, h), dim);
        for (uint32_t j = 0; j < dim; ++j) {
          exact_[(size_t{t} * heads + h) * dim + j] =
              decode(rows.row(t, h) + j * dtype_size(dtype), dtype);
        }
      }
    }
  }
  [[nodiscard]] const double* row(uint32_t token, uint32_t head) const {
    return exact_.data() + (size_t{token} * heads_ + head) * dim_;
  }
  [[nodiscard]] TensorOut from(uint32_t token) const {
    return rows.slice(token, rows.tokens - token);
  }
  [[nodiscard]] RowsView view() const { return {rows}; }

  TensorOut rows;

 private:
  uint32_t heads_, dim_;
  std::unique_ptr<GuardedBytes> bytes_;
  std::vector<double> exact_;
};

struct PromptCase {
  uint32_t n, rows, kv_heads, group, dim, window;
  DType dtype, out;
  LogitParams logits;
};

/// Random queries, keys and values; the logits' deviation is about `sigma`.
class TestPrompt {
 public:
  TestPrompt(Rng& rng, const PromptCase& c, double sigma = 2.0)
      : q(c.n, c.kv_heads * c.group, c.dim, c.dtype, gaussian(rng, sigma)),
        k(c.rows, c.kv_heads, c.dim, c.dtype, gaussian(rng)),
        v(c.rows, c.kv_heads, c.dim, c.dtype, gaussian(rng)),
        out(c.n, c.kv_heads * c.group, c.dim, c.out, [](auto...) { return 7.0; }),
        lse(size_t{c.n} * c.kv_heads * c.group, NAN) {
    piece.q = q.rows;
    piece.k = k.view();
    piece.v = v.view();
    piece.out = out.rows;
    piece.lse = lse.data();
    piece.n = c.n;
    piece.rows = c.rows;
    piece.q_heads = c.kv_heads * c.group;
    piece.kv_heads = c.kv_heads;
    piece.head_dim = c.dim;
    piece.window = c.window;
    piece.logits = c.logits;
  }

  [[nodiscard]] double logit(uint32_t query, uint32_t head, uint32_t row) const {
    const double *a = q.row(query, head), *b = k.row(row, head / piece.group());
    double x = 0;
    for (uint32_t j = 0; j < piece.head_dim; ++j) x += a[j] * b[j];
    x *= double{piece.logits.scale};
    const double cap = double{piece.logits.softcap};
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }
  [[nodiscard]] bool sees(uint32_t query, uint32_t row) const {
    const uint32_t position = piece.rows - piece.n + query;
    return row <= position && (piece.window == 0 || position - row < piece.window);
  }
  /// Attention from its definition over the rows that `attends(row)` names, with `sink` or -inf.
  struct Truth {
    std::vector<double> o;
    double lse;
  };
  template <class Attends>
  [[nodiscard]] Truth truth(uint32_t query, uint32_t head, double sink, Attends&& attends) const {
    std::vector<double> logits;
    std::vector<uint32_t> at;
    double top = sink;
    for (uint32_t i = 0; i < piece.rows; ++i) {
      if (!sees(query, i) || !attends(i)) continue;
      at.push_back(i);
      logits.push_back(logit(query, head, i));
      top = std::max(top, logits.back());
    }
    Truth t{std::vector<double>(piece.head_dim), -INFINITY};
    if (top == -INFINITY) return t;
    double sum = std::exp(sink - top);
    for (size_t i = 0; i < at.size(); ++i) {
      const double w = std::exp(logits[i] - top);
      sum += w;
      const double* value = v.row(at[i], head / piece.group());
      for (uint32_t j = 0; j < piece.head_dim; ++j) t.o[j] += w * value[j];
    }
    for (double& x : t.o) x /= sum;
    t.lse = top + std::log(sum);
    return t;
  }
  [[nodiscard]] double output(uint32_t query, uint32_t head, uint32_t j) const {
    const TensorOut& r = piece.out;
    return decode(r.row(query, head) + j * dtype_size(r.dtype), r.dtype);
  }

  TestTokens q, k, v, out;
  GuardedArray<float> lse;
  PromptPiece piece;
};

}  // namespace keyhole::cpu::test
