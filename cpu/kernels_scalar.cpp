// Level `scalar`: the reference for all others, compiled with the auto-vectoriser off. One plain loop per
// kernel; it runs on any machine and stays easy to check by eye.
#include <cmath>
#include <cstring>

#include "cpu/attention_state.h"
#include "cpu/half.h"
#include "cpu/levels.h"

namespace keyhole::cpu {
namespace {

// Keys whose logits are held at once; the same as in the SIMD levels.
constexpr size_t kBlock = 64;
// Weights below e^-60 of the largest are dropped: 2^32 of them sum to 4e-17 of it, far below fp32's 6e-8.
constexpr float kMinExponent = -60.0F;

template <DType T>
float load(const std::byte* row, size_t i) {
  if constexpr (T == DType::f32) {
    float f;
    std::memcpy(&f, row + i * sizeof f, sizeof f);
    return f;
  } else if constexpr (T == DType::i8) {
    return static_cast<float>(static_cast<int8_t>(row[i]));
  } else {
    uint16_t h;
    std::memcpy(&h, row + i * sizeof h, sizeof h);
    return T == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
  }
}

void i8_to_f32(const std::byte* src, const uint16_t* scales, float* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = load<DType::i8>(src, i) * bf16_to_f32(scales[i]);
}

/// Row i of `rows`, or row ids[i], in fp32.
template <DType T>
void unpack(const RowsView& rows, const uint32_t* ids, size_t i, float* out) {
  const size_t id = ids != nullptr ? ids[i] : i;
  const std::byte* row = rows.row(id);
  if constexpr (T == DType::i8) {
    i8_to_f32(row, rows.scales.row(id), out, rows.dim);
  } else {
    for (uint32_t j = 0; j < rows.dim; ++j) out[j] = load<T>(row, j);
  }
}

float dot(const float* a, const float* b, uint32_t dim) {
  float sum = 0.0F;
  for (uint32_t j = 0; j < dim; ++j) sum += a[j] * b[j];
  return sum;
}

template <DType T>
void score(const ScoreArgs& a) {
  float key[kMaxHeadDim];
  for (size_t i = 0; i < a.count; ++i) {
    unpack<T>(a.keys, a.ids, i, key);
    for (uint32_t h = 0; h < a.group; ++h) {
      a.scores[h * a.score_stride + i] = dot(a.queries + h * a.keys.dim, key, a.keys.dim);
    }
  }
}

void score_i8(const ScoreI8Args& a) {
  for (size_t i = 0; i < a.count; ++i) {
    const size_t id = a.ids != nullptr ? a.ids[i] : i;
    const int8_t* key = a.keys + id * a.key_stride;
    for (uint32_t h = 0; h < a.group; ++h) {
      const int8_t* query = a.queries + h * a.dim;
      int32_t sum = 0;
      for (uint32_t j = 0; j < a.dim; ++j) sum += query[j] * key[j];
      // |sum| <= 256*127*127 < 2^24: the conversion is exact.
      a.scores[h * a.score_stride + i] = static_cast<float>(sum) * a.query_scales[h];
    }
  }
}

template <DType T>
void score_components(const ScoreComponentsArgs& a) {
  for (size_t i = 0; i < a.count; ++i) {
    for (uint32_t h = 0; h < a.group; ++h) {
      float sum = 0.0F;
      for (uint32_t c = 0; c < a.component_count; ++c) {
        sum += a.queries[size_t{h} * a.component_count + c] *
               load<T>(a.block, a.components[c] * a.block_rows + a.first + i);
      }
      a.scores[h * a.score_stride + i] = sum;
    }
  }
}

/// Online softmax of one head.
struct Running {
  float largest = kMinusInf;  ///< logit so far
  float sum = 0.0F;           ///< of weights relative to it
};

/// Turns n logits into softmax weights in place; returns what all older weights are multiplied with.
float weigh(float* logits, size_t n, Running& r) {
  float top = r.largest;
  for (size_t i = 0; i < n; ++i) top = logits[i] > top ? logits[i] : top;
  // 0 for the first block: everything so far is empty.
  const float rescale = r.largest == top ? 1.0F : std::exp(r.largest - top);
  float block_sum = 0.0F;
  for (size_t i = 0; i < n; ++i) {
    const float x = logits[i] - top;
    logits[i] = x < kMinExponent ? 0.0F : std::exp(x);  // a NaN stays one
    block_sum += logits[i];
  }
  r.sum = r.sum * rescale + block_sum;
  r.largest = top;
  return rescale;
}

/// The running state of a group. Args: AttendArgs or AttendScoredArgs.
template <DType T, class Args>
class State {
 public:
  explicit State(const Args& a) : a_(a), dim_(a.values.dim) {
    for (size_t j = 0; j < size_t{a.group} * dim_; ++j) a.o[j] = 0.0F;
  }

