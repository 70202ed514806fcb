// Named ways: values of --index that are no index specs, ways to attend without a search, to compare with.
#pragma once

#include <keyhole/keyhole.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tools/caches/kv_format.h"

namespace keyhole::tools {

/// Exact attention, in commands that tell the two apart with all tokens where sink and window lie.
inline constexpr std::string_view kFullWay = "full";

struct NamedWay {
  std::string_view name;
  std::string_view meaning;
  keyhole_mode mode;
  std::optional<KvFormat>
      format;  ///< that K and V pass through as they enter the cache, or as they age in it
};

/// All named ways, one row each.
[[nodiscard]] std::span<const NamedWay> named_ways();
/// The way of this name; null: the name is that of an index spec.
[[nodiscard]] const NamedWay* find_way(std::string_view name);
/// The ways for help texts: "exact (every token, the truth to compare with), none (...), ...".
[[nodiscard]] std::string ways_help();

}  // namespace keyhole::tools
