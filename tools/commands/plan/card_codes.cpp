#include "tools/commands/plan/card_codes.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "tools/commands/common/budget_choice.h"

namespace keyhole::tools {
namespace {

/// What a spec has as a parameter; `otherwise` where it does not name it.
uint32_t parameter_of(const std::string& spec, const std::string& name, uint32_t otherwise) {
  for (const char before : {':', ','}) {
    const std::string key = before + name + '=';
    const size_t at = spec.find(key);
    if (at == std::string::npos) continue;
    uint32_t value = otherwise;
    (void)std::from_chars(spec.data() + at + key.size(), spec.data() + spec.size(), value);
    return value;
  }
  return otherwise;
}

}  // namespace

CardCodes codes_of(const std::string& spec) {
  constexpr uint32_t kUsualBits = 2, kUsualPercent = 12;
  constexpr double kPercent = 100.0;
  CardCodes codes;
  codes.any = has_codes(spec);
  codes.bits = (parameter_of(spec, "k", kUsualBits) + parameter_of(spec, "v", kUsualBits)) / 2.0;
  codes.list_rows = parameter_of(spec, "lists", 0);
  codes.list_share = parameter_of(spec, "read", kUsualPercent) / kPercent;
  return codes;
}

std::string without_lists(std::string spec) {
  if (parameter_of(spec, "lists", 0) == 0) return {};
  for (const char* key : {":lists=", ",lists="}) {
    const size_t at = spec.find(key);
    if (at == std::string::npos) continue;
    const size_t value = at + std::string_view(key).size();
    return spec.replace(value, std::min(spec.find(',', value), spec.size()) - value, "0");
  }
  return {};
}

}  // namespace keyhole::tools
