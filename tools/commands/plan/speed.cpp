#include "tools/commands/plan/speed.h"

#include <algorithm>
#include <cmath>

namespace keyhole::tools {

double seconds_of_codes(const Card& card, const CardLayer& shape, const CardShares& shares) {
  const double copies = card.bandwidth * shares.copies;
  const double share = std::lerp(shares.codes_2, shares.codes_4,
                                 std::clamp((shape.code_bits - 2.0) / 2.0, 0.0, 1.0));
  const double components = static_cast<double>(shape.q_heads) / shape.kv_heads * shape.head_dim;
  const double rows =
      static_cast<double>(shape.exact_rows) * shape.kv_heads * static_cast<double>(shape.row_bytes);
  return shares.fixed + shares.fixed_per_component * components + rows / card.bus +
         static_cast<double>(shape.code_bytes) / (copies * share) +
         static_cast<double>(shape.resident_bytes) / (copies * shares.full);
}

double seconds_of_full(const Card& card, const CardLayer& shape, const CardShares& shares) {
  return shares.full_fixed +
         static_cast<double>(shape.kv_bytes) / (card.bandwidth * shares.copies * shares.full);
}

double seconds_of_weights(const Card& card, uint64_t bytes, const CardShares& shares) {
  return static_cast<double>(bytes) / (card.bandwidth * shares.copies * shares.weights);
}

}  // namespace keyhole::tools
