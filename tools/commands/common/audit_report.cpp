#include "tools/commands/common/audit_report.h"

#include "runtime/files/json.h"
#include "runtime/files/settings.h"
#include "tools/commands/common/number_check.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

constexpr const Setting& kAction = setting(kSessionSettings, "audit_action");

std::string percent(double share) { return format_number(100.0 * share) + " %"; }

}  // namespace

keyhole_audit_action AuditFlags::action_code() const {
  return number_of_word(kAction, action).value_or(KEYHOLE_AUDIT_REPORT);
}

void add_audit_options(CLI::App& command, AuditFlags& flags) {
  CLI::Option* const audit =
      command
          .add_option(
              "--audit", flags.share,
              "Share of all (step, layer, KV head) that is attended exactly as well, beside the "
              "decoding: says how far off it is; e.g. 0.01")
          ->type_name("SHARE")
          ->check(no_nan("0 to 1"))
          ->check(CLI::Range(0.0, 1.0));
  command
      .add_option("--audit-action", flags.action,
                  "What follows an error above --audit-bound: report, widen (the head reads up to "
                  "16 times its budget) or exact (it reads everything)")
      ->check(CLI::IsMember(words_of(kAction)))
      ->needs(audit)
      ->capture_default_str();
  command
      .add_option(
          "--audit-bound", flags.bound,
          "Output error that is too much; default: 1.5 times the head's error target, or 0.1 "
          "without one")
      ->type_name("ERROR")
      ->check(no_nan("1e-9 to 1e9"))
      ->check(CLI::Range(1e-9, 1e9))
      ->needs(audit);
}

std::string audit_text(const keyhole_audit& a) {
  if (a.audits == 0) return "audits: none\n";
  std::string text = "audits: " + format_count(a.audits) + " head steps, output error median " +
                     format_number(a.error_median) + ", p95 " + format_number(a.error_p95) +
                     ", p99 " + format_number(a.error_p99) + ", largest " +
                     format_number(a.error_max) + "; " + format_count(a.over_bound) +
                     " above the bound";
  if (a.actions != 0) text += ", acted upon " + format_count(a.actions) + " times";
  text += "\n        mass read mean " + percent(a.mass_mean) + ", p05 " + percent(a.mass_p05) +
          "; recall " + percent(a.recall) + "; missing mass " + percent(a.missing_mean) +
          ", estimated " + percent(a.estimated_missing_mean) + " (off by " +
          percent(a.missing_error_mean) + ")";
  text += "\n        " + format_duration(a.seconds) + " of work, " + format_count(a.waits) +
          " made in steps\n";
  return text;
}

nlohmann::ordered_json audit_json(const keyhole_audit& a) {
  return {{"audits", a.audits},
          {"over_bound", a.over_bound},
          {"actions", a.actions},
          {"error",
           {{"mean", a.error_mean},
            {"median", a.error_median},
            {"p95", a.error_p95},
            {"p99", a.error_p99},
            {"max", a.error_max}}},
          {"mass", {{"mean", a.mass_mean}, {"p05", a.mass_p05}}},
          {"recall", a.recall},
          {"missing_mass",
           {{"mean", a.missing_mean},
            {"estimated", a.estimated_missing_mean},
            {"mean_difference", a.missing_error_mean}}},
          {"seconds", a.seconds},
          {"waits", a.waits}};
}

}  // namespace keyhole::tools
