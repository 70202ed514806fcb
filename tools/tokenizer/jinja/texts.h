// Operations on texts in templates. Bytes that somebody said stay marked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tools/tokenizer/jinja/value.h"

namespace keyhole::tools::jinja {

/// The text of `value`. Throws std::runtime_error that names `who` for other values.
[[nodiscard]] const Text& text_of(const Value& value, std::string_view who);

/// Whether a character is white space for Python's str.isspace(): Unicode's, and the separators U+001C to U+001F.
[[nodiscard]] bool is_space_of_python(uint32_t character);
/// The number of bytes of white space at the beginning of valid UTF-8; below, that of its bytes up to the white space
/// at its end.
[[nodiscard]] size_t leading_space(std::string_view text);
[[nodiscard]] size_t before_trailing_space(std::string_view text);

/// The text without the characters of `set` at its ends; without white space where there is no set.
[[nodiscard]] Text stripped(const Text& text, const Value& set, bool left, bool right);
/// The text in upper case, and below in lower case, by Unicode's mapping without context.
[[nodiscard]] Text upper(const Text& text);
[[nodiscard]] Text lower(const Text& text);
/// The text with the first letter, or that of every word, in upper case and the others in lower case.
[[nodiscard]] Text title(const Text& text, bool all_words);
/// The text with `wanted` replaced by `by`, at most `most` times; `most` < 0: all. Throws std::runtime_error for an
/// empty `wanted`.
[[nodiscard]] Text replaced(const Text& text, const Text& wanted, const Text& by, int64_t most);
/// The parts of the text between separators, or between white space where there is no separator. At most `most` cuts,
/// < 0: all.
[[nodiscard]] List split(const Text& text, const Value& separator, int64_t most);
[[nodiscard]] Text joined(const List& list, const Text& separator);
/// The text with its lines, or all but the first, moved by up to 1000 columns.
[[nodiscard]] Text indented(const Text& text, int64_t columns, bool first);

}  // namespace keyhole::tools::jinja
