// `--attend`: which of the keys that a search found are attended.
#pragma once

#include <keyhole/keyhole.h>

#include <cstdint>
#include <string>
#include <vector>

namespace keyhole::tools {

struct AttendChoice {
  keyhole_attend_mode mode = KEYHOLE_ATTEND_TOPK;
  uint32_t k = 0;          ///< keys that a search is asked for; of topk:K, else of --k
  float min_weight = 0;    ///< of weight:EPS
  bool has_own_k = false;  ///< topk:K

  /// The choice as text, with what it takes from elsewhere filled in: "topk:100", "scored", "weight:0.0001".
  [[nodiscard]] std::string text() const;
  bool operator==(const AttendChoice&) const = default;
};

/// Reads "topk", "topk:K", "scored", "none" or "weight:EPS"; k is that of --k. Throws UsageError.
[[nodiscard]] AttendChoice parse_attend(const std::string& text, uint32_t k);

/// Reads several choices; topk where there are none. Throws UsageError, also for one that is given twice.
[[nodiscard]] std::vector<AttendChoice> parse_attends(const std::vector<std::string>& texts,
                                                      uint32_t k);

/// The help of --attend.
inline constexpr const char* kAttendHelp =
    "What is attended of a search: topk:K (the K best keys of each head; without :K those of --k), "
    "scored (every key that was scored), weight:EPS (scored keys of a softmax weight above EPS), "
    "none (no search: a tail or a target says what is read)";

}  // namespace keyhole::tools
