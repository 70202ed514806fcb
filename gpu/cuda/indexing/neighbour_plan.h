// The plan of a neighbour search, made before anything runs: how many queries, keys and lists are on the device at a
// time, and how much memory that takes. Arithmetic only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/neighbours.h"

namespace keyhole::gpu {

/// Throws Error(invalid_argument) for a task that no search can answer.
void check_task(const NeighbourTask& task, const NeighbourLists& lists);

/// Bytes of a row as the kernels read it: 16 bits an element, or three bf16 planes of f32 keys.
[[nodiscard]] size_t operand_bytes(const NeighbourTask& task);

/// Which of a query's group maxima becomes its threshold. Of its `most` best keys the sample has L = most / 16 on
/// average and almost never as many as the result (L + 4.5 standard deviations + 4), so that the threshold lies below
/// all of them; for most = 100 some 22 * 16 of all keys are above it.
[[nodiscard]] uint32_t sample_rank(uint32_t most);

/// The smallest multiple of `unit` that is n or more.
[[nodiscard]] constexpr size_t round_up(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}

struct NeighbourSizes {
  size_t held = 0;   ///< queries whose lists are kept while the keys stream by
  size_t batch = 0;  ///< of those, per launch
  size_t block = 0;  ///< keys on the device at a time
};

/// How a search is spread over a device of `processors` multiprocessors.
class NeighbourPlan {
 public:
  /// config: with its limits filled in. Throws Error(invalid_argument) for a block size that is not allowed.
  NeighbourPlan(const NeighbourConfig& config, int processors);

  /// Number of parts that `keys` are divided into for a launch of `rows` queries. limited: the queries see unequally
  /// many keys.
  [[nodiscard]] size_t shares_of(size_t rows, size_t keys, bool limited) const;
  /// The most lists of a batch of at most `rows` queries: one per query and share.
  [[nodiscard]] size_t most_lists(size_t rows, bool limited) const;
  /// The largest sizes within the memory limit. Throws Error(out_of_device_memory).
  [[nodiscard]] NeighbourSizes sizes_of(const NeighbourTask& task) const;

 private:
  /// Number of thread blocks of a launch: whole waves of them; more and smaller ones where limits make them unequal.
  [[nodiscard]] size_t waves(bool limited) const { return (limited ? 4 : 2) * processors_; }
  [[nodiscard]] size_t bytes_of(const NeighbourTask& task, const NeighbourSizes& sizes) const;

  size_t memory_limit_;
  size_t block_keys_;
  size_t processors_;
};

}  // namespace keyhole::gpu
