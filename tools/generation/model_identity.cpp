#include "tools/generation/model_identity.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPlaceBytes = 4096;
constexpr size_t kPlaces = 64;
constexpr uint64_t kHeaderBytes = uint64_t{1} << 20;

/// FNV-1a of 64 bits: tells files apart that differ by accident, which is all that is asked.
class Fingerprint {
 public:
  void add(std::string_view bytes) {
    for (const char c : bytes) {
      state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    }
  }
  void add(uint64_t number) { add({reinterpret_cast<const char*>(&number), sizeof number}); }
  [[nodiscard]] std::string text() const {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(state_));
    return digits;
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

std::ifstream open(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be opened");
  return file;
}

void add_whole(const fs::path& path, Fingerprint& print) {
  std::ifstream file = open(path);
  print.add(std::string{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
}

void add_places(const fs::path& path, Fingerprint& print) {
  std::ifstream file = open(path);
  const uint64_t size = fs::file_size(path);
  print.add(path.filename().string());
  print.add(size);
  std::string bytes;
  const auto add = [&](uint64_t first, uint64_t count) {
    bytes.resize(std::min(count, size - first));
    file.seekg(static_cast<std::streamoff>(first));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file) throw std::runtime_error(path.string() + ": cannot be read");
    print.add(bytes);
  };
  add(0, kHeaderBytes);
  for (size_t place = 0; place < kPlaces; ++place) add(size / kPlaces * place, kPlaceBytes);
}

}  // namespace

ModelIdentity identify_model(const fs::path& folder) {
  Fingerprint weights;
  add_whole(folder / "config.json", weights);
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) add_places(file, weights);

  ModelIdentity identity{weights.text(), "none"};
  if (const fs::path file = folder / "tokenizer.json"; fs::exists(file)) {
    Fingerprint vocabulary;
    add_whole(file, vocabulary);
    identity.vocabulary = vocabulary.text();
  }
  return identity;
}

}  // namespace keyhole::tools
