#include "tools/commands/compare/advice.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/files/json.h"
#include "tools/terminal/command_line.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw UsageError("--goal " + text + ": " + why +
                   "; allowed: error=X above 0, latency=T in us, ms or s, memory=B in bytes, MiB, "
                   "GiB and the like");
}

// A positive number and what follows it.
double number_of(const std::string& text, const std::string& value, std::string& unit) {
  size_t read = 0;
  double number = 0;
  try {
    number = std::stod(value, &read);
  } catch (const std::exception&) {
    refuse(text, "'" + value + "' is no number");
  }
  unit = value.substr(read);
  if (!(number > 0) || !std::isfinite(number)) refuse(text, "'" + value + "' is not above 0");
  return number;
}

double microseconds_of(const std::string& text, const std::string& value) {
  std::string unit;
  const double number = number_of(text, value, unit);
  if (unit == "us") return number;
  if (unit == "ms") return 1e3 * number;
  if (unit == "s") return 1e6 * number;
  refuse(text, unit.empty() ? "the unit of time is missing" : "'" + unit + "' is no unit of time");
}

double memory_of(const Summary& s, size_t offloaded) {
  return s.memory_per_key_total * static_cast<double>(offloaded);
}

double figure_of(const Summary& s, Goal::Of of, size_t offloaded) {
  switch (of) {
    case Goal::Of::error:
      return s.mean.output_error ? s.mean.output_error->median
                                 : std::numeric_limits<double>::infinity();
    case Goal::Of::latency: return s.mean.latency_us.p50;
    default: return memory_of(s, offloaded);
  }
}

const char* name_of(Goal::Of of) {
  switch (of) {
    case Goal::Of::error: return "error";
    case Goal::Of::latency: return "latency";
    default: return "memory";
  }
}

std::string shown(Goal::Of of, double figure) {
  switch (of) {
    case Goal::Of::error: return "an output error of " + format_number(figure);
    case Goal::Of::latency: return format_duration(1e-6 * figure) + " a step";
    default: return format_bytes(static_cast<uint64_t>(figure)) + " of memory";
  }
}

}  // namespace

Goal parse_goal(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) refuse(text, "a value is missing");
  const std::string name = text.substr(0, equals);
  const std::string value = text.substr(equals + 1);
  Goal goal;
  goal.text = text;
  if (name == "error") {
    std::string unit;
    goal.most = number_of(text, value, unit);
    if (!unit.empty()) refuse(text, "an error has no unit '" + unit + "'");
  } else if (name == "latency") {
    goal.of = Goal::Of::latency;
    goal.most = microseconds_of(text, value);
  } else if (name == "memory") {
    goal.of = Goal::Of::memory;
    try {
      goal.most = static_cast<double>(parse_bytes(value));
    } catch (const UsageError& e) {
      refuse(text, e.what());
    }
    if (goal.most == 0) refuse(text, "'" + value + "' is not above 0");
  } else {
    refuse(text, "there is no goal '" + name + "'");
  }
  return goal;
}

std::vector<Goal> parse_goals(const std::vector<std::string>& texts) {
  std::vector<Goal> out;
  for (const std::string& text : texts) {
    Goal goal = parse_goal(text);
    for (const Goal& other : out) {
      if (other.of == goal.of)
        throw UsageError("--goal " + text + " and " + other.text + " are of one kind");
    }
    out.push_back(std::move(goal));
  }
  return out;
}

std::string Advice::options() const {
  const Measurement& m = chosen.mean;
  std::string out = "--index " + shell_word(m.index) + " --attend " + shell_word(m.attend);
  if (m.tail != "none") out += " --tail " + shell_word(m.tail);
  if (m.target != "none") out += " --target " + shell_word(m.target);
  return out;
}

