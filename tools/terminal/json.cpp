#include "tools/terminal/json.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace keyhole::tools {

void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& value) {
  // Texts may hold bytes that are no UTF-8 (a byte-level model's output): replace them, never fail.
  write_text(path,
             value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  const bool to_stdout = path == "-";
  const std::string partial = path.string() + ".tmp";
  const auto fail = [&](const char* what) {
    throw std::runtime_error((to_stdout ? "standard output" : partial) + ": " + what + ": " +
                             std::strerror(errno));
  };
  std::FILE* file = to_stdout ? stdout : std::fopen(partial.c_str(), "wb");
  if (file == nullptr) fail("cannot be opened for writing");
  const bool written =
      std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0;
  if (to_stdout) {
    if (!written) fail("cannot be written");
    return;
  }
  if (std::fclose(file) != 0 || !written) {
    const int error = errno;
    std::remove(partial.c_str());
    errno = error;
    fail("cannot be written");
  }
  std::filesystem::rename(partial, path);
}

}  // namespace keyhole::tools
