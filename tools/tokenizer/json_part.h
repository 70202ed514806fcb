// One value of a JSON file and where it stands there: what is wrong with a file is said with its place.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace keyhole::tools {

/// A view: the document lives longer. All calls that return a value throw std::runtime_error with the place
/// ("tokenizer.json: decoder.decoders[1].type"), the value seen and the values allowed. null and an absent field are
/// the same.
class JsonPart {
 public:
  JsonPart(const nlohmann::json& value, std::string place)
      : value_(&value), place_(std::move(place)) {}

  [[nodiscard]] const std::string& place() const { return place_; }
  [[noreturn]] void fail(const std::string& seen, const std::string& allowed) const;
  /// The same with this value as what was seen, shortened.
  [[noreturn]] void fail(const std::string& allowed) const;

  [[nodiscard]] bool is_object() const;
  [[nodiscard]] bool is_array() const;
  [[nodiscard]] bool is_string() const;
  /// The number 0, in any form.
  [[nodiscard]] bool is_zero() const;

  /// A field of an object; throws where this is none.
  [[nodiscard]] std::optional<JsonPart> find(const std::string& field) const;
  [[nodiscard]] JsonPart at(const std::string& field) const;
  /// The elements of an array, at most `most`.
  [[nodiscard]] std::vector<JsonPart> items(size_t most) const;
  /// The names of an object's fields.
  [[nodiscard]] std::vector<std::string> names() const;

  [[nodiscard]] const std::string& text() const;
  [[nodiscard]] uint32_t number() const;
  /// Fields with a value that they have where they are absent.
  [[nodiscard]] bool flag(const std::string& field, bool fallback) const;
  [[nodiscard]] std::string text(const std::string& field, const std::string& fallback) const;
  [[nodiscard]] uint32_t number(const std::string& field, uint32_t fallback) const;

  /// An object of numbers: every name with its value, which is below `bound`.
  [[nodiscard]] std::vector<std::pair<std::string_view, uint32_t>> numbers(uint32_t bound) const;
  /// An array of pairs of strings, each ["a", "b"] or "a b".
  [[nodiscard]] std::vector<std::pair<std::string_view, std::string_view>> pairs() const;

 private:
  const nlohmann::json* value_;
  std::string place_;
};

/// What an error shows of a text from a file: in quotes, shortened, nothing that a terminal would obey.
[[nodiscard]] std::string shown_text(std::string_view text);

/// `path` parsed; throws std::runtime_error that names it where it cannot be read, has more than 256 MiB or is no JSON
/// object.
[[nodiscard]] nlohmann::json read_json_file(const std::string& path);
/// `text` parsed; errors call it `source`.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& source);

}  // namespace keyhole::tools
