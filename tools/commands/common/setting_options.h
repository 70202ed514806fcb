// Options that are made of rows of the table of settings, so that a new setting has one.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

/// "--flush-block" of flush_block, "--host-memory" of host_memory_limit.
[[nodiscard]] std::string option_name(const Setting& row);

/// The rows of keyhole_session_config that commands have options of their own for, which say more than one row:
/// max_tokens (--context), mode and index (--index), budget (--k, --attend, --tail, --target, ...), and so on.
[[nodiscard]] bool has_own_option(const Setting& row);

/// An option for each row of keyhole_session_config without one of its own, but those of `not_here`: numbers, words and
/// bytes ("64GiB"). A value that the row does not allow is a UsageError while the command line is parsed. `values` lives as
/// long as the command.
void add_session_settings(CLI::App& command, std::vector<SettingValue>& values,
                          std::initializer_list<std::string_view> not_here = {});

}  // namespace keyhole::tools
