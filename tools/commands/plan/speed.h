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
  double list_rows = 64.0;   ///< of a list on average, where codes are in lists
  double list_share = 0.12;  ///< of the rows that steps read of lists
  uint32_t exact_rows = 16;  ///< of a KV head, which the device reads from host memory
  uint64_t row_bytes = 0;    ///< of K and V of one token and KV head in host memory
  /// Of sink and window on the card beyond the usual 640 tokens, which `fixed` holds.
  uint64_t resident_bytes = 0;
};

/// What the estimates take for granted, from times of bench/RESULTS.md ("What `keyhole plan` says of a card"); the
/// shares are of the rate at which a card copies within its own memory.
struct CardShares {
  double copies = 0.89;   ///< of the bandwidth that its maker states
  double weights = 0.92;  ///< products of one token with weights in 16 bits
  double full = 0.97;     ///< full attention
  /// Passes over codes of 4 and of 2 bits, those of chosen lists too; between them by their bits. From 128k to 1M
  /// tokens of 8 KV heads of 128 an H100 takes 350 and 196.5 us more, for 984 and 514 MB.
  double codes_4 = 0.95, codes_2 = 0.88;
  /// The same where codes do not leave the L2 cache first: kernels that are not of compute capability 9.0.
  double others_4 = 0.84, others_2 = 0.78;
  /// Bytes of codes a second of heads above 256 components, whose products take longer than their bytes on a fast card.
  double wide_4 = 2.35e12, wide_2 = 1.9e12;
  /// What does not grow with the context, seconds a layer: queries are prepared and what follows the pass is done by
  /// the components of a group's queries. 19 us of 512 of them (4 heads of 128), 32 of 1,536 (6 of 256).
  double fixed = 12.5e-6, fixed_per_component = 0.8e-6 / 64;
  /// Without clusters one thread block of each KV head does what follows the pass: 105 us of 4,096 components (8 heads
  /// of 512).
  double single_per_component = 1.4e-6 / 64;
  double full_fixed = 10e-6;
  /// Codes in lists: the same, with the choice; and bytes a second at which a KV head's mean keys are scored, which few
  /// multiprocessors do.
  double lists_fixed = 25.3e-6, lists_fixed_per_component = 0.6e-6 / 64;
  double lists_scored = 115e9;
  /// The same where one thread block chooses the heaviest rows, and mean keys where lists are chosen by the card's
  /// memory: an H200 as a card of 8.6.
  double lone_lists_fixed = 29.3e-6, lone_lists_fixed_per_component = 0.5e-6 / 64;
  double grid_lists_scored = 62e9;
  /// The same by 16 thread blocks of a KV head, which a card chooses by from 128k tokens on if it has the
  /// multiprocessors.
  double large_grid_lists_scored = 100e9;
};

/// Bytes of a row of codes of K and V: its bits, in whole words of a tile (of 128 bits a row of K, 64 of V: heads of 80
/// with 2 bits take 256 and 192 in place of 160), two factors of 16 bits and its part of the means of a block of 256
/// rows.
[[nodiscard]] double code_row_bytes(double bits, uint32_t head_dim);

/// Bytes of codes a second.
[[nodiscard]] double rate_of_codes(const Card& card, double bits, uint32_t head_dim,
                                   const CardShares& shares = {});
/// Seconds of a layer that codes take beside their bytes, by the components of a group's queries.
[[nodiscard]] double fixed_seconds_of_codes(const Card& card, double components,
                                            const CardShares& shares = {});

/// Seconds of a layer's attention by codes, all of them read.
[[nodiscard]] double seconds_of_codes(const Card& card, const CardLayer& shape,
                                      const CardShares& shares = {});
/// Whether a choice among lists is made by thread blocks that tell each other by the card's memory: without clusters,
/// and where a cluster's choice for more than 8 heads of 256 of a KV head takes more than 99 KiB.
[[nodiscard]] bool chooses_by_memory(const Card& card, const CardLayer& shape);
/// Multiprocessors without which a card has no lists, 8 for each KV head where it chooses by memory; else 0.
[[nodiscard]] uint32_t multiprocessors_of_lists(const Card& card, const CardLayer& shape);
/// Whether a card is known to have fewer than these.
[[nodiscard]] bool is_too_small_for_lists(const Card& card, const CardLayer& shape);
/// How often a step by lists reads their codes: in 99 KiB of shared memory heads of 256 with 4 bits are attended 4 at a
/// time, and heads of 128 8 at a time.
[[nodiscard]] uint32_t passes_of_lists(const Card& card, const CardLayer& shape);
/// Seconds of a layer that steps by lists take beside bytes and mean keys, and bytes a second at which these are
/// scored.
[[nodiscard]] double fixed_seconds_of_lists(const Card& card, const CardLayer& shape,
                                            const CardShares& shares = {});
[[nodiscard]] double rate_of_mean_keys(const Card& card, const CardLayer& shape,
                                       const CardShares& shares = {});
/// Seconds of a layer's attention by codes in lists, of which steps read list_share: heads that look at everything have
/// more read. No longer than by all codes: steps of fewer rows read all, and those of a card that is too small.
[[nodiscard]] double seconds_of_lists(const Card& card, const CardLayer& shape,
                                      const CardShares& shares = {});
/// Seconds of a layer's full attention, with K and V on the card.
[[nodiscard]] double seconds_of_full(const Card& card, const CardLayer& shape,
                                     const CardShares& shares = {});
/// Seconds in which a token's products read so many bytes of weights.
[[nodiscard]] double seconds_of_weights(const Card& card, uint64_t bytes,
                                        const CardShares& shares = {});

}  // namespace keyhole::tools
