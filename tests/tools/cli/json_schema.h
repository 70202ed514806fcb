// A check of JSON against the part of JSON Schema that docs/compare.schema.json uses.
#pragma once

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

#include "runtime/files/json.h"

namespace keyhole::tools {

class JsonSchema {
 public:
  explicit JsonSchema(nlohmann::json schema) : schema_(std::move(schema)) {}

  /// Returns what is wrong with a value, and where, "results[0].recall is \"x\", not number"; "" if nothing is.
  /// Throws std::runtime_error for a schema with a keyword that is not known here, because it would say more than is
  /// checked.
  [[nodiscard]] std::string error_in(const nlohmann::json& value) const {
    return check(schema_, value, "");
  }

 private:
  using json = nlohmann::json;

  static bool is(const json& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "boolean") return value.is_boolean();
    if (type == "null") return value.is_null();
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    throw std::runtime_error("unknown type " + type);
  }

  [[nodiscard]] std::string check(const json& rule, const json& value,
                                  const std::string& at) const {
    for (const auto& [key, what] : rule.items()) {
      const std::string error = check_one(key, what, rule, value, at);
      if (!error.empty()) return error;
    }
    return "";
  }

  [[nodiscard]] std::string check_one(const std::string& key, const json& what, const json& rule,
                                      const json& value, const std::string& at) const {
    static const std::set<std::string> kWords = {"$schema", "title", "description", "$defs"};
    const auto wrong = [&](const std::string& why) {
      return (at.empty() ? "the document" : at) + " is " + value.dump().substr(0, 60) + ", " + why;
    };
    if (kWords.count(key) != 0) return "";
    if (key == "$ref")
      return check(schema_.at(json::json_pointer(what.get<std::string>().substr(1))), value, at);
    if (key == "type") {
      for (const json& type : what.is_array() ? what : json::array({what})) {
        if (is(value, type)) return "";
      }
      return wrong("not " + what.dump());
    }
    if (key == "const") return value == what ? "" : wrong("not " + what.dump());
    if (key == "enum")
      return std::find(what.begin(), what.end(), value) != what.end()
                 ? ""
                 : wrong("none of " + what.dump());
    if (key == "minimum")
      return !value.is_number() || value >= what ? "" : wrong("below " + what.dump());
    if (key == "required") {
      for (const json& name : what) {
        if (value.is_object() && !value.contains(name)) return at + " lacks " + name.dump();
      }
      return "";
    }
    if (key == "properties") {
      for (const auto& [name, inner] : what.items()) {
        if (!value.is_object() || !value.contains(name)) continue;
        const std::string error = check(inner, value[name], at + (at.empty() ? "" : ".") + name);
        if (!error.empty()) return error;
      }
      return "";
    }
    if (key == "additionalProperties" && what == false) {
      if (!value.is_object()) return "";
      for (const auto& [name, inner] : value.items()) {
        if (!rule.at("properties").contains(name))
          return at + " has \"" + name + "\", which is not described";
      }
      return "";
    }
    if (key == "items") {
      for (size_t i = 0; value.is_array() && i < value.size(); ++i) {
        const std::string error = check(what, value[i], at + "[" + std::to_string(i) + "]");
        if (!error.empty()) return error;
      }
      return "";
    }
    if (key == "oneOf") {
      const auto fits = std::count_if(
          what.begin(), what.end(), [&](const json& one) { return check(one, value, at).empty(); });
      return fits == 1
                 ? ""
                 : wrong("of " + std::to_string(fits) + " kinds: " + check(what.back(), value, at));
    }
    throw std::runtime_error("the check does not know \"" + key + "\"");
  }

  nlohmann::json schema_;
};

}  // namespace keyhole::tools
