// JSON results of the commands.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

/// Writes `value`, indented, to a new file that takes the name of PATH; "-" is standard output. NaN becomes null.
/// Throws std::runtime_error that names the file.
void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& value);

/// Writes any text, e.g. CSV, like write_json().
void write_text(const std::filesystem::path& path, const std::string& text);

/// Throws as the two functions above would if they were to write `path` now. Call it before hours of work begin.
void check_writable(const std::filesystem::path& path);

}  // namespace keyhole::tools
