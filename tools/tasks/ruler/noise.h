// The line that RULER and InfiniteBench make haystacks of.
#pragma once

#include <string_view>

namespace keyhole::tools::ruler {

inline constexpr std::string_view kNoise =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// The lengths in tokens from which on haystacks have their usual shapes; shorter ones have fewer repetitions.
inline constexpr unsigned kUsualLength = 4096;

}  // namespace keyhole::tools::ruler