  /// Adds the n <= kBlock rows that begin at `begin`; logits become weights.
  void add(float (&logits)[kMaxGroup][kBlock], size_t begin, size_t n) {
    for (uint32_t h = 0; h < a_.group; ++h) {
      const float rescale = weigh(logits[h], n, running_[h]);
      for (uint32_t j = 0; j < dim_; ++j) a_.o[h * dim_ + j] *= rescale;
    }
    float row[kMaxHeadDim];
    for (size_t i = 0; i < n; ++i) {
      unpack<T>(a_.values, a_.ids, begin + i, row);
      for (uint32_t h = 0; h < a_.group; ++h) {
        for (uint32_t j = 0; j < dim_; ++j) a_.o[h * dim_ + j] += logits[h][i] * row[j];
      }
    }
  }

  /// Divides by the sums, writes lse; false if an fp32 sum has overflowed on the way.
  [[nodiscard]] bool finish() {
    bool finite = true;
    for (uint32_t h = 0; h < a_.group; ++h) {
      a_.lse[h] = running_[h].largest + std::log(running_[h].sum);  // empty: -inf + -inf
      const float inverse = running_[h].sum > 0.0F ? 1.0F / running_[h].sum : 0.0F;
      for (uint32_t j = 0; j < dim_; ++j) {
        a_.o[h * dim_ + j] *= inverse;
        finite = finite && std::isfinite(a_.o[h * dim_ + j]);
      }
      finite = finite && std::isfinite(a_.lse[h]);
    }
    return finite || a_.count == 0;
  }

 private:
  const Args& a_;
  const uint32_t dim_;
  Running running_[kMaxGroup];
};

template <DType T>
void attend(const AttendArgs& a) {
  float logits[kMaxGroup][kBlock];
  float row[kMaxHeadDim];
  State<T, AttendArgs> state(a);
  for (size_t begin = 0; begin < a.count; begin += kBlock) {
    const size_t n = a.count - begin < kBlock ? a.count - begin : kBlock;
    for (size_t i = 0; i < n; ++i) {
      unpack<T>(a.keys, a.ids, begin + i, row);
      for (uint32_t h = 0; h < a.group; ++h) {
        logits[h][i] = logit_of(dot(a.queries + h * a.keys.dim, row, a.keys.dim), a.logits);
      }
    }
    state.add(logits, begin, n);
  }
  if (!state.finish()) attend_in_double(a, T);
}

template <DType T>
void attend_scored(const AttendScoredArgs& a) {
  float logits[kMaxGroup][kBlock];
  State<T, AttendScoredArgs> state(a);
  for (size_t begin = 0; begin < a.count; begin += kBlock) {
    const size_t n = a.count - begin < kBlock ? a.count - begin : kBlock;
    for (uint32_t h = 0; h < a.group; ++h) {
      for (size_t i = 0; i < n; ++i) {
        logits[h][i] = logit_of(a.scores[h * a.score_stride + begin + i], a.logits);
      }
    }
    state.add(logits, begin, n);
  }
  if (!state.finish()) attend_scored_in_double(a, T);
}

float log_sum_exp(const float* scores, size_t count, const LogitParams& p) {
  float logits[kBlock];
  Running running;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = count - begin < kBlock ? count - begin : kBlock;
    for (size_t i = 0; i < n; ++i) logits[i] = logit_of(scores[begin + i], p);
    weigh(logits, n, running);
  }
  return running.largest + std::log(running.sum);
}

size_t keep_above(const KeepArgs& a) {
  size_t kept = 0;
  for (size_t i = 0; i < a.count; ++i) {
    bool above = false;
    for (uint32_t h = 0; h < a.group; ++h) {
      above = above || a.scores[h * a.score_stride + i] > a.thresholds[h];
    }
    if (!above) continue;
    for (uint32_t h = 0; h < a.group; ++h) {
      a.scores[h * a.score_stride + kept] = a.scores[h * a.score_stride + i];
    }
    a.ids[kept++] = a.ids[i];
  }
  return kept;
}

void weigh_partitions(const PartitionArgs& a) {
  for (uint32_t h = 0; h < a.group; ++h) {
    for (size_t i = 0; i < a.count; ++i) {
      const float x = a.scores[h * a.score_stride + i] * a.logits.scale;
      float mean = x;
      float slope = a.logits.scale;  // of the logit
      if (a.logits.softcap > 0.0F) {
        const float share = std::tanh(x / a.logits.softcap);
        mean = a.logits.softcap * share;
        slope *= 1.0F - share * share;
      }
      const float variance = a.variances != nullptr ? a.variances[i] : 0.0F;
      const float t = slope * slope * a.square_norms[h] * variance;
      float expected = mean + t / 2;
      expected = expected < a.caps[h] ? expected : a.caps[h];  // the cap for NaN too
      if (a.margins != nullptr && mean - a.margins[h] > expected) expected = mean - a.margins[h];
      float below = expected - a.shifts[h];
      below = below < 0.0F ? below : 0.0F;
      const float weight = below < kMinExponent ? 0.0F : a.sizes[i] * std::exp(below);
      a.weights[h * a.out_stride + i] = weight;
      if (a.uncertainties == nullptr) continue;
      const float spread = std::exp(t < 2.0F ? t : 2.0F) - 1.0F;
      a.uncertainties[h * a.out_stride + i] =
          weight * weight * spread / (a.sizes[i] > 1.0F ? a.sizes[i] : 1.0F);
    }
  }
}

template <DType T>
void weighted_sum(const WeightedSumArgs& a) {
  const uint32_t dim = a.values.dim;
  float row[kMaxHeadDim];
  for (size_t i = 0; i < a.count; ++i) {
    unpack<T>(a.values, a.ids, i, row);
    for (uint32_t h = 0; h < a.group; ++h) {
      const float weight = a.weights[h * a.weight_stride + i];
      for (uint32_t j = 0; j < dim; ++j) a.o[h * dim + j] += weight * row[j];
    }
  }
}

void product(const ProductArgs& p) {
  for (uint32_t i = 0; i < p.m; ++i) {
    for (uint32_t j = 0; j < p.n; ++j) {
      float sum = p.adds ? p.c[i * p.c_stride + j] : 0.0F;
      for (uint32_t l = 0; l < p.k; ++l) sum += p.a[i * p.a_stride + l] * p.b[l * p.b_stride + j];
      p.c[i * p.c_stride + j] = sum;
    }
  }
}

void weigh_row(const WeighRowArgs& a) {
  float largest = *a.largest;
  for (uint32_t i = 0; i < kPromptRows; ++i) {
    if (i < a.from || i >= a.to) {
      a.x[i] = kMinusInf;
      continue;
    }
    a.x[i] = logit_of(a.x[i], {1.0F, a.softcap});
    if (a.x[i] > largest) largest = a.x[i];
  }
  const bool is_empty = largest == kMinusInf && a.to <= a.from;
  const float rescale = is_empty || *a.largest == largest ? 1.0F : std::exp(*a.largest - largest);
  float sum = 0.0F;
  for (uint32_t i = 0; i < kPromptRows; ++i) {
    const float below = a.x[i] - largest;
    a.x[i] = is_empty || below < kMinExponent ? 0.0F : std::exp(below);
    sum += a.x[i];
  }
  *a.sum = *a.sum * rescale + sum;
  *a.largest = largest;
  if (rescale == 1.0F) return;
  for (uint32_t j = 0; j < a.dim; ++j) a.o[j] *= rescale;
}

template <DType T>
void to_f32(const std::byte* src, float* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = load<T>(src, i);
}

template <DType T>
void from_f32(const float* src, std::byte* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if constexpr (T == DType::f32) {
      std::memcpy(dst + i * sizeof(float), src + i, sizeof(float));
    } else {
      const uint16_t h = T == DType::f16 ? f32_to_f16(src[i]) : f32_to_bf16(src[i]);
      std::memcpy(dst + i * sizeof h, &h, sizeof h);
    }
  }
}

