// Which partitions a group should scan first (see ivf.h, PROBING).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace keyhole::index {

/// Working memory for ranking; grows to the largest number of lists seen.
class ListRanking {
 public:
  /// Reserves memory for `lists` lists and a group of up to `max_group`; allocates only where that is more
  /// than before.
  void reserve(uint32_t max_group, size_t lists);

  /// Where the caller puts the scores of the lists' mean keys, `[group, stride()]`.
  [[nodiscard]] float* scores() { return scores_.data(); }
  [[nodiscard]] size_t stride() const { return room_; }

  /// Combines the scores of the group's heads into one importance() per list.
  void combine(uint32_t group, size_t lists);

  /// Returns the `probe` best of `lists` lists for the group, best first; lists for which `is_empty(l)` is true come
  /// last. Equal ranks: the smaller list. Valid until the next call.
  template <class IsEmpty>
  std::span<const uint32_t> best(uint32_t group, size_t lists, size_t probe, IsEmpty is_empty) {
    combine(group, lists);
    return best(lists, probe, is_empty);
  }

  /// Where a caller that ranks by other means puts the lists' importance, `[lists]`, 0 or more.
  [[nodiscard]] float* importance() { return importance_.data(); }
  /// best() by the importance() that the caller has written.
  template <class IsEmpty>
  std::span<const uint32_t> best(size_t lists, size_t probe, IsEmpty is_empty) {
    for (size_t l = 0; l < lists; ++l) {
      if (is_empty(l)) importance_[l] = -1.0F;
    }
    return select(lists, probe);
  }

 private:
  std::span<const uint32_t> select(size_t lists, size_t probe);

  size_t room_ = 0;
  std::vector<float> scores_;
  std::vector<float> importance_;
  std::vector<uint64_t> ranks_;
  std::vector<uint64_t> spare_;
  std::vector<uint32_t> chosen_;
};

}  // namespace keyhole::index
