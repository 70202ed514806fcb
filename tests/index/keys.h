// Keys, queries and the independent truth of the index tests: rows decoded to double, every inner product
// taken in double, everything sorted.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "index/scan/key_codes.h"
#include "index/types/factory.h"
#include "tests/index/synthetic.h"
#include "tests/sanitized.h"
#include "tests/shapes.h"

namespace keyhole::index::test {

using keyhole::test::cases;
using keyhole::test::unless_sanitized;

/// RoPE as most models have it.
inline const RopeParams kRope = {10000.0F, 0, {}};

inline Context context(cpu::Pool* pool = nullptr) { return {&cpu::select_kernels(), pool}; }

/// Rows of one head in memory that does not move while it grows, as an index expects.
class Keys {
 public:
  Keys(size_t capacity, uint32_t dim, DType dtype)
      : dim_(dim), dtype_(dtype), bytes_(capacity * dim * dtype_size(dtype)) {}

  /// Writes values `[n, dim]` to rows [first, first + n); the count becomes first + n.
  void put(size_t first, const std::vector<float>& values) {
    const size_t n = values.size() / dim_;
    ASSERT_LE((first + n) * row_bytes(), bytes_.size());
    kernels().from_f32[static_cast<size_t>(dtype_)](
        values.data(), bytes_.data() + first * row_bytes(), values.size());
    count_ = first + n;
  }
  /// Makes rows [count, end of memory) unusable, as memory is that was given back.
  void poison(size_t count) {
    std::fill(bytes_.begin() + static_cast<std::ptrdiff_t>(count * row_bytes()), bytes_.end(),
              std::byte{0xFF});  // NaN in every dtype
    count_ = count;
  }

  [[nodiscard]] RowsView view() const { return view(count_); }
  [[nodiscard]] RowsView view(size_t count) const {
    return dense_rows(bytes_.data(), count, dim_, dtype_);
  }
  [[nodiscard]] size_t count() const { return count_; }
  [[nodiscard]] uint32_t dim() const { return dim_; }
  [[nodiscard]] DType dtype() const { return dtype_; }

  /// Inner product of row i with a query, in double.
  [[nodiscard]] double score(size_t i, const float* query) const {
    float row[kMaxHeadDim];
    kernels().to_f32[static_cast<size_t>(dtype_)](bytes_.data() + i * row_bytes(), row, dim_);
    double sum = 0.0;
    for (uint32_t j = 0; j < dim_; ++j) sum += double{row[j]} * query[j];
    return sum;
  }

 private:
  static const cpu::Kernels& kernels() { return *cpu::kernels_for(cpu::Level::scalar); }
  [[nodiscard]] size_t row_bytes() const { return dim_ * dtype_size(dtype_); }

