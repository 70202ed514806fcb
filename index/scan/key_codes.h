// Keys as int8, for traversal and scanning: half the bytes of fp16, and integer products where the machine
// has them. Keys are centred (no softmax and no ranking changes by it: every score of a query shifts by the
// same amount) and scaled per channel, because RoPE leaves some channels many times as wide as others; the
// scales move into the query, so that a code is nothing but its bytes: one cache line less per random key than
// with a scale of its own.
#pragma once

#include <vector>

#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "index/serial.h"

namespace keyhole::index {

class KeyCodes {
 public:
  KeyCodes() = default;
  KeyCodes(const cpu::Kernels& kernels, uint32_t dim) : kernels_(&kernels), dim_(dim) {}

  KeyCodes(const KeyCodes& o)
      : kernels_(o.kernels_),
        dim_(o.dim_),
        count_(o.count_),
        center_(o.center_),
        scales_(o.scales_),
        codes_(o.codes_.copy(count_ * dim_)) {}
  KeyCodes(KeyCodes&&) = default;
  KeyCodes& operator=(KeyCodes&&) = default;

  /// Learns centre and scales from all of `keys`; holds no codes.
  void learn(const RowsView& keys);
  /// Takes over centre and scales of `other`; holds no codes.
  void learn_from(const KeyCodes& other);
  /// Learns from all of `keys` and encodes them; memory is reserved for `capacity` rows.
  void build(const RowsView& keys, size_t capacity);

  /// Encodes n rows from `first` on, `[n, stride()]`, for callers that keep codes themselves.
  void encode_rows(const RowsView& keys, size_t first, size_t n, int8_t* out) const;

  /// Encodes rows [count(), keys.tokens) without taking them in.
  [[nodiscard]] std::vector<int8_t> encode(const RowsView& keys, size_t first) const;
  /// Takes in the codes of rows [count(), ...). Elements beyond the range that build() saw are saturated.
  void append(const std::vector<int8_t>& codes);
  void truncate(size_t count) { count_ = std::min(count_, count); }

  /// A key's element is about center(j) + scale(j) * its code.
  [[nodiscard]] float center(uint32_t j) const { return center_[j]; }
  [[nodiscard]] float scale(uint32_t j) const { return scales_[j]; }

  [[nodiscard]] size_t count() const { return count_; }
  [[nodiscard]] size_t stride() const { return dim_; }  ///< bytes of a row
  [[nodiscard]] const int8_t* row(size_t i) const {
    return reinterpret_cast<const int8_t*>(codes_.data()) + i * stride();
  }

  /// A group's queries in the geometry of the codes.
  struct Queries {
    alignas(64) int8_t elements[kMaxGroup * kMaxHeadDim];
    float scales[kMaxGroup];
    uint32_t group;
  };
  void encode_queries(const float* queries, uint32_t group, Queries& out) const;
  /// The inner product of a query with the centre, a constant that score() leaves out.
  [[nodiscard]] float center_score(const float* query) const;
  /// Scores the codes rows[ids[0..n) * stride()] (ids null: n rows one after the other), which need not be this
  /// object's own: the scores of the keys, less a constant for each query, up to rounding. The rounding of a key is
  /// at most half a scale for each channel, that of a query half a step.
  void score(const Queries& queries, const int8_t* rows, const uint32_t* ids, size_t n,
             float* scores, size_t score_stride) const;

  [[nodiscard]] size_t bytes() const {
    return count_ == 0 ? 0 : count_ * stride() + 2 * dim_ * sizeof(float);
  }
  [[nodiscard]] static size_t estimate(size_t count, uint32_t dim) {
    return count == 0 ? 0 : count * dim + 2 * dim * sizeof(float);
  }

  /// The standard deviation of a score's error, apart from that constant: roundings are uniform and independent.
  [[nodiscard]] double error_spread(const float* query) const;

  /// Centre and scales are saved; codes are made again from the keys.
  void save(Writer& out) const;
  void load_scales(Reader& in);
  void load(Reader& in, const RowsView& keys);

 private:
  const cpu::Kernels* kernels_ = nullptr;
  uint32_t dim_ = 0;
  size_t count_ = 0;
  std::vector<float> center_;  // `[dim]`
  std::vector<float> scales_;  // `[dim]`, > 0
  cpu::ReservedBuffer codes_;
};

}  // namespace keyhole::index
