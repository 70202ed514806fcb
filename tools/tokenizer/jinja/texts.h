// What texts can be asked to do in templates. What was said stays marked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tools/tokenizer/jinja/value.h"

namespace keyhole::tools::jinja {

/// The text of `value`; throws std::runtime_error that names `who` for others.
[[nodiscard]] const Text& text_of(const Value& value, std::string_view who);

/// White space as str.isspace() of Python has it: Unicode's, and the separators U+001C to U+001F.
[[nodiscard]] bool is_space_of_python(uint32_t character);
/// Bytes of white space at the beginning of valid UTF-8, and its bytes up to the white space at its end.
[[nodiscard]] size_t leading_space(std::string_view text);
[[nodiscard]] size_t before_trailing_space(std::string_view text);

/// Without the characters of `set` at its ends; white space where there is no set.
[[nodiscard]] Text stripped(const Text& text, const Value& set, bool left, bool right);
/// As Unicode has it, without context.
[[nodiscard]] Text upper(const Text& text);
[[nodiscard]] Text lower(const Text& text);
/// The first letter, or that of every word, in upper case, the others in lower case.
[[nodiscard]] Text title(const Text& text, bool all_words);
/// `most` < 0: all. Throws std::runtime_error for an empty `wanted`.
[[nodiscard]] Text replaced(const Text& text, const Text& wanted, const Text& by, int64_t most);
/// At white space where there is no separator. `most` cuts, < 0: all.
[[nodiscard]] List split(const Text& text, const Value& separator, int64_t most);
[[nodiscard]] Text joined(const List& list, const Text& separator);
/// Lines behind the first, or all, moved by up to 1000 columns.
[[nodiscard]] Text indented(const Text& text, int64_t columns, bool first);

}  // namespace keyhole::tools::jinja
