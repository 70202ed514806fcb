#include "tools/engines/llama.cpp/settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

namespace keyhole::llama_cpp {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("KEYHOLE_GGML: " + what);
}

uint32_t number(std::string_view key, std::string_view value, uint32_t least, uint32_t most) {
  uint32_t result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || result < least ||
      result > most) {
    refuse(std::string(key) + "=" + std::string(value) + ": allowed are whole numbers from " +
           std::to_string(least) + " to " + std::to_string(most));
  }
  return result;
}

/// Which of `words` the value is.
template <size_t n>
size_t choice(std::string_view key, std::string_view value,
              const std::array<std::string_view, n>& words) {
  const auto found = std::find(words.begin(), words.end(), value);
  if (found != words.end()) return static_cast<size_t>(found - words.begin());
  std::string allowed;
  for (const std::string_view word : words) {
    allowed += (allowed.empty() ? "" : ", ") + std::string(word);
  }
  refuse(std::string(key) + "=" + std::string(value) + ": allowed are " + allowed);
}

constexpr uint32_t kMostTokens = 1U << 29U;

/// A key, and what its value does.
struct Key {
  std::string_view name;
  void (*set)(Settings& settings, std::string_view key, std::string_view value);
};

constexpr std::array kKeys{
    Key{"index", [](Settings& s, std::string_view, std::string_view v) { s.index = v; }},
    Key{"tail",
        [](Settings& s, std::string_view k, std::string_view v) {
          (void)choice<5>(k, v, {"none", "mean", "centroid", "second", "codes"});
          s.tail = v;
        }},
    Key{"top_k", [](Settings& s, std::string_view k,
                    std::string_view v) { s.top_k = number(k, v, 1, kMostTokens); }},
    Key{"sink", [](Settings& s, std::string_view k,
                   std::string_view v) { s.sink = number(k, v, 0, kMostTokens); }},
    Key{"window", [](Settings& s, std::string_view k,
                     std::string_view v) { s.window = number(k, v, 1, kMostTokens); }},
    Key{"kv",
        [](Settings& s, std::string_view k, std::string_view v) {
          s.int8 = choice<2>(k, v, {"same", "int8"}) == 1;
        }},
    Key{"threads", [](Settings& s, std::string_view k,
                      std::string_view v) { s.threads = number(k, v, 1, 1024); }},
    Key{"copy",
        [](Settings& s, std::string_view k, std::string_view v) {
          s.copy = choice<2>(k, v, {"off", "on"}) == 1;
        }},
    Key{"card", [](Settings& s, std::string_view k,
                   std::string_view v) { s.card = number(k, v, 0, kMostTokens); }},
    Key{"rows",
        [](Settings& s, std::string_view k, std::string_view v) {
          s.rows_on_card = choice<2>(k, v, {"host", "card"}) == 1;
        }},
    Key{"graphs",
        [](Settings& s, std::string_view k, std::string_view v) {
          s.graphs = choice<2>(k, v, {"off", "on"}) == 1;
        }},
    Key{"together",
        [](Settings& s, std::string_view k, std::string_view v) {
          s.together = choice<2>(k, v, {"off", "on"}) == 1;
        }},
    Key{"prompt", [](Settings& s, std::string_view, std::string_view v) { s.prompt = v; }},
    Key{"prompt_from", [](Settings& s, std::string_view k,
                          std::string_view v) { s.prompt_from = number(k, v, 2, kMostTokens); }},
    Key{"plan",
        [](Settings& s, std::string_view k, std::string_view v) {
          s.plan = choice<2>(k, v, {"off", "on"}) == 1;
        }},
    Key{"budgets", [](Settings& s, std::string_view, std::string_view v) { s.budgets = v; }},
};

}  // namespace

Settings parse_settings(std::string_view text) {
  Settings settings;
  std::set<std::string_view> seen;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    if (item.empty()) continue;  // ";;", and a ";" at the end
    const size_t equals = item.find('=');
    const std::string_view name = item.substr(0, equals);
    const auto key =
        std::find_if(kKeys.begin(), kKeys.end(), [&](const Key& k) { return k.name == name; });
    if (key == kKeys.end()) {
      std::string known;
      for (const Key& k : kKeys) known += (known.empty() ? "" : ", ") + std::string(k.name);
      refuse("unknown key '" + std::string(name) + "': known are " + known);
    }
    if (equals == std::string_view::npos || equals + 1 == item.size()) {
      refuse(std::string(name) + " has no value: write " + std::string(name) + "=value");
    }
    if (!seen.insert(name).second) refuse(std::string(name) + " is there twice");
    key->set(settings, name, item.substr(equals + 1));
  }
  return settings;
}

}  // namespace keyhole::llama_cpp
