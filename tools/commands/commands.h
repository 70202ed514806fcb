// The subcommands of `keyhole`. Each add_* adds one to the application: its options, its help with
// examples, and a callback that does the work. A callback returns for success and throws otherwise:
// UsageError for what the user can mend on the command line, any other std::exception for a
// failure.
#pragma once

#include <string>
#include <vector>

#include "tools/commands/common/cli_fwd.h"

namespace keyhole::tools {

void add_record(CLI::App& keyhole);
void add_compare(CLI::App& keyhole);
void add_decode(CLI::App& keyhole);
void add_eval(CLI::App& keyhole);
void add_plan(CLI::App& keyhole);
void add_prefill(CLI::App& keyhole);
void add_calibrate(CLI::App& keyhole);
void add_heads(CLI::App& keyhole);
void add_train_saap(CLI::App& keyhole);
void add_bench_step(CLI::App& keyhole);

/// The footer of a help text: the heading "Examples:" and the lines below it, each shown as typed.
[[nodiscard]] std::string examples(const std::vector<std::string>& lines);

}  // namespace keyhole::tools
