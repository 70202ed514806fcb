// The normalizer of tokenizer.json: how a text is rewritten before it is cut.
#pragma once

#include <memory>
#include <string>

#include "tools/tokenizer/json_part.h"

namespace keyhole::tools {

/// A normalizer. Immutable.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  /// Normalizes `text`; it is valid UTF-8, and so is the result.
  [[nodiscard]] virtual std::string normalize(std::string text) const = 0;
};

/// Makes NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Replace, Prepend, Strip, Sequence. Throws std::runtime_error
/// that names another type and its place.
[[nodiscard]] std::unique_ptr<const Normalizer> make_normalizer(const JsonPart& part,
                                                                int depth = 0);

/// How deep sequences may hold sequences.
inline constexpr int kMaxSequenceDepth = 8;
/// The most parts of a sequence.
inline constexpr size_t kMaxSequenceParts = 256;

}  // namespace keyhole::tools
