// Reading and writing of safetensors files: 8 bytes little-endian header length, a JSON header, the
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace keyhole {

enum class ElementType { f32, f16, bf16, i32, u32, i64, u8, i8 };
[[nodiscard]] size_t element_size(ElementType type);
[[nodiscard]] const char* element_name(ElementType type);  ///< "F32", "F16", "BF16", ...

/// A tensor of an open file: a view into its mapping, row-major.
struct StoredTensor {
  ElementType type = ElementType::f32;
  std::vector<size_t> shape;
  std::span<const std::byte> bytes;

  [[nodiscard]] size_t elements() const;
  /// Copies the tensor as fp32 (from f32, f16 or bf16). Throws std::runtime_error for integers.
  [[nodiscard]] std::vector<float> to_f32() const;
};

/// A memory-mapped file, wholly validated when it is opened: header size, JSON, dtypes, shapes without overflow,
/// offsets in range, ascending, without holes or overlap, lengths that match. Throws std::runtime_error that names
/// the file, the tensor, the value seen and the value needed; CannotRead (runtime/files/mapped_file.h) where the file
/// cannot be opened.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  [[nodiscard]] bool contains(const std::string& name) const;
  /// The tensor of that name. Throws if it is absent (the text lists a few that are there).
  [[nodiscard]] const StoredTensor& tensor(const std::string& name) const;
  [[nodiscard]] const std::map<std::string, StoredTensor>& tensors() const;
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;  ///< __metadata__

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A tensor as the file's header describes it: where it lies in the data behind the header.
struct TensorEntry {
  ElementType type = ElementType::f32;
  std::vector<size_t> shape;
  size_t begin = 0, bytes = 0;
};

/// A file that others may write to while it is read: validated in the same way, but read and never mapped. Throws as
/// SafetensorsFile does; CannotRead also where the file has been cut meanwhile.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  [[nodiscard]] const std::map<std::string, TensorEntry>& tensors() const;
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;  ///< __metadata__
  /// Copies a tensor of this file to `to`, which has as many bytes.
  void read(const TensorEntry& tensor, std::span<std::byte> to) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Validates a file's bytes without a file, as SafetensorsFile does after mapping: for fuzzing. Throws as
/// SafetensorsFile does.
void validate_safetensors(std::span<const std::byte> bytes);

/// Writes tensors one after the other, so that a large trace never lies in memory twice. The layout
/// is declared first; then every tensor's bytes are written in that order, in pieces of any size.
/// The file appears under its name when finish() succeeds (see NewFile).
class SafetensorsWriter {
 public:
  struct Declaration {
    std::string name;
    ElementType type;
    std::vector<size_t> shape;
  };
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<Declaration>& layout,
                    const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();
  void write(std::span<const std::byte> piece);  ///< next bytes of the declared sequence
  void finish();                                 ///< throws if bytes are missing

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole
