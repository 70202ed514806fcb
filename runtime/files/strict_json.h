// Strict JSON: no repeated keys, no deep nesting, nothing guessed. For the readers of this folder alone.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "runtime/files/json.h"

namespace keyhole {

/// Parses `text`, which must be an object. Throws std::runtime_error that calls it `what` ("the
/// header") where it is not valid JSON, names a key twice or is nested more than `max_depth` deep.
[[nodiscard]] nlohmann::json parse_strict_json(std::span<const std::byte> text, int max_depth,
                                               const std::string& what);

/// `name` in quotes for an error's text. Names come from the file: they are shortened, and control
/// characters hidden, before they reach a terminal.
[[nodiscard]] std::string quoted_name(const std::string& name);

/// Throws std::runtime_error with this text.
[[noreturn]] void fail(const std::string& text);

}  // namespace keyhole
