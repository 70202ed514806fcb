#include "tools/commands/eval/options.h"

#include <algorithm>
#include <cmath>

#include "tools/llama/blas.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

using Json = nlohmann::ordered_json;

std::vector<BudgetChoice> all_budgets(const EvalOptions& options) {
  std::vector<AttendChoice> out;
  for (const uint32_t k : options.ks) {
    for (const AttendChoice& choice : parse_attends(options.budgets.attends, k)) {
      if (std::find(out.begin(), out.end(), choice) == out.end()) out.push_back(choice);
    }
  }
  return cross_budgets(out, options.budgets.tails, options.budgets.targets);
}

std::vector<AttendSpec> all_specs(const EvalOptions& options) {
  std::vector<AttendSpec> specs;
  for (const std::string& index : options.indexes) specs.push_back({index, ""});
  if (options.cache.budgets.empty()) {
    if (specs.empty()) throw UsageError("give --index or --budgets");
    return specs;
  }
  const auto indexed = std::find_if(specs.begin(), specs.end(),
                                    [](const AttendSpec& spec) { return spec.indexed(); });
  const std::string others = indexed == specs.end() ? "flat" : indexed->text;
  specs.insert(specs.begin(), {others, options.cache.budgets});
  return specs;
}

void for_each_way(KeyholeCache& cache, const std::vector<AttendSpec>& specs,
                  const std::vector<BudgetChoice>& budgets,
                  const std::function<void(const EvalWay&)>& run) {
  for (const AttendSpec& spec : specs) {
    double build_seconds = 0.0;
    for (size_t i = 0; i < budgets.size(); ++i) {
      EvalWay way;
      way.spec = spec;
      way.budget = budgets[i];
      if (i > 0 && !way.has_budget()) break;  // nothing to choose
      build_seconds +=
          i == 0 ? apply_spec(cache, spec, budgets[i]) : apply_budget(cache, spec, budgets[i]);
      way.build_seconds = build_seconds;
      run(way);
    }
  }
}

void measure_way(KeyholeCache& cache, const Decoder& decoder, const LlamaConfig& model,
                 EvalWay& way) {
  way.times = decoder.times();
  const keyhole_statistics statistics = cache.statistics();
  way.index_bytes = static_cast<double>(statistics.index_bytes);
  const double heads_steps = static_cast<double>(statistics.attends) * model.q_heads;
  way.keys_attended = static_cast<double>(statistics.keys_attended) / heads_steps;
  way.bytes_read =
      static_cast<double>(statistics.bytes_read) / static_cast<double>(way.times.steps);
  if (way.spec.mode() == KEYHOLE_MODE_EXACT) way.scan_fraction = 1.0;
  if (way.spec.indexed()) {
    way.scan_fraction = statistics.keys_offered == 0
                            ? std::nan("")  // everything is resident or pending
                            : static_cast<double>(statistics.keys_scored) /
                                  static_cast<double>(statistics.keys_offered);
  }
  if (cache.audited()) way.audit = cache.audit();
}

std::vector<std::string> way_cells(const EvalWay& way) {
  return {way.spec.shown(), way.has_budget() ? std::to_string(way.budget.attend.k) : "-",
          way.has_budget() ? way.budget.text() : "-"};
}

std::vector<std::string> cost_cells(const EvalWay& way) {
  const bool indexed = way.spec.indexed();
  return {std::isnan(way.scan_fraction) ? "-" : format_number(100.0 * way.scan_fraction) + " %",
          format_bytes(static_cast<uint64_t>(way.bytes_read)),
          format_number(way.tokens_per_second()),
          format_duration(1e-3 * way.attention_ms()),
          indexed ? format_duration(way.build_seconds) : "-",
          indexed ? format_bytes(static_cast<uint64_t>(way.index_bytes)) : "-"};
}

std::string audit_texts(const std::vector<const EvalWay*>& ways) {
  std::string text;
  for (const EvalWay* way : ways) {
    if (!way->audit) continue;
    text += "\n" + way->name() + "\n" + audit_text(*way->audit);
  }
  return text;
}

Json to_json(const EvalWay& way, const Json& result) {
  const bool chosen = way.has_budget();
  Json json = {{"index", way.spec.text},
               {"budgets", way.spec.budgets},
               {"k", chosen ? Json(way.budget.attend.k) : Json(nullptr)},
               {"attend", chosen ? Json(way.budget.attend.text()) : Json(nullptr)},
               {"tail", chosen ? Json(way.budget.tail.text()) : Json(nullptr)},
               {"target", chosen ? Json(way.budget.target.text()) : Json(nullptr)}};
  json.update(result);
  json.update({{"scan_fraction", way.scan_fraction},
               {"keys_attended", way.keys_attended},
               {"bytes_read_per_token", way.bytes_read},
               {"tokens_per_second", way.tokens_per_second()},
               {"attention_ms_per_token", way.attention_ms()},
               {"build_s", way.build_seconds},
               {"index_bytes", way.index_bytes}});
  if (way.audit) json["audit"] = audit_json(*way.audit);
  return json;
}

Json eval_header(const EvalOptions& options, const Runner& runner, const KeyholeCache& cache,
                 const keyhole_statistics& statistics, size_t tokens, double prefill_seconds) {
  return {{"machine", to_json(describe_machine(statistics.cpu_level))},
          {"model", model_name(options.model)},
          {"device", runner.device()},
          {"session_device", statistics.device},
          {"task", options.task.task},
          {"tokens", tokens},
          {"seed", options.task.seed},
          {"sink", options.cache.sink},
          {"window", options.cache.window},
          {"kv_dtype", options.cache.kv_dtype},
          {"threads", statistics.threads},
          {"blas", blas_kernels()},
          {"prefill_s", prefill_seconds},
          {"hand_over_s", cache.prefill_seconds()}};
}

}  // namespace keyhole::tools
