#include "tools/commands/compare/report.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

#include "runtime/files/json.h"
#include "tools/commands/compare/bytes_text.h"
#include "tools/page/front.h"
#include "tools/terminal/csv.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

// Adds weight * from to `into`, figure by figure.
void accumulate(Measurement& into, const Measurement& from, double weight) {
  const auto add = [&](auto figure) { figure(into) += weight * figure(from); };
  add([](auto& m) -> auto& { return m.middle_mass; });
  add([](auto& m) -> auto& { return m.sparsity; });
  add([](auto& m) -> auto& { return m.read_share; });
  add([](auto& m) -> auto& { return m.bytes_per_step; });
  add([](auto& m) -> auto& { return m.latency_us.p50; });
  add([](auto& m) -> auto& { return m.latency_us.p95; });
  add([](auto& m) -> auto& { return m.latency_us.p99; });
  add([](auto& m) -> auto& { return m.missing_mass; });
  add([](auto& m) -> auto& { return m.recall; });
  add([](auto& m) -> auto& { return m.recovered_mass; });
  add([](auto& m) -> auto& { return m.scan_fraction; });
  add([](auto& m) -> auto& { return m.keys_attended; });
  add([](auto& m) -> auto& { return m.build_seconds; });
  add([](auto& m) -> auto& { return m.bytes_per_key; });
  add([](auto& m) -> auto& { return m.tail_build_seconds; });
  add([](auto& m) -> auto& { return m.tail_bytes_per_key; });
  if (from.output_error) {
    if (!into.output_error) into.output_error.emplace();
    add([](auto& m) -> auto& { return m.output_error->mean; });
    add([](auto& m) -> auto& { return m.output_error->median; });
    add([](auto& m) -> auto& { return m.output_error->p95; });
  }
  if (from.missing) {
    if (!into.missing) into.missing.emplace();
    add([](auto& m) -> auto& { return m.missing->estimated; });
    add([](auto& m) -> auto& { return m.missing->estimate_error; });
    add([](auto& m) -> auto& { return m.missing->bytes_per_step; });
    add([](auto& m) -> auto& { return m.missing->keys_opened; });
  }
  if (from.held) into.held = into.held.value_or(0) + weight * *from.held;
}

bool same_way(const Measurement& a, const Measurement& b) {
  return a.index == b.index && a.attend == b.attend && a.tail == b.tail && a.target == b.target;
}

double memory_per_key(const Measurement& m) { return m.bytes_per_key + m.tail_bytes_per_key; }

Summary summarise_way(const Measurement& way, const std::vector<Measurement>& results) {
  Summary summary;
  double mass = 0;
  for (const Measurement& m : results) {
    if (!same_way(m, way)) continue;
    ++summary.heads;
    mass += m.middle_mass;
    if (m.middle_mass >= kHeavyMass) ++summary.heavy_heads;
  }
  for (const Measurement& m : results) {
    if (!same_way(m, way)) continue;
    accumulate(summary.mean, m,
               mass > 0 ? m.middle_mass / mass : 1.0 / static_cast<double>(summary.heads));
    if (m.middle_mass >= kHeavyMass) {
      accumulate(summary.heavy_mean, m, 1.0 / static_cast<double>(summary.heavy_heads));
    }
    summary.build_seconds_total += m.build_seconds;
    summary.memory_per_key_total += memory_per_key(m);
    summary.mean.params = m.params;
  }
  for (Measurement* mean : {&summary.mean, &summary.heavy_mean}) {
    mean->series = way.series;
    mean->index = way.index;
    mean->attend = way.attend;
    mean->tail = way.tail;
    mean->target = way.target;
  }
  return summary;
}

