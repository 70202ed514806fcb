#include "tools/llama/config_fields.h"

#include <sstream>
#include <stdexcept>
#include <utility>

#include "runtime/files/json.h"

namespace keyhole::tools {

using nlohmann::json;

std::string shown(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

Fields::Fields(const json& object, std::string source)
    : object_(&object), source_(std::move(source)) {}

void Fields::fail(const std::string& field, const std::string& seen,
                  const std::string& allowed) const {
  throw std::runtime_error(source_ + ": " + field + " is " + seen + "; allowed: " + allowed);
}

bool Fields::has(const std::string& field) const { return object_->contains(field); }

const json* Fields::find(const std::string& field) const {
  const auto it = object_->find(field);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

std::optional<Fields> Fields::object(const std::string& field) const {
  const json* value = find(field);
  if (value == nullptr) return {};
  if (!value->is_object()) fail(field, value->dump(), "an object or null");
  return Fields(*value, source_ + ": " + field);
}

std::vector<std::string> Fields::names() const {
  std::vector<std::string> out;
  for (const auto& [name, value] : object_->items()) {
    if (!value.is_null()) out.push_back(name);
  }
  return out;
}

double Fields::number(const std::string& field, double low, double high,
                      std::optional<double> fallback) const {
  const json* value = find(field);
  const std::string allowed = "a number from " + shown(low) + " to " + shown(high);
  if (value == nullptr) {
    if (fallback) return *fallback;
    fail(field, "missing", allowed);
  }
  if (!value->is_number()) fail(field, value->dump(), allowed);
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) fail(field, value->dump(), allowed);
  return number;
}

uint32_t Fields::count(const std::string& field, uint32_t high,
                       std::optional<uint32_t> fallback) const {
  const json* value = find(field);
  const std::string allowed = "a whole number from 1 to " + std::to_string(high);
  if (value == nullptr) {
    if (fallback) return *fallback;
    fail(field, "missing", allowed);
  }
  // is_number_unsigned is false for every negative and every fractional literal.
  if (!value->is_number_unsigned()) fail(field, value->dump(), allowed);
  const auto number = value->get<uint64_t>();
  if (number < 1 || number > high) fail(field, value->dump(), allowed);
  return static_cast<uint32_t>(number);
}

bool Fields::flag(const std::string& field, bool fallback) const {
  const json* value = find(field);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) fail(field, value->dump(), "true or false");
  return value->get<bool>();
}

std::string Fields::text(const std::string& field, const std::string& fallback) const {
  const json* value = find(field);
  if (value == nullptr) return fallback;
  if (!value->is_string()) fail(field, value->dump(), "a string");
  return value->get<std::string>();
}

}  // namespace keyhole::tools
