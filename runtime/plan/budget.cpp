#include "runtime/plan/budget.h"

#include <algorithm>

#include "cpu/types.h"

namespace keyhole::runtime {
namespace {

[[noreturn]] void bad(const std::string& text) { throw Error(Status::invalid_argument, text); }

}  // namespace

Budget::Budget() : keyhole_budget{} {
  struct_size = sizeof(keyhole_budget);
  set_initial(kBudgetSettings, static_cast<keyhole_budget*>(this));
  complete(kBudgetSettings, static_cast<keyhole_budget*>(this));
}

bool Budget::operator==(const Budget& other) const {
  const keyhole_budget& a = *this;
  const keyhole_budget& b = other;
  return std::all_of(kBudgetSettings.begin(), kBudgetSettings.end(),
                     [&](const Setting& s) { return same_number(s, &a, &b); });
}

void check_setting(const Setting& setting, const void* config) {
  const std::string text = refusal(setting, config);
  if (!text.empty()) bad(text);
}

void check_attend(keyhole_attend_mode attend) {
  keyhole_budget b{};
  b.attend = attend;
  check_setting(setting(kBudgetSettings, "attend"), &b);
}

float check_min_weight(float min_weight, float fallback) {
  keyhole_budget b{};
  b.min_weight = min_weight;
  check_setting(setting(kBudgetSettings, "min_weight"), &b);
  return min_weight == 0.0F ? fallback : min_weight;
}

uint32_t check_tail_partition(uint32_t keys) {
  constexpr const Setting& kSetting = setting(kSessionSettings, "tail_partition");
  keyhole_session_config c{};
  c.tail_partition = keys;
  check_setting(kSetting, &c);
  return keys == KEYHOLE_AUTO ? static_cast<uint32_t>(kSetting.automatic) : keys;
}

Budget check_budget(const keyhole_budget& b) {
  for (const Setting& s : kBudgetSettings) check_setting(s, &b);
  if (b.max_keys != 0 && b.min_keys > b.max_keys) {
    bad("min_keys is " + std::to_string(b.min_keys) + ", allowed: up to max_keys, which is " +
        std::to_string(b.max_keys));
  }
  if (b.attend == KEYHOLE_ATTEND_NONE && b.tail == KEYHOLE_TAIL_NONE && b.error_target == 0.0F &&
      b.mass_target == 0.0F) {
    bad("attend is KEYHOLE_ATTEND_NONE, which needs a tail or a target: nothing would be read");
  }
  if (std::any_of(std::begin(b.reserved), std::end(b.reserved), [](uint8_t x) { return x != 0; })) {
    throw Error(Status::version, std::string("budget has fields that version ") +
                                     keyhole_version() +
                                     " does not know: its reserved bytes are not 0");
  }
  Budget budget;
  static_cast<keyhole_budget&>(budget) = b;
  budget.struct_size = sizeof(keyhole_budget);
  complete(kBudgetSettings, static_cast<keyhole_budget*>(&budget));
  return budget;
}

Budget check_embedded_budget(const keyhole_budget& b) {
  if (b.struct_size != sizeof(keyhole_budget)) {
    bad("budget.struct_size is " + std::to_string(b.struct_size) +
        ", needed: " + std::to_string(sizeof(keyhole_budget)) +
        ", as the init function of the struct around it sets");
  }
  return check_budget(b);
}

}  // namespace keyhole::runtime
