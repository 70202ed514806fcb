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

constexpr uint64_t kLargeShared = uint64_t{100}
                                  << 10U;  // more than cards of 8.6, 8.9 and 12.0 have

/// Whether a card has 99 KiB of shared memory, in which clusters hold few heads of 256: `most` for a KV head.
bool is_too_large_for_clusters(const Card& card, const CardLayer& shape, uint32_t most) {
  constexpr uint32_t kLarge = 256;
  return card.shared_bytes() < kLargeShared && shape.head_dim == kLarge &&
         shape.q_heads / shape.kv_heads > most;
}

constexpr uint32_t kMostForRows = 4;   // where a cluster chooses the heaviest rows
constexpr uint32_t kMostForLists = 8;  // where it chooses among lists

}  // namespace

double rate_of_codes(const Card& card, double bits, uint32_t head_dim, const CardShares& shares) {
  constexpr uint32_t kWide = 256;
  const double four = std::clamp((bits - 2.0) / 2.0, 0.0, 1.0);
  const bool leave_cache_first = card.compute_major == 9 && card.compute_minor == 0;
  const double share = leave_cache_first ? std::lerp(shares.codes_2, shares.codes_4, four)
                                         : std::lerp(shares.others_2, shares.others_4, four);
  const double rate = card.bandwidth * shares.copies * share;
  if (head_dim <= kWide) return rate;
  return std::min(rate, std::lerp(shares.wide_2, shares.wide_4, four));
}

double code_row_bytes(double bits, uint32_t head_dim) {
  constexpr double kFactors = 4.0, kMeans = 2.0 * 2.0 / 256.0;
  constexpr double kKeyWord = 128.0, kValueWord = 64.0, kBytesOfKeyWord = 16.0,
                   kBytesOfValueWord = 8.0;
  const double of_row = bits * head_dim;
  return kBytesOfKeyWord * std::ceil(of_row / kKeyWord) +
         kBytesOfValueWord * std::ceil(of_row / kValueWord) + kMeans * head_dim + kFactors;
}

double fixed_seconds_of_codes(const Card& card, double components, const CardShares& shares) {
  return shares.fixed + components * (card.has_clusters() ? shares.fixed_per_component
                                                          : shares.single_per_component);
}

double seconds_of_codes(const Card& card, const CardLayer& shape, const CardShares& shares) {
  return fixed_seconds_of_codes(card, components_of(shape), shares) +
         static_cast<double>(shape.code_bytes) /
             rate_of_codes(card, shape.code_bits, shape.head_dim, shares) +
         seconds_of_others(card, shape, shares);
}

namespace {
/// Rows that have codes.
double rows_of(const CardLayer& shape) {
  return static_cast<double>(shape.code_bytes) / shape.kv_heads /
         code_row_bytes(shape.code_bits, shape.head_dim);
}
}  // namespace

bool chooses_by_memory(const Card& card, const CardLayer& shape) {
  return !card.has_clusters() || is_too_large_for_clusters(card, shape, kMostForLists);
}

uint32_t multiprocessors_of_lists(const Card& card, const CardLayer& shape) {
  constexpr uint32_t kOfKvHead = 8;
  return chooses_by_memory(card, shape) ? kOfKvHead * shape.kv_heads : 0;
}

bool is_too_small_for_lists(const Card& card, const CardLayer& shape) {
  return card.multiprocessors != 0 && card.multiprocessors < multiprocessors_of_lists(card, shape);
}

uint32_t passes_of_lists(const Card& card, const CardLayer& shape) {
  constexpr uint32_t kLong = 256, kUsual = 128;  // components
  constexpr double kFewBits = 2.0;
  const uint32_t group = shape.q_heads / shape.kv_heads;
  const uint32_t heads = shape.head_dim == kLong ? 4 : shape.head_dim == kUsual ? 8 : group;
  const bool divides = card.shared_bytes() < kLargeShared && shape.code_bits > kFewBits;
  return divides ? (group + heads - 1) / heads : 1;
}

double fixed_seconds_of_lists(const Card& card, const CardLayer& shape, const CardShares& shares) {
  const bool by_one_block =
      !card.has_clusters() || is_too_large_for_clusters(card, shape, kMostForRows);
  return by_one_block
             ? shares.lone_lists_fixed +
                   shares.lone_lists_fixed_per_component * components_of(shape)
             : shares.lists_fixed + shares.lists_fixed_per_component * components_of(shape);
}

double rate_of_mean_keys(const Card& card, const CardLayer& shape, const CardShares& shares) {
  if (!chooses_by_memory(card, shape)) return shares.lists_scored;
  constexpr double kManyLists = 2000.0;  // of 128k tokens
  const bool by_more = rows_of(shape) / shape.list_rows >= kManyLists &&
                       card.multiprocessors >= 2 * multiprocessors_of_lists(card, shape);
  return by_more ? shares.large_grid_lists_scored : shares.grid_lists_scored;
}

double seconds_of_lists(const Card& card, const CardLayer& shape, const CardShares& shares) {
  constexpr double kLeastRows = 8192.0;
  constexpr double kFigures = 24.0;  // bytes of a list beside its means
  const double code_bytes = static_cast<double>(shape.code_bytes), dim = shape.head_dim;
  const double rows = rows_of(shape);
  if (rows <= kLeastRows || is_too_small_for_lists(card, shape)) {
    return seconds_of_codes(card, shape, shares);
  }
  const double lists = rows / shape.list_rows,
               mean_bytes = 2.0 * dim;  // of keys or values of a list
  const double read =
      std::max(shape.list_share, kLeastRows / rows) * code_bytes * passes_of_lists(card, shape) +
      lists * shape.kv_heads * (mean_bytes + kFigures);
  const double seconds = fixed_seconds_of_lists(card, shape, shares) +
                         read / rate_of_codes(card, shape.code_bits, shape.head_dim, shares) +
                         lists * mean_bytes / rate_of_mean_keys(card, shape, shares) +
                         seconds_of_others(card, shape, shares);
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
