#include "tools/tokenizer/json_part.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

#include "runtime/files/json.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

/// Shows a value without the contents of an object or array, which may be the whole file.
std::string shown(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  if (value.is_string()) return shown_text(value.get_ref<const std::string&>());
  return value.dump();
}

}  // namespace

std::string shown_text(std::string_view text) {
  constexpr size_t kShown = 60;
  std::string out = "\"";
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7F ? '?' : c;
  }
  return out + (text.size() > kShown ? "...\"" : "\"");
}

void JsonPart::fail(const std::string& seen, const std::string& allowed) const {
  throw std::runtime_error(place_ + " is " + seen + "; allowed: " + allowed);
}

void JsonPart::fail(const std::string& allowed) const { fail(shown(*value_), allowed); }

bool JsonPart::is_object() const { return value_->is_object(); }
bool JsonPart::is_array() const { return value_->is_array(); }
bool JsonPart::is_string() const { return value_->is_string(); }
bool JsonPart::is_zero() const { return value_->is_number() && value_->get<double>() == 0.0; }

std::optional<JsonPart> JsonPart::find(const std::string& field) const {
  if (!value_->is_object()) fail("an object");
  const auto it = value_->find(field);
  if (it == value_->end() || it->is_null()) return std::nullopt;
  return JsonPart(*it, place_ + (place_.ends_with(": ") ? "" : ".") + field);
}

JsonPart JsonPart::at(const std::string& field) const {
  if (auto part = find(field)) return *part;
  JsonPart(*value_, place_ + (place_.ends_with(": ") ? "" : ".") + field)
      .fail("missing", "a value");
}

std::vector<JsonPart> JsonPart::items(size_t most) const {
  if (!value_->is_array()) fail("an array");
  if (value_->size() > most) {
    fail("an array of " + std::to_string(value_->size()), "at most " + std::to_string(most));
  }
  std::vector<JsonPart> parts;
  parts.reserve(value_->size());
  for (const json& item : *value_) {
    parts.emplace_back(item, place_ + "[" + std::to_string(parts.size()) + "]");
  }
  return parts;
}

std::vector<std::string> JsonPart::names() const {
  if (!value_->is_object()) fail("an object");
  std::vector<std::string> names;
  for (const auto& item : value_->items()) names.push_back(item.key());
  return names;
}

const std::string& JsonPart::text() const {
  if (!value_->is_string()) fail("a string");
  return value_->get_ref<const std::string&>();
}

uint32_t JsonPart::number() const {
  // is_number_unsigned is false for every negative and every fractional literal.
  if (!value_->is_number_unsigned() || value_->get<uint64_t>() >= (uint64_t{1} << 32)) {
    fail("a whole number from 0 to 4294967295");
  }
  return static_cast<uint32_t>(value_->get<uint64_t>());
}

bool JsonPart::flag(const std::string& field, bool fallback) const {
  const auto part = find(field);
  if (!part) return fallback;
  if (!part->value_->is_boolean()) part->fail("true or false");
  return part->value_->get<bool>();
}

std::string JsonPart::text(const std::string& field, const std::string& fallback) const {
  const auto part = find(field);
  return part ? part->text() : fallback;
}

uint32_t JsonPart::number(const std::string& field, uint32_t fallback) const {
  const auto part = find(field);
  return part ? part->number() : fallback;
}

std::vector<std::pair<std::string_view, uint32_t>> JsonPart::numbers(uint32_t bound) const {
  if (!value_->is_object()) fail("an object");
  std::vector<std::pair<std::string_view, uint32_t>> out;
  out.reserve(value_->size());
  for (auto it = value_->begin(); it != value_->end(); ++it) {
    const json& value = it.value();
    if (!value.is_number_unsigned() || value.get<uint64_t>() >= bound) {
      JsonPart(value, place_ + "." + shown_text(it.key()))
          .fail("a whole number below " + std::to_string(bound) +
                ", the rows of the model's vocabulary");
    }
    out.emplace_back(it.key(), static_cast<uint32_t>(value.get<uint64_t>()));
  }
  return out;
}

std::vector<std::pair<std::string_view, std::string_view>> JsonPart::pairs() const {
  if (!value_->is_array()) fail("an array");
  std::vector<std::pair<std::string_view, std::string_view>> out;
  out.reserve(value_->size());
  for (const json& item : *value_) {
    const auto wrong = [&]() {
      JsonPart(item, place_ + "[" + std::to_string(out.size()) + "]")
          .fail("two tokens, as [\"a\", \"b\"] or \"a b\"");
    };
    if (item.is_string()) {
      const std::string_view text = item.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos)
        wrong();
      out.emplace_back(text.substr(0, space), text.substr(space + 1));
    } else {
      if (!item.is_array() || item.size() != 2 || !item[0].is_string() || !item[1].is_string())
        wrong();
      out.emplace_back(item[0].get_ref<const std::string&>(),
                       item[1].get_ref<const std::string&>());
    }
  }
  return out;
}

json parse_json(std::string_view text, const std::string& source) {
  json root;
  try {
    root = json::parse(text.begin(), text.end());
  } catch (const json::exception& e) {
    throw std::runtime_error(source + " is not valid JSON: " + e.what());
  }
  if (!root.is_object()) {
    throw std::runtime_error(source + " is a JSON " + root.type_name() + ", not an object");
  }
  return root;
}

json read_json_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be opened");
  constexpr std::streamoff kMost = std::streamoff{256} << 20;
  file.seekg(0, std::ios::end);
  const std::streamoff size = file.tellg();
  if (size < 0) throw std::runtime_error(path + ": cannot be read");
  if (size > kMost) {
    throw std::runtime_error(path + " has " + std::to_string(size) + " bytes; allowed: at most " +
                             std::to_string(kMost));
  }
  std::string text(static_cast<size_t>(size), '\0');
  file.seekg(0);
  file.read(text.data(), size);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  return parse_json(text, path);
}

}  // namespace keyhole::tools