// A figure that JSON and CSV tell of heads and of summaries, by the same name and in the same order.
struct Figure {
  const char* name;
  std::optional<double> (*of)(const Measurement&);
};
using M = const Measurement&;
using Value = std::optional<double>;
constexpr Figure kFigures[] = {
    {"output_error_median",
     [](M m) { return m.output_error ? Value(m.output_error->median) : std::nullopt; }},
    {"output_error_p95",
     [](M m) { return m.output_error ? Value(m.output_error->p95) : std::nullopt; }},
    {"read_share", [](M m) { return Value(m.read_share); }},
    {"bytes_per_step", [](M m) { return Value(m.bytes_per_step); }},
    {"latency_us_p50", [](M m) { return Value(m.latency_us.p50); }},
    {"missing_mass", [](M m) { return Value(m.missing_mass); }},
    {"estimated_missing_mass",
     [](M m) { return m.missing ? Value(m.missing->estimated) : std::nullopt; }},
    {"missing_mass_error",
     [](M m) { return m.missing ? Value(m.missing->estimate_error) : std::nullopt; }},
    {"keys_opened", [](M m) { return m.missing ? Value(m.missing->keys_opened) : std::nullopt; }},
    {"held", [](M m) { return m.held; }},
    {"output_error",
     [](M m) { return m.output_error ? Value(m.output_error->mean) : std::nullopt; }},
    {"recall", [](M m) { return Value(m.recall); }},
    {"recovered_mass", [](M m) { return Value(m.recovered_mass); }},
    {"scan_fraction", [](M m) { return Value(m.scan_fraction); }},
    {"keys_attended", [](M m) { return Value(m.keys_attended); }},
    {"tail_bytes_per_step",
     [](M m) { return m.missing ? Value(m.missing->bytes_per_step) : std::nullopt; }},
    {"latency_us_p95", [](M m) { return Value(m.latency_us.p95); }},
    {"latency_us_p99", [](M m) { return Value(m.latency_us.p99); }},
    {"middle_mass", [](M m) { return Value(m.middle_mass); }},
    {"build_s", [](M m) { return Value(m.build_seconds); }},
    {"bytes_per_key", [](M m) { return Value(m.bytes_per_key); }},
    {"tail_build_s", [](M m) { return Value(m.tail_build_seconds); }},
    {"tail_bytes_per_key", [](M m) { return Value(m.tail_bytes_per_key); }},
    {"memory_bytes_per_key", [](M m) { return Value(memory_per_key(m)); }},
    {"sparsity", [](M m) { return Value(m.sparsity); }},
};

void put_figures(ordered_json& out, const Measurement& m) {
  constexpr std::string_view kLatency = "latency_us_";
  for (const Figure& figure : kFigures) {
    const std::string_view name = figure.name;
    const Value value = figure.of(m);
    ordered_json& at = name.starts_with(kLatency)
                           ? out["latency_us"][std::string(name.substr(kLatency.size()))]
                           : out[std::string(name)];
    if (value && !std::isnan(*value)) {
      at = *value;
    } else {
      at = nullptr;
    }
  }
}

