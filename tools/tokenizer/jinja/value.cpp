#include "tools/tokenizer/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "tools/tokenizer/unicode.h"

namespace keyhole::tools::jinja {

Text Text::part(size_t begin, size_t end) const {
  Text out;
  out.bytes = bytes.substr(begin, end - begin);
  out.said = said.substr(begin, end - begin);
  return out;
}

Text& Text::operator+=(const Text& other) {
  constexpr size_t kMost = size_t{64} << 20;
  if (bytes.size() + other.bytes.size() > kMost)
    throw std::runtime_error("a text of more than 64 MiB");
  bytes += other.bytes;
  said += other.said;
  return *this;
}

int Value::nesting_around(int inner) {
  if (inner >= kMaxNesting) {
    throw std::runtime_error("a value is nested more than " + std::to_string(kMaxNesting) +
                             " deep, or a namespace in another value");
  }
  return inner + 1;
}

Value::Value(List value) {
  for (const Value& element : value)
    nesting_ = std::max(nesting_, nesting_around(element.nesting_));
  data_ = std::make_shared<const List>(std::move(value));
}

Value::Value(Dict value) {
  for (const auto& entry : value)
    nesting_ = std::max(nesting_, nesting_around(entry.second.nesting_));
  data_ = std::make_shared<const Dict>(std::move(value));
}

Value::Value(Namespace value) : nesting_(kMaxNesting) {
  for (const auto& entry : value.entries) (void)nesting_around(entry.second.nesting_);
  data_ = std::make_shared<Namespace>(std::move(value));
}

const List* Value::list() const {
  const auto* list = as<std::shared_ptr<const List>>();
  return list == nullptr ? nullptr : list->get();
}

const Dict* Value::dict() const {
  if (const auto* space = as<std::shared_ptr<Namespace>>()) return &(*space)->entries;
  const auto* dict = as<std::shared_ptr<const Dict>>();
  return dict == nullptr ? nullptr : dict->get();
}

bool Value::truth() const {
  if (undefined() || none()) return false;
  if (const auto* flag = as<bool>()) return *flag;
  if (number()) return real() != 0.0;
  if (text() != nullptr) return !text()->bytes.empty();
  if (list() != nullptr) return !list()->empty();
  return !dict()->empty();
}

std::string Value::kind() const {
  if (undefined()) {
    const std::string& name = as<Undefined>()->name;
    return name.empty() ? "undefined" : "undefined (" + name + ")";
  }
  return none()              ? "none"
         : number()          ? "a number"
         : text() != nullptr ? "a string"
         : list() != nullptr ? "a list"
                             : "a dictionary";
}

double Value::real() const {
  if (const auto* flag = as<bool>()) return *flag ? 1.0 : 0.0;
  if (const auto* whole = as<int64_t>()) return static_cast<double>(*whole);
  if (const auto* real = as<double>()) return *real;
  throw std::runtime_error(kind() + " where a number is needed");
}

int64_t Value::integer() const {
  if (const auto* flag = as<bool>()) return *flag ? 1 : 0;
  if (const auto* whole = as<int64_t>()) return *whole;
  throw std::runtime_error(kind() + " where a whole number is needed");
}

Text Value::shown() const {
  if (undefined()) return {};
  if (none()) return "None";
  if (const auto* flag = as<bool>()) return *flag ? "True" : "False";
  if (text() != nullptr) return *text();
  return to_python(*this);
}

bool Value::equals(const Value& other) const {
  if (number() && other.number()) return real() == other.real();
  if (text() != nullptr && other.text() != nullptr) return text()->bytes == other.text()->bytes;
  if (list() != nullptr && other.list() != nullptr) {
    if (list()->size() != other.list()->size()) return false;
    for (size_t i = 0; i < list()->size(); ++i) {
      if (!(*list())[i].equals((*other.list())[i])) return false;
    }
    return true;
  }
  if (dict() != nullptr && other.dict() != nullptr) {
    if (dict() == other.dict()) return true;
    if (dict()->size() != other.dict()->size()) return false;
    return std::all_of(dict()->begin(), dict()->end(), [&](const auto& entry) {
      const Value there = other.get(entry.first);
      return !there.undefined() && entry.second.equals(there);
    });
  }
  return (none() && other.none()) || (undefined() && other.undefined());
}

bool Value::less(const Value& other) const {
  if (number() && other.number()) return real() < other.real();
  if (text() != nullptr && other.text() != nullptr) return text()->bytes < other.text()->bytes;
  throw std::runtime_error(kind() + " and " + other.kind() + " cannot be ordered");
}

Value Value::get(std::string_view key) const {
  if (const Dict* entries = dict()) {
    for (const auto& [name, value] : *entries) {
      if (name == key) return value;
    }
  }
  return Undefined{std::string(key)};
}

void Value::set(const std::string& key, Value value) const {
  const auto* space = as<std::shared_ptr<Namespace>>();
  if (space == nullptr)
    throw std::runtime_error("an attribute of " + kind() + " is set; allowed: of a namespace");
  (void)nesting_around(value.nesting_);
  Dict& entries = (*space)->entries;
  for (auto& [name, old] : entries) {
    if (name == key) {
      old = std::move(value);
      return;
    }
  }
  entries.emplace_back(key, std::move(value));
}

namespace {

Text quoted(const Text& text) {
  Text out = "\"";
  for (size_t i = 0; i < text.bytes.size(); ++i) {
    const char c = text.bytes[i];
    const bool is_said = text.said[i] != '\0';
    char code[8] = {c, '\0'};
    switch (c) {
      case '"': std::snprintf(code, sizeof(code), "\\\""); break;
      case '\\': std::snprintf(code, sizeof(code), "\\\\"); break;
      case '\n': std::snprintf(code, sizeof(code), "\\n"); break;
      case '\r': std::snprintf(code, sizeof(code), "\\r"); break;
      case '\t': std::snprintf(code, sizeof(code), "\\t"); break;
      case '\b': std::snprintf(code, sizeof(code), "\\b"); break;
      case '\f': std::snprintf(code, sizeof(code), "\\f"); break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          std::snprintf(code, sizeof(code), "\\u%04x", static_cast<unsigned>(c));
        }
        break;
    }
    out += Text(std::string_view(code), is_said);
  }
  return out += "\"";
}

/// A number as Python's repr() writes it: the shortest digits that read back as the same number, with an exponent
/// below 1e-4 and from 1e16 on, otherwise with a point.
std::string python_number(double real) {
  if (std::isnan(real)) return "nan";
  if (std::isinf(real)) return real < 0 ? "-inf" : "inf";
  const double size = std::abs(real);
  const bool is_plain = size == 0.0 || (size >= 1e-4 && size < 1e16);
  char digits[64];
  const auto end =
      std::to_chars(digits, digits + sizeof digits, real,
                    is_plain ? std::chars_format::fixed : std::chars_format::scientific)
          .ptr;
  std::string out(digits, end);
  if (is_plain && out.find('.') == std::string::npos) out += ".0";
  return out;
}

}  // namespace

