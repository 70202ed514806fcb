#include "tools/commands/eval/ways.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/files/json.h"
#include "tools/caches/aging_format.h"
#include "tools/commands/eval/caches.h"
#include "tools/llama/blas.h"
#include "tools/terminal/command_line.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

using nlohmann::ordered_json;

std::vector<BudgetChoice> all_budgets(const EvalOptions& options) {
  std::vector<AttendChoice> out;
  for (const uint32_t k : options.ks) {
    for (const AttendChoice& choice : parse_attends(options.budgets.attends, k)) {
      if (std::find(out.begin(), out.end(), choice) == out.end()) out.push_back(choice);
    }
  }
  return with_numbers(cross_budgets(out, options.budgets.tails, options.budgets.targets),
                      options.budgets.numbers);
}

std::vector<AttendSpec> all_specs(const EvalOptions& options) {
  std::vector<AttendSpec> specs;
  for (const std::string& index : options.indexes) specs.push_back({index, ""});
  if (options.cache.budgets.empty()) {
    if (specs.empty()) specs = {{"exact", ""}, {kAutoIndex, ""}};
    return specs;
  }
  const auto indexed = std::find_if(specs.begin(), specs.end(),
                                    [](const AttendSpec& spec) { return spec.indexed(); });
  const std::string others = indexed == specs.end() ? kAutoIndex : indexed->text;
  specs.insert(specs.begin(), {others, options.cache.budgets});
  return specs;
}

EvalOptions with_exact(EvalOptions options) {
  std::vector<std::string>& ways = options.indexes;
  if (ways.empty() && options.cache.budgets.empty()) return options;  // exact and auto
  const auto is_exact = [](const std::string& way) { return way == "exact" || way == "full"; };
  if (std::none_of(ways.begin(), ways.end(), is_exact)) ways.insert(ways.begin(), "exact");
  return options;
}

bool takes_budget(const BudgetChoice& choice, const AttendSpec& spec, size_t specs) {
  return !choice.reads_codes() || has_codes(spec.text) || specs == 1;
}

void for_each_way(EvalCaches& caches, const std::vector<AttendSpec>& specs,
                  const std::vector<BudgetChoice>& budgets,
                  const std::function<void(const EvalWay&, KeyholeCache&)>& run) {
  for (const AttendSpec& spec : specs) {
    KeyholeCache& cache = caches.of(spec);
    double build_seconds = 0.0;
    bool first = true;
    for (const BudgetChoice& choice : budgets) {
      EvalWay way;
      way.spec = spec;
      if (!first && !way.has_budget()) break;  // nothing to choose
      // A way that is no index takes any budget except one that needs codes.
      way.budget = way.has_budget() ? for_index(choice, spec.text) : choice;
      if (!way.has_budget() && choice.reads_codes()) way.budget.tail = {};
      if (way.has_budget() && !takes_budget(choice, spec, specs.size())) continue;
      build_seconds +=
          first ? apply_spec(cache, spec, way.budget) : apply_budget(cache, spec, way.budget);
      first = false;
      way.build_seconds = build_seconds;
      run(way, cache);
    }
  }
}

void measure_format(const LlamaConfig& model, size_t tokens, EvalWay& way) {
  const auto format = way.spec.format();
  if (!format) return;
  const uint64_t heads = uint64_t{model.full_layers()} * model.kv_heads;
  way.format_bits = cache_bits(*format, model.head_dim);
  way.format_bytes = cache_bytes(*format, model.head_dim, heads, static_cast<uint32_t>(tokens));
  way.format_bits_in_all = 8.0 * static_cast<double>(way.format_bytes) /
                           (2.0 * static_cast<double>(heads * model.head_dim * tokens));
}

void measure_way(KeyholeCache& cache, const Decoder& decoder, const LlamaConfig& model,
                 size_t tokens, EvalWay& way) {
  measure_format(model, tokens, way);
  way.times = decoder.times();
  const keyhole_statistics statistics = cache.statistics();
  way.index_bytes = static_cast<double>(statistics.index_bytes);
  const double heads_steps = static_cast<double>(statistics.attends) * model.q_heads;
  way.keys_attended = static_cast<double>(statistics.keys_attended) / heads_steps;
  way.bytes_read =
      static_cast<double>(statistics.bytes_read) / static_cast<double>(way.times.steps);
  if (way.spec.mode() == KEYHOLE_MODE_EXACT) way.scan_fraction = 1.0;
  if (way.spec.text == kAutoIndex && way.spec.budgets.empty()) way.in_effect = cache.config().index;
  if (way.spec.indexed()) {
    way.scan_fraction = statistics.keys_offered == 0
                            ? std::nan("")  // everything is resident or pending
                            : static_cast<double>(statistics.keys_scored) /
                                  static_cast<double>(statistics.keys_offered);
  }
  if (cache.audited()) way.audit = cache.audit();
}

std::vector<Table::Column> way_columns(std::vector<Table::Column> result) {
  std::vector<Table::Column> columns = {
      {"index", Table::Align::left}, {"k"}, {"attend", Table::Align::left}};
  for (Table::Column& column : result) columns.push_back(std::move(column));
  for (const char* cost :
       {"scanned", "read/token", "tokens/s", "attention/token", "build", "index size"}) {
    columns.push_back({cost});
  }
  return columns;
}

