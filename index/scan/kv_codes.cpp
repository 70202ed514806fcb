#include "index/scan/kv_codes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cpu/half.h"
#include "cpu/row_access.h"

namespace keyhole::index {
namespace {

constexpr float kLargestHalf = 65504.0F;

uint16_t to_half(float x) { return cpu::f32_to_f16(std::clamp(x, -kLargestHalf, kLargestHalf)); }

/// Four at a time: the compiler's own vectoriser leaves loops of so changing steps scalar. The order of the operations on
/// every element is that of the definition.
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

uint32_t get_code(const std::byte* words, CodePlace place, uint32_t bits) {
  uint32_t word;
  std::memcpy(&word, words + size_t{place.word} * 4, 4);
  return word >> place.shift & ((1U << bits) - 1);
}

void put_half(std::byte* at, float x) {
  const uint16_t bits = to_half(x);
  std::memcpy(at, &bits, sizeof bits);
}

float get_half(const std::byte* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return cpu::f16_to_f32(bits);
}

/// One block, read.
class BlockReader {
 public:
  BlockReader(const CodeShape& shape, const std::byte* data) : shape_(shape), data_(data) {}

  [[nodiscard]] float key_level(uint32_t row, uint32_t j) const {
    const std::byte* words = data_ + size_t{row / kCodeTile} * kCodeLanes * shape_.key_words() * 4;
    return level(get_code(words, shape_.key_place(row % kCodeTile, j), shape_.key_bits),
                 shape_.key_bits);
  }
  [[nodiscard]] float value_level(uint32_t row, uint32_t j) const {
    if (shape_.value_bits == 0) return 0.0F;
    const std::byte* words = data_ + shape_.values_at() +
                             size_t{row / kCodeTile} * kCodeLanes * shape_.value_words() * 4;
    return level(get_code(words, shape_.value_place(row % kCodeTile, j), shape_.value_bits),
                 shape_.value_bits);
  }
  [[nodiscard]] float key_factor(uint32_t row) const { return get_half(factor(row)); }
  [[nodiscard]] float value_factor(uint32_t row) const { return get_half(factor(row) + 2); }
  [[nodiscard]] float key_mean(uint32_t j) const {
    return get_half(data_ + shape_.key_mean_at() + size_t{j} * 2);
  }
  [[nodiscard]] float value_mean(uint32_t j) const {
    return get_half(data_ + shape_.value_mean_at() + size_t{j} * 2);
  }
  [[nodiscard]] float noise() const {
    float x;
    std::memcpy(&x, data_ + shape_.noise_at(), sizeof x);
    return x;
  }

 private:
  static float level(uint32_t code, uint32_t bits) {
    return static_cast<float>(2 * static_cast<int>(code) - ((1 << bits) - 1));
  }
  [[nodiscard]] const std::byte* factor(uint32_t row) const {
    return data_ + shape_.factors_at() + size_t{row} * 4;
  }

  const CodeShape& shape_;
  const std::byte* data_;
};

/// The block's rows in fp32, each channel times its scale, rotated; then the mean of each component, rounded as it is
/// stored, taken away.
class Residuals {
 public:
  Residuals(const cpu::Kernels& kernels, const RowsView& rows, size_t first, const float* scale,
            float one_scale)
      : dim_(rows.dim), data_(size_t{kCodeBlock} * rows.dim), means_(rows.dim) {
    for (uint32_t i = 0; i < kCodeBlock; ++i) {
      float* row = data_.data() + size_t{i} * dim_;
      cpu::read_row(kernels, rows, first + i, row);
      for (uint32_t j = 0; j < dim_; ++j) row[j] *= scale != nullptr ? scale[j] : one_scale;
      rotate_codes(row, dim_);
    }
    for (uint32_t j = 0; j < dim_; ++j) {
      float sum = 0.0F;
      for (uint32_t i = 0; i < kCodeBlock; ++i) sum += data_[size_t{i} * dim_ + j];
      means_[j] = cpu::f16_to_f32(to_half(sum * (1.0F / kCodeBlock)));
    }
    for (uint32_t i = 0; i < kCodeBlock; ++i) {
      for (uint32_t j = 0; j < dim_; ++j) data_[size_t{i} * dim_ + j] -= means_[j];
    }
  }
  [[nodiscard]] float* row(uint32_t i) { return data_.data() + size_t{i} * dim_; }
  [[nodiscard]] float mean(uint32_t j) const { return means_[j]; }