template <DType T>
bool all_finite(const std::byte* src, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (!std::isfinite(load<T>(src, i))) return false;
  }
  return true;
}

}  // namespace

const Kernels kScalarKernels = {
    .level = Level::scalar,
    .name = "scalar",
    .score = {score<DType::f32>, score<DType::f16>, score<DType::bf16>, score<DType::i8>},
    .score_i8 = score_i8,
    .score_components = {score_components<DType::f32>, score_components<DType::f16>,
                         score_components<DType::bf16>, score_components<DType::i8>},
    .attend = {attend<DType::f32>, attend<DType::f16>, attend<DType::bf16>, attend<DType::i8>},
    .attend_scored = {attend_scored<DType::f32>, attend_scored<DType::f16>,
                      attend_scored<DType::bf16>, attend_scored<DType::i8>},
    .log_sum_exp = log_sum_exp,
    .keep_above = keep_above,
    .weigh_partitions = weigh_partitions,
    .weighted_sum = {weighted_sum<DType::f32>, weighted_sum<DType::f16>, weighted_sum<DType::bf16>,
                     weighted_sum<DType::i8>},
    .score_codes = score_codes_scalar,
    .sum_codes = sum_codes_scalar,
    .product = product,
    .weigh_row = weigh_row,
    .to_f32 = {to_f32<DType::f32>, to_f32<DType::f16>, to_f32<DType::bf16>},
    .i8_to_f32 = i8_to_f32,
    .from_f32 = {from_f32<DType::f32>, from_f32<DType::f16>, from_f32<DType::bf16>},
    .all_finite = {all_finite<DType::f32>, all_finite<DType::f16>, all_finite<DType::bf16>},
};

}  // namespace keyhole::cpu
