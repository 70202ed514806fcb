// `--audit`: steps that the library computes again exactly while it decodes, and their findings.
#pragma once

#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tools/commands/common/cli_fwd.h"

namespace keyhole::tools {

/// The options `--audit`, `--audit-action`, `--audit-bound`.
struct AuditFlags {
  double share = 0.0;  ///< 0: none
  std::string action = "report";
  float bound = 0.0F;  ///< 0: the library's default

  [[nodiscard]] keyhole_audit_action action_code() const;
};
void add_audit_options(CLI::App& command, AuditFlags& flags);

/// Two or three lines about an audit; one line if nothing was audited.
[[nodiscard]] std::string audit_text(const keyhole_audit& audit);
[[nodiscard]] nlohmann::ordered_json audit_json(const keyhole_audit& audit);

}  // namespace keyhole::tools
