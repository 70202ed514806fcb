// Options that several commands have, and the meaning of their values.
#pragma once

#include <keyhole/keyhole.h>

#include <string>
#include <vector>

#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/cli_fwd.h"

namespace keyhole::tools {

/// Adds an option that is given once for each of its values. The help names `defaults`, which hold where it is not
/// given.
void add_repeatable(CLI::App& command, const std::string& name, const std::string& type,
                    const std::string& help, std::vector<std::string>& values,
                    const std::vector<std::string>& defaults = {});

/// Adds `--html`. `holds`: what the page shows beside figures, machine and command, e.g. "curves, heads".
void add_html_option(CLI::App& command, const std::string& holds, std::string& path);

/// Adds `--min-keys`, `--max-keys` and `--exact-rows`.
void add_budget_numbers(CLI::App& command, BudgetNumbers& numbers);

/// The repeatable options `--attend`, `--tail` and `--target`, as cross_budgets() takes them, and the numbers.
struct BudgetLists {
  std::vector<std::string> attends, tails, targets;
  BudgetNumbers numbers;
};
void add_budget_lists(CLI::App& command, BudgetLists& lists);

/// An index spec without alternatives, and the --index that it comes from.
struct SweptIndex {
  std::string spec;
  std::string series;
};
/// Expands every --index into its specs, see expand_sweep(). Throws UsageError for one that is given twice.
[[nodiscard]] std::vector<SweptIndex> expand_indexes(const std::vector<std::string>& indexes);

/// Adds `--kv-dtype`: f16, bf16 or f32.
void add_kv_dtype_option(CLI::App& command, std::string& dtype);
[[nodiscard]] keyhole_dtype dtype_of(const std::string& name);
/// Adds `--kv-host`: a word of the setting kv_host.
void add_kv_host_option(CLI::App& command, std::string& kv_host);
[[nodiscard]] keyhole_kv_host kv_host_of(const std::string& word);
/// The dtype's name, as options take it.
[[nodiscard]] std::string dtype_name(keyhole_dtype dtype);

}  // namespace keyhole::tools
