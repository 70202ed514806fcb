// How a pass over codes (index/scan/code_scan.h) is cut into parts, and what these have come to.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/code_layout.h"
#include "cpu/types.h"

namespace keyhole::index {

/// Ranges of a pass, at most.
inline constexpr uint32_t kMostCodeParts = 64;
/// Rows of a KV head that are read exactly, at most: 64 do what more would.
inline constexpr uint32_t kMostExactRows = 1024;

/// How `blocks` blocks are cut. The size of a part doubles where there would be more than kMostCodeParts, so that sequences of
/// nearly the same length are cut at the same places.
struct CodeCut {
  uint32_t parts = 0;
  uint32_t blocks = 0;  ///< of a part; the last may have less
};
[[nodiscard]] CodeCut code_cut(size_t blocks);

/// What the ranges of one pass have come to. Different ranges may be written at once.
class CodeParts {
 public:
  /// Takes memory for searches of up to `group` heads and `wanted` rows; keeps what it has where that is enough.
  void reserve(const CodeShape& shape, uint32_t group, uint32_t wanted);
  /// Before the first part of every pass.
  void begin();
  [[nodiscard]] size_t bytes() const {
    return (o_.size() + tops_.size() + sums_.size() + widest_.size()) * sizeof(float) +
           best_.size() * sizeof(uint64_t) + counts_.size() * sizeof(uint32_t);
  }

 private:
  friend class CodeScan;
  [[nodiscard]] size_t at(uint32_t part, uint32_t head) const {
    return size_t{part} * group_ + head;
  }
  uint32_t group_ = 0, wanted_ = 0;
  size_t o_stride_ = 0;           // of a part: group * dim
  std::vector<float> o_;          // rotated sums of weight * (g level + mean)
  std::vector<float> tops_;       // `[parts, group]` the log weight that weighs 1
  std::vector<float> sums_;       // `[parts, group]` of weights
  std::vector<uint64_t> best_;    // `[parts, group, wanted_]` ranks
  std::vector<uint32_t> counts_;  // `[parts, kMaxGroup]`
  std::vector<float> widest_;     // `[parts]` the largest f^2 noise of a row; infinite: not known
  // `[kMaxGroup]` log weights that as many rows as are wanted reach: what parts that run side by side or later need not
  // keep. Which rows are chosen in the end does not depend on it.
  std::unique_ptr<std::atomic<float>[]> floors_;
};

/// One of several that ask the same codes at once, each for itself.
struct CodeAsker {
  const float* queries = nullptr;  ///< `[group, dim]` fp32
  uint32_t group = 0;
  CodeParts* out = nullptr;
};

}  // namespace keyhole::index
