#include "index/partitions/rope_undo.h"

#include <algorithm>
#include <cmath>

namespace keyhole::index {
namespace {

// Of the saved number of pairs: a bit that no number of them has.
constexpr uint32_t kInterleaved = uint32_t{1} << 31;

}  // namespace

RopeUndo::RopeUndo(const RopeParams* params, uint32_t dim, uint32_t first_position)
    : dim_(dim), first_position_(first_position) {
  if (params == nullptr || params->theta == 0.0F) return;
  const uint32_t rotary = params->rotary_dim == 0 ? dim : params->rotary_dim;
  const std::vector<float>& scale = params->inv_freq_scale;
  if (!(params->theta > 0.0F) || rotary % 2 != 0 || rotary > dim ||
      (!scale.empty() && scale.size() != rotary / 2)) {
    throw Error(
        Status::invalid_argument,
        "RoPE of base " + std::to_string(params->theta) + ", " + std::to_string(rotary) +
            " components and " + std::to_string(scale.size()) +
            " scaled frequencies; allowed for head dimension " + std::to_string(dim) +
            ": a base above 0, an even number of components up to it, half as many scales or none");
  }
  interleaved_ = params->interleaved;
  frequencies_.resize(rotary / 2);
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    frequencies_[i] = std::pow(double{params->theta}, -2.0 * static_cast<double>(i) / rotary) *
                      (scale.empty() ? 1.0 : double{scale[i]});
  }
}

void RopeUndo::balance_pairs(const std::vector<float>& scale) {
  const size_t half = frequencies_.size();
  std::vector<float> own(dim_, 1.0F);
  bool some = false;
  for (size_t i = 0; i < half && scale.size() == dim_; ++i) {
    const float width = scale[low(i)], other = scale[high(i)];
    if (!(std::max(width, other) > kUnlike * std::min(width, other))) continue;
    // Scales are relative to their mean: the width of the pair as a whole is left to the scales of what is turned
    // back.
    const float mean = std::sqrt(width) * std::sqrt(other);
    own[low(i)] = width / mean;
    own[high(i)] = other / mean;
    some = true;
  }
  scale_ = some ? std::move(own) : std::vector<float>{};
}

uint32_t RopeUndo::partner(uint32_t channel) const {
  if (channel >= 2 * pairs()) return channel;
  if (interleaved_) return channel ^ 1U;
  return channel < pairs() ? channel + pairs() : channel - pairs();
}

void RopeUndo::turn_back(float* rows, size_t n, int64_t position) const {
  const size_t half = frequencies_.size();
  float cosines[kMaxHeadDim / 2];
  float sines[kMaxHeadDim / 2];
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * frequencies_[i];
    cosines[i] = static_cast<float>(std::cos(angle));
    sines[i] = static_cast<float>(std::sin(angle));
  }
  for (float* row = rows; row != rows + n * dim_; row += dim_) {
    for (size_t i = 0; i < half; ++i) {
      const float a = row[low(i)];
      const float b = row[high(i)];
      row[low(i)] = a * cosines[i] + b * sines[i];
      row[high(i)] = b * cosines[i] - a * sines[i];
    }
  }
}

void RopeUndo::rows(float* rows, size_t first, size_t n) const {
  if (!changes()) return;
  for (size_t i = 0; i < n; ++i) {
    float* row = rows + i * dim_;
    for (uint32_t j = 0; j < dim_ && !offset_.empty(); ++j) row[j] -= offset_[j];
    for (uint32_t j = 0; j < dim_ && !scale_.empty(); ++j) row[j] *= scale_[j];
    turn_back(row, 1, first_position_ + static_cast<uint32_t>(first + i));
  }
}

const float* RopeUndo::queries(const SearchArgs& args, size_t count, float* out) const {
  if (!changes()) return args.queries;
  std::copy_n(args.queries, size_t{args.group} * dim_, out);
  for (uint32_t j = 0; j < args.group * dim_ && !scale_.empty(); ++j) out[j] /= scale_[j % dim_];
  turn_back(out, args.group,
            args.position != kUnknownPosition ? args.position
                                              : first_position_ + static_cast<uint32_t>(count));
  return out;
}

void RopeUndo::save(Writer& out) const {
  out.put(first_position_);
  out.put(pairs() | (interleaved_ ? kInterleaved : 0U));
  out.put_array(frequencies_.data(), frequencies_.size());
  out.put(static_cast<uint32_t>(scale_.size()));
  out.put_array(scale_.data(), scale_.size());
  out.put(static_cast<uint32_t>(offset_.size()));
  out.put_array(offset_.data(), offset_.size());
}

RopeUndo RopeUndo::load(Reader& in, uint32_t dim) {
  RopeUndo undo;
  undo.dim_ = dim;
  undo.first_position_ = in.get<uint32_t>();
  const auto saved = in.get<uint32_t>();
  const uint32_t pairs = saved & ~kInterleaved;
  undo.interleaved_ = (saved & kInterleaved) != 0;
  require_sound(pairs <= dim / 2, "RoPE of more components than a key has");
  undo.frequencies_ = in.get_array<double>(pairs);
  require_sound(std::all_of(undo.frequencies_.begin(), undo.frequencies_.end(),
                            [](double f) { return std::isfinite(f); }),
                "a RoPE frequency that is not finite");
  const auto scales = in.get<uint32_t>();
  require_sound(scales == 0 || (scales == dim && pairs != 0),
                "scales of other channels than keys have");
  undo.scale_ = in.get_array<float>(scales);
  require_sound(std::all_of(undo.scale_.begin(), undo.scale_.end(),
                            [](float s) { return std::isfinite(s) && s > 0.0F; }),
                "an impossible scale of a channel");
  const auto offsets = in.get<uint32_t>();
  require_sound(offsets == 0 || (offsets == dim && pairs != 0),
                "means of other channels than keys have");
  undo.offset_ = in.get_array<float>(offsets);
  require_sound(std::all_of(undo.offset_.begin(), undo.offset_.end(),
                            [](float x) { return std::isfinite(x); }),
                "a mean of a channel that is not finite");
  return undo;
}

}  // namespace keyhole::index
