// Binary streams with a running XXH3 checksum, so that damage anywhere in a file is noticed.
#pragma once

#include <fstream>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/types.h"
#include "index/serial.h"

namespace keyhole::runtime {

class ChecksumWriter {
 public:
  explicit ChecksumWriter(std::ostream& out) : out_(&out) {}

  void bytes(const std::byte* data, size_t n) {
    sum_.update(data, n);
    out_->write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(n));
  }
  template <class T>
  void value(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes(reinterpret_cast<const std::byte*>(&v), sizeof v);
  }
  void text(const std::string& s) {
    value(static_cast<uint64_t>(s.size()));
    bytes(reinterpret_cast<const std::byte*>(s.data()), s.size());
  }
  void finish() {
    const uint64_t sum = sum_.value();
    out_->write(reinterpret_cast<const char*>(&sum), sizeof sum);
  }

 private:
  std::ostream* out_;
  index::Checksum sum_;
};

/// Every read is checked against what is left of the file, so that a damaged length can neither
/// read past the end nor allocate more than the file's size.
class ChecksumReader {
 public:
  ChecksumReader(std::istream& in, uint64_t size) : in_(&in), left_(size) {}

  void bytes(std::byte* data, size_t n, const char* what) {
    need(n, what);
    in_->read(reinterpret_cast<char*>(data), static_cast<std::streamsize>(n));
    if (!*in_) throw Error(Status::io, std::string("reading ") + what + " failed");
    sum_.update(data, n);
    left_ -= n;
  }
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
    if (n > left_ / sizeof(T)) need(UINT64_MAX, what);
    std::vector<T> v(n);
    bytes(reinterpret_cast<std::byte*>(v.data()), n * sizeof(T), what);
    return v;
  }
  /// The file must end here with the right sum.
  void finish() {
    const uint64_t computed = sum_.value();
    if (left_ != sizeof computed) {
      throw Error(Status::corrupt, std::to_string(left_) + " bytes are left at the end, needed: " +
                                       std::to_string(sizeof computed));
    }
    uint64_t stored = 0;
    in_->read(reinterpret_cast<char*>(&stored), sizeof stored);
    if (!*in_ || (index::kChecksSums && stored != computed))
      throw Error(Status::corrupt, "the checksum does not match");
  }

 private:
  void need(uint64_t n, const char* what) const {
    if (n > left_) {
      throw Error(Status::corrupt, std::string("the file ends inside ") + what + " (" +
                                       std::to_string(left_) + " bytes are left)");
    }
  }
  std::istream* in_;
  uint64_t left_;
  index::Checksum sum_;
};

}  // namespace keyhole::runtime
