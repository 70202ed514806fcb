// Searches in unordered floats, without branches on the data.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#include "cpu/types.h"
#include "index/scan/sixteen.h"

namespace keyhole::index {

/// The position of the first largest of x[0..n), n > 0. NaN is never the largest, unless all are: then the first.
[[nodiscard]] inline size_t position_of_largest(const float* x, size_t n) {
  using namespace detail;
  float largest = kMinusInf;
  size_t i = 0;
  if (n >= kSixteen) {
    Quad best[4];
    for (size_t j = 0; j < 4; ++j) best[j] = load(x + 4 * j);
    for (i = kSixteen; i + kSixteen <= n; i += kSixteen) {
      for (size_t j = 0; j < 4; ++j) {
        const Quad v = load(x + i + 4 * j);
        best[j] = v > best[j] ? v : best[j];
      }
    }
    for (size_t j = 0; j < 4; ++j) {
      for (size_t l = 0; l < 4; ++l) largest = std::max(largest, best[j][l]);
    }
  }
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (i = 0; i + kSixteen <= n; i += kSixteen) {
    if (!all_below(x + i, largest)) break;
  }
  for (; i < n; ++i) {
    if (x[i] == largest) return i;
  }
  return 0;
}

/// How many of x[0..n) are above `limit`.
[[nodiscard]] inline size_t count_above(const float* x, size_t n, float limit) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) count += static_cast<size_t>(x[i] > limit);
  return count;
}

/// The k-th largest of x[0..n), k >= 1, -inf where there are fewer; reorders x. Quickselect whose partition has
/// no branch on the data (see topk.cpp).
[[nodiscard]] inline float kth_largest(float* x, size_t n, size_t k) {
  if (k > n) return kMinusInf;
  size_t begin = 0;
  size_t end = n;
  for (int round = 0; round < 64 && end - begin > 8; ++round) {
    float a = x[begin];
    const float b = x[begin + (end - begin) / 2];
    float c = x[end - 1];
    if (a > c) std::swap(a, c);
    const float pivot = std::max(a, std::min(b, c));
    size_t middle = begin;
    for (size_t i = begin; i < end; ++i) {
      const float v = x[i];
      x[i] = x[middle];
      x[middle] = v;
      middle += static_cast<size_t>(v > pivot);
    }
    // [begin, middle) > pivot >= [middle, end)
    if (k <= middle) {
      end = middle;
    } else {
      begin = middle;
    }
  }
  std::nth_element(x + begin, x + k - 1, x + end, std::greater<>());
  return x[k - 1];
}

}  // namespace keyhole::index
