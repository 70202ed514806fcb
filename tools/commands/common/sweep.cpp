#include "tools/commands/common/sweep.h"

#include <charconv>
#include <cstdint>
#include <string_view>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

[[noreturn]] void refuse_range(const std::string& param, const std::string& why) {
  throw UsageError(param + ": " + why +
                   "; a range of whole numbers is first..last*factor or first..last+step, e.g. "
                   "32..512*2 or 8..64+8");
}

uint64_t whole(std::string_view text, const std::string& param) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number > INT64_MAX) {
    refuse_range(param, "'" + std::string(text) + "' is no whole number");
  }
  return number;
}

// The values of an alternative: those of a range, or itself. `param`: for errors, "name=alternative".
std::vector<std::string> values_of(const std::string& alternative, const std::string& param) {
  const size_t dots = alternative.find("..");
  if (dots == std::string::npos) return {alternative};
  const std::string_view text = alternative;
  const size_t sign = text.find_first_of("*+", dots);
  if (sign == std::string_view::npos)
    refuse_range(param, "how it goes on from number to number is missing");
  const uint64_t first = whole(text.substr(0, dots), param);
  const uint64_t last = whole(text.substr(dots + 2, sign - dots - 2), param);
  const uint64_t by = whole(text.substr(sign + 1), param);
  if (first > last)
    refuse_range(param, std::to_string(first) + " is above " + std::to_string(last));
  const bool multiplies = text[sign] == '*';
  if (multiplies && (by < 2 || first == 0)) {
    refuse_range(param, std::to_string(first) + " times " + std::to_string(by) + " does not grow");
  }
  if (!multiplies && by == 0) refuse_range(param, "a step of 0 does not grow");
  std::vector<std::string> values;
  for (uint64_t number = first;;) {
    values.push_back(std::to_string(number));
    if (values.size() > kMostSwept) {
      refuse_range(param, "it has more than " + std::to_string(kMostSwept) + " numbers");
    }
    // Neither product nor sum is computed where it would be beyond the last number, and overflow.
    if (multiplies ? number > last / by : by > last - number) return values;
    number = multiplies ? number * by : number + by;
  }
}

}  // namespace

std::vector<std::string> expand_sweep(const std::string& spec) {
  const size_t colon = spec.find(':');
  if (colon == std::string::npos) return {spec};
  std::vector<std::string> specs = {spec.substr(0, colon)};
  char separator = ':';
  for (const std::string& param : split(spec.substr(colon + 1), ',')) {
    const size_t equals = param.find('=');
    const std::string name = equals == std::string::npos ? "" : param.substr(0, equals + 1);
    std::vector<std::string> values;
    for (const std::string& alternative : split(param.substr(name.size()), '|')) {
      const std::vector<std::string> some = values_of(alternative, name + alternative);
      values.insert(values.end(), some.begin(), some.end());
    }
    if (specs.size() * values.size() > kMostSwept) {
      throw UsageError(spec + ": it has more than " + std::to_string(kMostSwept) +
                       " combinations of alternatives");
    }
    std::vector<std::string> longer;
    for (const std::string& begun : specs) {
      for (const std::string& value : values) longer.push_back(begun + separator + name + value);
    }
    specs = std::move(longer);
    separator = ',';
  }
  return specs;
}

}  // namespace keyhole::tools
