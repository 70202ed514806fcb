// GPUs by name: what a plan for a card needs to know of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// A GPU and the bus to it. Rates are bytes a second: of its memory as its maker states it, of the bus as copies from
/// pinned memory reach it.
struct Card {
  std::string name;
  uint64_t memory = 0;
  double bandwidth = 0.0;
  double bus = 0.0;
  /// Compute capability; where it is not known, that of the least GPUs that the library runs on.
  int compute_major = 8, compute_minor = 0;
  uint32_t multiprocessors = 0;  ///< 0: not known

  /// Whether kernels run in clusters of thread blocks.
  [[nodiscard]] bool has_clusters() const { return compute_major >= 9; }
  /// Bytes of shared memory that a thread block may have.
  [[nodiscard]] uint64_t shared_bytes() const;
  /// "8.9" or the like.
  [[nodiscard]] std::string capability() const;
};

/// Finds a card by its name: "RTX 4090", "4090", "h100 pcie"; case, spaces and the maker's words do not count. Or reads
/// one that is not in the table: "MEMORY,BANDWIDTH,BUS", "24GiB,1008GB,25GB" (the latter two a second), and behind them
/// its compute capability where it is more than 8.0: "24GiB,1008GB,25GB,8.9". Throws UsageError with the names that are
/// known, or those that are like it: another card of nearly the same name may have half the memory.
[[nodiscard]] Card find_card(std::string_view text);

}  // namespace keyhole::tools
