#include "runtime/files/settings.h"

#include <cmath>
#include <cstring>

namespace keyhole {
namespace {

std::string range_text(const Setting& s) {
  const auto whole = [](double x) { return std::to_string(static_cast<uint64_t>(x)); };
  std::string text;
  if (s.range.open) {
    text = "above " + whole(s.range.low) + " and below " + whole(s.range.high);
  } else if (std::isinf(s.range.high)) {
    text = "finite and at least " + whole(s.range.low);
  } else {
    text = whole(s.range.low) + ".." + whole(s.range.high);
  }
  if (s.zero == Zero::none && (s.range.open || s.range.low > 0)) text += ", or 0 for none";
  if (s.zero == Zero::automatic && s.automatic >= 1 && s.range.low > 0) {
    text += ", or KEYHOLE_AUTO (0) for " + whole(s.automatic);
  }
  return text;
}

std::string refused(const Setting& s, const std::string& value, const std::string& allowed) {
  return std::string(s.name) + " is " + value + ", allowed: " + allowed;
}

/// Written so that NaN is refused.
template <class Number>
bool is_allowed(const Setting& s, Number value) {
  const auto x = static_cast<double>(value);
  if (x == 0.0 && s.zero != Zero::number) return true;
  if (s.range.open) return x > s.range.low && x < s.range.high;
  return x >= s.range.low && x <= s.range.high && std::isfinite(x);
}

}  // namespace

void copy_field(const Setting& s, const void* from, void* to) {
  std::memcpy(static_cast<std::byte*>(to) + s.offset,
              static_cast<const std::byte*>(from) + s.offset, s.size);
}

bool same_number(const Setting& s, const void* a, const void* b) {
  bool same = false;
  visit_number(s, a,
               [&](const auto& x) { same = x == field<std::remove_cvref_t<decltype(x)>>(s, b); });
  return same;
}

void set_initial(std::span<const Setting> table, void* config) {
  for (const Setting& s : table) {
    visit_number(s, config,
                 [&](auto& x) { x = static_cast<std::decay_t<decltype(x)>>(s.initial); });
  }
}

void complete(std::span<const Setting> table, void* config) {
  for (const Setting& s : table) {
    if (s.zero != Zero::automatic) continue;
    visit_number(s, config, [&](auto& x) {
      if (x == 0) x = static_cast<std::decay_t<decltype(x)>>(s.automatic);
    });
  }
}

std::string refusal(const Setting& s, const void* config) {
  if (s.kind == SettingKind::word) {
    const auto value = field<int32_t>(s, config);
    if (value >= 0 && static_cast<size_t>(value) < s.words.size()) return "";
    std::string list;
    for (size_t i = 0; i < s.words.size(); ++i) {
      list.append(i == 0 ? "" : ", ").append(s.words[i].constant);
      list.append(" (").append(std::to_string(i)).append(")");
    }
    return refused(s, std::to_string(value), list);
  }
  if (s.kind == SettingKind::bytes) return "";
  std::string text;
  visit_number(s, config, [&](const auto& x) {
    if (!is_allowed(s, x)) text = refused(s, std::to_string(x), range_text(s));
  });
  return text;
}

std::optional<int32_t> number_of_word(const Setting& s, std::string_view word) {
  for (size_t i = 0; i < s.words.size(); ++i) {
    if (word == s.words[i].word) return static_cast<int32_t>(i);
  }
  return std::nullopt;
}

const char* word_of_number(const Setting& s, int32_t number) {
  return s.words[static_cast<size_t>(number)].word;
}

std::vector<std::string> words_of(const Setting& s) {
  std::vector<std::string> words;
  for (const SettingWord& w : s.words) words.emplace_back(w.word);
  return words;
}

std::string words_help(const Setting& s) {
  std::string text;
  for (const SettingWord& w : s.words) {
    text.append(text.empty() ? "" : ", ").append(w.word).append(" (").append(w.help).append(")");
  }
  return text;
}

}  // namespace keyhole
