#include "runtime/plan/budget.h"

#include <algorithm>

#include "cpu/types.h"
#include "index/scan/code_scan.h"
#include "index/types/factory.h"
#include "runtime/plan/refusals.h"

namespace keyhole::runtime {
namespace {

/// The budget of an index with codes that is given none.
Budget default_for_codes() {
  Budget budget;
  budget.top_k = 16;
  budget.tail = KEYHOLE_TAIL_CODES;
  return budget;
}

void check_tail_codes(const keyhole_budget& b) {
  if (b.attend != KEYHOLE_ATTEND_TOPK && b.attend != KEYHOLE_ATTEND_NONE) {
    bad("attend is " + std::to_string(b.attend) +
        " with tail KEYHOLE_TAIL_CODES, allowed: KEYHOLE_ATTEND_TOPK (0), the top_k heaviest rows "
        "of "
        "the KV head exactly, or KEYHOLE_ATTEND_NONE (3), all rows by their codes");
  }
  if (b.error_target != 0.0F || b.mass_target != 0.0F) {
    bad("a target with tail KEYHOLE_TAIL_CODES: a target needs partitions, allowed: none");
  }
  if (b.attend == KEYHOLE_ATTEND_TOPK && b.top_k > index::kMostExactRows) {
    bad("top_k is " + std::to_string(b.top_k) + " with tail KEYHOLE_TAIL_CODES, allowed: 1.." +
        std::to_string(index::kMostExactRows));
  }
}

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
  if (b.tail == KEYHOLE_TAIL_CODES) check_tail_codes(b);
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

Budget completed(const Budget& budget, std::string_view spec) {
  return budget == Budget() && index::has_codes(spec) ? default_for_codes() : budget;
}

void check_codes(const Budget& budget, std::string_view spec) {
  if (!budget.reads_codes() || index::has_codes(spec)) return;
  bad("tail is KEYHOLE_TAIL_CODES with index '" + std::string(spec) +
      "', which has no codes; needed: an index of type codes");
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
