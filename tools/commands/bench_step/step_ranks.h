// The ranks of `bench-step --parallel`: processes that take the steps of one model together, and tell each other what they
// have measured.
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

/// Of one process alone where it is made without arguments: then everything stays as it is. All ranks make the same calls
/// in the same order; those that exchange something throw LibraryError where ranks are gone. One thread.
class StepRanks {
 public:
  StepRanks() = default;
  explicit StepRanks(const CacheRanks& ranks) : ranks_(ranks) {}

  /// Whether --parallel was given, also by a single process.
  [[nodiscard]] bool any() const { return ranks_.communicator != nullptr; }
  [[nodiscard]] bool by_heads() const { return any() && ranks_.by_heads; }
  [[nodiscard]] bool by_tokens() const { return any() && !ranks_.by_heads; }
  [[nodiscard]] uint32_t size() const { return keyhole_communicator_size(ranks_.communicator); }
  [[nodiscard]] uint32_t rank() const { return keyhole_communicator_rank(ranks_.communicator); }
  /// Rank 0 writes the results.
  [[nodiscard]] bool speaks() const { return rank() == 0; }
  /// "context", "tensor", or "".
  [[nodiscard]] const char* way() const;

  /// This rank's part of the model: all of it where the heads are not shared. Throws UsageError where the ranks do not divide
  /// the KV heads.
  [[nodiscard]] StepShape share(const StepShape& model) const;
  /// Lets the engine spread its sessions where the tokens are shared.
  void put_into(keyhole_engine_config& engine) const;
  /// Throws UsageError where a rank's share of the context is no more than its sink and window hold, or none; the block is that
  /// in effect.
  void check_context(uint64_t context, uint32_t block, uint64_t resident) const;

  /// Runs it on every rank, and lets all fail with the text of the first that does. Throws std::runtime_error, and Interrupted
  /// without waiting for others.
  void together(const std::function<void()>& work) const;
  /// `bytes` of every rank to `all`, as keyhole_communicator_gather.
  void gather(const void* own, void* all, size_t bytes) const;
  /// Rows of this rank's query heads become those of all heads, in their order; nothing where heads are not shared.
  [[nodiscard]] std::vector<float> all_heads(std::vector<float> own) const;

  /// Each number becomes the largest of the ranks: all have as many.
  void slowest(std::vector<double>& sample) const;
  /// Statistics and busy bandwidth of this rank become those of all: counts, worker time and bytes are added up, wall time and
  /// attends are those of the rank that has most. Notes the memory of each.
  void add_up(StepTiming& timing) const;
  /// Audits of shares of the heads: counts are added up, means are those over all, error_max is the largest. Quantiles cannot be told from
  /// those of the ranks, and become NaN where there are several.
  void join(keyhole_audit& audit) const;

  /// How the model is shared, a line for people.
  [[nodiscard]] std::string description(const StepShape& model, uint32_t block) const;
  /// What a rank does of an attend without an index, for the note of a comparison; "" of one process.
  [[nodiscard]] std::string share_of_comparison() const;

 private:
  CacheRanks ranks_;
};

/// Tokens of the first `context` of a text that the last of `size` ranks holds, who has the fewest.
[[nodiscard]] uint64_t fewest_tokens(uint64_t context, uint32_t block, uint32_t size);

}  // namespace keyhole::tools
