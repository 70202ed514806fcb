// How a step searches an index, and what of the result it attends.
#pragma once

#include <algorithm>

#include "index/scan/code_scan.h"
#include "keyhole/keyhole.h"
#include "runtime/step/tail_reader.h"

namespace keyhole::runtime {

struct SearchParams {
  uint32_t k = 0;  ///< keys wanted per query head
  keyhole_attend_mode attend = KEYHOLE_ATTEND_TOPK;
  float min_weight = 0.0F;  ///< of KEYHOLE_ATTEND_WEIGHT
  TailWork tail{};          ///< its goal's max_rows: beyond what the search finds
  /// The codes of the rows, if there are any: all rows are then attended by their codes, except the k heaviest of the
  /// KV head, which are read exactly.
  index::CodedRows codes{};

  /// Number of rows that are read exactly, where there are codes.
  [[nodiscard]] uint32_t exact_rows() const {
    return attend == KEYHOLE_ATTEND_NONE ? 0 : std::min(k, index::kMostExactRows);
  }
  /// Whether every key that the search has scored may be attended, not only the best k.
  [[nodiscard]] bool explores() const {
    return attend == KEYHOLE_ATTEND_SCORED || attend == KEYHOLE_ATTEND_WEIGHT;
  }
};

}  // namespace keyhole::runtime
