// Fields of a config.json, each read with the error that it can have.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace keyhole::tools {

/// A number for error texts: "0.5", "1e+06".
[[nodiscard]] std::string shown(double value);

/// The fields of one JSON object, borrowed. Errors are std::runtime_error: "SOURCE: FIELD is SEEN; allowed: ...".
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string source);

  [[noreturn]] void fail(const std::string& field, const std::string& seen,
                         const std::string& allowed) const;

  /// Whether the field is there, be it as null.
  [[nodiscard]] bool has(const std::string& field) const;
  /// The field's value, or nullptr if it is absent or null (which Hugging Face mostly uses alike).
  [[nodiscard]] const nlohmann::json* find(const std::string& field) const;
  /// Names of all fields that are there and not null.
  [[nodiscard]] std::vector<std::string> names() const;
  /// The field, which has to be an object if it is there.
  [[nodiscard]] std::optional<Fields> object(const std::string& field) const;

  [[nodiscard]] double number(const std::string& field, double low, double high,
                              std::optional<double> fallback = {}) const;
  /// The field as a number from 1 to `high`.
  [[nodiscard]] uint32_t count(const std::string& field, uint32_t high,
                               std::optional<uint32_t> fallback = {}) const;
  [[nodiscard]] bool flag(const std::string& field, bool fallback) const;
  [[nodiscard]] std::string text(const std::string& field, const std::string& fallback) const;

  [[nodiscard]] const std::string& source() const { return source_; }

 private:
  const nlohmann::json* object_;
  std::string source_;
};

}  // namespace keyhole::tools
