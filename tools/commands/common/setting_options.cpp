#include "tools/commands/common/setting_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

[[noreturn]] void refuse_setting(const std::string& option, const std::string& text,
                                 const std::string& allowed) {
  throw UsageError(option + " is " + text + ", allowed: " + allowed);
}

double number_of(const Setting& row, const std::string& option, const std::string& text) {
  if (row.kind == SettingKind::word) {
    const auto number = number_of_word(row, text);
    if (!number) refuse_setting(option, text, words_help(row));
    return *number;
  }
  if (row.kind == SettingKind::bytes) return static_cast<double>(parse_bytes(text));
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = row.kind != SettingKind::count ||
                     (value == std::floor(value) && value >= 0 && value <= 4294967295.0);
  if (error != std::errc() || end != text.data() + text.size() || !whole) {
    refuse_setting(option, text, row.kind == SettingKind::count ? "whole numbers" : "numbers");
  }
  return value;
}

SettingValue parse(const Setting& row, const std::string& text) {
  const std::string option = option_name(row);
  const SettingValue value{&row, number_of(row, option, text)};
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  apply_settings({value}, &config);
  if (std::string wrong = refusal(row, &config); !wrong.empty()) {
    throw UsageError(option + wrong.substr(std::string_view(row.name).size()));
  }
  return value;
}

std::string help_of(const Setting& row) {
  std::string text = row.help;
  if (row.kind == SettingKind::word) text += ": " + words_help(row);
  if (row.zero == Zero::none) text += "; 0: no limit";
  if (row.kind == SettingKind::word) {
    text += std::string(" [") + word_of_number(row, static_cast<int32_t>(row.initial)) + "]";
  } else if (const double usual = row.initial != 0 ? row.initial : row.automatic; usual != 0) {
    text += " [" + format_number(usual, 9) + "]";
  }
  return text;
}

}  // namespace

std::string option_name(const Setting& row) {
  std::string name = row.name;
  if (name.ends_with("_limit")) name.resize(name.size() - std::string_view("_limit").size());
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

bool has_own_option(const Setting& row) {
  constexpr std::string_view kOwn[] = {"max_tokens",
                                       "sink",
                                       "window",
                                       "mode",
                                       "index",
                                       "budget",
                                       "budgets",
                                       "dense_layers",
                                       "audit_share",
                                       "audit_action",
                                       "audit_bound",
                                       "kv_host",
                                       "device_memory_limit"};
  return std::find(std::begin(kOwn), std::end(kOwn), row.name) != std::end(kOwn);
}

void add_session_settings(CLI::App& command, std::vector<SettingValue>& values,
                          std::initializer_list<std::string_view> not_here) {
  for (const Setting& row : kSessionSettings) {
    if (has_own_option(row) ||
        std::find(not_here.begin(), not_here.end(), row.name) != not_here.end()) {
      continue;
    }
    const char* type = row.kind == SettingKind::word    ? "WHAT"
                       : row.kind == SettingKind::bytes ? "BYTES"
                                                        : "N";
    command
        .add_option_function<std::string>(
            option_name(row),
            [&row, &values](const std::string& text) { values.push_back(parse(row, text)); },
            help_of(row))
        ->type_name(type);
  }
}

}  // namespace keyhole::tools
