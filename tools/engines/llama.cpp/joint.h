// Which rows of a batch are attended by one call of the library: the few new tokens of each of several sequences, as a
// server's slots have them, by one for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/sequences.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

/// Rows of one sequence that lie side by side in the batch.
struct Stretch {
  const Part* part = nullptr;
  /// Which of the batch's streams the rows are of, and which row of it is the first.
  size_t stream = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};

/// Tokens of a sequence up to which it joins others: more fill a device, or the threads, by themselves.
constexpr uint32_t kMostJointTokens = 16;

/// Stretches of different sequences that lie side by side in the batch, in this order.
using Joint = std::vector<Stretch>;

/// New rows of a layer, and where its answers go.
struct JointRows {
  Rows q, k, v, out;
};

/// All rows of a batch, sorted by where they lie in it, whatever the order of the parts; those of one part go on with
/// one another. A part whose rows do not lie side by side is cut into stretches, of which each is in another joint.
///   parts     of each stream
///   rows      of each stream in the batch
///   most      tokens that a sequence may have in a joint of several; 0: each stretch goes alone
///   is_whole  whether a row, counted through all streams, and the one behind it may be of one stretch, or of one
///             joint; null: always
[[nodiscard]] std::vector<Joint> join(std::span<const std::vector<Part>> parts, size_t rows,
                                      uint32_t most,
                                      const std::function<bool(size_t)>& is_whole = {});

/// What the log says of so many batches.
[[nodiscard]] inline std::string told_joints(uint64_t batches) {
  return "several sequences attended together in " + std::to_string(batches) + " batches";
}

}  // namespace keyhole::llama_cpp
