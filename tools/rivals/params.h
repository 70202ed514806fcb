// The text form of a rival, "name:parameter=value,...", and the table in which each rival declares its parameters:
// parsing, error texts and help read that table. Index types of the library have a table of their own (index/spec.h),
// which tools do not see.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace keyhole::tools {

class Rival;
class RivalSpec;
struct RivalShape;

/// When a parameter's value matters. Parameters that only a search reads are swept without building again.
enum class RivalStage { build, search };

/// One parameter; values are integers.
struct RivalParam {
  const char* name;
  RivalStage stage;
  int64_t fallback;         ///< the default
  int64_t lowest, highest;  ///< allowed, both included
  const char* meaning;      ///< says what 0 stands for where 0 means "chosen"
};

/// One rival; lives in the source file of that rival.
struct RivalType {
  const char* name;
  const char* meaning;
  std::span<const RivalParam> params;
  /// The package that the command was built without; null where the rival can be built.
  const char* needs = nullptr;
  /// Whether a search is asked for k keys of each head, as --attend topk:K says; otherwise a budget of its own
  /// decides.
  bool asks_for_k = false;
  /// Throws UsageError where the spec cannot be built over keys of this shape, e.g. with more lists than keys. Null:
  /// it always can.
  void (*check)(const RivalSpec& spec, const RivalShape& shape) = nullptr;
  /// Makes the rival. Null where `needs` is not.
  std::unique_ptr<Rival> (*make)(const RivalSpec& spec) = nullptr;
};

/// A parsed spec: a rival and one value per declared parameter, in the order of its table.
class RivalSpec {
 public:
  /// Parses a spec. Throws UsageError that names what is unknown, repeated, malformed, out of range or not built in,
  /// and what is allowed.
  static RivalSpec parse(const std::string& text, std::span<const RivalType* const> types);

  /// A spec with all parameters at their defaults.
  explicit RivalSpec(const RivalType& type);

  [[nodiscard]] const RivalType& type() const { return *type_; }
  [[nodiscard]] int64_t operator[](size_t param) const { return values_[param]; }
  /// A value by its place in the table, as a size.
  [[nodiscard]] size_t size(size_t param) const { return static_cast<size_t>(values_[param]); }

  /// Whether a rival built by `other` serves this spec, too: they differ at most in parameters that searches read.
  [[nodiscard]] bool built_alike(const RivalSpec& other) const;
  /// The whole spec, every parameter written out: parse(text()) gives the same values.
  [[nodiscard]] std::string text() const;

 private:
  const RivalType* type_;
  std::vector<int64_t> values_;
};

/// The help's list of rivals with their parameters.
[[nodiscard]] std::string describe_rivals(std::span<const RivalType* const> types);

}  // namespace keyhole::tools
