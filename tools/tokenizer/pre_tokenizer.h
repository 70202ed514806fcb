// The pre_tokenizer of tokenizer.json: how a text is cut into words, within which tokens are formed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/tokenizer/json_part.h"

namespace keyhole::tools {

struct Word {
  std::string text;
  bool first = false;  ///< begins the whole text: no token, added ones included, stands before it
};

/// A pre-tokenizer. Immutable.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  /// Cuts every word into words, none of them empty. Words are valid UTF-8.
  [[nodiscard]] virtual std::vector<Word> cut(std::vector<Word> words) const = 0;
};

/// Makes ByteLevel, Split, Digits, Punctuation, Metaspace, Whitespace, WhitespaceSplit, Sequence. Throws
/// std::runtime_error that names another type and its place.
[[nodiscard]] std::unique_ptr<const PreTokenizer> make_pre_tokenizer(const JsonPart& part,
                                                                     int depth = 0);

/// The scheme of a Metaspace, "always", "first" or "never"; its older form is add_prefix_space.
enum class PrependScheme : uint8_t { always, first, never };
[[nodiscard]] PrependScheme prepend_scheme(const JsonPart& part);

}  // namespace keyhole::tools
