#include "tools/commands/common/bundled_model.h"

#include <cstdlib>
#include <stdexcept>
#include <system_error>

namespace keyhole::tools {

namespace fs = std::filesystem;

fs::path bundled_model_folder() {
  if (const char* folder = std::getenv("KEYHOLE_MODEL"); folder != nullptr && *folder != '\0') {
    return folder;
  }
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  for (const fs::path& folder : {program.parent_path().parent_path() / KEYHOLE_INSTALLED_MODEL,
                                 fs::path(KEYHOLE_SOURCE_MODEL)}) {
    if (fs::exists(folder / "config.json", ignored)) return folder;
  }
  throw std::runtime_error(
      "the bundled model is not where it was installed; name a folder with --model or "
      "KEYHOLE_MODEL");
}

}  // namespace keyhole::tools
