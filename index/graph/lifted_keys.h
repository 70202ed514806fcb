// The geometry in which graph edges are chosen. Lifting appends sqrt(phi^2 - |x|^2) to each key: all keys
// then have length phi, so the largest inner product is the smallest L2 distance and a key is its own
// nearest neighbour. Raw inner products disconnect a graph of attention keys: a few long keys are
// "nearest" to everything and occlude all else (CIKM '26, doi 10.1145/3799682.3839984: degree 1.4,
// recall@10 21 %; lifted: degree 43, 96 %).
//
// What is lifted is x = s * (key - mean of the keys), s being the scale of each channel (scan/balance.h). Neither
// changes which keys a query wants most, and without them a few wide channels, or a channel far from 0, decide alone
// what is near. No key is copied: the inner product of x and y is that of s^2 * (key - mean) and the other key as it
// lies in memory, less a number that is the same for all y.
#pragma once

#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "index/serial.h"

namespace keyhole::index {

/// The parameters that lift a graph's keys, fixed by its first rows.
struct Lift {
  double radius = 0.0;        ///< phi; 0: raw inner products
  std::vector<float> center;  ///< `[dim]`; empty: 0

  /// Learns from `rows` of the keys (empty: all), centred and scaled by `scale`. The radius is the length that a
  /// share `quantile` of them does not exceed (1: the longest). Less than 1 keeps a few outliers from flattening all
  /// other keys onto a small cap of the sphere.
  [[nodiscard]] static Lift of(const cpu::Kernels& kernels, const RowsView& keys,
                               std::span<const float> scale, double quantile,
                               std::span<const uint32_t> rows = {});

  void save(Writer& out) const;
  /// Reads a saved Lift. Throws Error(corrupt).
  [[nodiscard]] static Lift load(Reader& in, uint32_t dim);
};

/// Keys of one head with their extra coordinate; nothing but that coordinate is stored.
class LiftedKeys {
 public:
  /// Lifts rows [0, keys.tokens). scale: `[dim]` s, empty: 1. Keys longer than the radius get 0 as their coordinate
  /// (their edges are slightly off, their scores never).
  LiftedKeys(const cpu::Kernels& kernels, const RowsView& keys, const Lift& lift,
             std::span<const float> scale);

  [[nodiscard]] const RowsView& rows() const { return keys_; }
  /// The appended coordinate of each row.
  [[nodiscard]] const std::vector<float>& extra() const { return extra_; }
  /// Copies the scaled and centred keys of `rows` (empty: all), `[rows, dim]`, for an accelerator: as fp32 for fp32
  /// keys, otherwise as fp16 whatever the range of the keys, because scaled elements are about 1.
  [[nodiscard]] std::vector<std::byte> copy(std::span<const uint32_t> rows = {}) const;
  [[nodiscard]] DType copy_dtype() const {
    return keys_.dtype == DType::f32 ? DType::f32 : DType::f16;
  }

  /// A row that others are compared with.
  struct Query {
    float elements[kMaxHeadDim] = {};
    float extra = 0.0F;
    float shift = 0.0F;
  };
  void load(uint32_t row, Query& query) const;
  /// The squared length of a row's key, scaled and centred, without the extra coordinate.
  [[nodiscard]] double square(size_t row) const;
  /// False where the lift was made of keys that are all equal: their lengths say nothing about others.
  [[nodiscard]] bool is_lifted() const { return is_lifted_; }
  /// Inner products with rows ids[0..n), lifted: larger is nearer.
  void similarity(const Query& query, const uint32_t* ids, size_t n, float* out) const;

 private:
  /// Writes the scaled and centred key of a row, `[dim]`.
  void place(size_t row, double* x) const;

  const cpu::Kernels* kernels_;
  RowsView keys_;
  std::vector<double> center_, scale_;
  bool is_lifted_;
  std::vector<float> extra_;  // the appended coordinate
};

}  // namespace keyhole::index
