#include "tools/commands/compare_report.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

// Adds weight * from to `into`, figure by figure.
void accumulate(Measurement& into, const Measurement& from, double weight) {
  into.middle_mass += weight * from.middle_mass;
  into.recall += weight * from.recall;
  into.recovered_mass += weight * from.recovered_mass;
  into.scan_fraction += weight * from.scan_fraction;
  into.keys_attended += weight * from.keys_attended;
  into.bytes_per_step += weight * from.bytes_per_step;
  into.latency_us.p50 += weight * from.latency_us.p50;
  into.latency_us.p95 += weight * from.latency_us.p95;
  into.latency_us.p99 += weight * from.latency_us.p99;
  into.build_seconds += weight * from.build_seconds;
  into.bytes_per_key += weight * from.bytes_per_key;
  if (!from.output_error) return;
  if (!into.output_error) into.output_error.emplace();
  into.output_error->mean += weight * from.output_error->mean;
  into.output_error->median += weight * from.output_error->median;
  into.output_error->p95 += weight * from.output_error->p95;
}

bool same_way(const Measurement& a, const Measurement& b) {
  return a.index == b.index && a.attend == b.attend;
}

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
    summary.mean.params = m.params;
  }
  for (Measurement* mean : {&summary.mean, &summary.heavy_mean}) {
    mean->series = way.series;
    mean->index = way.index;
    mean->attend = way.attend;
  }
  return summary;
}

// The figures that a head's row and a summary share.
void put_figures(ordered_json& out, const Measurement& m) {
  out["middle_mass"] = m.middle_mass;
  out["recall"] = m.recall;
  out["recovered_mass"] = m.recovered_mass;
  out["output_error"] = nullptr;
  out["output_error_median"] = nullptr;
  out["output_error_p95"] = nullptr;
  if (m.output_error) {
    out["output_error"] = m.output_error->mean;
    out["output_error_median"] = m.output_error->median;
    out["output_error_p95"] = m.output_error->p95;
  }
  out["scan_fraction"] = m.scan_fraction;
  out["keys_attended"] = m.keys_attended;
  out["bytes_per_step"] = m.bytes_per_step;
  out["latency_us"] = {
      {"p50", m.latency_us.p50}, {"p95", m.latency_us.p95}, {"p99", m.latency_us.p99}};
  out["build_s"] = m.build_seconds;
  out["bytes_per_key"] = m.bytes_per_key;
}

// RFC 4180: quotes around everything that needs them, quotes inside doubled.
std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + "\"";
}

std::string percent(double share) { return format_number(100 * share) + " %"; }
std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::vector<std::string> figure_cells(const Measurement& m) {
  return {fixed(m.recall, 3),
          fixed(m.recovered_mass, 4),
          m.output_error ? fixed(m.output_error->mean, 4) : "-",
          m.output_error ? fixed(m.output_error->p95, 4) : "-",
          percent(m.scan_fraction),
          format_number(m.keys_attended),
          format_bytes(static_cast<uint64_t>(m.bytes_per_step)),
          fixed(m.latency_us.p50, 1),
          fixed(m.latency_us.p95, 1),
          fixed(m.latency_us.p99, 1)};
}

const std::vector<Table::Column> kFigureColumns = {
    {"recall"},   {"mass"},      {"error"},  {"error p95"}, {"scan"},
    {"attended"}, {"read/step"}, {"p50 us"}, {"p95 us"},    {"p99 us"}};

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
  return out;
}

ordered_json to_json(const Measurement& m) {
  ordered_json out = {{"index", m.index},
                      {"attend", m.attend},
                      {"layer", m.layer},
                      {"kv_head", m.kv_head},
                      {"params", m.params}};
  put_figures(out, m);
  out["diagnostics"] = ordered_json::parse(m.diagnostics, nullptr, false);
  return out;
}

ordered_json to_json(const Summary& s) {
  ordered_json out = {{"index", s.mean.index},
                      {"attend", s.mean.attend},
                      {"params", s.mean.params},
                      {"heads", s.heads}};
  put_figures(out, s.mean);
  out["build_s_total"] = s.build_seconds_total;
  ordered_json heavy = {{"least_middle_mass", kHeavyMass}, {"heads", s.heavy_heads}};
  if (s.heavy_heads != 0) put_figures(heavy, s.heavy_mean);
  out["heavy_heads"] = heavy;
  return out;
}

std::string to_csv(const std::vector<Measurement>& results) {
  std::ostringstream out;
  out.precision(9);
  out << "index,attend,layer,kv_head,params,middle_mass,recall,recovered_mass,output_error,"
         "output_error_median,output_error_p95,scan_fraction,keys_attended,bytes_per_step,"
         "latency_us_p50,latency_us_p95,latency_us_p99,build_s,bytes_per_key\n";
  for (const Measurement& m : results) {
    out << csv_text(m.index) << ',' << m.attend << ',' << m.layer << ',' << m.kv_head << ','
        << csv_text(m.params) << ',' << m.middle_mass << ',' << m.recall << ',' << m.recovered_mass
        << ',';
    if (m.output_error) {
      out << m.output_error->mean << ',' << m.output_error->median << ',' << m.output_error->p95;
    } else {
      out << ",,";
    }
    out << ',' << m.scan_fraction << ',' << m.keys_attended << ',' << m.bytes_per_step << ','
        << m.latency_us.p50 << ',' << m.latency_us.p95 << ',' << m.latency_us.p99 << ','
        << m.build_seconds << ',' << m.bytes_per_key << '\n';
  }
  return out.str();
}

std::string summary_table(const std::vector<Summary>& summaries, const Style& style) {
  Table table(joined(
      joined({{"index", Table::Align::left}, {"attend", Table::Align::left}}, kFigureColumns),
      {{"build"}, {"bytes/key"}}));
  for (const Summary& s : summaries) {
    table.add_row(
        joined(joined({s.mean.index, s.mean.attend}, figure_cells(s.mean)),
               {format_duration(s.build_seconds_total), format_number(s.mean.bytes_per_key)}));
  }
  return table.text(style);
}

std::string heavy_table(const std::vector<Summary>& summaries, const Style& style) {
  Table table(
      joined({{"index", Table::Align::left}, {"attend", Table::Align::left}}, kFigureColumns));
  for (const Summary& s : summaries) {
    table.add_row(joined({s.mean.index, s.mean.attend}, figure_cells(s.heavy_mean)));
  }
  return table.text(style);
}

std::string head_table(const std::vector<Measurement>& results, const Style& style) {
  Table table(joined({{"index", Table::Align::left},
                      {"attend", Table::Align::left},
                      {"layer"},
                      {"kv head"},
                      {"middle"}},
                     kFigureColumns));
  for (const Measurement& m : results) {
    table.add_row(joined({m.index, m.attend, std::to_string(m.layer), std::to_string(m.kv_head),
                          fixed(m.middle_mass, 3)},
                         figure_cells(m)));
  }
  return table.text(style);
}

}  // namespace keyhole::tools
