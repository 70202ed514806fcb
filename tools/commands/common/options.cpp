#include "tools/commands/common/options.h"

#include <algorithm>
#include <limits>

#include "runtime/files/settings.h"
#include "tools/commands/common/attend_choice.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/sweep.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {

void add_repeatable(CLI::App& command, const std::string& name, const std::string& type,
                    const std::string& help, std::vector<std::string>& values,
                    const std::vector<std::string>& defaults) {
  std::string text = help + "; repeatable";
  for (size_t i = 0; i < defaults.size(); ++i) text += (i == 0 ? " [" : " ") + defaults[i];
  if (!defaults.empty()) text += "]";
  command.add_option(name, values, text)->allow_extra_args(false)->type_name(type);
}

void add_html_option(CLI::App& command, const std::string& holds, std::string& path) {
  command
      .add_option("--html", path,
                  "Write one page with " + holds +
                      ", figures, the machine and this command here: it needs no network")
      ->type_name("FILE");
}

void add_budget_numbers(CLI::App& command, BudgetNumbers& numbers) {
  const auto add_keys = [&command](const char* name, const Setting& row,
                                   std::vector<uint32_t>& keys) {
    command
        .add_option(name, keys,
                    std::string(row.help) + ", e.g. 512,1024; of a tail without a target")
        ->delimiter(',')
        ->type_name("N,...")
        ->check(CLI::Range(1U, std::numeric_limits<uint32_t>::max() / 2).description(""));
  };
  add_keys("--min-keys", setting(kBudgetSettings, "min_keys"), numbers.min_keys);
  add_keys("--max-keys", setting(kBudgetSettings, "max_keys"), numbers.max_keys);
  command
      .add_option("--exact-rows", numbers.exact_rows,
                  "Rows of each KV head that are attended exactly, beside codes of the others [16]")
      ->type_name("N")
      ->check(CLI::Range(0U, 1024U));
}

void add_budget_lists(CLI::App& command, BudgetLists& lists) {
  add_repeatable(command, "--attend", "WAY", kAttendHelp, lists.attends, {"topk"});
  add_repeatable(command, "--tail", "TAIL", kTailHelp, lists.tails, {"none"});
  add_repeatable(command, "--target", "TARGET", kTargetHelp, lists.targets, {"none"});
  add_budget_numbers(command, lists.numbers);
}

std::vector<SweptIndex> expand_indexes(const std::vector<std::string>& indexes) {
  std::vector<SweptIndex> out;
  for (const std::string& index : indexes) {
    for (const std::string& spec : expand_sweep(index)) {
      const bool known =
          std::any_of(out.begin(), out.end(), [&](const SweptIndex& i) { return i.spec == spec; });
      if (known) throw UsageError("--index " + spec + " is given twice");
      out.push_back({spec, index});
    }
  }
  return out;
}

void add_kv_dtype_option(CLI::App& command, std::string& dtype) {
  command.add_option("--kv-dtype", dtype, "How keys and values are stored")
      ->type_name("TYPE")
      ->check(CLI::IsMember({"f16", "bf16", "f32"}))
      ->capture_default_str();
}

void add_kv_host_option(CLI::App& command, std::string& kv_host) {
  constexpr const Setting& kHost = setting(kSessionSettings, "kv_host");
  command.add_option("--kv-host", kv_host, std::string(kHost.help) + ": " + words_help(kHost))
      ->type_name("HOW")
      ->check(CLI::IsMember(words_of(kHost)))
      ->capture_default_str();
}

keyhole_kv_host kv_host_of(const std::string& word) {
  return number_of_word(setting(kSessionSettings, "kv_host"), word).value_or(KEYHOLE_KV_HOST_SAME);
}

keyhole_dtype dtype_of(const std::string& name) {
  if (name == "f32") return KEYHOLE_F32;
  return name == "f16" ? KEYHOLE_F16 : KEYHOLE_BF16;
}

std::string dtype_name(keyhole_dtype dtype) {
  if (dtype == KEYHOLE_F32) return "f32";
  return dtype == KEYHOLE_F16 ? "f16" : "bf16";
}

}  // namespace keyhole::tools
