// Token ids in a file, for models whose text was made elsewhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace keyhole::tools {

/// Reads token ids in decimal, separated by white space or commas. Throws std::runtime_error that names the file and
/// the place of what is no token id.
[[nodiscard]] std::vector<uint32_t> read_token_file(const std::filesystem::path& path);

}  // namespace keyhole::tools
