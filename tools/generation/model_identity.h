// The identity of the model and vocabulary that a session was made with, which says what K and V mean.
#pragma once

#include <filesystem>
#include <string>

namespace keyhole::tools {

/// Fingerprints, of 16 hexadecimal digits each.
struct ModelIdentity {
  std::string weights;     ///< of config.json and the safetensors files
  std::string vocabulary;  ///< of tokenizer.json; "none" where the folder has none
};

/// Identifies a model folder. Of weights it reads the beginnings of the files (names, shapes and dtypes), their
/// lengths, and 64 places of 4 KiB of each, so that it takes milliseconds; any training changes these places. Throws
/// std::runtime_error that names a file that cannot be read.
[[nodiscard]] ModelIdentity identify_model(const std::filesystem::path& folder);

}  // namespace keyhole::tools
