#include <charconv>

#include "runtime/files/budgets.h"
#include "runtime/files/json.h"

namespace keyhole {
namespace {

using nlohmann::ordered_json;

/// A float as a double that prints as short: 0.05, not 0.05000000074505806.
double shortest(float value) {
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  double out = 0;
  (void)std::from_chars(digits, end, out);
  return out;
}

ordered_json place(const std::optional<uint32_t>& number) {
  return number ? ordered_json(*number) : ordered_json("all");
}

ordered_json to_json(const BudgetsFile::Entry& entry) {
  if (entry.pattern) {
    ordered_json of_prompts = {{"layer", place(entry.layer)},
                               {"q_head", place(entry.q_head)},
                               {"pattern", *entry.pattern}};
    if (!entry.measured.empty()) of_prompts["measured"] = entry.measured;
    return of_prompts;
  }
  ordered_json out = {{"layer", place(entry.layer)}, {"kv_head", place(entry.kv_head)}};
  const auto put = [&](const char* key, const auto& value) {
    if (value) out[key] = *value;
  };
  put("index", entry.index);
  for (const Setting& s : kBudgetSettings) {
    if (!entry.budget.has(s)) continue;
    visit_number(s, &entry.budget.values(), [&](const auto& x) {
      if (s.kind == SettingKind::word) {
        out[s.name] = word_of_number(s, static_cast<int32_t>(x));
      } else if (s.kind == SettingKind::real) {
        out[s.name] = shortest(static_cast<float>(x));
      } else {
        out[s.name] = x;
      }
    });
  }
  put("dense", entry.dense);
  if (!entry.measured.empty()) out["measured"] = entry.measured;
  return out;
}

}  // namespace

std::string budgets_text(const BudgetsFile& budgets) {
  ordered_json head = {{"keyhole_budgets", 1},
                       {"model",
                        {{"layers", budgets.layers},
                         {"q_heads", budgets.q_heads},
                         {"kv_heads", budgets.kv_heads},
                         {"head_dim", budgets.head_dim}}}};
  if (budgets.tail_partition) head["tail_partition"] = *budgets.tail_partition;
  if (!budgets.target.empty()) head["target"] = budgets.target;
  if (!budgets.machine.empty()) head["machine"] = budgets.machine;
  if (!budgets.made_by.empty()) head["made_by"] = budgets.made_by;
  // A line for each head: such files are read, compared and mended by people.
  std::string text = "{\n";
  for (const auto& [key, value] : head.items()) {
    text += " " + ordered_json(key).dump() + ": " + value.dump() + ",\n";
  }
  text += " \"heads\": [";
  for (size_t i = 0; i < budgets.heads.size(); ++i) {
    text += (i == 0 ? "\n  " : ",\n  ") + to_json(budgets.heads[i]).dump();
  }
  return text + "]}\n";
}

}  // namespace keyhole
