#include "tools/llama/vector_math.h"

#include <cmath>
#include <cstdint>
#include <cstring>

// Clones by feature level: "arch=<a CPU's name>" would ask for that very model and give newer ones the
// baseline. Not under sanitizers: symbols are resolved before their runtime is ready, which crashes.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(KEYHOLE_SANITIZED)
#define KEYHOLE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KEYHOLE_CLONES
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KEYHOLE_F16C 1  // Clang has no such feature test
#endif
#define KEYHOLE_INLINE inline __attribute__((always_inline))

namespace keyhole::tools {
namespace {

// GCC's portable vectors: one AVX-512 register, two of AVX2 or four of SSE, as the clone has them.
constexpr size_t kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

KEYHOLE_INLINE Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
KEYHOLE_INLINE Ints load_bits(const void* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof(halves));
  return __builtin_convertvector(halves, Ints);
}
KEYHOLE_INLINE Floats load(const BFloat16* p) {
  const Ints bits = load_bits(p) << 16;
  Floats v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}
/// GCC 12 converts vectors of _Float16 element by element, the baseline by calls: whole vectors of integers do it in a
/// dozen instructions.
KEYHOLE_INLINE Floats load(const Float16* p) {
  const Ints half = load_bits(p);
  const Ints magnitude = half & 0x7FFF;
  constexpr int32_t kBias = (127 - 15) << 23;
  // Infinities and NaNs have the largest exponent in fp32 as well.
  const Ints normal = (magnitude << 13) + kBias + (magnitude >= 0x7C00 ? Ints{} + kBias : Ints{});
  // Zero and subnormals are magnitude * 2^-24. As an integer: subnormals of fp32 would be slow.
  const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-24F;
  Ints bits;
  std::memcpy(&bits, &small, sizeof(bits));
  bits = magnitude >= 0x0400 ? normal : bits;
  bits |= (half & 0x8000) << 16;
  Floats v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}
KEYHOLE_INLINE float value(float x) { return x; }
template <class Half>
KEYHOLE_INLINE float value(Half half) {
  Half lanes[kLanes] = {half};
  return load(lanes)[0];
}
KEYHOLE_INLINE void store(Floats v, float* p) { std::memcpy(p, &v, sizeof(v)); }
KEYHOLE_INLINE Floats fill(float x) { return Floats{} + x; }
KEYHOLE_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

KEYHOLE_INLINE float sum_of(Floats v) {
  float sum = 0.0F;
  for (size_t i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}
KEYHOLE_INLINE float max_of(Floats v) {
  float best = v[0];
  for (size_t i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

/// 2^x, relative error below 2e-7 for |x| <= 126; larger |x| are clamped there.
KEYHOLE_INLINE Floats exp2_of(Floats x) {
  x = x > 126.0F ? fill(126.0F) : x;
  x = x < -126.0F ? fill(-126.0F) : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the low bits of the mantissa.
  const Floats shifted = x + 12582912.0F;
  const Floats whole = shifted - 12582912.0F;
  const Floats f = x - whole;  // [-0.5, 0.5]
  // Taylor series of 2^f: the first term left out, (f ln 2)^7 / 7!, is below 1.2e-7.
  Floats p = fill(1.5403530e-4F);
  p = p * f + 1.3333558e-3F;
  p = p * f + 9.6181291e-3F;
  p = p * f + 5.5504109e-2F;
  p = p * f + 2.4022651e-1F;
  p = p * f + 6.9314718e-1F;
  p = p * f + 1.0F;
  Ints bits;
  std::memcpy(&bits, &p, sizeof(bits));
  bits += __builtin_convertvector(whole, Ints) << 23;
  std::memcpy(&p, &bits, sizeof(p));
  return p;
}

constexpr float kLog2e = 1.44269504F;

KEYHOLE_INLINE Floats exp_of(Floats x) { return exp2_of(x * kLog2e); }

template <class Weight>
KEYHOLE_INLINE void multiply_rows(const Weight* matrix, size_t cols, const float* x, size_t first,
                                  size_t last, float* y) {
  // Four rows at a time: four independent sums hide the latency of the multiply-add, and x is loaded
  // once for all of them.
  constexpr size_t kRows = 4;
  size_t row = first;
  for (; row + kRows <= last; row += kRows) {
    const Weight* w = matrix + row * cols;
    Floats sums[kRows] = {};
    size_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) {
      const Floats v = load(x + i);
      for (size_t r = 0; r < kRows; ++r) sums[r] += load(w + r * cols + i) * v;
    }
    for (size_t r = 0; r < kRows; ++r) {
      float sum = sum_of(sums[r]);
      for (size_t j = i; j < cols; ++j) sum += value(w[r * cols + j]) * x[j];
      y[row + r] = sum;
    }
  }
  for (; row < last; ++row) {
    const Weight* w = matrix + row * cols;
    Floats sums{};
    size_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) sums += load(w + i) * load(x + i);
    float sum = sum_of(sums);
    for (; i < cols; ++i) sum += value(w[i]) * x[i];
    y[row] = sum;
  }
}

template <class Half>
KEYHOLE_INLINE void widen(const Half* x, size_t n, float* out) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(load(x + i), out + i);
  for (; i < n; ++i) out[i] = value(x[i]);
}

template <class Number>
KEYHOLE_INLINE void sum_rows(const Number* matrix, size_t cols, const float* factors, size_t rows,
                             float* y) {
  // Four rows at a time: y is read and written once for all of them.
  size_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    const Number* w = matrix + row * cols;
    const float* f = factors + row;
    size_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) {
      const Floats even = load(w + i) * f[0] + load(w + 2 * cols + i) * f[2];
      const Floats odd = load(w + cols + i) * f[1] + load(w + 3 * cols + i) * f[3];
      store(load(y + i) + (even + odd), y + i);
    }
    for (; i < cols; ++i) {
      for (size_t r = 0; r < 4; ++r) y[i] += value(w[r * cols + i]) * f[r];
    }
  }
  for (; row < rows; ++row) {
    const Number* w = matrix + row * cols;
    size_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) {
      store(load(y + i) + load(w + i) * factors[row], y + i);
    }
    for (; i < cols; ++i) y[i] += value(w[i]) * factors[row];
  }
}

