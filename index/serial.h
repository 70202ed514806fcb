// Saved indexes as bytes: fixed-width values in little-endian order behind a running checksum. The
// reader trusts nothing: it never allocates much more than it has already read, and every shortage
// or contradiction is an Error(corrupt).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace keyhole::index {

static_assert(std::endian::native == std::endian::little, "saved indexes are little-endian");

/// XXH3 (64 bits) of a byte stream; the same for any division into update() calls. Finds damage, is
/// no defence against forgery (readers check every value as well).
class Checksum {
 public:
  Checksum();
  void update(const void* data, size_t bytes);
  [[nodiscard]] uint64_t value() const;
  /// The value() of these bytes alone, without the memory of a stream: a hash of something small.
  [[nodiscard]] static uint64_t of(const void* data, size_t bytes);

 private:
  struct State;  // xxHash's
  struct Free {
    void operator()(State* state) const;
  };
  std::unique_ptr<State, Free> state_;
};

/// Whether checksums are compared. Fuzzers set it to false in the build that has them: their inputs would otherwise
/// all end at a checksum.
#ifdef KEYHOLE_FUZZED
inline bool checks_sums = true;
#else
inline constexpr bool checks_sums = true;  // NOLINT: a variable for fuzzers
#endif

class Writer {
 public:
  explicit Writer(std::ostream& out) : out_(out) {}

  template <class T>
  requires std::is_trivially_copyable_v<T>
  void put(const T& value) { bytes(&value, sizeof value); }
  void put_text(std::string_view text) {
    put(static_cast<uint32_t>(text.size()));
    bytes(text.data(), text.size());
  }
  /// Writes the elements alone; the reader knows their number from elsewhere.
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void put_array(const T* data, size_t n) { bytes(data, n * sizeof(T)); }
  /// Writes the checksum of all that was put. Throws Error(io) where the stream has failed.
  void finish();

 private:
  void bytes(const void* data, size_t n);
  std::ostream& out_;
  Checksum checksum_;
};

class Reader {
 public:
  explicit Reader(std::istream& in) : in_(in) {}

  template <class T>
  requires std::is_trivially_copyable_v<T>
  [[nodiscard]] T get() {
    T value;
    bytes(&value, sizeof value);
    return value;
  }
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void get_into(T* data, size_t n) { bytes(data, n * sizeof(T)); }
  [[nodiscard]] std::string get_text(size_t longest);
  template <class T>
  requires std::is_trivially_copyable_v<T>
  [[nodiscard]] std::vector<T> get_array(size_t n) {
    // Reads piece by piece, so that a false length meets the end of the stream before it can exhaust memory.
    constexpr size_t kPiece = (size_t{1} << 20) / sizeof(T);
    std::vector<T> data;
    while (data.size() < n) {
      const size_t have = data.size();
      data.resize(have + std::min(kPiece, n - have));
      bytes(data.data() + have, (data.size() - have) * sizeof(T));
    }
    return data;
  }
  /// Reads the checksum and compares it. Throws Error(corrupt) where it differs.
  void finish();

 private:
  void bytes(void* data, size_t n);
  std::istream& in_;
  Checksum checksum_;
};

/// Throws Error(corrupt) "saved index: <what>" unless `ok`.
void require_sound(bool ok, const char* what);

}  // namespace keyhole::index
