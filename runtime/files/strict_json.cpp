#include "runtime/files/strict_json.h"

#include <set>
#include <stdexcept>
#include <vector>

namespace keyhole {
namespace {

using nlohmann::json;

}  // namespace

void fail(const std::string& text) { throw std::runtime_error(text); }

std::string quoted_name(const std::string& name) {
  constexpr size_t kShown = 80;
  std::string out = "\"";
  for (const char c : name.substr(0, kShown)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return out + (name.size() > kShown ? "...\"" : "\"");
}

// nlohmann::json keeps the last of two equal keys without a word, so keys are watched as they come.
json parse_strict_json(std::span<const std::byte> text, int max_depth, const std::string& what) {
  std::vector<std::set<std::string>> seen;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > max_depth) {
      fail(what + " is nested more than " + std::to_string(max_depth) + " deep");
    }
    if (event == json::parse_event_t::object_start) {
      seen.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      seen.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!seen.back().insert(key).second) fail(what + " names " + quoted_name(key) + " twice");
    }
    return true;
  };
  const char* begin = reinterpret_cast<const char*>(text.data());
  json parsed;
  try {
    parsed = json::parse(begin, begin + text.size(), watch);
  } catch (const json::exception& e) {
    fail(what + " is not valid JSON: " + e.what());
  }
  if (!parsed.is_object()) {
    fail(what + " is a JSON " + parsed.type_name() + ", not an object");
  }
  return parsed;
}

}  // namespace keyhole
