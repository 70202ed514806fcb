// Bytes that can be read at any place and by several threads at once, from a file or from memory. Nothing is mapped:
// bytes are checked in our own memory, where no other process can change or cut them.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "cpu/types.h"
#include "runtime/files/input_file.h"

namespace keyhole::runtime {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  [[nodiscard]] virtual uint64_t size() const = 0;
  /// Copies bytes [offset, offset + n), which must exist, to `to`. Throws Error(io).
  virtual void read(uint64_t offset, std::byte* to, size_t n) const = 0;
};

class FileSource final : public ByteSource {
 public:
  /// Opens the file. Throws Error(io).
  explicit FileSource(const std::string& path) try : file_(path) {
  } catch (const CannotRead& e) {
    throw Error(Status::io, e.what());
  }
  [[nodiscard]] uint64_t size() const override { return file_.size(); }
  void read(uint64_t offset, std::byte* to, size_t n) const override {
    try {
      file_.read(offset, {to, n});
    } catch (const CannotRead& e) {
      throw Error(Status::io, e.what());
    }
  }

 private:
  InputFile file_;
};

class MemorySource final : public ByteSource {
 public:
  /// Reads from `bytes`, which outlive it.
  explicit MemorySource(std::span<const std::byte> bytes) : bytes_(bytes) {}
  explicit MemorySource(const std::string& bytes) : bytes_(std::as_bytes(std::span(bytes))) {}
  [[nodiscard]] uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t offset, std::byte* to, size_t n) const override {
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(offset), n, to);
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace keyhole::runtime
