// Values of chat templates as in Python: texts, numbers, lists, dictionaries.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace keyhole::tools::jinja {

/// A text that remembers which of its bytes somebody said; those that the template itself wrote are not said.
struct Text {
  std::string bytes;
  std::string said;  ///< of the same size: 1 for said bytes, else 0

  Text() = default;
  Text(std::string_view text, bool is_said = false)  // NOLINT: a text anywhere
      : bytes(text), said(text.size(), is_said ? '\1' : '\0') {}
  Text(const char* text) : Text(std::string_view(text)) {}  // NOLINT

  [[nodiscard]] Text part(size_t begin, size_t end) const;
  /// Appends. Throws std::runtime_error beyond 64 MiB.
  Text& operator+=(const Text& other);
};

class Value;
using List = std::vector<Value>;
/// Entries of a dictionary in the order of insertion.
using Dict = std::vector<std::pair<std::string, Value>>;
struct Undefined {
  std::string name;  ///< for errors
};
struct None {};

/// The value that namespace() makes, the only kind that changes.
struct Namespace {
  Dict entries;
};

/// A value. Lists and dictionaries are shared and never change, so that no value holds itself. They are at most
/// kMaxNesting deep: more throws std::runtime_error. Only names hold a namespace.
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
  /// The entries of a dictionary or of a namespace.
  [[nodiscard]] const Dict* dict() const;

  [[nodiscard]] bool truth() const;
  /// The kind for error texts: "a string", "a list", ...
  [[nodiscard]] std::string kind() const;
  /// The value as Python's str() shows it.
  [[nodiscard]] Text shown() const;
  [[nodiscard]] double real() const;
  [[nodiscard]] int64_t integer() const;

  [[nodiscard]] bool equals(const Value& other) const;
  /// Compares numbers, or texts. Throws std::runtime_error for others.
  [[nodiscard]] bool less(const Value& other) const;
  /// An entry of a dictionary; undefined where there is none, and for other values.
  [[nodiscard]] Value get(std::string_view key) const;
  /// Sets an entry of a namespace. Throws std::runtime_error for others.
  void set(const std::string& key, Value value) const;

  static constexpr int kMaxNesting = 64;

 private:
  static int nesting_around(int inner);

  std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<List>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Namespace>>
      data_;
  int nesting_ = 0;
};

/// The value as json.dumps(ensure_ascii=False) writes it; `indent` < 0: in one line.
[[nodiscard]] Text to_json(const Value& value, int64_t indent = -1, int depth = 0);

/// The value as Python's repr() shows it, which is how a template shows a list or a dictionary.
[[nodiscard]] Text to_python(const Value& value);

/// The places where the characters of valid UTF-8 begin, and its end.
[[nodiscard]] std::vector<size_t> character_starts(std::string_view text);

}  // namespace keyhole::tools::jinja
