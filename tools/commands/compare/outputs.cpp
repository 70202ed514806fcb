#include "tools/commands/compare/outputs.h"

#include <cstdio>

#include "runtime/files/json.h"
#include "tools/commands/compare/ann_csv.h"
#include "tools/commands/compare/page.h"
#include "tools/terminal/command_line.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

ordered_json describe(const Trace& trace, const CompareOptions& options) {
  const TraceInfo& info = trace.info();
  return {{"path", options.trace},
          {"model", info.model},
          {"task", info.task},
          {"prompt", info.prompt},
          {"seed", info.seed},
          {"tokens", info.tokens},
          {"layers", info.layers},
          {"q_heads", info.q_heads},
          {"kv_heads", info.kv_heads},
          {"head_dim", info.head_dim},
          {"scale", info.scale},
          {"dtype", element_name(trace.heads().front().keys.type)},
          {"queries", trace.query_positions().size()},
          {"first_query_position", trace.query_positions().front()},
          {"last_query_position", trace.query_positions().back()},
          {"training_positions", trace.training_positions().size()}};
}

ordered_json describe(const ComparisonPlan& plan, const CompareOptions& options) {
  return {{"k", options.k},
          {"sink", plan.sink},
          {"window", plan.window},
          {"offloaded", plan.truth.offloaded.count()},
          {"queries", plan.truth.queries.size()},
          {"kv_dtype", options.kv_dtype},
          {"classifiers", options.classifiers},
          {"threads", plan.threads},
          {"builds_at_once", plan.builds_at_once},
          {"threads_per_build", plan.threads_per_build()}};
}

void print(const ComparisonResult& r) {
  const Style style = style_of(stdout);
  const TraceInfo& info = r.trace.info();
  std::printf(
      "%s\n%s: %s tokens, %s of them offloaded; %zu KV heads x %u query heads, d = %u; %zu "
      "queries\n\n",
      to_text(r.machine).c_str(), r.options.trace.c_str(), format_count(info.tokens).c_str(),
      format_count(r.plan.truth.offloaded.count()).c_str(), r.plan.heads.size(), info.group(),
      info.head_dim, r.plan.truth.queries.size());
  if (r.options.per_head) std::printf("%s\n", head_table(r.rows, style).c_str());
  std::fputs(summary_table(r.summaries, style).c_str(), stdout);
  std::printf(
      "\nMeans over heads, weighted by the attention mass of their offloaded tokens. recall@%u; "
      "build: summed over heads.\n",
      r.options.k);
  if (r.summaries.size() > 1) std::printf("%s\n", kFrontMeaning);
  if (const size_t heavy = r.summaries.front().heavy_heads; heavy != 0) {
    std::printf("\n%s\nPlain means over the %zu heads with at least %.0f %% of their mass there.\n",
                heavy_table(r.summaries, style).c_str(), heavy, 100 * kHeavyMass);
  }
  if (r.advice) std::printf("\n%s", to_text(*r.advice).c_str());
}

}  // namespace

void check_outputs(const CompareOptions& options) {
  if (options.json == "-" && options.csv == "-") {
    throw UsageError("--json and --csv cannot both go to standard output");
  }
  if (options.svg == "-") throw UsageError("--svg needs a file");
  if (options.html == "-") throw UsageError("--html needs a file");
  if (options.ann_csv == "-") throw UsageError("--ann-csv needs a file");
  for (const std::string& path :
       {options.json, options.csv, options.ann_csv, options.svg, options.html}) {
    if (!path.empty()) check_writable(path);
  }
}

ordered_json compare_document(const ComparisonResult& r) {
  ordered_json rows = ordered_json::array();
  for (const Measurement& m : r.rows) rows.push_back(to_json(m));
  ordered_json means = ordered_json::array();
  for (const Summary& s : r.summaries) means.push_back(to_json(s));
  return {{"format", "keyhole-compare"},
          {"version", kCompareVersion},
          {"command", command_line()},
          {"machine", to_json(r.machine)},
          {"trace", describe(r.trace, r.options)},
          {"options", describe(r.plan, r.options)},
          {"results", rows},
          {"summary", means},
          {"advice", r.advice ? to_json(*r.advice) : ordered_json(nullptr)}};
}

ordered_json resume_header(const ComparisonResult& r) {
  ordered_json trace = describe(r.trace, r.options);
  trace.erase("path");  // it may have moved
  ordered_json machine = to_json(r.machine);
  for (const char* name : {"memory_bytes", "system"}) machine.erase(name);
  return {{"file", {{"format", "keyhole-compare-rows"}, {"version", kCompareVersion}}},
          {"trace", trace},
          {"options", describe(r.plan, r.options)},
          {"machine", machine}};
}

void write_outputs(const ComparisonResult& r) {
  const CompareOptions& options = r.options;
  if (options.json != "-" && options.csv != "-") print(r);
  if (!options.csv.empty()) write_text(options.csv, to_csv(r.rows));
  if (options.json.empty() && options.ann_csv.empty() && options.svg.empty() &&
      options.html.empty()) {
    return;
  }
  const ordered_json document = compare_document(r);
  if (!options.ann_csv.empty()) write_text(options.ann_csv, ann_csv(document));
  if (!options.svg.empty()) write_text(options.svg, compare_svg(document));
  if (!options.html.empty()) write_text(options.html, compare_page(document));
  if (!options.json.empty()) write_json(options.json, document);
}

}  // namespace keyhole::tools
