// How a pass over codes (index/scan/code_scan.h) is cut into parts, and the results of the parts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/code_layout.h"
#include "cpu/types.h"

namespace keyhole::index {

/// The most parts of a pass.
inline constexpr uint32_t kMostCodeParts = 64;
/// The most rows of a KV head that a step reads exactly; 64 are as good as more.
inline constexpr uint32_t kMostExactRows = 1024;

/// The cut of a number of blocks into parts. The size of a part doubles where there would be more than
/// kMostCodeParts, so that sequences of nearly the same length are cut at the same places.
struct CodeCut {
  uint32_t parts = 0;
  uint32_t blocks = 0;  ///< blocks of a part; the last may have fewer
};
[[nodiscard]] CodeCut code_cut(size_t blocks);

/// The results of the parts of one pass. Different parts may be written at once.
class CodeParts {
 public:
  /// Takes memory for searches of up to `group` heads and `wanted` rows; keeps what it has where that is enough.
  void reserve(const CodeShape& shape, uint32_t group, uint32_t wanted);
  /// Call before the first part of every pass.
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
  size_t o_stride_ = 0;           // floats of a part: group * dim
  std::vector<float> o_;          // rotated sums of weight * (g level + mean)
  std::vector<float> tops_;       // `[parts, group]` the log weight that weighs 1
  std::vector<float> sums_;       // `[parts, group]` of weights
  std::vector<uint64_t> best_;    // `[parts, group, wanted_]` ranks
  std::vector<uint32_t> counts_;  // `[parts, kMaxGroup]`
  std::vector<float> widest_;     // `[parts]` the largest f^2 noise of a row; infinite: not known
  // `[kMaxGroup]` log weights that at least as many rows as are wanted reach, so that parts that run side by side or
  // later need not keep what is below. The choice of rows does not depend on them.
  std::unique_ptr<std::atomic<float>[]> floors_;
};

/// One of several searches that read the same codes at once, each for itself.
struct CodeAsker {
  const float* queries = nullptr;  ///< `[group, dim]` fp32
  uint32_t group = 0;
  CodeParts* out = nullptr;
};

}  // namespace keyhole::index
