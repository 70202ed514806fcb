// What a card will do at a context: an estimate from its bandwidth and what was measured on other cards.
#pragma once

#include <cstdint>

#include "tools/commands/plan/cards.h"

namespace keyhole::tools {

/// What a layer's attention of one token reads.
struct CardLayer {
  uint32_t q_heads = 0, kv_heads = 0, head_dim = 0;
  uint64_t kv_bytes = 0;     ///< of the layer's K and V, all tokens, as the cache has them
  uint64_t code_bytes = 0;   ///< of the layer's codes, without lists
  double code_bits = 4.0;    ///< of a component of K or V, as the codes take them
  uint32_t exact_rows = 16;  ///< of a KV head, which the device reads from host memory
  uint64_t row_bytes = 0;    ///< of K and V of one token and KV head in host memory
  uint64_t resident_bytes =
      0;  ///< of sink and window on the card beyond the usual 640 tokens, which `fixed` holds
};

/// What the estimates take for granted. Each was measured on an H100 and an H200, as bench/RESULTS.md tells; the shares
/// are of the rate at which a card copies within its own memory.
struct CardShares {
  double copies = 0.89;   ///< of the bandwidth that its maker states
  double weights = 0.92;  ///< products of one token with weights in 16 bits
  double full = 0.97;     ///< full attention
  double codes_4 = 0.84,
         codes_2 = 0.78;  ///< passes over codes of 4 and of 2 bits; between them by their bits
  /// What does not grow with the context, seconds a layer: queries are prepared once for each part of the codes, by the
  /// components of a group's queries.
  double fixed = 15e-6, fixed_per_component = 1e-6 / 64;
  double full_fixed = 10e-6;
  /// Codes in lists: seconds a layer, the share of copies at which chosen lists and the means of the others are read, and bytes a second
  /// of a KV head's mean keys, which few multiprocessors score.
  double lists_fixed = 27e-6, lists_fixed_per_component = 0.3e-6 / 64;
  double lists = 0.59, lists_scored = 66e9;
};

/// Seconds of a layer's attention by codes, all of them read.
[[nodiscard]] double seconds_of_codes(const Card& card, const CardLayer& shape,
                                      const CardShares& shares = {});
/// Seconds of a layer's attention by codes in lists of 64 rows, where steps read their usual share of these: more in heads that look at
/// everything. No longer than by all codes: steps of fewer rows read all.
[[nodiscard]] double seconds_of_lists(const Card& card, const CardLayer& shape,
                                      const CardShares& shares = {});
/// Seconds of a layer's full attention, with K and V on the card.
[[nodiscard]] double seconds_of_full(const Card& card, const CardLayer& shape,
                                     const CardShares& shares = {});
/// Seconds in which a token's products read so many bytes of weights.
[[nodiscard]] double seconds_of_weights(const Card& card, uint64_t bytes,
                                        const CardShares& shares = {});

}  // namespace keyhole::tools
