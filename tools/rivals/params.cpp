#include "tools/rivals/params.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

std::string range_text(const RivalParam& param) {
  return std::to_string(param.lowest) + ".." + std::to_string(param.highest);
}

template <class Range, class Name>
std::string listed(const Range& things, const Name& name) {
  std::string out;
  for (const auto& thing : things) out += (out.empty() ? "" : ", ") + std::string(name(thing));
  return out;
}

const RivalType& find_type(const std::string& name, std::span<const RivalType* const> types) {
  const auto type =
      std::find_if(types.begin(), types.end(), [&](const RivalType* t) { return t->name == name; });
  if (type == types.end()) {
    throw UsageError("there is no rival '" + name + "'; there are " +
                     listed(types, [](const RivalType* t) { return t->name; }));
  }
  if ((*type)->needs != nullptr) {
    throw UsageError("this keyhole was built without " + name + ": install " + (*type)->needs +
                     ", then configure and build again");
  }
  return **type;
}

int64_t parse_value(const RivalParam& param, const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < param.lowest || value > param.highest) {
    throw UsageError(std::string(param.name) + "=" + text + ": a whole number in " +
                     range_text(param) + " is wanted");
  }
  return value;
}

}  // namespace

RivalSpec::RivalSpec(const RivalType& type) : type_(&type) {
  for (const RivalParam& param : type.params) values_.push_back(param.fallback);
}

RivalSpec RivalSpec::parse(const std::string& text, std::span<const RivalType* const> types) {
  const size_t colon = text.find(':');
  RivalSpec spec(find_type(text.substr(0, colon), types));
  if (colon == std::string::npos) return spec;
  const std::span<const RivalParam> params = spec.type_->params;
  std::vector<bool> given(params.size());
  for (size_t begin = colon + 1; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto param = std::find_if(params.begin(), params.end(),
                                    [&](const RivalParam& p) { return p.name == name; });
    if (equals == std::string::npos || param == params.end()) {
      throw UsageError(
          "'" + part + "' is no parameter with a value; " + spec.type_->name + " has " +
          listed(params, [](const RivalParam& p) { return std::string(p.name) + "="; }));
    }
    const auto at = static_cast<size_t>(param - params.begin());
    if (given[at]) throw UsageError(name + " is given twice");
    given[at] = true;
    spec.values_[at] = parse_value(*param, part.substr(equals + 1));
  }
  return spec;
}

bool RivalSpec::built_alike(const RivalSpec& other) const {
  if (type_ != other.type_) return false;
  for (size_t i = 0; i < values_.size(); ++i) {
    if (type_->params[i].stage == RivalStage::build && values_[i] != other.values_[i]) return false;
  }
  return true;
}

std::string RivalSpec::text() const {
  std::string out = type_->name;
  for (size_t i = 0; i < values_.size(); ++i) {
    out += (i == 0 ? ":" : ",") + std::string(type_->params[i].name) + "=" +
           std::to_string(values_[i]);
  }
  return out;
}

std::string describe_rivals(std::span<const RivalType* const> types) {
  std::ostringstream out;
  for (const RivalType* type : types) {
    out << type->name << ": " << type->meaning;
    if (type->needs != nullptr) out << " [not in this build, which lacks " << type->needs << "]";
    out << "\n";
    for (const RivalParam& param : type->params) {
      out << "    " << param.name << "=" << param.fallback << "  (" << range_text(param) << ") "
          << param.meaning << "\n";
    }
  }
  return out.str();
}

}  // namespace keyhole::tools
