#include "tools/commands/plan/speed.h"

#include <algorithm>
#include <cmath>

namespace keyhole::tools {

namespace {

/// Of the rows that are read exactly, and of resident tokens beyond the usual ones.
double seconds_of_others(const Card& card, const CardLayer& shape, const CardShares& shares) {
  const double rows =
      static_cast<double>(shape.exact_rows) * shape.kv_heads * static_cast<double>(shape.row_bytes);
  return rows / card.bus +
         static_cast<double>(shape.resident_bytes) / (card.bandwidth * shares.copies * shares.full);
}

double components_of(const CardLayer& shape) {
  return static_cast<double>(shape.q_heads) / shape.kv_heads * shape.head_dim;
}

}  // namespace

double seconds_of_codes(const Card& card, const CardLayer& shape, const CardShares& shares) {
  const double copies = card.bandwidth * shares.copies;
  const double share = std::lerp(shares.codes_2, shares.codes_4,
                                 std::clamp((shape.code_bits - 2.0) / 2.0, 0.0, 1.0));
  return shares.fixed + shares.fixed_per_component * components_of(shape) +
         static_cast<double>(shape.code_bytes) / (copies * share) +
         seconds_of_others(card, shape, shares);
}

double seconds_of_lists(const Card& card, const CardLayer& shape, const CardShares& shares) {
  constexpr double kRowsOfList = 64.0, kShare = 0.12, kLeastRows = 8192.0, kBitsOfByte = 8.0;
  constexpr double kFigures = 24.0;  // bytes of a list beside its means
  const double code_bytes = static_cast<double>(shape.code_bytes), dim = shape.head_dim;
  const double rows = code_bytes * kBitsOfByte / (2.0 * shape.code_bits * shape.kv_heads * dim);
  if (rows <= kLeastRows) return seconds_of_codes(card, shape, shares);
  const double lists = rows / kRowsOfList;
  const double read = std::max(kShare, kLeastRows / rows) * code_bytes +
                      lists * shape.kv_heads * (4.0 * dim + kFigures);
  const double seconds =
      shares.lists_fixed + shares.lists_fixed_per_component * components_of(shape) +
      read / (card.bandwidth * shares.copies * shares.lists) +
      lists * 2.0 * dim / shares.lists_scored + seconds_of_others(card, shape, shares);
  return std::min(seconds, seconds_of_codes(card, shape, shares));
}

double seconds_of_full(const Card& card, const CardLayer& shape, const CardShares& shares) {
  return shares.full_fixed +
         static_cast<double>(shape.kv_bytes) / (card.bandwidth * shares.copies * shares.full);
}

double seconds_of_weights(const Card& card, uint64_t bytes, const CardShares& shares) {
  return static_cast<double>(bytes) / (card.bandwidth * shares.copies * shares.weights);
}

}  // namespace keyhole::tools
