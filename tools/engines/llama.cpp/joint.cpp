#include "tools/engines/llama.cpp/joint.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace keyhole::llama_cpp {

std::vector<Joint> join(std::span<const std::vector<Part>> parts, size_t rows, uint32_t most,
                        const std::function<bool(size_t)>& is_whole) {
  const auto row_of = [&](const Stretch& s) { return s.stream * rows + s.first; };
  const auto goes_on = [&](size_t row) { return !is_whole || is_whole(row); };
  std::vector<Stretch> stretches;
  for (size_t stream = 0; stream < parts.size(); ++stream) {
    for (const Part& part : parts[stream]) {
      for (size_t i = 0; i < part.rows.size();) {
        Stretch s{&part, stream, part.rows[i], 1};
        while (i + s.count < part.rows.size() && part.rows[i + s.count] == s.first + s.count &&
               goes_on(row_of(s) + s.count - 1)) {
          ++s.count;
        }
        stretches.push_back(s);
        i += s.count;
      }
    }
  }
  std::sort(stretches.begin(), stretches.end(),
            [&](const Stretch& a, const Stretch& b) { return row_of(a) < row_of(b); });
  std::vector<Joint> joints;
  for (const Stretch& s : stretches) {
    const auto joins = [&](const Joint& joint) {
      const Stretch& before = joint.back();
      const size_t end = row_of(before) + before.count;
      return std::max(before.count, s.count) <= most && end == row_of(s) && goes_on(end - 1) &&
             std::none_of(joint.begin(), joint.end(),
                          [&](const Stretch& other) { return other.part == s.part; });
    };
    if (joints.empty() || !joins(joints.back())) joints.emplace_back();
    joints.back().push_back(s);
  }
  return joints;
}

}  // namespace keyhole::llama_cpp
