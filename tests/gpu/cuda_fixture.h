// For tests of the CUDA device: random rows of every dtype, and the truth about a layer's resident tokens, in
// double precision and with the bookkeeping written as plainly as it can be.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "gpu/cuda/common/memory.h"
#include "gpu/device.h"
#include "tests/gpu/cuda_parts.h"
#include "tests/gpu/exact_attention.h"
#include "tests/normal.h"

namespace keyhole::gpu::test {

#define KEYHOLE_NEEDS_GPU() \
  if (cuda_devices().empty()) GTEST_SKIP() << "no CUDA device: " << cuda_status()

inline float rounded(float x, DType dtype) {
  switch (dtype) {
    case DType::f16: return __half2float(__float2half_rn(x));
    case DType::bf16: return __bfloat162float(__float2bfloat16_rn(x));
    default: return x;
  }
}

inline void put(std::vector<std::byte>& bytes, size_t i, float x, DType dtype) {
  switch (dtype) {
    case DType::f16: {
      const __half h = __float2half_rn(x);
      std::memcpy(bytes.data() + 2 * i, &h, 2);
      break;
    }
    case DType::bf16: {
      const __nv_bfloat16 h = __float2bfloat16_rn(x);
      std::memcpy(bytes.data() + 2 * i, &h, 2);
      break;
    }
    default: std::memcpy(bytes.data() + 4 * i, &x, 4);
  }
}

inline float get(const std::byte* bytes, size_t i, DType dtype) {
  switch (dtype) {
    case DType::f16: {
      __half h;
      std::memcpy(&h, bytes + 2 * i, 2);
      return __half2float(h);
    }
    case DType::bf16: {
      __nv_bfloat16 h;
      std::memcpy(&h, bytes + 2 * i, 2);
      return __bfloat162float(h);
    }
    default: {
      float x;
      std::memcpy(&x, bytes + 4 * i, 4);
      return x;
    }
  }
}

inline std::vector<float> random_floats(std::mt19937& rng, size_t n, float deviation = 1.0F) {
  keyhole::test::Normal<float> normal(0.0F, deviation);
  std::vector<float> x(n);
  for (float& y : x) y = normal(rng);
  return x;
}

inline std::vector<std::byte> as_bytes(const std::vector<float>& x, DType dtype) {
  std::vector<std::byte> bytes(x.size() * dtype_size(dtype));
  for (size_t i = 0; i < x.size(); ++i) put(bytes, i, x[i], dtype);
  return bytes;
}

/// Arrays in device memory, which live as long as this.
class Uploads {
 public:
  template <class T>
  T* operator()(const std::vector<T>& x) {
    arrays_.emplace_back(std::max<size_t>(x.size(), 1) * sizeof(T));
    check(cudaMemcpy(arrays_.back().data(), x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
    return arrays_.back().template as<T>();
  }
  void clear() { arrays_.clear(); }

 private:
  std::deque<DeviceBuffer> arrays_;
};

template <class T>
std::vector<T> download(const T* from, size_t n) {
  std::vector<T> x(n);
  check(cudaMemcpy(x.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return x;
}

/// Attention states in double.
struct States {
  std::vector<double> o, lse;  ///< `[q_heads, dim]`, `[q_heads]`
};

/// One token: k and v `[kv_heads, dim]`, in the precision of the session's dtype.
struct Token {
  std::vector<float> k, v;
};

/// The content of a layer, in the words of gpu/step.h.
class Truth {
 public:
  explicit Truth(const ResidentShape& shape) : shape_(shape) {}

  std::deque<Token> sink, window;

  /// Takes a step's token; returns the tokens that leave, oldest first.
  std::vector<Token> take(const Token& token) {
    std::vector<Token> left;
    if (sink.size() < shape_.sink) {
      sink.push_back(token);
      return left;
    }
    if (window.size() == shape_.window_capacity) {
      const size_t keep = shape_.window == 0 ? 0 : shape_.window - 1;
      while (window.size() > keep) {
        left.push_back(window.front());
        window.pop_front();
      }
    }
    window.push_back(token);
    return left;
  }

  [[nodiscard]] States attend(const std::vector<float>& q) const {
    const uint32_t dim = shape_.head_dim;
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    States out;
    out.o.assign(size_t{shape_.q_heads} * dim, 0.0);
    out.lse.assign(shape_.q_heads, -INFINITY);
    std::vector<const Token*> tokens;
    for (const Token& t : sink) tokens.push_back(&t);
    for (const Token& t : window) tokens.push_back(&t);
    if (tokens.empty()) return out;
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      const size_t kv = h / group * size_t{dim};
      ExactAttention exact(shape_.logits, &q[size_t{h} * dim], dim);
      for (const Token* t : tokens) exact.add(&t->k[kv], &t->v[kv]);
      const std::vector<double> o = exact.o();
      std::copy(o.begin(), o.end(), out.o.begin() + size_t{h} * dim);
      out.lse[h] = exact.lse();
    }
    return out;
  }

 private:
  ResidentShape shape_;
};

inline States merged(const States& a, const States& b) {
  States out = a;
  const size_t dim = a.lse.empty() ? 0 : a.o.size() / a.lse.size();
  for (size_t h = 0; h < a.lse.size(); ++h) {
    const double top = std::max(a.lse[h], b.lse[h]);
    if (top == -INFINITY) continue;
    const double wa = std::exp(a.lse[h] - top), wb = std::exp(b.lse[h] - top);
    for (size_t d = 0; d < dim; ++d) {
      const size_t i = h * dim + d;
      out.o[i] = (wa * a.o[i] + wb * b.o[i]) / (wa + wb);
    }
    out.lse[h] = top + std::log(wa + wb);
  }
  return out;
}

/// The largest relative error over heads, |o - truth| / |truth| in the 2-norm. Where the truth is 0 o must be 0. NaN
/// never passes.
inline double worst_error(const std::vector<float>& o, const States& truth) {
  const size_t heads = truth.lse.size();
  const size_t dim = truth.o.size() / heads;
  double worst = 0;
  for (size_t h = 0; h < heads; ++h) {
    double difference = 0, norm = 0;
    for (size_t d = 0; d < dim; ++d) {
      const double t = truth.o[h * dim + d];
      difference += (double{o[h * dim + d]} - t) * (double{o[h * dim + d]} - t);
      norm += t * t;
    }
    const double error = norm > 0 ? std::sqrt(difference / norm) : (difference == 0 ? 0.0 : 1e9);
    if (!(error <= worst)) worst = error;
    if (std::isnan(error)) return error;
  }
  return worst;
}

inline double worst_lse(const std::vector<float>& lse, const States& truth) {
  double worst = 0;
  for (size_t h = 0; h < truth.lse.size(); ++h) {
    if (truth.lse[h] == -INFINITY) {
      if (lse[h] != -INFINITY) return 1e9;
      continue;
    }
    const double error = std::abs(double{lse[h]} - truth.lse[h]);
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

/// Makes n random tokens, rounded to the shape's dtype; rows_of() lays them out as the interface wants them.
inline std::vector<Token> random_tokens(std::mt19937& rng, const ResidentShape& shape, size_t n) {
  std::vector<Token> tokens(n);
  for (Token& t : tokens) {
    t.k = random_floats(rng, size_t{shape.kv_heads} * shape.head_dim);
    t.v = random_floats(rng, size_t{shape.kv_heads} * shape.head_dim);
    for (float& x : t.k) x = rounded(x, shape.dtype);
    for (float& x : t.v) x = rounded(x, shape.dtype);
  }
  return tokens;
}

struct Rows {
  std::vector<std::byte> k, v;
};

inline Rows rows_of(const std::vector<Token>& tokens, DType dtype) {
  Rows rows;
  for (const Token& t : tokens) {
    const auto k = as_bytes(t.k, dtype), v = as_bytes(t.v, dtype);
    rows.k.insert(rows.k.end(), k.begin(), k.end());
    rows.v.insert(rows.v.end(), v.begin(), v.end());
  }
  return rows;
}

inline ResidentShape small_shape(uint32_t dim, DType dtype, uint32_t group, uint32_t kv_heads = 2) {
  ResidentShape shape;
  shape.layers = 2;
  shape.kv_heads = kv_heads;
  shape.q_heads = kv_heads * group;
  shape.head_dim = dim;
  shape.dtype = dtype;
  shape.sink = 5;
  shape.window_capacity = 75;
  shape.window = 43;
  shape.logits.scale = 1.0F / std::sqrt(static_cast<float>(dim));
  return shape;
}

/// Rows in device memory, `[heads, dim]`, with room between heads where asked for.
class DeviceArray {
 public:
  DeviceArray(uint32_t heads, uint32_t dim, DType dtype, uint32_t gap = 0)
      : heads_(heads),
        dim_(dim),
        stride_(dim + gap),
        dtype_(dtype),
        memory_(size_t{heads} * stride_ * dtype_size(dtype)) {
    check(cudaMemset(memory_.data(), 0xff, memory_.bytes()), "poison");  // NaN in all three dtypes
  }
  void write(const std::vector<float>& x) {
    std::vector<float> padded(size_t{heads_} * stride_, NAN);
    for (uint32_t h = 0; h < heads_; ++h) {
      std::copy_n(x.begin() + size_t{h} * dim_, dim_, padded.begin() + size_t{h} * stride_);
    }
    const auto bytes = as_bytes(padded, dtype_);
    check(cudaMemcpy(memory_.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "write");
  }
  [[nodiscard]] std::vector<float> read() const {
    std::vector<std::byte> bytes(memory_.bytes());
    check(cudaMemcpy(bytes.data(), memory_.data(), bytes.size(), cudaMemcpyDeviceToHost), "read");
    std::vector<float> x(size_t{heads_} * dim_);
    for (uint32_t h = 0; h < heads_; ++h) {
      for (uint32_t d = 0; d < dim_; ++d) {
        x[size_t{h} * dim_ + d] = get(bytes.data(), size_t{h} * stride_ + d, dtype_);
      }
    }
    return x;
  }
  [[nodiscard]] TensorOut rows() const {
    TensorOut rows = dense_tensor(memory_.data(), 1, heads_, dim_, dtype_, Memory::device);
    rows.head_stride = stride_;
    return rows;
  }
  [[nodiscard]] float* floats() const { return memory_.as<float>(); }

 private:
  uint32_t heads_, dim_, stride_;
  DType dtype_;
  DeviceBuffer memory_;
};

}  // namespace keyhole::gpu::test