 private:
  uint32_t dim_;
  std::vector<float> data_, means_;
};

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

void encode_block(const CodeShape& shape, const Balance& balance, const cpu::Kernels& kernels,
                  const KvView& kv, size_t first, std::byte* out) {
  std::memset(out, 0, shape.block_bytes());
  const uint32_t dim = shape.dim;
  Residuals keys(kernels, kv.keys, first, balance.key_scale.data(), 1.0F);
  float noise = 0.0F;
  for (uint32_t i = 0; i < kCodeBlock; ++i) {
    const CodedRow coded = code_row(keys.row(i), dim, shape.key_bits);
    std::byte* words = out + size_t{i / kCodeTile} * kCodeLanes * shape.key_words() * 4;
    for (uint32_t j = 0; j < dim; ++j) {
      put_code(words, shape.key_place(i % kCodeTile, j), coded.codes[j]);
    }
    const bool empty = !(coded.product > 0.0F);
    put_half(out + shape.factors_at() + size_t{i} * 4, empty ? 0.0F : coded.square / coded.product);
    if (empty) continue;
    const float explained = coded.product / coded.square * coded.product;
    noise += std::max(0.0F, static_cast<float>(coded.levels) - explained) / static_cast<float>(dim);
  }
  noise *= 1.0F / kCodeBlock;
  std::memcpy(out + shape.noise_at(), &noise, sizeof noise);
  for (uint32_t j = 0; j < dim; ++j)
    put_half(out + shape.key_mean_at() + size_t{j} * 2, keys.mean(j));

  if (kv.values.count == 0) return;
  Residuals values(kernels, kv.values, first, nullptr, 1.0F / balance.value_scale);
  for (uint32_t j = 0; j < dim; ++j) {
    put_half(out + shape.value_mean_at() + size_t{j} * 2, values.mean(j));
  }
  if (shape.value_bits == 0) return;
  for (uint32_t i = 0; i < kCodeBlock; ++i) {
    const CodedRow coded = code_row(values.row(i), dim, shape.value_bits);
    std::byte* words =
        out + shape.values_at() + size_t{i / kCodeTile} * kCodeLanes * shape.value_words() * 4;
    for (uint32_t j = 0; j < dim; ++j) {
      put_code(words, shape.value_place(i % kCodeTile, j), coded.codes[j]);
    }
    put_half(out + shape.factors_at() + size_t{i} * 4 + 2,
             coded.product / static_cast<float>(coded.levels));
  }
}

void KvCodes::extend(const cpu::Kernels& kernels, const KvView& kv) {
  const size_t begin = blocks();
  const size_t end = std::max(begin, kv.keys.count / kCodeBlock);
  std::vector<std::byte> more((end - begin) * shape_.block_bytes());
  for (size_t b = begin; b < end; ++b) {
    encode_block(shape_, balance_, kernels, kv, b * kCodeBlock,
                 more.data() + (b - begin) * shape_.block_bytes());
  }
  append(more);
}

void KvCodes::append(const std::vector<std::byte>& more) {
  if (more.empty()) return;
  const size_t begin = blocks(), end = begin + more.size() / shape_.block_bytes();
  if (!pieces_.empty() && !pieces_.back().data.is_shared()) {
    Piece& last = pieces_.back();
    Data& data = last.data.own();
    data.resize((last.end - last.begin) * shape_.block_bytes());
    data.insert(data.end(), more.begin(), more.end());
    last.end = end;
    return;
  }
  Data data;
  if (pieces_.size() < kMostPieces) {
    data.assign(more.begin(), more.end());
    Piece piece{cpu::Shared(std::move(data)), begin, end};
    pieces_.push_back(std::move(piece));
    return;
  }
  data.reserve(end * shape_.block_bytes());
  for (const Piece& piece : pieces_) {
    const std::byte* from = piece.data->data();
    data.insert(data.end(), from, from + (piece.end - piece.begin) * shape_.block_bytes());
  }
  data.insert(data.end(), more.begin(), more.end());
  Piece all{cpu::Shared(std::move(data)), 0, end};
  pieces_.front() = std::move(all);
  pieces_.erase(pieces_.begin() + 1, pieces_.end());
}

void KvCodes::truncate(size_t rows) noexcept {
  const size_t end = std::min(blocks(), rows / kCodeBlock);
  while (!pieces_.empty() && pieces_.back().begin >= end) pieces_.pop_back();
  if (pieces_.empty()) return;
  Piece& last = pieces_.back();
  last.end = end;
  if (!last.data.is_shared()) last.data.own().resize((end - last.begin) * shape_.block_bytes());
}

size_t KvCodes::bytes() const {
  size_t bytes = balance_.key_scale.size() * sizeof(float);
  for (const Piece& piece : pieces_) bytes += piece.data->size();
  return bytes;
}

size_t KvCodes::bytes_of_others() const {
  size_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += piece.data.is_first() ? 0 : piece.data->size();
  return bytes;
}

CodeQueries KvCodes::queries(const float* q, uint32_t group) const {
  const uint32_t dim = shape_.dim;
  CodeQueries out;
  out.group = group;
  out.rows.resize(size_t{group} * dim);
  rotate_queries(q, group, out.rows.data());
  return out;
}

void KvCodes::rotate_queries(const float* q, uint32_t group, float* out) const {
  const uint32_t dim = shape_.dim;
  for (uint32_t h = 0; h < group; ++h, q += dim, out += dim) {
    for (uint32_t j = 0; j < dim; ++j) out[j] = q[j] / balance_.key_scale[j];
    rotate_codes(out, dim);
  }
}

void KvCodes::score(const CodeQueries& queries, float* scores, size_t stride) const {
  const uint32_t dim = shape_.dim;
  for (size_t b = 0; b < blocks(); ++b) {
    const BlockReader block(shape_, this->block(b));
    for (uint32_t h = 0; h < queries.group; ++h) {
      const float* q = queries.rows.data() + size_t{h} * dim;
      double of_mean = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        of_mean += double{q[j]} * block.key_mean(j);
      }
      for (uint32_t i = 0; i < kCodeBlock; ++i) {
        double product = 0.0;
        for (uint32_t j = 0; j < dim; ++j) product += double{q[j]} * block.key_level(i, j);
        scores[h * stride + b * kCodeBlock + i] =
            static_cast<float>(block.key_factor(i) * product + of_mean);
      }
    }
  }
}

void KvCodes::attend(const CodeQueries& queries, const LogitParams& logits,
                     std::span<const uint32_t> skipped, StateView out) const {
  const uint32_t dim = shape_.dim;
  const size_t n = count();
  std::vector<float> scores(n * queries.group);
  score(queries, scores.data(), n);
  for (uint32_t h = 0; h < queries.group; ++h) {
    double norm = 0.0;
    for (uint32_t j = 0; j < dim; ++j) {
      norm += double{queries.rows[size_t{h} * dim + j]} * queries.rows[size_t{h} * dim + j];
    }
    // Log weights first, so that the sums can be relative to the largest.
    std::vector<double> log_weights(n, double{kMinusInf});
    double largest = kMinusInf;
    for (size_t i = 0; i < n; ++i) {
      if (std::binary_search(skipped.begin(), skipped.end(), static_cast<uint32_t>(i))) continue;
      const BlockReader block(shape_, this->block(i / kCodeBlock));
      double logit = double{logits.scale} * scores[h * n + i];
      double slope = logits.scale;
      if (logits.softcap > 0.0F) {
        const double t = std::tanh(logit / logits.softcap);
        slope *= 1.0 - t * t;
        logit = logits.softcap * t;
      }
      const double f = block.key_factor(static_cast<uint32_t>(i % kCodeBlock));
      log_weights[i] = logit - 0.5 * slope * slope * norm * f * f * block.noise();
      largest = std::max(largest, log_weights[i]);
    }
    float* o = out.o + size_t{h} * dim;
    std::fill_n(o, dim, 0.0F);
    out.lse[h] = kMinusInf;
    if (largest == double{kMinusInf}) continue;
    std::vector<double> rotated(dim, 0.0);
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) {
      const double w = std::exp(log_weights[i] - largest);
      if (w == 0.0) continue;
      const BlockReader block(shape_, this->block(i / kCodeBlock));
      const auto row = static_cast<uint32_t>(i % kCodeBlock);
      sum += w;
      const double g = w * block.value_factor(row);
      for (uint32_t j = 0; j < dim; ++j) {
        rotated[j] += g * block.value_level(row, j) + w * block.value_mean(j);
      }
    }
    for (uint32_t j = 0; j < dim; ++j) {
      o[j] = balance_.value_scale * static_cast<float>(rotated[j] / sum);
    }
    rotate_codes_back(o, dim);
    out.lse[h] = static_cast<float>(largest + std::log(sum));
  }
}

