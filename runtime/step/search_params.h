// How an index is searched in a step, and what of the result is attended.
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
  /// Where there are some: all their rows are attended by them but the k heaviest of the KV head, which are read exactly.
  index::CodedRows codes{};

  /// With codes: rows that are read exactly.
  [[nodiscard]] uint32_t exact_rows() const {
    return attend == KEYHOLE_ATTEND_NONE ? 0 : std::min(k, index::kMostExactRows);
  }
  /// Every key that the search has scored may be attended, not only the best k.
  [[nodiscard]] bool explores() const {
    return attend == KEYHOLE_ATTEND_SCORED || attend == KEYHOLE_ATTEND_WEIGHT;
  }
};

}  // namespace keyhole::runtime