std::vector<std::string> way_cells(const EvalWay& way) {
  if (way.emulated()) return {way.shown(), "-", format_number(way.format_bits_in_all) + " bits"};
  return {way.shown(), way.has_budget() ? std::to_string(way.budget.attend.k) : "-",
          way.has_budget() ? way.budget.text() : "-"};
}

std::vector<std::string> cost_cells(const EvalWay& way) {
  if (way.emulated()) return {6, "-"};
  const bool indexed = way.spec.indexed();
  return {std::isnan(way.scan_fraction) ? "-" : format_number(100.0 * way.scan_fraction) + " %",
          format_bytes(static_cast<uint64_t>(way.bytes_read)),
          format_number(way.tokens_per_second()),
          format_duration(1e-3 * way.attention_ms()),
          indexed ? format_duration(way.build_seconds) : "-",
          indexed ? format_bytes(static_cast<uint64_t>(way.index_bytes)) : "-"};
}

std::string emulation_text(const EvalWay& way) {
  if (!way.emulated()) return "";
  const bool aged = ages(*way.spec.format());
  return way.spec.text + ": K and V of " + (aged ? "older" : "all") +
         " tokens went through the format and back, " + format_number(way.format_bits) +
         " bits a number, " + format_bytes(way.format_bytes) + " of the prompt" +
         (aged ? " (" + format_number(way.format_bits_in_all) + " bits a number)" : "") +
         "; Keyhole has no such cache to time\n";
}

std::string audit_lines(const EvalWay& way) {
  return way.audit ? "\n" + way.name() + "\n" + audit_text(*way.audit) : "";
}

std::string above_exact_cell(const std::optional<Difference>& difference) {
  if (!difference) return "-";
  return (difference->mean < 0 ? "-" : "+") + format_number(std::abs(difference->mean)) + " +- " +
         format_number(difference->error, 2);
}

std::string swaps_cell(const std::optional<Swaps>& swaps) {
  return swaps ? std::to_string(swaps->lost) + " / " + std::to_string(swaps->won) : "-";
}

ordered_json way_json(const EvalWay& way, const ordered_json& result) {
  const bool chosen = way.has_budget();
  ordered_json json = {
      {"index", way.spec.text},
      {"index_in_effect", way.in_effect.empty() ? way.spec.text : way.in_effect},
      {"budgets", way.spec.budgets},
      {"k", chosen ? ordered_json(way.budget.attend.k) : ordered_json(nullptr)},
      {"attend", chosen ? ordered_json(way.budget.attend.text()) : ordered_json(nullptr)},
      {"tail", chosen ? ordered_json(way.budget.tail.text()) : ordered_json(nullptr)},
      {"target", chosen ? ordered_json(way.budget.target.text()) : ordered_json(nullptr)}};
  json.update(result);
  const auto timed = [&way](double figure) {
    return way.emulated() ? ordered_json(nullptr) : ordered_json(figure);
  };
  json.update({{"scan_fraction", way.scan_fraction},
               {"keys_attended", way.keys_attended},
               {"bytes_read_per_token", timed(way.bytes_read)},
               {"tokens_per_second", timed(way.tokens_per_second())},
               {"attention_ms_per_token", timed(way.attention_ms())},
               {"build_s", way.build_seconds},
               {"index_bytes", way.index_bytes}});
  if (way.emulated()) {
    json["kv_format"] = {{"name", way.spec.text},
                         {"bits", way.format_bits},
                         {"bits_in_all", way.format_bits_in_all},
                         {"bytes", way.format_bytes}};
  }
  if (way.audit) json["audit"] = audit_json(*way.audit);
  return json;
}

std::string eval_heading(const std::string& what, const EvalOptions& options, const Runner& runner,
                         const keyhole_statistics& statistics, double prefill_seconds,
                         const TurnCost& turn) {
  return what + ", sink " + std::to_string(options.cache.sink) + ", window " +
         std::to_string(options.cache.window) + ", K and V in " + options.cache.kv_dtype +
         (options.cache.kv_host == "same" ? "" : ", offloaded in " + options.cache.kv_host) +
         ", model on " + runner.device() + ", sink and window on " + statistics.device +
         ", prefill " + format_duration(prefill_seconds) + prefill_text(runner) + turn_text(turn) +
         "\n" + to_text(describe_machine(statistics.cpu_level)) + "\n\n";
}

ordered_json eval_header(const EvalOptions& options, const Runner& runner,
                         const KeyholeCache& cache, const keyhole_statistics& statistics,
                         size_t tokens, double prefill_seconds, const TurnCost& turn) {
  return {{"command", command_line()},
          {"machine", to_json(describe_machine(statistics.cpu_level))},
          {"model", model_name(options.model)},
          {"device", runner.device()},
          {"session_device", statistics.device},
          {"task", options.task.task},
          {"tokens", tokens},
          {"seed", options.task.seed},
          {"sink", options.cache.sink},
          {"window", options.cache.window},
          {"kv_dtype", options.cache.kv_dtype},
          {"kv_host", options.cache.kv_host},
          {"threads", statistics.threads},
          {"blas", blas_kernels()},
          {"prefill_s", prefill_seconds},
          {"prefill", runner.prefill_pattern()},
          {"prefill_share", runner.prefill_share()},
          {"chunk", runner.prefill_chunk()},
          {"products", options.model.products},
          {"turn", turn_json(turn)},
          {"turn_as", options.turn_as},
          {"hand_over_s", cache.prefill_seconds()}};
}

}  // namespace keyhole::tools