void KvCodes::decode_key(size_t row, float* out) const {
  const BlockReader block(shape_, this->block(row / kCodeBlock));
  const auto i = static_cast<uint32_t>(row % kCodeBlock);
  for (uint32_t j = 0; j < shape_.dim; ++j) {
    out[j] = block.key_factor(i) * block.key_level(i, j) + block.key_mean(j);
  }
  rotate_codes_back(out, shape_.dim);
  for (uint32_t j = 0; j < shape_.dim; ++j) out[j] /= balance_.key_scale[j];
}

void KvCodes::rotated_value(size_t row, float* out) const {
  const BlockReader block(shape_, this->block(row / kCodeBlock));
  const auto i = static_cast<uint32_t>(row % kCodeBlock);
  const float g = block.value_factor(i);
  // A step does this for its chosen rows: components in the order in which they lie, one after the other.
  for (uint32_t eight = 0; eight < 8; ++eight) {
    for (uint32_t j = eight; j < shape_.dim; j += 8) {
      out[j] = g * block.value_level(i, j) + block.value_mean(j);
    }
  }
}

void KvCodes::decode_value(size_t row, float* out) const {
  rotated_value(row, out);
  for (uint32_t j = 0; j < shape_.dim; ++j) out[j] *= balance_.value_scale;
  rotate_codes_back(out, shape_.dim);
}

}  // namespace keyhole::index