/// tanh(x) = 1 - 2 / (exp(2x) + 1); exp's clamp at 2^126 makes it exactly 1 there.
KEYHOLE_INLINE Floats tanh_of(Floats x) { return 1.0F - 2.0F / (exp_of(2.0F * x) + 1.0F); }

/// 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2u)).
KEYHOLE_INLINE Floats gelu_of(Floats x) {
  const Floats u = 0.797884561F * (x + 0.044715F * x * x * x);
  return x / (1.0F + exp_of(-2.0F * u));
}

KEYHOLE_INLINE Floats load_some(const float* p, size_t n) {
  if (n == kLanes) return load(p);
  float some[kLanes] = {};
  std::memcpy(some, p, n * sizeof(float));
  return load(some);
}

#ifdef KEYHOLE_F16C
__attribute__((target("avx,f16c"))) void widen_by_f16c(const Float16* x, size_t n, float* out) {
  constexpr size_t kAtOnce = 8;
  typedef short Eight __attribute__((vector_size(2 * kAtOnce)));
  typedef float Wide __attribute__((vector_size(4 * kAtOnce)));
  size_t i = 0;
  for (; i + kAtOnce <= n; i += kAtOnce) {
    Eight halves;
    std::memcpy(&halves, x + i, sizeof(halves));
    const Wide wide = __builtin_ia32_vcvtph2ps256(halves);
    std::memcpy(out + i, &wide, sizeof(wide));
  }
  if (i == n) return;
  Eight halves{};
  std::memcpy(&halves, x + i, (n - i) * sizeof(*x));
  const Wide wide = __builtin_ia32_vcvtph2ps256(halves);
  std::memcpy(out + i, &wide, (n - i) * sizeof(*out));
}
#endif

using Widen = void (*)(const Float16*, size_t, float*);

/// The processor's own conversion of fp16, which all processors with AVX2 have; GCC 12 does not use it for portable
/// vectors. Converting by integers takes a dozen instructions for a vector, more than the rest of a product.
Widen best_widen() {
#ifdef KEYHOLE_F16C
  if (__builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c")) return widen_by_f16c;
#endif
  return to_f32_by_integers;
}

// Numbers of each of four rows that are widened before they are multiplied: 8 KiB in the first cache.
constexpr size_t kWidened = 512;

}  // namespace

