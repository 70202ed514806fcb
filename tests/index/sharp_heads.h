// Heads whose logits spread from half a nat to hundreds, as keys with a large bias make them (Qwen2.5's k_proj: keys
// of norm 172 to 921), and exact attention to them in double: for the sweep of the tests and that of the benchmarks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "index/index.h"
#include "index/scan/code_scan.h"
#include "tests/relative_error.h"

namespace keyhole::index::test {

/// The part that all keys have in common beside the random one: nothing, the same vector, the same in two channels,
/// or a vector whose channels are turned by the position, as RoPE turns a bias of a projection.
enum class Bias : uint8_t { none, all, few, turned };
inline const char* bias_name(Bias bias) {
  constexpr const char* kNames[] = {"none", "all", "few", "turned"};
  return kNames[static_cast<size_t>(bias)];
}

struct SharpShape {
  uint32_t dim = 128;
  size_t rows = 4096;
  Bias bias = Bias::none;
  float norm = 1.0F;         ///< of a key, root mean square
  bool uneven = false;       ///< norms of the random parts differ by factors of up to 30
  float first_value = 1.0F;  ///< length of the value of row 0 beside those of others
};

/// K and V in f16, as sessions hold them, and the same numbers in fp32 for the truth.
class SharpHead {
 public:
  SharpHead(const SharpShape& shape, uint64_t seed) : shape_(shape), random_(seed) {
    const uint32_t d = shape.dim;
    const auto bias = [&](float x) { return 10.0F * x; };  // of the random part
    std::vector<float> common(d);
    for (uint32_t j = 0; j < d; ++j) {
      const bool few = shape.bias != Bias::few || j == d / 4 || j == d / 4 + 1;
      common[j] = shape.bias == Bias::none || !few ? 0.0F : bias(draw());
      if (shape.bias == Bias::few) common[j] *= std::sqrt(static_cast<float>(d) / 2.0F);
    }
    std::vector<float> keys(shape.rows * d), values(keys.size());
    double square = 0.0;
    for (size_t i = 0; i < shape.rows; ++i) {
      float* k = keys.data() + i * d;
      const float length = shape.uneven ? std::exp(1.7F * std::clamp(draw(), -2.0F, 2.0F)) : 1.0F;
      for (uint32_t j = 0; j < d; ++j) {
        k[j] = length * draw() + common[j];
        values[i * d + j] = draw();
      }
      for (uint32_t j = 0; shape.bias == Bias::turned && j < d / 2; ++j) {
        const double angle = static_cast<double>(i) * std::pow(10000.0, -2.0 * j / d);
        const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
        const float a = k[j], b = k[j + d / 2];
        k[j] = c * a - s * b;
        k[j + d / 2] = s * a + c * b;
      }
      for (uint32_t j = 0; j < d; ++j) square += double{k[j]} * k[j];
    }
    for (uint32_t j = 0; j < d; ++j) values[j] *= shape.first_value;
    const auto unit = static_cast<float>(shape.norm * std::sqrt(double(shape.rows) / square));
    for (float& x : keys) x *= unit;
    store(keys, key_bytes_, keys_);
    store(values, value_bytes_, values_);
  }

  [[nodiscard]] uint32_t dim() const { return shape_.dim; }
  [[nodiscard]] KvView kv() const { return {view(key_bytes_), view(value_bytes_)}; }
  /// Queries `[n, dim]` of random directions, each as long as gives the logits, at scale 1 / sqrt(dim), this standard
  /// deviation over the keys.
  [[nodiscard]] std::vector<float> queries(uint32_t n, double deviation) {
    const uint32_t d = shape_.dim;
    std::vector<float> q(size_t{n} * d);
    for (uint32_t h = 0; h < n; ++h) {
      float* row = q.data() + size_t{h} * d;
      for (uint32_t j = 0; j < d; ++j) row[j] = draw();
      double sum = 0.0, squares = 0.0;
      for (size_t i = 0; i < shape_.rows; ++i) {
        const double x = product(row, i);
        sum += x;
        squares += x * x;
      }
      const double mean = sum / static_cast<double>(shape_.rows);
      const double spread = std::sqrt(squares / static_cast<double>(shape_.rows) - mean * mean);
      const auto unit = static_cast<float>(deviation * std::sqrt(double(d)) / spread);
      for (uint32_t j = 0; j < d; ++j) row[j] *= unit;
    }
    return q;
  }
  /// A query whose logits of all other rows have this standard deviation, and for which row 0 has this share of the
  /// weight, at scale 1 / sqrt(dim).
  [[nodiscard]] std::vector<float> query_of_first(double deviation, double weight) {
    std::vector<float> q = queries(1, deviation);
    const double root = std::sqrt(double(shape_.dim)), square = product(keys_.data(), 0);
    const auto turn = [&](double along) {
      for (uint32_t j = 0; j < shape_.dim; ++j) q[j] += static_cast<float>(along) * keys_[j];
    };
    turn(-product(q.data(), 0) / square);
    // What is added along the row's key changes the other logits, too.
    for (int round = 0; round < 8; ++round) {
      double others = 0.0;
      for (size_t i = 1; i < shape_.rows; ++i) others += std::exp(product(q.data(), i) / root);
      turn((std::log(others * weight / (1.0 - weight)) * root - product(q.data(), 0)) / square);
    }
    return q;
  }
  [[nodiscard]] double product(const float* q, size_t row) const {
    double sum = 0.0;
    for (uint32_t j = 0; j < shape_.dim; ++j) sum += double{q[j]} * keys_[row * shape_.dim + j];
    return sum;
  }
  [[nodiscard]] const float* value(size_t row) const { return &values_[row * shape_.dim]; }
  [[nodiscard]] size_t rows() const { return shape_.rows; }