// A share in percent. Results of files have figures that nobody knows: NaN.
std::string percent(double share) {
  return std::isnan(share) ? "-" : format_number(100 * share) + " %";
}
std::string fixed(double value, int digits) {
  if (std::isnan(value)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// The columns that a table has beside those that every table has.
struct Extras {
  bool tail = false, target = false;

  void see(const Measurement& m) {
    tail = tail || m.tail != "none";
    target = target || m.target != "none";
  }
  [[nodiscard]] bool any() const { return tail || target; }
};
Extras extras_of(const std::vector<Summary>& summaries) {
  Extras extras;
  for (const Summary& s : summaries) extras.see(s.mean);
  return extras;
}
Extras extras_of(const std::vector<Measurement>& results) {
  Extras extras;
  for (const Measurement& m : results) extras.see(m);
  return extras;
}

std::vector<Table::Column> way_columns(const Extras& extras) {
  std::vector<Table::Column> out = {{"index", Table::Align::left}, {"attend", Table::Align::left}};
  if (extras.tail) out.push_back({"tail", Table::Align::left});
  if (extras.target) out.push_back({"target", Table::Align::left});
  return out;
}
std::vector<std::string> way_cells(const Measurement& m, const Extras& extras) {
  std::vector<std::string> out = {m.index, m.attend};
  if (extras.tail) out.push_back(m.tail);
  if (extras.target) out.push_back(m.target);
  return out;
}

// The columns: first the quality and cost of a step, then what explains them.
std::vector<Table::Column> figure_columns(const Extras& extras) {
  std::vector<Table::Column> out = {
      {"error p50"}, {"error p95"}, {"read"}, {"read/step"}, {"p50 us"}};
  if (extras.any()) out.insert(out.end(), {{"missing"}, {"estimated"}});
  if (extras.target) out.insert(out.end(), {{"opened"}, {"held"}});
  out.insert(out.end(), {{"recall"}, {"mass"}, {"scan"}, {"attended"}, {"p95 us"}, {"p99 us"}});
  return out;
}
std::vector<std::string> figure_cells(const Measurement& m, const Extras& extras) {
  std::vector<std::string> out = {m.output_error ? fixed(m.output_error->median, 4) : "-",
                                  m.output_error ? fixed(m.output_error->p95, 4) : "-",
                                  percent(m.read_share), bytes_text(m.bytes_per_step),
                                  fixed(m.latency_us.p50, 1)};
  if (extras.any()) {
    out.push_back(fixed(m.missing_mass, 4));
    out.push_back(m.missing ? fixed(m.missing->estimated, 4) : "-");
  }
  if (extras.target) {
    out.push_back(m.missing ? format_number(m.missing->keys_opened) : "-");
    out.push_back(m.held ? percent(*m.held) : "-");
  }
  out.insert(out.end(), {fixed(m.recall, 3), fixed(m.recovered_mass, 4), percent(m.scan_fraction),
                         format_number(m.keys_attended), fixed(m.latency_us.p95, 1),
                         fixed(m.latency_us.p99, 1)});
  return out;
}

template <class T>
std::vector<T> joined(std::vector<T> first, const std::vector<T>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

std::vector<Summary> summarise(const std::vector<Measurement>& results) {
  std::vector<Summary> out;
  for (const Measurement& m : results) {
    const bool known =
        std::any_of(out.begin(), out.end(), [&](const Summary& s) { return same_way(s.mean, m); });
    if (!known) out.push_back(summarise_way(m, results));
  }
  mark_fronts(out);
  return out;
}

void sort(std::vector<Summary>& summaries, SortBy by) {
  if (by == SortBy::none) return;
  const auto figure = [by](const Summary& s) {
    constexpr double kLast = std::numeric_limits<double>::infinity();
    switch (by) {
      case SortBy::error: return s.mean.output_error ? s.mean.output_error->median : kLast;
      case SortBy::bytes: return std::isnan(s.mean.bytes_per_step) ? kLast : s.mean.bytes_per_step;
      default: return s.mean.latency_us.p50;
    }
  };
  std::stable_sort(summaries.begin(), summaries.end(),
                   [&](const Summary& a, const Summary& b) { return figure(a) < figure(b); });
}

void mark_fronts(std::vector<Summary>& summaries) {
  const bool errors = std::all_of(summaries.begin(), summaries.end(),
                                  [](const Summary& s) { return s.mean.output_error.has_value(); });
  std::vector<double> losses;
  for (Summary& s : summaries) {
    s.fronts.clear();
    losses.push_back(errors ? s.mean.output_error->median : 1 - s.mean.recall);
  }
  const auto mark = [&](const char* name, double (*cost)(M)) {
    std::vector<double> costs;
    for (const Summary& s : summaries) costs.push_back(cost(s.mean));
    const std::vector<bool> front = pareto_front(costs, losses);
    for (size_t i = 0; i < summaries.size(); ++i) {
      if (front[i]) summaries[i].fronts.emplace_back(name);
    }
  };
  mark("time", [](M m) { return m.latency_us.p50; });
  mark("bytes", [](M m) { return m.bytes_per_step; });
  mark("memory", memory_per_key);
}

ordered_json to_json(const Measurement& m) {
  ordered_json out = {{"series", m.series},   {"index", m.index},   {"attend", m.attend},
                      {"tail", m.tail},       {"target", m.target}, {"layer", m.layer},
                      {"kv_head", m.kv_head}, {"params", m.params}};
  put_figures(out, m);
  out["diagnostics"] = ordered_json::parse(m.diagnostics, nullptr, false);
  return out;
}

ordered_json to_json(const Summary& s) {
  ordered_json out = {{"series", s.mean.series}, {"index", s.mean.index},
                      {"attend", s.mean.attend}, {"tail", s.mean.tail},
                      {"target", s.mean.target}, {"params", s.mean.params},
                      {"heads", s.heads}};
  put_figures(out, s.mean);
  out["build_s_total"] = std::isnan(s.build_seconds_total) ? ordered_json(nullptr)
                                                           : ordered_json(s.build_seconds_total);
  ordered_json heavy = {{"least_middle_mass", kHeavyMass}, {"heads", s.heavy_heads}};
  if (s.heavy_heads != 0) put_figures(heavy, s.heavy_mean);
  out["heavy_heads"] = heavy;
  out["pareto"] = s.fronts;
  return out;
}

std::string to_csv(const std::vector<Measurement>& results) {
  std::ostringstream out;
  out.precision(9);
  out << "index,attend,tail,target,layer,kv_head";
  for (const Figure& figure : kFigures) out << ',' << figure.name;
  out << ",params\n";
  for (const Measurement& m : results) {
    out << csv_text(m.index) << ',' << m.attend << ',' << m.tail << ',' << csv_text(m.target) << ','
        << m.layer << ',' << m.kv_head;
    for (const Figure& figure : kFigures) {
      out << ',';
      if (const Value value = figure.of(m); value && !std::isnan(*value)) out << *value;
    }
    out << ',' << csv_text(m.params) << '\n';
  }
  return out.str();
}

std::string summary_table(const std::vector<Summary>& summaries, const Style& style) {
  const Extras extras = extras_of(summaries);
  std::vector<Table::Column> columns =
      joined(joined(way_columns(extras), figure_columns(extras)), {{"build"}, {"bytes/key"}});
  const bool several = summaries.size() > 1;
  if (several) columns.push_back({"front", Table::Align::left});
  Table table(columns);
  for (const Summary& s : summaries) {
    std::vector<std::string> cells =
        joined(joined(way_cells(s.mean, extras), figure_cells(s.mean, extras)),
               {format_duration(s.build_seconds_total), format_number(memory_per_key(s.mean))});
    if (several) {
      std::string fronts;
      for (const std::string& front : s.fronts) fronts += (fronts.empty() ? "" : " ") + front;
      cells.push_back(fronts);
    }
    table.add_row(std::move(cells));
  }
  return table.text(style);
}

std::string heavy_table(const std::vector<Summary>& summaries, const Style& style) {
  const Extras extras = extras_of(summaries);
  Table table(joined(way_columns(extras), figure_columns(extras)));
  for (const Summary& s : summaries) {
    table.add_row(joined(way_cells(s.mean, extras), figure_cells(s.heavy_mean, extras)));
  }
  return table.text(style);
}

std::string head_table(const std::vector<Measurement>& results, const Style& style) {
  const Extras extras = extras_of(results);
  Table table(
      joined(joined(way_columns(extras), {{"layer"}, {"KV head"}, {"middle"}, {"sparsity"}}),
             figure_columns(extras)));
  for (const Measurement& m : results) {
    table.add_row(
        joined(joined(way_cells(m, extras), {std::to_string(m.layer), std::to_string(m.kv_head),
                                             fixed(m.middle_mass, 3), fixed(m.sparsity, 4)}),
               figure_cells(m, extras)));
  }
  return table.text(style);
}

}  // namespace keyhole::tools
