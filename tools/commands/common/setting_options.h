// Options made from the rows of the table of settings, so that a new setting has an option.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

/// The name of a row's option: "--flush-block" of flush_block, "--host-memory" of host_memory_limit.
[[nodiscard]] std::string option_name(const Setting& row);

/// Whether commands have an option of their own for a row of keyhole_session_config, which says more than one row:
/// max_tokens (--context), mode and index (--index), budget (--k, --attend, --tail, --target, ...), and so on.
[[nodiscard]] bool has_own_option(const Setting& row);

/// Adds an option for each row of keyhole_session_config without one of its own, except those of `not_here`: numbers,
/// words and bytes ("64GiB"). A value that the row does not allow is a UsageError while the command line is parsed.
/// `values` lives as long as the command.
void add_session_settings(CLI::App& command, std::vector<SettingValue>& values,
                          std::initializer_list<std::string_view> not_here = {});

}  // namespace keyhole::tools
