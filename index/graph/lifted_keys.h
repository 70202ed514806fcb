// The geometry in which graph edges are chosen. Lifting appends sqrt(phi^2 - |k|^2) to each key: all keys
// then have length phi, so the largest inner product is the smallest L2 distance and a key is its own
// nearest neighbour. Raw inner products disconnect a graph of attention keys: a few long keys are
// "nearest" to everything and occlude all else (CIKM '26, doi 10.1145/3799682.3839984: degree 1.4,
// recall@10 21 %; lifted: degree 43, 96 %).
#pragma once

#include <vector>

#include "cpu/kernels.h"

namespace keyhole::index {

/// Keys of one head with their extra coordinate; nothing but that coordinate is stored.
class LiftedKeys {
 public:
  /// Over rows [0, keys.count). radius: phi; longer keys get 0 for their coordinate (their edges are
  /// slightly off, their scores never). A radius of 0 gives raw inner products.
  LiftedKeys(const cpu::Kernels& kernels, const RowsView& keys, double radius);

  /// The largest |k| among the keys; 0 for none.
  static double largest_norm(const cpu::Kernels& kernels, const RowsView& keys);

  /// The length that a share `quantile` of the keys does not exceed; 0 for none. As a radius it keeps a few
  /// outliers from flattening all other keys onto a small cap of the sphere.
  static double norm_quantile(const cpu::Kernels& kernels, const RowsView& keys, double quantile);

  [[nodiscard]] const RowsView& rows() const { return keys_; }
  /// The appended coordinate of each row.
  [[nodiscard]] const std::vector<float>& extra() const { return extra_; }

  /// Writes a row, `[dim]`, to `query` and returns its appended coordinate.
  float load(uint32_t row, float* query) const;
  /// Inner products of a row, as load() gave it, with rows ids[0..n), lifted: larger is nearer.
  void similarity(const float* query, float extra, const uint32_t* ids, size_t n, float* out) const;

 private:
  const cpu::Kernels* kernels_;
  RowsView keys_;
  std::vector<float> extra_;  // the appended coordinate
};

}  // namespace keyhole::index
