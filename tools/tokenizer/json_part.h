// One value of a JSON file and its place there, with which errors are reported.
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
  /// fail() with this value, shortened, as the value seen.
  [[noreturn]] void fail(const std::string& allowed) const;

  [[nodiscard]] bool is_object() const;
  [[nodiscard]] bool is_array() const;
  [[nodiscard]] bool is_string() const;
  /// Whether it is the number 0, in any form.
  [[nodiscard]] bool is_zero() const;

  /// A field of an object. Throws where this value is none.
  [[nodiscard]] std::optional<JsonPart> find(const std::string& field) const;
  [[nodiscard]] JsonPart at(const std::string& field) const;
  /// The elements of an array, at most `most`.
  [[nodiscard]] std::vector<JsonPart> items(size_t most) const;
  /// The names of an object's fields.
  [[nodiscard]] std::vector<std::string> names() const;

  [[nodiscard]] const std::string& text() const;
  [[nodiscard]] uint32_t number() const;
  /// Fields with the value that they have where they are absent.
  [[nodiscard]] bool flag(const std::string& field, bool fallback) const;
  [[nodiscard]] std::string text(const std::string& field, const std::string& fallback) const;
  [[nodiscard]] uint32_t number(const std::string& field, uint32_t fallback) const;

  /// The names and values of an object of numbers, all below `bound`.
  [[nodiscard]] std::vector<std::pair<std::string_view, uint32_t>> numbers(uint32_t bound) const;
  /// The pairs of an array of pairs of strings, each ["a", "b"] or "a b".
  [[nodiscard]] std::vector<std::pair<std::string_view, std::string_view>> pairs() const;

 private:
  const nlohmann::json* value_;
  std::string place_;
};

/// A text from a file as an error shows it: in quotes, shortened, without anything that a terminal would obey.
[[nodiscard]] std::string shown_text(std::string_view text);

/// Reads and parses the file `path`. Throws std::runtime_error that names it where it cannot be read, has more than
/// 256 MiB or is no JSON object.
[[nodiscard]] nlohmann::json read_json_file(const std::string& path);
/// Parses `text`; errors call it `source`.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& source);

}  // namespace keyhole::tools
