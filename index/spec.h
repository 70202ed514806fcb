// The text form of an index, "type:name=value,name=value", and the one table per type that declares its
// parameters: parsing, error texts, help and the effective-parameters string all read that table.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::index {

/// When the value of a parameter matters. Parameters that only a search reads may differ between the index that was
/// saved and the one that loads it.
enum class Stage { build, search };

/// One parameter. Values are integers; a choice is the position of its word in `options`.
struct ParamDecl {
  std::string_view name;
  Stage stage;
  int64_t fallback;                           ///< the default
  int64_t lowest, highest;                    ///< allowed, both included; unused with options
  std::span<const std::string_view> options;  ///< the words of a choice; empty: an integer
  std::string_view meaning;                   ///< says what 0 stands for where 0 means "chosen"
};

constexpr ParamDecl integer(std::string_view name, Stage stage, int64_t fallback, int64_t lowest,
                            int64_t highest, std::string_view meaning) {
  return {name, stage, fallback, lowest, highest, {}, meaning};
}
constexpr ParamDecl choice(std::string_view name, Stage stage, int64_t fallback,
                           std::span<const std::string_view> options, std::string_view meaning) {
  return {name, stage, fallback, 0, 0, options, meaning};
}

/// One index type; lives in the source file of that type.
struct TypeDecl {
  std::string_view name;
  std::string_view meaning;
  std::span<const ParamDecl> params;
};

/// A parsed spec: a type and one value per declared parameter, in the order of its table.
class Spec {
 public:
  /// Parses a spec. Throws Error(invalid_argument) that names what is unknown, repeated, malformed or out of range,
  /// and what is allowed.
  /// also: what the caller takes beside the types, for the text of an error.
  static Spec parse(std::string_view text, std::span<const TypeDecl* const> types,
                    std::string_view also = {});

  /// A spec with all parameters at their defaults.
  explicit Spec(const TypeDecl& type);

  [[nodiscard]] const TypeDecl& type() const { return *type_; }
  [[nodiscard]] int64_t operator[](size_t param) const { return values_[param]; }
  void set(size_t param, int64_t value) { values_[param] = value; }

  /// The whole spec, every parameter written out: parse(text()) gives the same values.
  [[nodiscard]] std::string text() const;

 private:
  const TypeDecl* type_;
  std::vector<int64_t> values_;
};

/// The allowed values as text: "1..65536", or the words of a choice, "global | segmented".
[[nodiscard]] std::string allowed_text(const ParamDecl& param);
/// A value as it is written in a spec.
[[nodiscard]] std::string value_text(const ParamDecl& param, int64_t value);

}  // namespace keyhole::index
