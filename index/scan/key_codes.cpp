#include "index/scan/key_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/quantise.h"
#include "cpu/row_access.h"

namespace keyhole::index {
namespace {

constexpr size_t kReadAhead =
    64;  // bytes after the last row that vector loads may prefetch, never read

}  // namespace

void KeyCodes::learn(const RowsView& keys) {
  std::vector<double> sum(dim_, 0.0);
  std::vector<float> low(dim_, std::numeric_limits<float>::infinity());
  std::vector<float> high(dim_, kMinusInf);
  float row[kMaxHeadDim];
  for (size_t i = 0; i < keys.tokens; ++i) {
    cpu::read_row(*kernels_, keys, i, row);
    for (uint32_t j = 0; j < dim_; ++j) {
      sum[j] += row[j];
      low[j] = std::min(low[j], row[j]);
      high[j] = std::max(high[j], row[j]);
    }
  }
  center_.assign(dim_, 0.0F);
  scales_.assign(dim_, 1.0F);
  for (uint32_t j = 0; j < dim_ && keys.tokens > 0; ++j) {
    center_[j] = static_cast<float>(sum[j] / static_cast<double>(keys.tokens));
    // Halves, so that the width of the widest floats does not overflow.
    const float widest = std::max(high[j] / 2 - center_[j] / 2, center_[j] / 2 - low[j] / 2);
    const float scale = widest / 127.0F * 2.0F;
    scales_[j] = scale > 1e-30F && std::isfinite(scale) ? scale : 1.0F;
  }
  count_ = 0;
}

void KeyCodes::learn_from(const KeyCodes& other) {
  center_ = other.center_;
  scales_ = other.scales_;
  count_ = 0;
}

void KeyCodes::build(const RowsView& keys, size_t capacity) {
  learn(keys);
  codes_ = cpu::ReservedBuffer(std::max(capacity, keys.tokens) * stride() + kReadAhead);
  encode_rows(keys, 0, keys.tokens, reinterpret_cast<int8_t*>(codes_.data()));
  count_ = keys.tokens;
}

void KeyCodes::encode_rows(const RowsView& keys, size_t first, size_t n, int8_t* out) const {
  float row[kMaxHeadDim];
  for (size_t i = 0; i < n; ++i) {
    cpu::read_row(*kernels_, keys, first + i, row);
    for (uint32_t j = 0; j < dim_; ++j) {
      const float x = std::nearbyint((row[j] - center_[j]) / scales_[j]);
      out[i * stride() + j] = static_cast<int8_t>(std::clamp(x, -127.0F, 127.0F));
    }
  }
}

std::vector<int8_t> KeyCodes::encode(const RowsView& keys, size_t first) const {
  std::vector<int8_t> codes((keys.tokens - first) * stride());
  encode_rows(keys, first, keys.tokens - first, codes.data());
  return codes;
}

void KeyCodes::append(const std::vector<int8_t>& codes) {
  const size_t used = count_ * stride();
  if (used + codes.size() + kReadAhead > codes_.bytes()) {
    cpu::ReservedBuffer larger(2 * (used + codes.size()) + kReadAhead);
    if (used > 0) std::memcpy(larger.data(), codes_.data(), used);
    codes_ = std::move(larger);
  }
  std::memcpy(codes_.data() + used, codes.data(), codes.size());
  count_ += codes.size() / stride();
}

void KeyCodes::encode_queries(const float* queries, uint32_t group, Queries& out) const {
  float scaled[kMaxHeadDim];
  out.group = group;
  for (uint32_t h = 0; h < group; ++h) {
    for (uint32_t j = 0; j < dim_; ++j) scaled[j] = queries[size_t{h} * dim_ + j] * scales_[j];
    out.scales[h] = cpu::quantise_row(scaled, dim_, out.elements + size_t{h} * dim_);
  }
}

float KeyCodes::center_score(const float* query) const {
  // Several sums, because additions wait for each other. Head dimensions are multiples of 16.
  double sums[4] = {};
  for (uint32_t j = 0; j < dim_; j += 4) {
    for (uint32_t i = 0; i < 4; ++i) sums[i] += double{query[j + i]} * center_[j + i];
  }
  return static_cast<float>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void KeyCodes::score(const Queries& queries, const int8_t* rows, const uint32_t* ids, size_t n,
                     float* scores, size_t score_stride) const {
  kernels_->score_i8({.queries = queries.elements,
                      .query_scales = queries.scales,
                      .group = queries.group,
                      .dim = dim_,
                      .keys = rows,
                      .key_stride = stride(),
                      .ids = ids,
                      .count = n,
                      .scores = scores,
                      .score_stride = score_stride});
}

double KeyCodes::error_spread(const float* query) const {
  double largest = 0.0;
  double squares = 0.0;
  for (uint32_t j = 0; j < dim_; ++j) {
    const double scaled = std::abs(double{query[j]} * scales_[j]);
    largest = std::max(largest, scaled);
    squares += scaled * scaled;
  }
  // A code is off by up to half a step, with variance 1/12; a query element by as much of largest / 127, and it
  // meets a code of some tens.
  const double step = largest / 127.0;
  return std::sqrt((squares + step * step * dim_ * 32.0 * 32.0) / 12.0);
}

void KeyCodes::save(Writer& out) const {
  out.put_array(center_.data(), center_.size());
  out.put_array(scales_.data(), scales_.size());
}

void KeyCodes::load_scales(Reader& in) {
  center_ = in.get_array<float>(dim_);
  scales_ = in.get_array<float>(dim_);
  for (uint32_t j = 0; j < dim_; ++j) {
    require_sound(std::isfinite(center_[j]), "a centre that is not finite");
    require_sound(std::isfinite(scales_[j]) && scales_[j] > 0.0F, "an impossible scale");
  }
  count_ = 0;
}

void KeyCodes::load(Reader& in, const RowsView& keys) {
  load_scales(in);
  codes_ = cpu::ReservedBuffer(2 * keys.tokens * stride() + kReadAhead);
  encode_rows(keys, 0, keys.tokens, reinterpret_cast<int8_t*>(codes_.data()));
  count_ = keys.tokens;
}

}  // namespace keyhole::index
