// Sweeps: several specs in one, e.g. of `--index`, `--rival` and `--pattern`.
#pragma once

#include <string>
#include <vector>

namespace keyhole::tools {

/// Expands "ivf:C=64|128,probe=8|16" into its specs: one for each combination of alternatives, the last parameter
/// varying first. An alternative may be a range of whole numbers: 32..512*2 is 32, 64, 128, 256, 512 and 8..32+8 is
/// 8, 16, 24, 32; a range ends before it exceeds the last number. Throws UsageError for a malformed range, and for
/// more than kMostSwept specs.
[[nodiscard]] std::vector<std::string> expand_sweep(const std::string& spec);

inline constexpr size_t kMostSwept = 10000;

/// The help of options with sweeps.
inline constexpr const char* kSweepHelp =
    "name=a|b|c sweeps a parameter, as do the ranges 32..512*2 and 8..64+8";

}  // namespace keyhole::tools
