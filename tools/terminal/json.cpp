#include "tools/terminal/json.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace keyhole::tools {
namespace {

// Standard output for "-", else PATH.tmp, which is gone afterwards unless it was renamed.
struct Destination {
  explicit Destination(const std::filesystem::path& path)
      : is_stdout(path == "-"),
        partial(path.string() + ".tmp"),
        file(is_stdout ? stdout : std::fopen(partial.c_str(), "wb")) {
    if (file == nullptr) fail("cannot be opened for writing");
  }
  ~Destination() {
    if (is_stdout) return;
    std::fclose(file);
    std::remove(partial.c_str());
  }
  Destination(const Destination&) = delete;
  Destination& operator=(const Destination&) = delete;

  [[noreturn]] void fail(const char* what) const {
    throw std::runtime_error((is_stdout ? "standard output" : partial) + ": " + what + ": " +
                             std::strerror(errno));
  }

  const bool is_stdout;
  const std::string partial;
  std::FILE* const file;
};

}  // namespace

void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& value) {
  // Texts may hold bytes that are no UTF-8 (a byte-level model's output): replace them, never fail.
  write_text(path,
             value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  const Destination to(path);
  const bool written =
      std::fwrite(text.data(), 1, text.size(), to.file) == text.size() && std::fflush(to.file) == 0;
  if (!written) to.fail("cannot be written");
  if (!to.is_stdout) std::filesystem::rename(to.partial, path);
}

void check_writable(const std::filesystem::path& path) { const Destination probe(path); }

}  // namespace keyhole::tools