  uint32_t dim_;
  DType dtype_;
  std::vector<std::byte> bytes_;
  size_t count_ = 0;
};

/// attention_queries() drawn towards rows of `keys`.
inline std::vector<float> attention_queries(size_t n, uint32_t dim, const Keys& keys,
                                            std::mt19937& random) {
  if (keys.count() == 0) return gaussian(n, dim, random);
  const auto row = [&](size_t i, float* out) {
    context().kernels->to_f32[static_cast<size_t>(keys.dtype())](keys.view().row(i), out, dim);
  };
  return attention_queries(n, dim, keys.count(), row, random);
}

/// The largest error of a score by codes, apart from the constant of its query, for keys that were not saturated:
/// half a scale per channel from the key, and half a step of the query, which meets a code of at most 127.
inline double code_error_bound(const KeyCodes& codes, const float* query, uint32_t dim) {
  double largest = 0.0;
  double key_part = 0.0;
  for (uint32_t j = 0; j < dim; ++j) {
    const double scaled = std::abs(double{query[j]} * codes.scale(j));
    key_part += scaled / 2;
    largest = std::max(largest, scaled);
  }
  return key_part + dim * 127.0 * (largest / 127.0 / 2);
}

/// The rows of one head's answer.
struct Found {
  std::vector<uint32_t> ids;
  std::vector<float> scores;
  bool operator==(const Found&) const = default;
};

struct Answer {
  std::vector<Found> heads;
  uint64_t keys_scored = 0;
  uint64_t bytes_read = 0;
};

inline Answer search(const Index& index, const std::vector<float>& queries, uint32_t dim,
                     uint32_t k, Scratch& scratch) {
  const auto group = static_cast<uint32_t>(queries.size() / dim);
  std::vector<uint32_t> ids(size_t{group} * k, 0xDEADBEEF);
  std::vector<float> scores(size_t{group} * k, -1.0F);
  std::vector<uint32_t> counts(group, 0xDEADBEEF);
  Hits hits{ids.data(), scores.data(), counts.data()};
  index.search(queries.data(), group, k, scratch, hits);
  Answer answer;
  answer.keys_scored = hits.keys_scored;
  answer.bytes_read = hits.bytes_read;
  for (uint32_t h = 0; h < group; ++h) {
    EXPECT_LE(counts[h], k);
    const auto begin = static_cast<std::ptrdiff_t>(size_t{h} * k);
    const auto end = begin + static_cast<std::ptrdiff_t>(std::min(counts[h], k));
    answer.heads.push_back(
        {{ids.begin() + begin, ids.begin() + end}, {scores.begin() + begin, scores.begin() + end}});
  }
  return answer;
}
inline Answer search(const Index& index, const std::vector<float>& queries, uint32_t dim,
                     uint32_t k) {
  const auto scratch = index.make_scratch(static_cast<uint32_t>(queries.size() / dim), k);
  return search(index, queries, dim, k, *scratch);
}

inline std::unique_ptr<Index> built(const std::string& spec, const Keys& keys,
                                    cpu::Pool* pool = nullptr) {
  auto index = make_index(spec, keys.dim(), keys.dtype(), context(pool));
  BuildInput input;
  input.keys = keys.view();
  index->build(input, {});
  return index;
}

/// The pairs (score, row) of all rows, best first; of equal scores the smaller row first.
inline std::vector<std::pair<double, uint32_t>> truth(const Keys& keys, const float* query) {
  std::vector<std::pair<double, uint32_t>> all;
  for (uint32_t i = 0; i < keys.count(); ++i) all.emplace_back(keys.score(i, query), i);
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  return all;
}

/// Checks what holds for every answer, however approximate: distinct rows below the count, with their true inner
/// products, in the contract's order.
inline void expect_sound(const Found& found, const Keys& keys, const float* query) {
  std::vector<uint32_t> sorted = found.ids;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end()) << "a row came twice";
  for (size_t i = 0; i < found.ids.size(); ++i) {
    ASSERT_LT(found.ids[i], keys.count());
    const double expected = keys.score(found.ids[i], query);
    // 256 products of fp32: the sum's rounding is far below this share of the largest score.
    EXPECT_NEAR(found.scores[i], expected, 1e-3 * (1.0 + std::abs(expected)));
    if (i == 0) continue;
    EXPECT_TRUE(found.scores[i - 1] > found.scores[i] ||
                (found.scores[i - 1] == found.scores[i] && found.ids[i - 1] < found.ids[i]))
        << "out of order at " << i;
  }
}

/// Checks that nothing better was left out: there are as many rows as there can be, and no row outside beats one
/// inside by more than rounding.
inline void expect_exact(const Found& found, const Keys& keys, const float* query, uint32_t k) {
  expect_sound(found, keys, query);
  const auto all = truth(keys, query);
  const size_t expected = std::min<size_t>(k, all.size());
  ASSERT_EQ(found.ids.size(), expected);
  for (size_t i = 0; i < expected; ++i) {
    EXPECT_NEAR(found.scores[i], all[i].first, 1e-3 * (1.0 + std::abs(all[i].first)))
        << "rank " << i;
  }
}

/// The share of the true k best rows that were found.
inline double recall(const Found& found, const Keys& keys, const float* query, uint32_t k) {
  const auto all = truth(keys, query);
  const size_t expected = std::min<size_t>(k, all.size());
  if (expected == 0) return 1.0;
  size_t hits = 0;
  for (size_t i = 0; i < expected; ++i) {
    hits += static_cast<size_t>(std::count(found.ids.begin(), found.ids.end(), all[i].second));
  }
  return static_cast<double>(hits) / static_cast<double>(expected);
}

/// The mean recall@k over `groups` group searches of 2 heads with attention_queries().
inline double mean_recall(const Index& index, const Keys& keys, uint32_t k, int groups,
                          std::mt19937& random) {
  double sum = 0.0;
  for (int g = 0; g < groups; ++g) {
    const auto queries = attention_queries(2, keys.dim(), keys, random);
    const Answer answer = search(index, queries, keys.dim(), k);
    for (size_t h = 0; h < 2; ++h) {
      expect_sound(answer.heads[h], keys, queries.data() + h * keys.dim());
      sum += recall(answer.heads[h], keys, queries.data() + h * keys.dim(), k);
    }
  }
  return sum / (2.0 * groups);
}

/// The bytes of a saved index.
inline std::string saved_bytes(const Index& index) {
  std::ostringstream out;
  index.save(out);
  return out.str();
}

inline double diagnostic(const Index& index, const std::string& name) {
  for (const auto& [key, value] : index.info().diagnostics) {
    if (key == name) return value;
  }
  ADD_FAILURE() << "no diagnostic " << name;
  return -1.0;
}

inline const std::vector<uint32_t>& head_dims() {
  static const std::vector<uint32_t> dims(std::begin(keyhole::test::kHeadDims),
                                          std::end(keyhole::test::kHeadDims));
  return dims;
}
inline const std::vector<DType>& key_dtypes() {
  static const std::vector<DType> dtypes = {DType::f32, DType::f16, DType::bf16};
  return dtypes;
}

}  // namespace keyhole::index::test
