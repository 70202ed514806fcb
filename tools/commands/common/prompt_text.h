// Texts that commands read and show: files of prompts, and bytes that need not be UTF-8.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace keyhole::tools {

/// Reads the bytes of a file. Throws std::runtime_error that names it.
[[nodiscard]] std::string read_text_file(const std::filesystem::path& path);

/// Throws UsageError where the prompt of file `name` has no token: a model without BOS makes none of an empty text.
void check_not_empty(const std::vector<uint32_t>& tokens, const std::string& name);

/// Reads the text of --prompt FILE. Throws UsageError for "-" and folders, and std::runtime_error, with hints, where
/// there is no such file.
[[nodiscard]] std::string read_prompt_file(const std::filesystem::path& path);

/// Makes UTF-8 of `bytes` for JSON and terminals: each byte that belongs to no character, or to a control character
/// except line ends and tabs, becomes \xNN.
[[nodiscard]] std::string printable(const std::string& bytes);

}  // namespace keyhole::tools
