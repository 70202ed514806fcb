// Finds the bundled model.
#pragma once

#include <filesystem>

namespace keyhole::tools {

/// The folder of the bundled model: $KEYHOLE_MODEL, the installed one, or that of the source tree.
/// Throws std::runtime_error if none is there.
[[nodiscard]] std::filesystem::path bundled_model_folder();

}  // namespace keyhole::tools
