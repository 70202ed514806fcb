// Checks a tile's list of blocks of a prompt against each block's share of the tile's weight in double precision, for
// the host and for a device.
// on a device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace keyhole::test {

struct ListRule {
  // Blocks that are attended anyhow: the first ones, and those from `near` blocks before `own` on, where `own` is
  // that of the tile's first query.
  uint32_t first = 0, near = 0, own = 0;
  uint32_t unit = 1;   ///< blocks that are attended together
  uint32_t most = 0;   ///< other units; 0: until the mass is held
  double mass = 1.0;   ///< by bins of an eighth of an octave
  double error = 0.0;  ///< of sums of shares
  double close = 1.0;  ///< shares that differ by a smaller factor may be told apart wrongly

  [[nodiscard]] bool keeps(uint32_t block) const {
    const uint32_t begin = block - block % unit;
    return begin < first || begin + unit - 1 + near >= own;
  }
};

/// Checks a list. share: those of all blocks that the tile sees. The list is rising, has whole units and all blocks
/// that are attended anyhow, and of the others the heaviest: as many as are wanted, or no more than it takes to hold
/// the mass.
template <class Number>
void expect_heaviest(const Number* list, uint32_t count, const std::vector<double>& share,
                     const ListRule& rule) {
  const auto end = static_cast<uint32_t>(share.size());
  ASSERT_LE(count, end);
  std::vector<bool> in(end);
  for (uint32_t i = 0; i < count; ++i) {
    ASSERT_LT(list[i], end);
    ASSERT_TRUE(i == 0 || list[i] > list[i - 1]) << "number " << i;
    in[list[i]] = true;
  }
  std::vector<double> of_unit(end);
  double held = 0, least = INFINITY, most_left = 0;
  uint32_t others = 0, candidates = 0;
  for (uint32_t b = 0; b < end; ++b) {
    const uint32_t begin = b - b % rule.unit;
    for (uint32_t c = begin; c < std::min(begin + rule.unit, end); ++c) {
      of_unit[b] += share[c];
      ASSERT_EQ(in[b], in[c]) << "a part of the unit of block " << b;
    }
    if (in[b]) held += share[b];
    if (rule.keeps(b)) {
      ASSERT_TRUE(in[b]) << "block " << b << " is always attended";
      continue;
    }
    const bool is_first = b == begin;
    if (of_unit[b] > 0 && is_first) ++candidates;
    if (in[b] && is_first) ++others;
    double& side = in[b] ? least : most_left;
    side = in[b] ? std::min(side, of_unit[b]) : std::max(side, of_unit[b]);
  }
  ASSERT_LE(most_left, least * rule.close) << "a heavier block is left out";
  if (rule.most != 0) {
    ASSERT_EQ(others, std::min(rule.most, candidates));
    return;
  }
  ASSERT_GE(held, rule.mass - rule.error);
  if (least == INFINITY) return;
  // Without the lightest of them, an eighth of an octave, less than the mass would be held.
  constexpr double kBin = 1.1;
  double without = held;
  for (uint32_t b = 0; b < end; ++b) {
    if (!rule.keeps(b) && in[b] && of_unit[b] < least * kBin) without -= share[b];
  }
  ASSERT_LT(without, rule.mass + rule.error);
}

}  // namespace keyhole::test
