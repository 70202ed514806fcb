// Symmetric int8 quantisation of a row, or of the channels of a block of rows: x ~ scale * q, q in [-127, 127].
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace keyhole::cpu {

/// Quantises one fp32 row of `dim`: scale = max|x| / 127 (0 for an all-zero row). Round to nearest even.
/// Returns the scale. The error per element is at most scale / 2.
float quantise_row(const float* src, uint32_t dim, int8_t* dst);

/// Quantises the channels (columns) of a block of finite fp32 rows to int8 with one bf16 scale for each channel: the
/// bf16 nearest to max|x| / 127, and 0 for a channel below 1e-30. The error of an element is at most scale / 2. Rows
/// come twice, first all to look(), then all to write(), so that none has to be kept.
class ChannelQuantiser {
 public:
  /// dim: at most kMaxHeadDim.
  explicit ChannelQuantiser(uint32_t dim) : dim_(dim) {}

  void look(const float* row);
  /// Writes the scales `[dim]`; called once, between look() and write(). `most` is the largest number of the rows'
  /// dtype, which no |scale * q| exceeds: a channel whose largest element comes within half a percent of it may get a
  /// smaller scale, and elements near it are then off by up to 1.5 * scale.
  void choose_scales(float most, uint16_t* scales);
  void write(const float* row, int8_t* out) const;

 private:
  uint32_t dim_;
  float numbers_[kMaxHeadDim] = {};  // max|x|, then what elements are divided by
};

}  // namespace keyhole::cpu