KEYHOLE_CLONES void rms_norm(const float* x, const float* weight, size_t n, float eps, float* out) {
  Floats squares{};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) squares += load(x + i) * load(x + i);
  float sum = sum_of(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float inverse = 1.0F / std::sqrt(sum / static_cast<float>(n) + eps);
  for (i = 0; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

KEYHOLE_CLONES void matrix_vector(const float* matrix, size_t cols, const float* x, size_t first,
                                  size_t last, float* y) {
  multiply_rows(matrix, cols, x, first, last, y);
}

KEYHOLE_CLONES void matrix_vector(const BFloat16* matrix, size_t cols, const float* x, size_t first,
                                  size_t last, float* y) {
  multiply_rows(matrix, cols, x, first, last, y);
}

void matrix_vector(const Float16* matrix, size_t cols, const float* x, size_t first, size_t last,
                   float* y) {
  float wide[4 * kWidened], sums[4];
  for (size_t row = first; row < last; row += 4) {
    const size_t rows = last - row < 4 ? last - row : 4;
    for (size_t r = 0; r < rows; ++r) y[row + r] = 0.0F;
    for (size_t i = 0; i < cols; i += kWidened) {
      const size_t n = cols - i < kWidened ? cols - i : kWidened;
      for (size_t r = 0; r < rows; ++r) to_f32(matrix + (row + r) * cols + i, n, wide + r * n);
      matrix_vector(wide, n, x + i, 0, rows, sums);
      for (size_t r = 0; r < rows; ++r) y[row + r] += sums[r];
    }
  }
}

KEYHOLE_CLONES void to_f32(const BFloat16* x, size_t n, float* out) { widen(x, n, out); }
KEYHOLE_CLONES void to_f32_by_integers(const Float16* x, size_t n, float* out) { widen(x, n, out); }
void to_f32(const Float16* x, size_t n, float* out) {
  static const Widen kBest = best_widen();
  kBest(x, n, out);
}

KEYHOLE_CLONES void add_rows(const float* matrix, size_t cols, const float* factors, size_t rows,
                             float* y) {
  sum_rows(matrix, cols, factors, rows, y);
}
KEYHOLE_CLONES void add_rows(const BFloat16* matrix, size_t cols, const float* factors, size_t rows,
                             float* y) {
  sum_rows(matrix, cols, factors, rows, y);
}
void add_rows(const Float16* matrix, size_t cols, const float* factors, size_t rows, float* y) {
  float wide[4 * kWidened];
  for (size_t row = 0; row < rows; row += 4) {
    const size_t some = rows - row < 4 ? rows - row : 4;
    for (size_t i = 0; i < cols; i += kWidened) {
      const size_t n = cols - i < kWidened ? cols - i : kWidened;
      for (size_t r = 0; r < some; ++r) to_f32(matrix + (row + r) * cols + i, n, wide + r * n);
      add_rows(wide, n, factors + row, some, y + i);
    }
  }
}

KEYHOLE_CLONES void silu_multiply(const float* gate, const float* up, size_t n, float* out) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats g = load(gate + i);
    store(g / (1.0F + exp_of(-g)) * load(up + i), out + i);
  }
  for (; i < n; ++i) out[i] = gate[i] / (1.0F + std::exp(-gate[i])) * up[i];
}

KEYHOLE_CLONES void gelu_multiply(const float* gate, const float* up, size_t n, float* out) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(gelu_of(load(gate + i)) * load(up + i), out + i);
  if (i == n) return;
  float rest[kLanes];
  store(gelu_of(load_some(gate + i, n - i)) * load_some(up + i, n - i), rest);
  std::memcpy(out + i, rest, (n - i) * sizeof(float));
}

KEYHOLE_CLONES void soft_cap(float cap, size_t n, float* x) {
  const float inverse = 1.0F / cap;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(cap * tanh_of(load(x + i) * inverse), x + i);
  if (i == n) return;
  float rest[kLanes];
  store(cap * tanh_of(load_some(x + i, n - i) * inverse), rest);
  std::memcpy(x + i, rest, (n - i) * sizeof(float));
}

KEYHOLE_CLONES void add(const float* x, size_t n, float* y) {
  for (size_t i = 0; i < n; ++i) y[i] += x[i];
}

KEYHOLE_CLONES float online_softmax_row(float* scores, size_t valid, size_t n, float& running_max,
                                        float& running_sum) {
  const size_t whole = valid / kLanes * kLanes;
  Floats maxima = fill(running_max);
  for (size_t i = 0; i < whole; i += kLanes) maxima = larger(load(scores + i), maxima);
  float best = max_of(maxima);
  for (size_t i = whole; i < valid; ++i) best = scores[i] > best ? scores[i] : best;

  const Floats shift = fill(best);
  Floats sums{};
  for (size_t i = 0; i < whole; i += kLanes) {
    const Floats p = exp2_of(load(scores + i) - shift);
    store(p, scores + i);
    sums += p;
  }
  if (whole < valid) {
    float rest[kLanes];
    for (size_t i = 0; i < kLanes; ++i) rest[i] = whole + i < valid ? scores[whole + i] : best;
    store(exp2_of(load(rest) - shift), rest);
    for (size_t i = whole; i < valid; ++i) {
      scores[i] = rest[i - whole];
      sums[0] += rest[i - whole];
    }
  }
  std::memset(scores + valid, 0, (n - valid) * sizeof(float));

  const float shrink = std::exp2(running_max - best);  // exp2(-inf) = 0 for the first block
  running_max = best;
  running_sum = running_sum * shrink + sum_of(sums);
  return shrink;
}

KEYHOLE_CLONES void scale(float factor, size_t n, float* y) {
  for (size_t i = 0; i < n; ++i) y[i] *= factor;
}

KEYHOLE_CLONES void exp_in_place(float* x, size_t n) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(exp_of(load(x + i)), x + i);
  if (i < n) {
    float rest[kLanes] = {};
    std::memcpy(rest, x + i, (n - i) * sizeof(float));
    store(exp_of(load(rest)), rest);
    std::memcpy(x + i, rest, (n - i) * sizeof(float));
  }
}

}  // namespace keyhole::tools
