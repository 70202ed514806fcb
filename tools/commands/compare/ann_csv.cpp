#include "tools/commands/compare/ann_csv.h"

#include <cmath>
#include <filesystem>

#include "runtime/files/json.h"
#include "tools/commands/common/page_facts.h"
#include "tools/page/markup.h"
#include "tools/terminal/csv.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

bool same_way(const ordered_json& a, const ordered_json& b) {
  for (const char* field : {"index", "attend", "tail", "target"}) {
    if (a[field] != b[field]) return false;
  }
  return true;
}

std::string number(double value) { return std::isfinite(value) ? exact_number(value) : ""; }

}  // namespace

std::string ann_csv(const ordered_json& document) {
  const ordered_json& trace = document["trace"];
  const ordered_json& options = document["options"];
  const double group = trace["q_heads"].get<double>() / trace["kv_heads"].get<double>();
  const double keys = options["offloaded"];
  const std::string dataset = std::filesystem::path(trace["path"].get<std::string>()).stem();
  std::string out =
      "k,dataset,algorithm,params,count,recall,qps,p50,p95,p99,distcomps,build_time,index_size,"
      "output_error,recovered_mass,bytes_per_step\n";
  for (const ordered_json& row : document["summary"]) {
    double bytes = 0;
    for (const ordered_json& head : document["results"]) {
      if (same_way(head, row)) bytes += keys * figure_at(head, "memory_bytes_per_key");
    }
    const std::string index = row["index"];
    std::string params = row["params"];
    for (const char* field : {"attend", "tail", "target"}) {
      params += " " + std::string(field) + "=" + row[field].get<std::string>();
    }
    out += options["k"].dump() + "," + csv_text(dataset) + "," +
           csv_text(index.substr(0, index.find(':'))) + "," + csv_text(params) + "," +
           options["queries"].dump();
    for (const double value :
         {figure_at(row, "recall"), 1e6 * group / figure_at(row, "latency_us.p50"),
          1e-3 * figure_at(row, "latency_us.p50"), 1e-3 * figure_at(row, "latency_us.p95"),
          1e-3 * figure_at(row, "latency_us.p99"), keys * figure_at(row, "scan_fraction"),
          figure_at(row, "build_s_total"), bytes / 1024, figure_at(row, "output_error_median"),
          figure_at(row, "recovered_mass"), figure_at(row, "bytes_per_step")}) {
      out += "," + number(value);
    }
    out += "\n";
  }
  return out;
}

}  // namespace keyhole::tools
