#include "tools/terminal/units.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

template <class... Args>
std::string print(const char* format, Args... args) {
  char text[64];
  std::snprintf(text, sizeof text, format, args...);
  return text;
}

struct Quantity {
  double number;
  std::string unit;  ///< lower case
};

// Splits "1.5 GiB" into 1.5 and "gib".
Quantity split(std::string_view text, const char* what, const char* allowed) {
  const std::string copy(text);
  char* end = nullptr;
  const bool starts_with_digit = !copy.empty() && copy[0] >= '0' && copy[0] <= '9';
  const double number = starts_with_digit ? std::strtod(copy.c_str(), &end) : -1.0;
  if (!starts_with_digit || !std::isfinite(number) ||
      copy.find_first_of("xXpP") != std::string::npos) {
    throw UsageError("\"" + copy + "\" is not a " + what + "; write " + allowed);
  }
  std::string unit;
  for (; *end != '\0'; ++end) {
    if (*end != ' ')
      unit += static_cast<char>(*end >= 'A' && *end <= 'Z' ? *end - 'A' + 'a' : *end);
  }
  return {number, unit};
}

uint64_t whole(double value, std::string_view text, const char* what) {
  // 2^63: what the library's plan can express.
  if (!(value < 9223372036854775808.0)) {
    throw UsageError("the " + std::string(what) + " \"" + std::string(text) + "\" is above 2^63");
  }
  return static_cast<uint64_t>(value);
}

}  // namespace

std::string format_bytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  return format_number(value) + " " + kUnits[unit];
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  if (seconds < 0.9995e-3) return print("%.0f us", seconds * 1e6);
  if (seconds < 0.9995) return format_number(seconds * 1e3) + " ms";
  if (seconds < 59.5) return print("%.1f s", seconds);
  const auto total = static_cast<uint64_t>(std::llround(seconds));
  if (total < 3600) {
    return print("%d min %02d s", static_cast<int>(total / 60), static_cast<int>(total % 60));
  }
  return print("%lld h %02d min", static_cast<long long>(total / 3600),
               static_cast<int>(total % 3600 / 60));
}

std::string format_count(uint64_t count) {
  std::string out = std::to_string(count);
  for (size_t from_end = 3; from_end < out.size(); from_end += 4) {
    out.insert(out.size() - from_end, ",");
  }
  return out;
}

std::string format_number(double value, int digits) {
  if (std::isnan(value)) return "-";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  const double magnitude = std::abs(value);
  if (magnitude != 0 && magnitude < 1e-4) return print("%.*e", digits - 1, value);
  const int exponent = magnitude == 0 ? 0 : static_cast<int>(std::floor(std::log10(magnitude)));
  std::string out = print("%.*f", std::max(digits - 1 - exponent, 0), value);
  if (out.find('.') != std::string::npos) {
    out.erase(out.find_last_not_of('0') + 1);
    if (out.back() == '.') out.pop_back();
  }
  return out;
}

std::string file_size_text(const std::filesystem::path& path) {
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(path, error);
  return error ? "no file" : format_bytes(bytes);
}

uint64_t parse_bytes(std::string_view text) {
  constexpr const char* kAllowed = "bytes, e.g. 17179869184, 16GiB, 24G or 80GB";
  const Quantity q = split(text, "number of bytes", kAllowed);
  double factor = 1;
  if (!q.unit.empty() && q.unit != "b") {
    constexpr std::string_view kPrefixes = "kmgt";
    const size_t power = kPrefixes.find(q.unit[0]);
    const std::string rest = q.unit.substr(1);
    if (power == std::string_view::npos || (!rest.empty() && rest != "ib" && rest != "b")) {
      throw UsageError("\"" + std::string(text) + "\" has an unknown unit; write " + kAllowed);
    }
    factor = std::pow(rest == "b" ? 1000.0 : 1024.0, static_cast<double>(power + 1));
  }
  return whole(q.number * factor, text, "number of bytes");
}

uint64_t parse_tokens(std::string_view text) {
  constexpr const char* kAllowed = "tokens, e.g. 131072, 128k or 1M";
  const Quantity q = split(text, "number of tokens", kAllowed);
  if (!q.unit.empty() && q.unit != "k" && q.unit != "m") {
    throw UsageError("\"" + std::string(text) + "\" has an unknown unit; write " + kAllowed);
  }
  const double factor = q.unit.empty() ? 1.0 : (q.unit == "k" ? 1024.0 : 1024.0 * 1024.0);
  return whole(q.number * factor, text, "number of tokens");
}

}  // namespace keyhole::tools
