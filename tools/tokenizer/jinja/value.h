// Values of chat templates, as Python has them: texts, numbers, lists, dictionaries.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace keyhole::tools::jinja {

/// A text that remembers which of its bytes somebody said: what the template itself wrote is not said.
struct Text {
  std::string bytes;
  std::string said;  ///< of the same size: 1 for said bytes, else 0

  Text() = default;
  Text(std::string_view text, bool is_said = false)  // NOLINT: a text anywhere
      : bytes(text), said(text.size(), is_said ? '\1' : '\0') {}
  Text(const char* text) : Text(std::string_view(text)) {}  // NOLINT

  [[nodiscard]] Text part(size_t begin, size_t end) const;
  /// Throws std::runtime_error beyond 64 MiB.
  Text& operator+=(const Text& other);
};

class Value;
using List = std::vector<Value>;
/// In the order of insertion.
using Dict = std::vector<std::pair<std::string, Value>>;
struct Undefined {
  std::string name;  ///< for errors
};
struct None {};

/// What namespace() makes: the only value that changes.
struct Namespace {
  Dict entries;
};

/// Lists and dictionaries are shared and never change, so that no value holds itself. They are at most kMaxNesting
/// deep: more throws std::runtime_error. A namespace is held by names alone.
class Value {
 public:
  Value() : data_(Undefined{}) {}
  Value(Undefined value) : data_(std::move(value)) {}  // NOLINT: any of them is a value
  Value(None value) : data_(value) {}                  // NOLINT
  Value(bool value) : data_(value) {}                  // NOLINT
  Value(int64_t value) : data_(value) {}               // NOLINT
  Value(double value) : data_(value) {}                // NOLINT
  Value(Text value) : data_(std::move(value)) {}       // NOLINT
  Value(const char* value) : data_(Text(value)) {}     // NOLINT
  Value(List value);                                   // NOLINT
  Value(Dict value);                                   // NOLINT
  Value(Namespace value);                              // NOLINT

  template <class T>
  [[nodiscard]] const T* as() const {
    return std::get_if<T>(&data_);
  }
  [[nodiscard]] bool undefined() const { return as<Undefined>() != nullptr; }
  [[nodiscard]] bool none() const { return as<None>() != nullptr; }
  [[nodiscard]] bool number() const { return as<int64_t>() || as<double>() || as<bool>(); }
  [[nodiscard]] const Text* text() const { return as<Text>(); }
  [[nodiscard]] const List* list() const;
  /// Of a namespace too.
  [[nodiscard]] const Dict* dict() const;

  [[nodiscard]] bool truth() const;
  /// "a string", "a list", ...
  [[nodiscard]] std::string kind() const;
  /// As str() of Python has it.
  [[nodiscard]] Text shown() const;
  [[nodiscard]] double real() const;
  [[nodiscard]] int64_t integer() const;

  [[nodiscard]] bool equals(const Value& other) const;
  /// Of numbers, or of texts; throws std::runtime_error for others.
  [[nodiscard]] bool less(const Value& other) const;
  /// An entry of a dictionary; undefined where there is none, and for what is no dictionary.
  [[nodiscard]] Value get(std::string_view key) const;
  /// Of a namespace; throws std::runtime_error for others.
  void set(const std::string& key, Value value) const;

  static constexpr int kMaxNesting = 64;

 private:
  static int nesting_around(int inner);

  std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<List>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Namespace>>
      data_;
  int nesting_ = 0;
};

/// As json.dumps(ensure_ascii=False) has it; `indent` < 0: in one line.
[[nodiscard]] Text to_json(const Value& value, int64_t indent = -1, int depth = 0);

/// As repr() of Python has it: what a template shows of a list or a dictionary.
[[nodiscard]] Text to_python(const Value& value);

/// Where the characters of valid UTF-8 begin, and its end.
[[nodiscard]] std::vector<size_t> character_starts(std::string_view text);

}  // namespace keyhole::tools::jinja
