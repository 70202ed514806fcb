#include "index/spec.h"

#include <charconv>

#include "cpu/types.h"

namespace keyhole::index {
namespace {

[[noreturn]] void refuse(std::string_view spec, const std::string& why) {
  throw Error(Status::invalid_argument, "index spec '" + std::string(spec) + "': " + why);
}

std::string quoted(std::string_view s) { return std::string(1, '\'').append(s).append(1, '\''); }

template <class Range, class Name>
std::string list_names(const Range& range, Name name) {
  std::string text;
  for (const auto& item : range) {
    if (!text.empty()) text += ", ";
    text += name(item);
  }
  return text;
}

std::string param_names(const TypeDecl& type) {
  if (type.params.empty()) return "it has none";
  return "allowed: " + list_names(type.params, [](const ParamDecl& p) { return p.name; });
}

int64_t parse_value(std::string_view spec, const ParamDecl& param, std::string_view text) {
  const auto bad = [&] {
    refuse(spec, std::string(param.name) + "=" + std::string(text) + " is not allowed; " +
                     std::string(param.name) + " takes " + allowed_text(param));
  };
  if (!param.options.empty()) {
    for (size_t i = 0; i < param.options.size(); ++i) {
      if (param.options[i] == text) return static_cast<int64_t>(i);
    }
    bad();
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < param.lowest ||
      value > param.highest) {
    bad();
  }
  return value;
}

}  // namespace

std::string allowed_text(const ParamDecl& param) {
  if (!param.options.empty()) {
    std::string text;
    for (const std::string_view option : param.options) {
      if (!text.empty()) text += " | ";
      text += option;
    }
    return text;
  }
  return std::to_string(param.lowest) + ".." + std::to_string(param.highest);
}

std::string value_text(const ParamDecl& param, int64_t value) {
  return param.options.empty() ? std::to_string(value)
                               : std::string(param.options[static_cast<size_t>(value)]);
}

Spec::Spec(const TypeDecl& type) : type_(&type) {
  for (const ParamDecl& param : type.params) values_.push_back(param.fallback);
}

Spec Spec::parse(std::string_view text, std::span<const TypeDecl* const> types,
                 std::string_view also) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const TypeDecl* type = nullptr;
  for (const TypeDecl* t : types) {
    if (t->name == name) type = t;
  }
  if (type == nullptr) {
    refuse(text, "unknown index type " + quoted(name) +
                     "; allowed: " + list_names(types, [](const TypeDecl* t) { return t->name; }) +
                     std::string(also));
  }

  Spec spec(*type);
  if (colon == std::string_view::npos) return spec;
  std::vector<bool> seen(type->params.size(), false);
  std::string_view rest = text.substr(colon + 1);
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      refuse(text, "expected name=value where it says " + quoted(item) + "; parameters of " +
                       std::string(name) + ": " + param_names(*type));
    }
    const std::string_view key = item.substr(0, equals);
    size_t index = 0;
    while (index < type->params.size() && type->params[index].name != key) ++index;
    if (index == type->params.size()) {
      refuse(text,
             std::string(name) + " has no parameter " + quoted(key) + "; " + param_names(*type));
    }
    if (seen[index]) refuse(text, "parameter " + quoted(key) + " is given twice");
    seen[index] = true;
    spec.values_[index] = parse_value(text, type->params[index], item.substr(equals + 1));
    if (comma == std::string_view::npos) return spec;
    rest.remove_prefix(comma + 1);
  }
}

std::string Spec::text() const {
  std::string text(type_->name);
  for (size_t i = 0; i < values_.size(); ++i) {
    text += i == 0 ? ':' : ',';
    text += std::string(type_->params[i].name) + "=" + value_text(type_->params[i], values_[i]);
  }
  return text;
}

}  // namespace keyhole::index