Text to_json(const Value& value, int64_t indent, int depth) {
  if (value.undefined()) throw std::runtime_error(value.kind() + " is no JSON");
  if (value.none()) return "null";
  if (const auto* flag = value.as<bool>()) return *flag ? "true" : "false";
  if (const auto* whole = value.as<int64_t>()) return std::string_view(std::to_string(*whole));
  if (const auto* real = value.as<double>()) return std::string_view(python_number(*real));
  if (value.text() != nullptr) return quoted(*value.text());
  const bool is_list = value.list() != nullptr;
  const size_t count = is_list ? value.list()->size() : value.dict()->size();
  const auto line = [indent](int to) {
    return indent < 0 ? std::string() : "\n" + std::string(static_cast<size_t>(indent * to), ' ');
  };
  Text out = is_list ? "[" : "{";
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) out += indent < 0 ? ", " : ",";
    out += std::string_view(line(depth + 1));
    if (is_list) {
      out += to_json((*value.list())[i], indent, depth + 1);
    } else {
      const auto& [key, entry] = (*value.dict())[i];
      out += quoted(std::string_view(key));
      out += ": ";
      out += to_json(entry, indent, depth + 1);
    }
  }
  if (count > 0) out += std::string_view(line(depth));
  return out += is_list ? "]" : "}";
}

namespace {

/// A text as repr() of Python writes it: between ' unless it holds ' and no ".
Text python_quoted(const Text& text) {
  const bool has_single = text.bytes.find('\'') != std::string::npos;
  const char quote = has_single && text.bytes.find('"') == std::string::npos ? '"' : '\'';
  const std::string mark(1, quote);
  Text out = std::string_view(mark);
  for (size_t at = 0; at < text.bytes.size();) {
    const size_t begin = at;
    const bool is_said = text.said[at] != '\0';
    const uint32_t c = next_character(text.bytes, at);
    char code[16] = "";
    if (c == static_cast<uint32_t>(quote) || c == '\\') {
      std::snprintf(code, sizeof code, "\\%c", static_cast<char>(c));
    } else if (c == '\n' || c == '\r' || c == '\t') {
      std::snprintf(code, sizeof code, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    } else if (!is_printable(c)) {
      const char* const form = c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
      std::snprintf(code, sizeof code, form, static_cast<unsigned>(c));  // NOLINT: one of three
    }
    out += code[0] == '\0' ? text.part(begin, at) : Text(std::string_view(code), is_said);
  }
  return out += std::string_view(mark);
}

}  // namespace

Text to_python(const Value& value) {
  if (value.text() != nullptr) return python_quoted(*value.text());
  if (value.number() || value.none()) {
    return value.as<bool>() != nullptr || value.none() ? value.shown() : to_json(value);
  }
  if (value.undefined()) return "Undefined";
  const bool is_list = value.list() != nullptr;
  const size_t count = is_list ? value.list()->size() : value.dict()->size();
  Text out = is_list ? "[" : "{";
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) out += ", ";
    if (is_list) {
      out += to_python((*value.list())[i]);
    } else {
      const auto& [key, entry] = (*value.dict())[i];
      out += python_quoted(std::string_view(key));
      out += ": ";
      out += to_python(entry);
    }
  }
  return out += is_list ? "]" : "}";
}

std::vector<size_t> character_starts(std::string_view text) {
  std::vector<size_t> starts;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0U) != 0x80U) starts.push_back(i);
  }
  starts.push_back(text.size());
  return starts;
}

}  // namespace keyhole::tools::jinja
