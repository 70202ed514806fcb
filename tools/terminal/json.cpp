#include "tools/terminal/json.h"

#include <cerrno>
#include <cstdio>
#include <ostream>
#include <string>
#include <system_error>

#include "runtime/files/json.h"
#include "runtime/files/replace_file.h"

namespace keyhole::tools {

void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& value) {
  // Texts may hold bytes that are no UTF-8 (a byte-level model's output): replace them, never fail.
  write_text(path,
             value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  if (path == "-") {
    errno = 0;
    if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0)
      return;
    throw std::system_error(errno, std::generic_category(), "standard output: cannot be written");
  }
  std::fflush(stdout);  // /dev/stdout is written past the buffer
  replace_file(path, [&](std::ostream& out) { out << text; });
}

void check_writable(const std::filesystem::path& path) {
  if (path != "-") const NewFile probe(path);
}

}  // namespace keyhole::tools
