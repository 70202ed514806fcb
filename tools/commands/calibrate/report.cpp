#include "tools/commands/calibrate/report.h"

#include <algorithm>

#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

std::string head_name(const HeadChoice& choice) {
  return "layer " + std::to_string(choice.layer) + " head " + std::to_string(choice.kv_head);
}

std::string microseconds(double us) { return us > 0 ? format_duration(us * 1e-6) : "-"; }

}  // namespace

BudgetsFile to_budgets(const std::vector<HeadChoice>& choices, const CalibrationPlan& plan,
                       const ModelDims& model, const std::string& machine) {
  BudgetsFile out;
  out.layers = model.layers;
  out.q_heads = model.q_heads;
  out.kv_heads = model.kv_heads;
  out.head_dim = model.head_dim;
  out.target = {{"error", plan.requirement.error},
                {"quantile", plan.requirement.quantile},
                {"factor", plan.requirement.factor}};
  out.machine = machine;
  out.made_by = std::string("keyhole ") + keyhole_version() + " calibrate";
  for (const HeadChoice& choice : choices) {
    BudgetsFile::Entry& entry = out.heads.emplace_back();
    entry.layer = choice.layer;
    entry.kv_head = choice.kv_head;
    entry.dense = choice.dense;
    entry.measured = {{"error_median", choice.error_median},
                      {"error_p95", choice.error_p95},
                      {"bytes", choice.bytes},
                      {"us", choice.us}};
    if (choice.dense) continue;
    const keyhole_budget budget = choice.budget.budget();
    entry.index = choice.index;
    for (const Setting& s : kBudgetSettings) {
      const bool unused = s.offset == offsetof(keyhole_budget, min_weight) &&
                          budget.attend != KEYHOLE_ATTEND_WEIGHT;
      if (!unused) copy_field(s, &budget, &entry.budget.name(s));
    }
    const TailChoice& tail = choice.budget.tail;
    if (choice.budget.needs_partitions() && tail.keys_per_partition != KEYHOLE_AUTO) {
      out.tail_partition = tail.keys_per_partition;
    }
  }
  return out;
}

std::string choice_table(const std::vector<HeadChoice>& choices, const Style& style) {
  Table table({{"layer"},
               {"head"},
               {"mass"},
               {"index", Table::Align::left},
               {"budget", Table::Align::left},
               {"median"},
               {"p95"},
               {"held", Table::Align::left},
               {"attended"},
               {"read/step"},
               {"time/step"},
               {"of exact"},
               {"index size"}});
  for (const HeadChoice& c : choices) {
    const double share = c.us > 0 && c.dense_us > 0 ? c.us / c.dense_us : c.bytes / c.dense_bytes;
    table.add_row({std::to_string(c.layer), std::to_string(c.kv_head), format_number(c.middle_mass),
                   c.dense ? "exact" : c.index, c.dense ? "-" : c.budget.text(),
                   format_number(c.error_median), format_number(c.error_p95),
                   !c.met() ? "not met" : (c.held() ? "yes" : "no"), format_number(c.attended),
                   format_bytes(static_cast<uint64_t>(c.bytes)), microseconds(c.us),
                   format_number(100 * share) + " %",
                   format_bytes(static_cast<uint64_t>(c.held_bytes))});
  }
  return table.text(style);
}

std::string choice_summary(const std::vector<HeadChoice>& choices, const CalibrationPlan& plan) {
  double us = 0;
  double dense_us = 0;
  double bytes = 0;
  double dense_bytes = 0;
  double held = 0;
  size_t dense = 0;
  std::string unmet;
  std::string broken;
  for (const HeadChoice& c : choices) {
    us += c.us;
    dense_us += c.dense_us;
    bytes += c.bytes;
    dense_bytes += c.dense_bytes;
    held += c.held_bytes;
    dense += static_cast<size_t>(c.dense);
    if (!c.met()) {
      unmet += (unmet.empty() ? "" : ", ") + head_name(c);
    } else if (!c.held()) {
      broken += (broken.empty() ? "" : ", ") + head_name(c);
    }
  }
  std::string text = std::to_string(choices.size()) + " heads, " + std::to_string(dense) +
                     " of them exact; one step reads " +
                     format_bytes(static_cast<uint64_t>(bytes)) + " (exact attention " +
                     format_bytes(static_cast<uint64_t>(dense_bytes)) + ") in " + microseconds(us) +
                     " (" + microseconds(dense_us) + ") of one thread; indexes hold " +
                     format_bytes(static_cast<uint64_t>(held)) + "\n";
  if (!unmet.empty()) {
    text += "warning: nothing that was tried gives " + plan.requirement.text() + " for " + unmet +
            ": what comes nearest was chosen\n";
  }
  if (!broken.empty()) {
    text += "warning: " + plan.requirement.text() +
            " did not hold on the queries of the check for " + broken + "\n";
  }
  return text;
}

}  // namespace keyhole::tools
