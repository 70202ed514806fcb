// What a session's tokens are, as its caller has said: the model's id, and a hash of the token ids. A saved context is
// not taken for another model's, or for another text's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

struct Identity {
  static constexpr size_t kLongestModel = 255;

  std::string model;         ///< empty: not known
  uint64_t token_count = 0;  ///< 0: not known
  uint64_t token_hash = 0;   ///< 0 where token_count is

  /// model null: keeps the one there is. held: the tokens of the session, of which `count` are named. Strong guarantee.
  /// Throws Error(invalid_argument).
  void set(const char* model, const int32_t* tokens, uint64_t count, uint64_t held);
  /// Only the first n tokens are left.
  void truncate(uint64_t n);

  void save(ChecksumWriter& out) const;
  /// Throws Error(corrupt | io).
  [[nodiscard]] static Identity load(ChecksumReader& in);
};

/// What a caller wants to load; null: anything.
struct ExpectedIdentity {
  const char* model = nullptr;
  const int32_t* tokens = nullptr;
  uint64_t count = 0;
  std::optional<uint64_t> held_by_all;  ///< of a file of several ranks; none: by the session

  /// Throws Error(invalid_argument) unless a session of this identity, with `held` tokens that it names all, is of this
  /// model and holds the first of these tokens.
  void check(const Identity& identity, uint32_t held) const;
};

}  // namespace keyhole::runtime
