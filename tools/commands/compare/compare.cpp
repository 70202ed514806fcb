// keyhole compare: index types on recorded heads, against exact attention.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "keyhole/inspect.h"
#include "tools/api/handles.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/compare/options.h"
#include "tools/commands/compare/outputs.h"
#include "tools/commands/compare/results_file.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/units.h"
#include "tools/terminal/warning.h"

namespace keyhole::tools {
namespace {

const std::map<std::string, SortBy> kSortings = {
    {"none", SortBy::none}, {"error", SortBy::error}, {"bytes", SortBy::bytes}, {"us", SortBy::us}};

Trace open_trace(const CompareOptions& options) {
  VectorFiles vectors = options.vectors;
  const bool has_parts =
      !vectors.queries.empty() || !vectors.training.empty() || !vectors.values.empty();
  if (!is_vector_file(options.trace)) {
    if (has_parts) {
      throw UsageError(
          "--query-file, --training-file and --value-file belong to fbin and fvecs keys; " +
          options.trace + " is a trace, which holds its own");
    }
    return Trace::open(options.trace);
  }
  vectors.keys = options.trace;
  const bool raw = vectors.keys.extension() == ".fbin" || vectors.keys.extension() == ".fvecs";
  if (raw && vectors.queries.empty()) {
    throw UsageError(options.trace + " holds keys only: give --query-file as well");
  }
  if (!raw && has_parts) {
    throw UsageError(
        "--query-file, --training-file and --value-file belong to fbin and fvecs keys; "
        "an HDF5 file holds its own queries");
  }
  return open_vectors(vectors);
}

template <class Range>
std::string listed(const Range& numbers) {
  std::string out;
  for (const uint32_t number : numbers) out += (out.empty() ? "" : ", ") + std::to_string(number);
  return out;
}

std::vector<const TraceHead*> select_heads(const Trace& trace, const CompareOptions& options) {
  const auto contains = [](const std::vector<uint32_t>& list, uint32_t number) {
    return std::find(list.begin(), list.end(), number) != list.end();
  };
  for (const uint32_t layer : options.layers) {
    if (!contains(trace.info().layers, layer)) {
      throw UsageError("layer " + std::to_string(layer) + " is not in the trace, which has " +
                       listed(trace.info().layers));
    }
  }
  for (const uint32_t head : options.heads) {
    if (head >= trace.info().kv_heads) {
      throw UsageError("KV head " + std::to_string(head) + " is not in the trace, which has 0.." +
                       std::to_string(trace.info().kv_heads - 1));
    }
  }
  std::vector<const TraceHead*> out;
  for (const TraceHead& head : trace.heads()) {
    if (!options.layers.empty() && !contains(options.layers, head.layer)) continue;
    if (!options.heads.empty() && !contains(options.heads, head.kv_head)) continue;
    out.push_back(&head);
  }
  return out;
}

// `wanted` of `total` rows, evenly spread, the last one included.
std::vector<size_t> spread(size_t total, size_t wanted) {
  const size_t count = std::min(total, wanted);
  std::vector<size_t> out;
  for (size_t i = 1; i <= count; ++i) out.push_back(i * total / count - 1);
  return out;
}

ComparisonPlan make_plan(const Trace& trace, const CompareOptions& options) {
  ComparisonPlan plan;
  plan.trace_path = options.trace;
  plan.kv_dtype = dtype_of(options.kv_dtype);
  // Sets of vectors have no sequence, so there is nothing to keep resident unless it is asked for.
  const bool vectors = trace.info().task == "vectors";
  plan.sink = options.sink.value_or(vectors ? 0 : 128);
  plan.window = options.window.value_or(vectors ? 0 : 512);
  std::vector<std::string> indexes, rivals;
  for (const RunFile::Run& run : options.groups) {
    (run.rival ? rivals : indexes).push_back(run.spec);
  }
  plan.rivals = expand_rivals(rivals);
  for (SweptIndex& index : expand_indexes(indexes)) {
    const auto run = std::find_if(options.groups.begin(), options.groups.end(),
                                  [&](const RunFile::Run& r) { return r.spec == index.series; });
    const BudgetLists& lists = run->budgets;
    plan.indexes.push_back(
        {std::move(index), with_numbers(cross_budgets(parse_attends(lists.attends, options.k),
                                                      lists.tails, lists.targets),
                                        options.budgets.numbers)});
  }
  std::vector<BudgetChoice> budgets;  // that are anywhere asked for
  for (const IndexRun& run : plan.indexes) {
    budgets.insert(budgets.end(), run.budgets.begin(), run.budgets.end());
  }
  if (budgets.empty())
    budgets = cross_budgets(parse_attends(options.budgets.attends, options.k), {}, {});
  plan.rival_ks = rival_ks(budgets, options.k);
  if (!trace.heads().front().values &&
      std::any_of(budgets.begin(), budgets.end(),
                  [](const BudgetChoice& b) { return b.target.error != 0; })) {
    throw UsageError("--target error= is about outputs, and " + options.trace + " has no values");
  }
  plan.classifiers = options.classifiers;
  plan.heads = select_heads(trace, options);
  plan.threads = options.threads != 0 ? options.threads : describe_machine("").cores;
  plan.builds_at_once = std::min<unsigned>(plan.threads, static_cast<unsigned>(plan.heads.size()));
  plan.truth.offloaded = offloaded_tokens(trace, plan.sink, plan.window);
  plan.truth.k = options.k;
  plan.truth.coverage = kUsualCoverage;
  plan.others = read_other_results(options.ann_results, options.trace, trace, options.k);
  plan.truth.queries = spread(trace.query_positions().size(), options.queries);
  return plan;
}

/// What the library takes for "auto" in a session of these keys on the host: an index by itself has no context to
/// choose by.
std::string index_of_auto(const Trace& trace, const CompareOptions& options) {
  const TraceInfo& info = trace.info();
  keyhole_engine_config engine;
  keyhole_engine_config_init(&engine);
  engine.layers = static_cast<uint32_t>(info.layers.size());
  engine.q_heads = info.q_heads;
  engine.kv_heads = info.kv_heads;
  engine.head_dim = info.head_dim;
  engine.kv_dtype = dtype_of(options.kv_dtype);
  engine.device = KEYHOLE_DEVICE_HOST;  // searches are the host's, whatever this build has
  keyhole_session_config session;
  keyhole_session_config_init(&session);
  session.index = kAutoIndex;
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  check(keyhole_plan(&engine, &session, info.tokens, 0, 0, &plan));
  return plan.index;
}

/// Puts what "auto" stands for in its place, and says so where results are text.
void resolve_auto(const Trace& trace, CompareOptions& options) {
  for (RunFile::Run& run : options.groups) {
    if (run.rival || run.spec != kAutoIndex) continue;
    run.spec = index_of_auto(trace, options);
    if (options.json != "-" && options.csv != "-") {
      std::printf("--index auto is %s in a session of these keys on the host\n\n",
                  run.spec.c_str());
    }
  }
}

void run(const CompareOptions& given) {
  check_outputs(given);
  CompareOptions options = given;
  const std::vector<Goal> goals = parse_goals(options.goals);
  const Trace trace = open_trace(options);
  resolve_auto(trace, options);
  ComparisonPlan plan = make_plan(trace, options);
  if (!trace.heads().front().values && std::any_of(goals.begin(), goals.end(), [](const Goal& g) {
        return g.of == Goal::Of::error;
      })) {
    throw UsageError("--goal error= is about outputs, and " + options.trace + " has no values");
  }
  if (!goals.empty() && plan.indexes.empty()) {
    throw UsageError("--goal advises an index, and none is measured: give --index");
  }
  std::optional<AnswerFiles> answers;
  if (!options.ann_hdf5.empty()) {
    answers.emplace(options.ann_hdf5,
                    options.ann_layout == "vibe" ? AnswerFiles::Layout::vibe
                                                 : AnswerFiles::Layout::ann_benchmarks,
                    options.trace, trace, options.k, plan.truth.queries);
    plan.answers = &*answers;
  }
  std::optional<ResultsFile> kept;
  ComparisonResult result{options, trace, plan, {}, {}, {}, {}};
  {
    Comparison comparison(trace, plan);
    result.machine = describe_machine(comparison.simd_level());
    if (!options.resume.empty()) kept.emplace(options.resume, resume_header(result));
    try {
      result.rows = comparison.run(kept ? &*kept : nullptr);
    } catch (const Interrupted&) {
      if (kept) {
        warn(options.resume + " holds the rows that are measured, " +
             format_count(kept->rows().size()) + " so far; the same command goes on from there");
      }
      throw;
    }
  }
  result.summaries = summarise(result.rows);
  sort(result.summaries, kSortings.at(options.sort));
  result.advice = advise(result.summaries, goals, plan.specs(), plan.truth.offloaded.count());
  write_outputs(result);
}

}  // namespace

void add_compare(CLI::App& keyhole) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* command = keyhole.add_subcommand("compare",
                                             "Compare index types and budgets on a recorded trace: "
                                             "output error against bytes read and time");
  add_compare_options(*command, *options);
  command->callback([options, command] { run(resolve_runs(*command, *options)); });
}

}  // namespace keyhole::tools