std::optional<Advice> advise(const std::vector<Summary>& summaries, const std::vector<Goal>& goals,
                             const std::vector<std::string>& indexes, size_t offloaded) {
  const auto is_goal = [&](Goal::Of of) {
    return std::any_of(goals.begin(), goals.end(), [of](const Goal& g) { return g.of == of; });
  };
  const auto worst_ratio = [&](const Summary& s) {
    double worst = 0;
    for (const Goal& g : goals) worst = std::max(worst, figure_of(s, g.of, offloaded) / g.most);
    return worst;
  };
  const bool errors = std::all_of(summaries.begin(), summaries.end(),
                                  [](const Summary& s) { return s.mean.output_error.has_value(); });
  const auto worth = [&](const Summary& s) {
    if (is_goal(Goal::Of::error)) {
      const bool smallest = is_goal(Goal::Of::latency) && !is_goal(Goal::Of::memory);
      return figure_of(s, smallest ? Goal::Of::memory : Goal::Of::latency, offloaded);
    }
    return errors ? figure_of(s, Goal::Of::error, offloaded) : 1 - s.mean.recall;
  };
  Advice out;
  out.goals = goals;
  const Summary* best = nullptr;
  for (const Summary& s : summaries) {
    if (std::find(indexes.begin(), indexes.end(), s.mean.index) == indexes.end()) continue;
    ++out.candidates;
    const double ratio = worst_ratio(s);
    const bool reached = ratio <= 1;
    if (reached) ++out.reaching;
    const bool better =
        best == nullptr || (reached && !out.reached) ||
        (reached == out.reached && (reached ? worth(s) < worth(*best) : ratio < out.worst_ratio));
    if (!better) continue;
    best = &s;
    out.reached = reached;
    out.worst_ratio = ratio;
  }
  if (goals.empty() || best == nullptr) return std::nullopt;
  out.chosen = *best;
  out.memory_bytes = memory_of(*best, offloaded);
  out.best_in =
      !is_goal(Goal::Of::error)
          ? (errors ? "output error" : "recall")
          : (is_goal(Goal::Of::latency) && !is_goal(Goal::Of::memory) ? "memory" : "latency");
  return out;
}

std::string to_text(const Advice& advice) {
  std::string goals;
  for (const Goal& g : advice.goals) goals += (goals.empty() ? "" : ", ") + g.text;
  const Measurement& m = advice.chosen.mean;
  std::string text = "For " + goals + ":";
  if (!advice.reached) text += " nothing that was measured reaches it; what comes nearest is";
  text += "\n  " + advice.options() + "\n  ";
  if (m.output_error) {
    text += "output error " + format_number(m.output_error->median) + " (p95 " +
            format_number(m.output_error->p95) + "), ";
  }
  text += "recall " + format_number(m.recall) + ", mass " + format_number(m.recovered_mass, 4) +
          "; a step takes " + format_duration(1e-6 * m.latency_us.p50) + " and reads " +
          format_bytes(static_cast<uint64_t>(m.bytes_per_step)) + "; indexes and tails hold " +
          format_bytes(static_cast<uint64_t>(advice.memory_bytes)) + " (" +
          std::to_string(advice.chosen.heads) + " heads)\n  ";
  if (advice.reached) {
    return text + "the best in " + advice.best_in + " of the " + std::to_string(advice.reaching) +
           " of " + std::to_string(advice.candidates) + " that reach it\n";
  }
  std::string missed;
  for (const Goal& g : advice.goals) {
    // Memory as the advice holds it: bytes per key times keys is one key's worth.
    const double figure =
        g.of == Goal::Of::memory ? advice.memory_bytes : figure_of(advice.chosen, g.of, 0);
    if (figure <= g.most) continue;
    missed += (missed.empty() ? "" : ", ") + shown(g.of, figure) + ", " +
              format_number(figure / g.most) + " times the goal";
  }
  return text + missed + "\n";
}

nlohmann::ordered_json to_json(const Advice& advice) {
  nlohmann::ordered_json goals = nlohmann::ordered_json::array();
  for (const Goal& g : advice.goals) {
    goals.push_back({{"of", name_of(g.of)}, {"most", g.most}, {"text", g.text}});
  }
  const Measurement& m = advice.chosen.mean;
  const auto error = [&](double figure) {
    return m.output_error ? nlohmann::ordered_json(figure) : nlohmann::ordered_json(nullptr);
  };
  return {{"goals", goals},
          {"reached", advice.reached},
          {"best_in", advice.reached ? nlohmann::ordered_json(advice.best_in)
                                     : nlohmann::ordered_json(nullptr)},
          {"worst_ratio", advice.worst_ratio},
          {"candidates", advice.candidates},
          {"reaching", advice.reaching},
          {"options", advice.options()},
          {"index", m.index},
          {"attend", m.attend},
          {"tail", m.tail},
          {"target", m.target},
          {"output_error_median", error(m.output_error ? m.output_error->median : 0)},
          {"recall", m.recall},
          {"recovered_mass", m.recovered_mass},
          {"latency_us_p50", m.latency_us.p50},
          {"bytes_per_step", m.bytes_per_step},
          {"memory_bytes", advice.memory_bytes},
          {"text", to_text(advice)}};
}

}  // namespace keyhole::tools
