// The tensors of a Hugging Face folder, whether they lie in one file or in shards.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "runtime/files/safetensors.h"

namespace keyhole::tools {

/// The files of the model: model.safetensors, or every shard that model.safetensors.index.json names. They are
/// mapped, so of gigabytes of weights only headers are read. Throws std::runtime_error, which names the file and the
/// tensor, for a file that is absent or corrupt, and for an index that names a tensor in a shard that does not hold
/// it.
class Checkpoint {
 public:
  explicit Checkpoint(const std::filesystem::path& folder);

  [[nodiscard]] bool contains(const std::string& name) const { return home_.count(name) != 0; }

  /// Takes a tensor, which lives as long as this object. Throws std::runtime_error where it is missing, has another
  /// shape than `shape`, or is not of F32, F16 or BF16.
  const StoredTensor& take(const std::string& name, const std::vector<size_t>& shape);

  /// Throws where a tensor was not taken, because ignored weights would silently give wrong text. `harmless` says by
  /// name which may be ignored.
  template <class Harmless>
  void refuse_leftovers(const Harmless& harmless) const {
    for (const auto& [name, file] : home_) {
      if (taken_.count(name) == 0 && !harmless(name)) refuse(name, file);
    }
  }

 private:
  void read_index(const std::filesystem::path& path);
  void add_file(const std::string& name);
  [[noreturn]] void refuse(const std::string& tensor, const std::string& file) const;

  std::filesystem::path folder_;
  std::map<std::string, std::string> home_;  // tensor -> file
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::set<std::string> taken_;
};

}  // namespace keyhole::tools
