// What --index takes beside index specs: ways to attend that search for nothing, to compare with.
#pragma once

#include <keyhole/keyhole.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tools/llama/kv_format.h"

namespace keyhole::tools {

struct NamedWay {
  std::string_view name;
  std::string_view meaning;
  keyhole_mode mode;
  std::optional<KvFormat>
      format;  ///< that K and V of all tokens pass through as they enter the cache
};

/// All of them, one row each.
[[nodiscard]] std::span<const NamedWay> named_ways();
/// The one of this name, or null: then it is an index spec.
[[nodiscard]] const NamedWay* find_way(std::string_view name);
/// "exact (every token, the truth to compare with), none (...), ..." for help.
[[nodiscard]] std::string ways_help();

}  // namespace keyhole::tools
