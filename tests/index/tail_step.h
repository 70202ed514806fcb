// One step over a TailTree in double precision, with which the tests of estimates and of goals compare.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "index/tail/tail_estimate.h"
#include "tests/index/tails.h"
#include "tests/normal.h"

namespace keyhole::index::test {

inline double logit_of(double score, const LogitParams& p) {
  const double x = score * p.scale;
  return p.softcap > 0.0F ? p.softcap * std::tanh(x / p.softcap) : x;
}

inline double add_logs(double a, double b) {
  const double top = std::max(a, b);
  return top == -INFINITY ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

/// A state in double.
struct Exact {
  double lse = -INFINITY;
  std::vector<double> o;
};

inline Exact merged(const Exact& a, const Exact& b) {
  Exact out{add_logs(a.lse, b.lse), std::vector<double>(a.o.size(), 0.0)};
  for (size_t j = 0; j < a.o.size(); ++j) {
    if (a.lse != -INFINITY) out.o[j] += std::exp(a.lse - out.lse) * a.o[j];
    if (b.lse != -INFINITY) out.o[j] += std::exp(b.lse - out.lse) * b.o[j];
  }
  return out;
}

inline double norm(const std::vector<double>& x) {
  double squares = 0.0;
  for (const double v : x) squares += v * v;
  return std::sqrt(squares);
}

/// One step over a tree: queries, what is read, and what lies elsewhere (sink and window).
struct Step {
  const KvRows& kv;
  const TailTree& tree;
  uint32_t group;
  LogitParams logits;
  TailMode mode = TailMode::second;
  std::vector<float> queries = {};
  std::vector<double> resident = {};  ///< lse of what lies elsewhere; -inf: nothing
  std::vector<float> caps = {};       ///< empty: none given
  std::vector<uint32_t> read = {};    ///< of begin()
  std::vector<uint32_t> later = {};   ///< of next_rows()
  std::vector<float> scores = {}, seen = {};

  [[nodiscard]] double score(uint32_t h, size_t row) const {
    return kv.keys.score(row, queries.data() + size_t{h} * tree.dim());
  }
  /// The state of some rows.
  [[nodiscard]] Exact attend(uint32_t h, const std::vector<uint32_t>& rows) const {
    Exact s;
    s.o.assign(tree.dim(), 0.0);
    std::vector<double> x;
    for (const uint32_t row : rows) x.push_back(logit_of(score(h, row), logits));
    const double top = x.empty() ? 0.0 : *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (size_t i = 0; i < rows.size(); ++i) {
      const double w = std::exp(x[i] - top);
      const auto v = decoded(kv.values.view(), rows[i]);
      for (size_t j = 0; j < v.size(); ++j) s.o[j] += w * v[j];
      sum += w;
    }
    for (double& o : s.o) o = sum > 0.0 ? o / sum : 0.0;
    if (sum > 0.0) s.lse = top + std::log(sum);
    return s;
  }
  [[nodiscard]] std::vector<uint32_t> all_rows() const {
    std::vector<uint32_t> rows(tree.count());
    for (uint32_t i = 0; i < rows.size(); ++i) rows[i] = i;
    return rows;
  }
  [[nodiscard]] std::vector<uint32_t> read_now() const {
    std::vector<uint32_t> rows = read;
    rows.insert(rows.end(), later.begin(), later.end());
    return rows;
  }
  void see() {
    seen.resize(group);
    for (uint32_t h = 0; h < group; ++h) {
      seen[h] = static_cast<float>(add_logs(resident[h], attend(h, read_now()).lse));
    }
  }
  void begin(TailEstimate& estimate) {
    scores.resize(group * read.size());
    for (uint32_t h = 0; h < group; ++h) {
      for (size_t i = 0; i < read.size(); ++i) {
        scores[h * read.size() + i] = static_cast<float>(score(h, read[i]));
      }
    }
    see();
    estimate.reserve(tree, group);
    estimate.begin(tree, *context().kernels,
                   {.queries = queries.data(),
                    .group = group,
                    .logits = logits,
                    .mode = mode,
                    .seen_lse = seen.data(),
                    .caps = caps.empty() ? nullptr : caps.data()},
                   {read, scores.data(), read.size()});
  }
};

/// The rows that were not read, and for each of them the most rows that its partition had.
struct Unread {
  explicit Unread(const Step& step) {
    std::vector<char> is_read(step.tree.count(), 0);
    for (const uint32_t row : step.read_now()) is_read[row] = 1;
    const auto& tree = step.tree;
    for (size_t c = 0; c < tree.coarse().count(); ++c) {
      double left = 0.0;
      for (uint32_t f = tree.fine_begin(c); f < tree.fine_begin(c + 1); ++f) {
        double fine_left = 0.0;
        for (const uint32_t row : tree.rows_of(f)) {
          if (is_read[row] == 0) rows.push_back(row);
          fine_left += is_read[row] == 0 ? 1.0 : 0.0;
        }
        if (fine_left > 0.0) worst_ratio = std::max(worst_ratio, tree.fine().sizes[f] / fine_left);
        left += fine_left;
      }
      if (left > 0.0) worst_ratio = std::max(worst_ratio, tree.coarse().sizes[c] / left);
    }
  }
  std::vector<uint32_t> rows;
  double worst_ratio = 1.0;
};

/// A tail's state as it was written. Fails where it is not finite, or impossible.
struct Tail {
  Tail(TailEstimate& estimate, const Step& step)
      : dim(step.tree.dim()), o(size_t{step.group} * dim, NAN), lse(step.group, NAN) {
    estimate.state(step.kv.values.view(), {o.data(), lse.data()});
    for (const float x : o) EXPECT_TRUE(std::isfinite(x));
    const Unread unread(step);
    for (uint32_t h = 0; h < step.group; ++h) {
      EXPECT_TRUE(std::isfinite(lse[h]) || lse[h] == kMinusInf) << lse[h];
      // The weight is no more than that of all rows at the cap, or at the best of them: a mean is a lower bound that
      // no cap is above.
      const double cap = step.caps.empty() ? step.seen[h] : std::min(step.caps[h], step.seen[h]);
      double most = std::isfinite(step.seen[h]) ? cap : -INFINITY;
      for (const uint32_t row : unread.rows) {
        most = std::max(most, logit_of(step.score(h, row), step.logits));
      }
      // The mean of the remaining rows of a partition takes the error of the codes as often as rows have gone.
      const float* query = step.queries.data() + size_t{h} * dim;
      const double off =
          unread.rows.empty() ? 0.0 : code_error_bound(step.tree.codes(), query, dim);
      most += step.logits.scale * unread.worst_ratio * off;
      if (std::isfinite(step.seen[h]) && std::isfinite(most)) {
        EXPECT_LE(lse[h], std::log(unread.rows.size()) + most + 1e-3 + 1e-5 * std::fabs(most))
            << "head " << h;
      }
      EXPECT_GE(estimate.missing(h), 0.0F);
      EXPECT_LE(estimate.missing(h), 1.0F);
      EXPECT_GE(estimate.error(h, 1.0F), 0.0F);
      EXPECT_GE(estimate.error(h, 0.0F), 0.0F);
      EXPECT_TRUE(std::isfinite(estimate.error(h, 0.0F)));
    }
  }
  [[nodiscard]] Exact head(uint32_t h) const {
    return {lse[h], {o.begin() + h * dim, o.begin() + (h + 1) * dim}};
  }
  uint32_t dim;
  std::vector<float> o, lse;
};

/// Queries that int8 codes represent exactly, so that only formulas are compared: multiples of a step in the geometry
/// of the codes.
inline std::vector<float> exact_queries(const TailTree& tree, uint32_t group,
                                        std::mt19937& random) {
  const CodeScales s = scales_of(tree);
  keyhole::test::Normal<float> normal;
  std::vector<float> q;
  for (uint32_t h = 0; h < group; ++h) {
    for (uint32_t j = 0; j < tree.dim(); ++j) {
      const float integer = j == h % tree.dim()
                                ? 127.0F
                                : std::clamp(std::round(40.0F * normal(random)), -127.0F, 127.0F);
      q.push_back(integer / 64.0F / s.scales[j]);
    }
  }
  return q;
}

/// A random set of read rows: none, a few, many, whole partitions, all of some and part of others, or all.
inline std::vector<uint32_t> random_read_set(const TailTree& tree, std::mt19937& random) {
  std::vector<uint32_t> rows;
  const size_t way = random() % 6;
  const double share =
      way == 5 ? 1.0 : (way == 4 ? 0.9 : 0.02 * static_cast<double>(random() % 30));
  for (size_t f = 0; f < tree.fine().count(); ++f) {
    const bool whole = way == 1 ? random() % 2 == 0 : false;
    for (const uint32_t row : tree.rows_of(f)) {
      if (way == 0) continue;
      if (whole || static_cast<double>(random() % 1000) < 1000.0 * share) rows.push_back(row);
    }
  }
  std::shuffle(rows.begin(), rows.end(), random);
  return rows;
}

/// The scale of logits that gives those of head 0 about this spread.
inline float scale_for(const Step& step, double spread) {
  double sum = 0.0;
  double squares = 0.0;
  const auto n = static_cast<double>(step.tree.count());
  for (size_t row = 0; row < step.tree.count(); ++row) {
    const double s = step.score(0, row);
    sum += s / n;
    squares += s * s / n;
  }
  const double variance = squares - sum * sum;
  return static_cast<float>(spread / std::sqrt(std::max(variance, 1e-3 * squares + 1e-6)));
}

/// Adds a resident state above every key, so that no cap touches the estimate.
inline void add_resident(Step& step, double above) {
  step.resident.resize(step.group);
  for (uint32_t h = 0; h < step.group; ++h) {
    double top = -INFINITY;
    for (size_t row = 0; row < step.tree.count(); ++row) {
      top = std::max(top, logit_of(step.score(h, row), step.logits));
    }
    step.resident[h] = top + above;
  }
}

/// Blocks of equal keys that the codes represent exactly, each a segment of its own: no partition has any
/// variance. Values are random.
struct EqualBlocks {
  EqualBlocks(size_t blocks, size_t largest, uint32_t dim, DType dtype, const TailParams& params,
              std::mt19937& random)
      : kv(blocks * largest, dim, dtype), tree(context(), dim, dtype, params) {
    for (size_t b = 0; b < blocks; ++b) {
      const size_t n = 1 + random() % largest;
      std::vector<float> key(dim);
      // Codes learned from equal keys have steps of 1.
      for (float& x : key) x = static_cast<float>(static_cast<int>(random() % 21) - 10);
      std::vector<float> k;
      for (size_t i = 0; i < n; ++i) k.insert(k.end(), key.begin(), key.end());
      kv.add(k, gaussian(n, dim, random));
      if (b == 0) {
        tree.build(kv.view(), {});
      } else {
        tree.commit_append(*tree.prepare_append(kv.view(), {}));
      }
    }
  }
  KvRows kv;
  TailTree tree;
};

inline void expect_state_near(const Exact& got, const Exact& truth, double lse_bound,
                              double o_bound, uint32_t h) {
  if (truth.lse == -INFINITY) {
    ASSERT_EQ(got.lse, -INFINITY) << "head " << h;
  } else {
    ASSERT_NEAR(got.lse, truth.lse, lse_bound) << "head " << h;
  }
  for (size_t j = 0; j < truth.o.size(); ++j) {
    ASSERT_NEAR(got.o[j], truth.o[j], o_bound) << "head " << h << ", element " << j;
  }
}

inline double largest_value(const KvRows& kv) {
  double largest = 0.0;
  for (size_t row = 0; row < kv.count(); ++row) {
    for (const double v : decoded(kv.values.view(), row)) largest = std::max(largest, std::fabs(v));
  }
  return largest;
}

}  // namespace keyhole::index::test
