#include "index/scan/code_rows.h"

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/row_access.h"

namespace keyhole::index {
namespace {

constexpr float kLargestHalf = 65504.0F;

// What is larger after the balance is beyond fp16 by far; the square of a row of them is finite.
constexpr float kLargestScaled = 1e15F;

/// x in fp16. Where it is beyond `most` that stands for it, and `fits` becomes false.
uint16_t to_half(float x, bool& fits, float most = kLargestHalf) {
  if (!(std::abs(x) <= most)) {
    fits = false;
    x = std::signbit(x) ? -most : most;
  }
  return cpu::f32_to_f16(x);
}

/// Four at a time: the compiler's own vectoriser leaves loops of so changing steps scalar. The order of the operations
/// on every element is that of the definition.
void hadamard(float* x, uint32_t size) {
  using Four = float __attribute__((vector_size(16)));
  const auto load = [](const float* at) {
    Four v;
    std::memcpy(&v, at, sizeof v);
    return v;
  };
  const auto store = [](float* at, Four v) { std::memcpy(at, &v, sizeof v); };
  for (uint32_t i = 0; i < size; i += 4) {
    const float a = x[i] + x[i + 1], b = x[i] - x[i + 1];
    const float c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
    x[i] = a + c;
    x[i + 1] = b + d;
    x[i + 2] = a - c;
    x[i + 3] = b - d;
  }
  for (uint32_t step = 4; step < size; step *= 2) {
    for (uint32_t begin = 0; begin < size; begin += 2 * step) {
      for (uint32_t i = begin; i < begin + step; i += 4) {
        const Four a = load(x + i), b = load(x + i + step);
        store(x + i, a + b);
        store(x + i + step, a - b);
      }
    }
  }
  const float norm = 1.0F / std::sqrt(static_cast<float>(size));
  for (uint32_t i = 0; i < size; i += 4) store(x + i, load(x + i) * norm);
}

/// Sum of x[i] in the order of a warp: 32 sums of every 32nd element, then halves onto each other.
template <class Term>
float warp_sum(uint32_t n, Term term) {
  std::array<float, 32> sums{};
  for (uint32_t i = 0; i < n; ++i) sums[i % 32] += term(i);
  for (uint32_t step = 16; step > 0; step /= 2) {
    for (uint32_t i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  return sums[0];
}

/// What a row has become.
struct CodedRow {
  std::array<uint8_t, kMaxHeadDim> codes;
  float square = 0.0F;   ///< <r, r>
  float product = 0.0F;  ///< <r, level>
  uint32_t levels = 0;   ///< <level, level>
};

CodedRow code_row(const float* row, uint32_t dim, uint32_t bits) {
  CodedRow out;
  out.square = warp_sum(dim, [&](uint32_t i) { return row[i] * row[i]; });
  const float step = code_step(bits) * std::sqrt(out.square / static_cast<float>(dim));
  const float inverse = step > 0.0F ? 0.5F / step : 0.0F;
  const auto half = static_cast<float>(1U << (bits - 1));
  const int most = (1 << bits) - 1;
  for (uint32_t i = 0; i < dim; ++i) {
    const float place = std::floor(row[i] * inverse + half);
    const int code = static_cast<int>(std::clamp(place, 0.0F, static_cast<float>(most)));
    out.codes[i] = static_cast<uint8_t>(code);
    const int level = 2 * code - most;
    out.levels += static_cast<uint32_t>(level * level);
  }
  out.product = warp_sum(
      dim, [&](uint32_t i) { return row[i] * static_cast<float>(2 * out.codes[i] - most); });
  return out;
}

void put_code(std::byte* words, CodePlace place, uint32_t code) {
  uint32_t word;
  std::memcpy(&word, words + size_t{place.word} * 4, 4);
  word |= code << place.shift;
  std::memcpy(words + size_t{place.word} * 4, &word, 4);
}

void put_half(std::byte* at, float x, bool& fits, float most = kLargestHalf) {
  const uint16_t bits = to_half(x, fits, most);
  std::memcpy(at, &bits, sizeof bits);
}

/// The rows in fp32, each channel times its scale, rotated; then the mean of each component, rounded as it is stored,
/// taken away.
class Residuals {
 public:
  Residuals(const cpu::Kernels& kernels, const RowsView& rows, std::span<const uint32_t> ids,
            const float* scale, float one_scale, float most_mean, bool& fits)
      : dim_(rows.dim), data_(ids.size() * rows.dim), means_(rows.dim) {
    for (size_t i = 0; i < ids.size(); ++i) {
      float* row = data_.data() + i * dim_;
      cpu::read_row(kernels, rows, ids[i], row);
      for (uint32_t j = 0; j < dim_; ++j) {
        const float x = row[j] * (scale != nullptr ? scale[j] : one_scale);
        row[j] = std::clamp(x, -kLargestScaled, kLargestScaled);
      }
      rotate_codes(row, dim_);
    }
    const float share = 1.0F / static_cast<float>(ids.size());
    for (uint32_t j = 0; j < dim_; ++j) {
      float sum = 0.0F;
      for (size_t i = 0; i < ids.size(); ++i) sum += data_[i * dim_ + j];
      means_[j] = cpu::f16_to_f32(to_half(sum * share, fits, most_mean));
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      for (uint32_t j = 0; j < dim_; ++j) data_[i * dim_ + j] -= means_[j];
    }
  }
  [[nodiscard]] float* row(size_t i) { return data_.data() + i * dim_; }
  [[nodiscard]] float mean(uint32_t j) const { return means_[j]; }

 private:
  uint32_t dim_;
  std::vector<float> data_, means_;
};

/// The values of encode_rows(), where there are any.
void encode_values(const CodeShape& shape, const Balance& balance, const cpu::Kernels& kernels,
                   const RowsView& rows, std::span<const uint32_t> ids,
                   const CodeRunOf<std::byte>& out, bool& fits) {
  if (rows.tokens == 0) return;
  const uint32_t dim = shape.dim;
  Residuals values(kernels, rows, ids, nullptr, 1.0F / balance.value_scale, kMostValueMean, fits);
  for (uint32_t j = 0; j < dim; ++j) put_half(out.value_mean + size_t{j} * 2, values.mean(j), fits);
  if (shape.value_bits == 0) return;
  for (uint32_t i = 0; i < ids.size(); ++i) {
    const CodedRow coded = code_row(values.row(i), dim, shape.value_bits);
    std::byte* words = out.values + size_t{i / kCodeTile} * kCodeLanes * shape.value_words() * 4;
    for (uint32_t j = 0; j < dim; ++j) {
      put_code(words, shape.value_place(i % kCodeTile, j), coded.codes[j]);
    }
    put_half(out.factors + size_t{i} * 4 + 2, coded.product / static_cast<float>(coded.levels),
             fits, kMostValueFactor);
  }
}

}  // namespace

void rotate_codes(float* row, uint32_t dim) {
  for (uint32_t i = 0; i < hadamard_passes(dim); ++i) {
    const HadamardPass pass = hadamard_pass(dim, i);
    for (uint32_t j = 0; j < pass.size; ++j) row[pass.begin + j] *= code_sign(i, j);
    hadamard(row + pass.begin, pass.size);
  }
}

void rotate_codes_back(float* row, uint32_t dim) {
  for (uint32_t i = hadamard_passes(dim); i-- > 0;) {
    const HadamardPass pass = hadamard_pass(dim, i);
    hadamard(row + pass.begin, pass.size);
    for (uint32_t j = 0; j < pass.size; ++j) row[pass.begin + j] *= code_sign(i, j);
  }
}

bool rotate_queries(const Balance& balance, const float* q, uint32_t group, float* out,
                    float* norms) {
  const auto dim = static_cast<uint32_t>(balance.key_scale.size());
  const auto square = [&] {
    double sum = 0.0;
    for (uint32_t j = 0; j < dim; ++j) sum += double{out[j]} * out[j];
    return sum;
  };
  bool any_beyond = false;
  for (uint32_t h = 0; h < group; ++h, q += dim, out += dim) {
    for (uint32_t j = 0; j < dim; ++j) out[j] = q[j] / balance.key_scale[j];
    rotate_codes(out, dim);
    double norm = square();
    if (!(norm <= kLongestQuery * kLongestQuery)) {  // infinities of both signs have become NaN
      any_beyond = true;
      double sum = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        const double x = double{q[j]} / double{balance.key_scale[j]};
        sum += x * x;
      }
      const double less = std::exp2(std::floor(std::log2(0.5 * kLongestQuery / std::sqrt(sum))));
      for (uint32_t j = 0; j < dim; ++j) {
        out[j] = static_cast<float>(double{q[j]} / double{balance.key_scale[j]} * less);
      }
      rotate_codes(out, dim);
      norm = square();
    }
    if (norms != nullptr) norms[h] = static_cast<float>(norm);
  }
  return any_beyond;
}

CodeRunFigures encode_rows(const CodeShape& shape, const Balance& balance,
                           const cpu::Kernels& kernels, const KvView& kv,
                           std::span<const uint32_t> ids, const CodeRunOf<std::byte>& out) {
  const uint32_t dim = shape.dim;
  const auto n = static_cast<uint32_t>(ids.size());
  const float share = 1.0F / static_cast<float>(n);
  CodeRunFigures figures;
  bool fits = true;
  Residuals keys(kernels, kv.keys, ids, balance.key_scale.data(), 1.0F, kLargestHalf, fits);
  for (uint32_t i = 0; i < n; ++i) {
    const CodedRow coded = code_row(keys.row(i), dim, shape.key_bits);
    std::byte* words = out.keys + size_t{i / kCodeTile} * kCodeLanes * shape.key_words() * 4;
    for (uint32_t j = 0; j < dim; ++j) {
      put_code(words, shape.key_place(i % kCodeTile, j), coded.codes[j]);
    }
    figures.spread += coded.square / static_cast<float>(dim);
    const bool empty = !(coded.product > 0.0F);
    put_half(out.factors + size_t{i} * 4, empty ? 0.0F : coded.square / coded.product, fits);
    if (empty) continue;
    const float explained = coded.product / coded.square * coded.product;
    figures.noise +=
        std::max(0.0F, static_cast<float>(coded.levels) - explained) / static_cast<float>(dim);
  }
  figures.noise *= share;
  figures.spread *= share;
  for (uint32_t j = 0; j < dim; ++j) put_half(out.key_mean + size_t{j} * 2, keys.mean(j), fits);
  encode_values(shape, balance, kernels, kv.values, ids, out, fits);
  if (!fits) figures.noise = kUnknownNoise;
  return figures;
}

bool is_sound_run(const CodeShape& shape, const CodeRun& run) {
  const CodeRunReader reader(shape, run);
  for (uint32_t i = 0; i < run.rows; ++i) {
    const float key = reader.key_factor(i);
    if (!std::isfinite(key) || std::signbit(key)) return false;
    if (!std::isfinite(reader.value_factor(i))) return false;
  }
  for (uint32_t j = 0; j < shape.dim; ++j) {
    if (!std::isfinite(reader.key_mean(j)) || !std::isfinite(reader.value_mean(j))) return false;
  }
  return std::isfinite(run.noise) && run.noise >= 0.0F;
}

float widest_factor(const CodeRun& run) {
  uint16_t most = 0;  // halves above 0 have the order of integers
  for (uint32_t i = 0; i < run.rows; ++i) {
    uint16_t bits;
    std::memcpy(&bits, run.factors + size_t{i} * 4, sizeof bits);
    most = std::max(most, bits);
  }
  return cpu::f16_to_f32(most);
}

uint32_t CodeRunReader::code(const std::byte* words, CodePlace place, uint32_t bits) {
  uint32_t word;
  std::memcpy(&word, words + size_t{place.word} * 4, 4);
  return word >> place.shift & ((1U << bits) - 1);
}

float CodeRunReader::half(const std::byte* at, uint32_t i) {
  uint16_t bits;
  std::memcpy(&bits, at + size_t{i} * 2, sizeof bits);
  return cpu::f16_to_f32(bits);
}

void CodeRunReader::rotated_value(uint32_t row, float* out) const {
  const float g = value_factor(row);
  // A step does this for its chosen rows: components in the order in which they lie, one after the other.
  for (uint32_t eight = 0; eight < 8; ++eight) {
    for (uint32_t j = eight; j < shape_.dim; j += 8) {
      out[j] = g * value_level(row, j) + value_mean(j);
    }
  }
}

}  // namespace keyhole::index
