// A random KV head, and exact attention over it in double precision by the definition alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/normal.h"
#include "tools/rivals/rivals.h"
#include "tools/rivals/step.h"

namespace keyhole::tools {

struct RivalCase {
  RivalShape shape;
  LogitRule rule{0.3F, 0};
  std::vector<float> keys, values, queries, training;
  std::vector<uint32_t> training_positions;
  StoredRows stored;

  /// Makes keys around a mean that is not 0, as keys of models are; every number is one of fp16.
  RivalCase(std::mt19937& random, size_t rows, size_t dim, size_t group, size_t steps = 3,
            size_t training_steps = 8)
      : shape{rows, dim, group, training_steps * group} {
    keyhole::test::Normal<float> normal;
    const auto fill = [&](std::vector<float>& out, size_t n, float mean) {
      out.resize(n);
      for (float& x : out) {
        x = std::round((normal(random) + mean) * 64) / 64;
      }
    };
    fill(keys, rows * dim, 0.5F);
    fill(values, rows * dim, 0);
    fill(queries, steps * group * dim, 0);
    fill(training, shape.training_rows * dim, 0);
    for (size_t t = 0; t < training_steps; ++t) {
      training_positions.push_back(static_cast<uint32_t>((t + 1) * rows / training_steps));
    }
    stored = {StoredMatrix(ElementType::f16, keys.data(), rows, dim),
              StoredMatrix(ElementType::f16, values.data(), rows, dim)};
  }

  [[nodiscard]] RivalData data() const {
    return {.shape = shape,
            .keys = keys.data(),
            .training = training.data(),
            .training_positions = training_positions,
            .stored = &stored};
  }
  [[nodiscard]] const float* query(size_t row) const { return queries.data() + row * shape.dim; }

  [[nodiscard]] double product(size_t query_row, size_t key) const {
    double sum = 0;
    for (size_t c = 0; c < shape.dim; ++c) {
      sum += double{query(query_row)[c]} * keys[key * shape.dim + c];
    }
    return sum;
  }
  [[nodiscard]] double weight(size_t query_row, size_t key) const {
    const double logit = rule.scale * product(query_row, key);
    return std::exp(rule.softcap > 0 ? rule.softcap * std::tanh(logit / rule.softcap) : logit);
  }

  /// Sums of weights, and of weights times values `[d]`, over `rows` or all.
  struct Sums {
    double weights = 0;
    std::vector<double> values;
  };
  [[nodiscard]] Sums sums(size_t query_row, std::vector<uint32_t> rows = {}) const {
    if (rows.empty()) {
      rows.resize(shape.rows);
      std::iota(rows.begin(), rows.end(), 0U);
    }
    Sums out;
    out.values.resize(shape.dim);
    for (const uint32_t row : rows) {
      const double w = weight(query_row, row);
      out.weights += w;
      for (size_t c = 0; c < shape.dim; ++c) out.values[c] += w * values[row * shape.dim + c];
    }
    return out;
  }

  /// The k rows of the largest inner products.
  [[nodiscard]] std::set<uint32_t> best(size_t query_row, size_t k) const {
    std::vector<uint32_t> rows(shape.rows);
    std::iota(rows.begin(), rows.end(), 0U);
    std::sort(rows.begin(), rows.end(), [&](uint32_t a, uint32_t b) {
      return product(query_row, a) > product(query_row, b);
    });
    return {rows.begin(), rows.begin() + static_cast<ptrdiff_t>(std::min(k, rows.size()))};
  }
};

/// Builds a rival over a case; null where this build lacks it.
inline std::unique_ptr<Rival> build_rival(const RivalCase& on, const std::string& text) {
  const std::string name = text.substr(0, text.find(':'));
  for (const RivalType* type : rival_types()) {
    if (type->name != name || type->needs != nullptr) continue;
    const RivalSpec spec = RivalSpec::parse(text, rival_types());
    if (type->check != nullptr) type->check(spec, on.shape);
    std::unique_ptr<Rival> rival = type->make(spec);
    rival->build(on.data());
    return rival;
  }
  return nullptr;
}

}  // namespace keyhole::tools
