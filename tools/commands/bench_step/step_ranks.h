// The ranks of `bench-step --parallel`: processes that take the steps of one model together and exchange their
// measurements.
#pragma once

#include <keyhole/parallel.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/commands/bench_step/results.h"
#include "tools/commands/bench_step/step_data.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

/// The ranks as one of them sees them. Made without arguments it is one process alone, for which every call changes
/// nothing. All ranks make the same calls in the same order; calls that exchange something throw LibraryError where
/// ranks are gone. One thread.
class StepRanks {
 public:
  StepRanks() = default;
  explicit StepRanks(const CacheRanks& ranks) : ranks_(ranks) {}

  /// Whether --parallel was given, also by a single process.
  [[nodiscard]] bool any() const { return ranks_.communicator != nullptr; }
  [[nodiscard]] bool by_heads() const { return any() && ranks_.by_heads; }
  [[nodiscard]] bool by_tokens() const { return any() && !ranks_.by_heads; }
  [[nodiscard]] uint32_t size() const { return keyhole_communicator_get_size(ranks_.communicator); }
  [[nodiscard]] uint32_t rank() const { return keyhole_communicator_get_rank(ranks_.communicator); }
  /// Whether this rank writes the results: rank 0 does.
  [[nodiscard]] bool speaks() const { return rank() == 0; }
  /// How the model is shared: "context", "tensor", or "".
  [[nodiscard]] const char* way() const;

  /// This rank's part of the model: all of it where the heads are not shared. Throws UsageError where the number of
  /// ranks does not divide that of KV heads.
  [[nodiscard]] StepShape share(const StepShape& model) const;
  /// Makes the engine spread its sessions over the ranks, where the tokens are shared.
  void put_into(keyhole_engine_config& engine) const;
  /// Throws UsageError where a rank's share of the context is empty, or no more than its sink and window hold. block:
  /// the block in effect.
  void check_context(uint64_t context, uint32_t block, uint64_t resident) const;

  /// Runs `work` on every rank; all fail with the text of the first that fails. Throws std::runtime_error, and
  /// Interrupted without waiting for others.
  void together(const std::function<void()>& work) const;
  /// Gathers `bytes` of every rank to `all`, like keyhole_communicator_gather.
  void gather(const void* own, void* all, size_t bytes) const;
  /// Gathers rows of each rank's query heads to those of all heads, in their order; returns `own` where heads are not
  /// shared.
  [[nodiscard]] std::vector<float> all_heads(std::vector<float> own) const;

  /// Replaces each number by the largest of the ranks, all of which have as many numbers.
  void slowest(std::vector<double>& sample) const;
  /// Replaces statistics and busy bandwidth of this rank by those of all: counts, worker time and bytes are added up;
  /// wall time and attends are those of the rank that has most. Notes the memory of each.
  void add_up(StepTiming& timing) const;
  /// Joins audits of shares of the heads: counts are added up, means are those over all, error_max is the largest.
  /// Quantiles cannot be computed from those of the ranks, and become NaN where there are several.
  void join(keyhole_audit& audit) const;

  /// How the model is shared, as a line for people.
  [[nodiscard]] std::string description(const StepShape& model, uint32_t block) const;
  /// Which share of an attend without an index a rank does, for the note of a comparison; "" for one process.
  [[nodiscard]] std::string share_of_comparison() const;

 private:
  CacheRanks ranks_;
};

/// The number of the first `context` tokens of a text that the last of `size` ranks holds, which has the fewest.
[[nodiscard]] uint64_t fewest_tokens(uint64_t context, uint32_t block, uint32_t size);

}  // namespace keyhole::tools
