#include "tools/tokenizer/jinja/texts.h"

#include <cctype>

#include "tools/tokenizer/jinja/fail.h"

namespace keyhole::tools::jinja {
namespace {

template <class Function>
Text each_byte(Text text, const Function& function) {
  for (char& c : text.bytes) {
    if (static_cast<unsigned char>(c) < 0x80)
      c = static_cast<char>(function(static_cast<unsigned char>(c)));
  }
  return text;
}

}  // namespace

const Text& text_of(const Value& value, std::string_view who) {
  if (value.text() == nullptr)
    fail(std::string(who) + " of " + value.kind() + "; allowed: of a string");
  return *value.text();
}

Text stripped(const Text& text, const Value& set, bool left, bool right) {
  const std::string characters =
      set.undefined() || set.none() ? " \t\n\r\v\f" : text_of(set, "strip").bytes;
  size_t begin = 0;
  size_t end = text.bytes.size();
  while (left && begin < end && characters.find(text.bytes[begin]) != std::string::npos) ++begin;
  while (right && end > begin && characters.find(text.bytes[end - 1]) != std::string::npos) --end;
  return text.part(begin, end);
}

Text upper(const Text& text) {
  return each_byte(text, [](unsigned char c) { return std::toupper(c); });
}
Text lower(const Text& text) {
  return each_byte(text, [](unsigned char c) { return std::tolower(c); });
}

Text title(const Text& text, bool all_words) {
  bool begins = true;
  return each_byte(text, [&](unsigned char c) {
    const int changed = begins ? std::toupper(c) : std::tolower(c);
    begins = all_words && std::isalpha(c) == 0;
    return changed;
  });
}

Text replaced(const Text& text, const Text& wanted, const Text& by, int64_t most) {
  if (wanted.bytes.empty()) fail("replace of an empty string");
  Text out;
  size_t at = 0;
  for (size_t found = text.bytes.find(wanted.bytes); found != std::string::npos && most != 0;
       found = text.bytes.find(wanted.bytes, at), --most) {
    out += text.part(at, found);
    out += by;
    at = found + wanted.bytes.size();
  }
  return out += text.part(at, text.bytes.size());
}

List split(const Text& text, const Value& separator, int64_t most) {
  List out;
  size_t at = 0;
  if (separator.undefined() || separator.none()) {
    const auto space = [&](size_t i) {
      return std::isspace(static_cast<unsigned char>(text.bytes[i])) != 0;
    };
    while (true) {
      while (at < text.bytes.size() && space(at)) ++at;
      if (at == text.bytes.size()) return out;
      size_t end = at;
      while (end < text.bytes.size() && !space(end)) ++end;
      out.push_back(text.part(at, end));
      at = end;
    }
  }
  const std::string mark = text_of(separator, "split").bytes;
  if (mark.empty()) fail("split at an empty string");
  for (size_t found = text.bytes.find(mark); found != std::string::npos && most != 0;
       found = text.bytes.find(mark, at), --most) {
    out.push_back(text.part(at, found));
    at = found + mark.size();
  }
  out.push_back(text.part(at, text.bytes.size()));
  return out;
}

Text joined(const List& list, const Text& separator) {
  Text out;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i > 0) out += separator;
    out += list[i].shown();
  }
  return out;
}

Text indented(const Text& text, int64_t columns, bool first) {
  if (columns < 0 || columns > 1000) fail("indent by " + std::to_string(columns));
  const std::string spaces(static_cast<size_t>(columns), ' ');
  Text out;
  if (first) out += std::string_view(spaces);
  for (size_t i = 0; i < text.bytes.size(); ++i) {
    out += text.part(i, i + 1);
    const bool line_begins =
        text.bytes[i] == '\n' && i + 1 < text.bytes.size() && text.bytes[i + 1] != '\n';
    if (line_begins) out += std::string_view(spaces);
  }
  return out;
}

}  // namespace keyhole::tools::jinja
