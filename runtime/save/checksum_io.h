// Saved sessions as bytes, with a checksum of all of them (chunk_sums.h) at the end. Large arrays, many at a time,
// are written, read and summed by all threads of a pool.
#pragma once

#include <functional>
#include <iosfwd>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/pool.h"
#include "cpu/types.h"
#include "runtime/save/byte_source.h"
#include "runtime/save/chunk_sums.h"

namespace keyhole::runtime {

/// Large arrays begin at a multiple of this in the file, behind zeros: if their lengths are multiples of 4, no
/// element of up to 4 bytes lies in two chunks.
inline constexpr size_t kArrayAlignment = 64;

class ChecksumWriter {
 public:
  /// Both arguments outlive it. pool null: the calling thread does everything.
  explicit ChecksumWriter(std::ostream& out, cpu::Pool* pool = nullptr) : out_(&out), pool_(pool) {}

  void bytes(const std::byte* data, size_t n);
  template <class T>
  void value(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes(reinterpret_cast<const std::byte*>(&v), sizeof v);
  }
  void text(const std::string& s) {
    value(static_cast<uint64_t>(s.size()));
    bytes(reinterpret_cast<const std::byte*>(s.data()), s.size());
  }
  /// Writes large arrays one after the other. The reader knows their lengths.
  void arrays(std::span<const std::span<const std::byte>> all);
  void finish();

 private:
  std::ostream* out_;
  cpu::Pool* pool_;
  uint64_t at_ = 0;
  ChunkSums sums_;
};

/// Reads what ChecksumWriter wrote. Every read is checked against what is left of the file, so that a damaged length
/// can neither read past the end nor allocate more than the file's size.
class ChecksumReader {
 public:
  /// The source outlives it. pool null: the calling thread reads everything.
  explicit ChecksumReader(const ByteSource& source, cpu::Pool* pool = nullptr);

  void bytes(std::byte* data, size_t n, const char* what);
  template <class T>
  T value(const char* what) {
    static_assert(std::is_trivially_copyable_v<T>);
    T v;
    bytes(reinterpret_cast<std::byte*>(&v), sizeof v, what);
    return v;
  }
  std::string text(const char* what) {
    const auto n = value<uint64_t>(what);
    need(n, what);
    std::string s(n, '\0');
    bytes(reinterpret_cast<std::byte*>(s.data()), n, what);
    return s;
  }
  template <class T>
  std::vector<T> array(uint64_t n, const char* what) {
    if (n > left() / sizeof(T)) need(UINT64_MAX, what);
    std::vector<T> v(n);
    bytes(reinterpret_cast<std::byte*>(v.data()), n * sizeof(T), what);
    return v;
  }
  /// Throws Error(corrupt) where fewer than n bytes are left. Called before memory is taken to read into.
  void need(uint64_t n, const char* what) const;
  /// Called on any thread with a part of array `number` of ChecksumWriter::arrays(), while it is still in a cache:
  /// check(number, data, n). What it throws, arrays() throws.
  using Check = std::function<void(size_t number, const std::byte* data, size_t n)>;
  void arrays(std::span<const std::span<std::byte>> all, const char* what, const Check& check = {});
  /// Throws Error(corrupt) unless the file ends here with the right sum.
  void finish();

 private:
  static constexpr size_t kAhead = size_t{64} << 10;  // that small values are read from

  [[nodiscard]] uint64_t left() const { return source_->size() - at_; }
  const ByteSource* source_;
  cpu::Pool* pool_;
  uint64_t at_ = 0;
  std::vector<std::byte> ahead_;  // bytes [ahead_at_, ahead_at_ + size) of the file
  uint64_t ahead_at_ = 0;
  ChunkSums sums_;
};

}  // namespace keyhole::runtime
