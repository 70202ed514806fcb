#include "runtime/prefill/block_choice.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace keyhole::runtime {
namespace {

// Bins of 1/8 of an octave down to 2^-32 of a sample's weight.
constexpr uint32_t kBins = 256;
constexpr float kBinsOfOctave = 8.0F;
// A sample is alone in a block where it has so many times the weight of any other.
constexpr float kAlone = 8.0F;

uint64_t in_units(float share) {
  return std::isnan(share) ? 0 : static_cast<uint64_t>(double{share} * kShareUnits);
}

/// Of a share of all samples together: 0 for 1, one more for each 1/8 of an octave less. What is not finite is
/// attended, so that outputs say so.
uint32_t bin_of(float share) {
  if (std::isnan(share)) return 0;
  if (share <= 0.0F) return kBins - 1;
  const float place = -std::log2(share) * kBinsOfOctave;
  return static_cast<uint32_t>(std::clamp(place, 0.0F, static_cast<float>(kBins - 1)));
}

/// ln of the whole weight of a sample.
float whole(const float* row, const cpu::PromptPiece::Span& seen) {
  const float top = *std::max_element(row + seen.begin, row + seen.end);
  if (top == kMinusInf) return 0.0F;
  float sum = 0.0F;
  for (uint32_t b = seen.begin; b < seen.end; ++b) sum += std::exp(row[b] - top);
  return top + std::log(sum);
}

/// What is kept anyhow, and the `most` heaviest others that have any weight, rising; their number. Blocks of a unit
/// have the same share.
template <class IsKept>
uint32_t keep_heaviest(const cpu::PromptPiece::Span& seen, uint32_t most, uint32_t unit,
                       IsKept&& is_kept, const float* shares, uint32_t* list) {
  uint32_t* end = list;
  for (uint32_t b = seen.begin; b < seen.end; b += unit) {
    if (!is_kept(b) && shares[b] > 0.0F) *end++ = b;
  }
  if (most < static_cast<size_t>(end - list)) {
    std::nth_element(list, list + most, end, [&](uint32_t a, uint32_t b) {
      return shares[a] != shares[b] ? shares[a] > shares[b] : a < b;
    });
    end = list + most;
  }
  // The last of those seen is kept anyhow, and with it what its unit lacks.
  for (const uint32_t *first = list, *last = end; first < last && unit > 1; ++first) {
    *end++ = *first + 1;
  }
  for (uint32_t b = seen.begin; b < seen.end; ++b) {
    if (is_kept(b)) *end++ = b;
  }
  std::sort(list, end);
  return static_cast<uint32_t>(end - list);
}

}  // namespace

TileChoice choose_blocks(const cpu::PromptPiece& piece, uint32_t tile, const BlockRule& rule,
                         const TileWeights& weights, uint32_t* list) {
  const cpu::PromptPiece::Span seen = piece.seen(tile);
  const uint32_t own = piece.position(tile * cpu::kPromptQueries) / cpu::kPromptRows;
  const uint32_t near =
      (own > rule.near_blocks ? own - rule.near_blocks : 0) / rule.unit * rule.unit;
  // All blocks of a unit or none: the block that a pair has more than first_blocks belongs to them.
  const auto is_kept = [&](uint32_t b) {
    return b / rule.unit * rule.unit < rule.first_blocks || b >= near;
  };

  TileChoice out;
  uint32_t last_bin = 0;               // bins below it are attended
  float* const shares = weights.data;  // in the place of the first sample's weights
  if (weights.data != nullptr && weights.samples != 0) {
    std::array<float, cpu::kPromptQueries> lse{};
    for (uint32_t i = 0; i < weights.samples; ++i) {
      lse[i] = whole(weights.data + i * weights.stride, seen);
    }
    std::array<uint64_t, kBins + 1> bins{};  // and what is kept anyhow
    float looked_up = 0.0F;
    const auto samples = static_cast<float>(weights.samples);
    for (uint32_t b = seen.begin; b < seen.end; ++b) {
      float share = 0.0F, largest = 0.0F, second = 0.0F;
      for (uint32_t i = 0; i < weights.samples; ++i) {
        const float x = std::exp(weights.data[i * weights.stride + b] - lse[i]);
        share += x;
        second = std::max(second, std::min(largest, x));
        largest = std::max(largest, x);
      }
      share /= samples;
      shares[b] = share;
      if (weights.samples > 1 && !is_kept(b) && largest > kAlone * second) looked_up += largest;
    }
    for (uint32_t b = seen.begin; b < seen.end; b += rule.unit) {
      float share = shares[b];
      if (rule.unit == 2 && b + 1 < seen.end) shares[b] = shares[b + 1] = share += shares[b + 1];
      bins[is_kept(b) ? kBins : bin_of(share)] += in_units(share);
    }
    out.looked_up = in_units(looked_up / samples);
    uint64_t held = bins[kBins];
    while (last_bin < kBins && held < in_units(rule.mass)) held += bins[last_bin++];
  }
  if (shares != nullptr && rule.most_blocks != 0) {
    out.count = keep_heaviest(seen, rule.most_blocks, rule.unit, is_kept, shares, list);
    return out;
  }
  for (uint32_t b = seen.begin; b < seen.end; ++b) {
    if (is_kept(b) || (last_bin > 0 && bin_of(shares[b]) < last_bin)) list[out.count++] = b;
  }
  return out;
}

}  // namespace keyhole::runtime