 private:
  float draw() { return normal_(random_); }
  [[nodiscard]] RowsView view(const std::vector<std::byte>& bytes) const {
    return dense_rows(bytes.data(), shape_.rows, shape_.dim, DType::f16);
  }
  static void store(const std::vector<float>& from, std::vector<std::byte>& bytes,
                    std::vector<float>& back) {
    constexpr auto kHalfRows = static_cast<size_t>(DType::f16);
    const cpu::Kernels& kernels = *cpu::kernels_for(cpu::Level::scalar);
    bytes.resize(from.size() * 2);
    back.resize(from.size());
    kernels.from_f32[kHalfRows](from.data(), bytes.data(), from.size());
    kernels.to_f32[kHalfRows](bytes.data(), back.data(), from.size());
  }

  SharpShape shape_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  std::vector<std::byte> key_bytes_, value_bytes_;
  std::vector<float> keys_, values_;
};

/// Exact attention of one query.
struct SharpTruth {
  std::vector<double> o;
  double lse = 0.0;
  double heaviest16 = 0.0;  ///< what the 16 rows that weigh most weigh together

  SharpTruth(const SharpHead& head, const float* q, const LogitParams& logits) {
    const size_t n = head.rows();
    std::vector<double> x(n);
    for (size_t i = 0; i < n; ++i) {
      x[i] = head.product(q, i) * logits.scale;
      if (logits.softcap > 0.0F) x[i] = logits.softcap * std::tanh(x[i] / logits.softcap);
    }
    const double top = *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (const double l : x) sum += std::exp(l - top);
    lse = top + std::log(sum);
    o.assign(head.dim(), 0.0);
    for (double& l : x) l = std::exp(l - lse);
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t j = 0; j < head.dim(); ++j) o[j] += x[i] * head.value(i)[j];
    }
    std::nth_element(x.begin(), x.begin() + 15, x.end(), std::greater<>());
    for (size_t i = 0; i < 16; ++i) heaviest16 += x[i];
  }
  /// Whether 0.9 of the weight lies on 16 rows or fewer.
  [[nodiscard]] bool is_sharp() const { return heaviest16 >= 0.9; }
  [[nodiscard]] double error(const float* seen) const {
    return keyhole::test::relative_error(seen, o);
  }
};

/// The answer of a step to a group: exact rows and codes merged.
struct SharpAnswer {
  std::vector<float> o, lse;
  size_t exact_rows = 0;
  CodeDoubt doubt{};
};

/// settles: whether more rows are read where codes cannot tell which weigh.
inline SharpAnswer attend_by_codes(const CodeSearch& search, const KvView& kv,
                                   bool settles = true) {
  const uint32_t dim = search.shape().dim;
  CodeParts parts;
  parts.reserve(search.shape(), search.group, search.wanted);
  CodeScan scan;
  for (uint32_t p = 0; p < search.rows.parts(); ++p) scan.scan(search, p, {}, parts);
  const auto rows = scan.choose(search, parts);
  SharpAnswer out{std::vector<float>(size_t{search.group} * dim),
                  std::vector<float>(search.group),
                  rows.size(),
                  {}};
  std::vector<float> coded_o(out.o.size()), coded_lse(search.group);
  const StateView exact{out.o.data(), out.lse.data()}, coded{coded_o.data(), coded_lse.data()};
  cpu::attend_ids(*search.kernels, kv, rows, search.queries, search.group, search.logits, exact);
  scan.finish(search, exact.lse, parts, coded);
  if (settles) out.doubt = scan.settle(search, kv, parts, exact, coded);
  out.exact_rows += out.doubt.more;
  const StateView both[] = {exact, coded};
  cpu::merge_states(both, search.group, dim, exact);
  return out;
}

}  // namespace keyhole::index::test
