// keyhole compare: index types on recorded heads, against exact attention.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/commands.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/sweep.h"
#include "tools/commands/compare/report.h"
#include "tools/commands/compare/run.h"
#include "tools/commands/compare/svg.h"
#include "tools/io/vector_trace.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::string trace;
  VectorFiles vectors;
  std::vector<std::string> indexes, rivals;
  BudgetLists budgets;
  uint32_t k = 100;
  std::optional<uint32_t> sink, window;
  unsigned threads = 0;
  std::vector<uint32_t> layers, heads;
  size_t queries = 1000;
  std::string kv_dtype = "f16";
  std::string classifiers;
  std::string json, csv, svg;
  std::string sort = "none";
  bool per_head = false;
};

const std::map<std::string, SortBy> kSortings = {
    {"none", SortBy::none}, {"error", SortBy::error}, {"bytes", SortBy::bytes}, {"us", SortBy::us}};

Trace open_trace(const Options& options) {
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

std::vector<const TraceHead*> select_heads(const Trace& trace, const Options& options) {
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

ComparisonPlan make_plan(const Trace& trace, const Options& options) {
  ComparisonPlan plan;
  plan.kv_dtype = dtype_of(options.kv_dtype);
  // Sets of vectors have no sequence, so there is nothing to keep resident unless it is asked for.
  const bool vectors = trace.info().task == "vectors";
  plan.sink = options.sink.value_or(vectors ? 0 : 128);
  plan.window = options.window.value_or(vectors ? 0 : 512);
  if (options.indexes.empty() && options.rivals.empty()) {
    throw UsageError("nothing to compare: give --index, e.g. --index ivf, or --rival");
  }
  plan.indexes = expand_indexes(options.indexes);
  plan.rivals = expand_rivals(options.rivals);
  plan.budgets = with_numbers(cross_budgets(parse_attends(options.budgets.attends, options.k),
                                            options.budgets.tails, options.budgets.targets),
                              options.budgets.numbers);
  plan.rival_ks = rival_ks(plan.budgets, options.k);
  if (!trace.heads().front().values &&
      std::any_of(plan.budgets.begin(), plan.budgets.end(),
                  [](const BudgetChoice& b) { return b.target.error != 0; })) {
    throw UsageError("--target error= is about outputs, and " + options.trace + " has no values");
  }
  plan.classifiers = options.classifiers;
  plan.heads = select_heads(trace, options);
  plan.threads = options.threads != 0 ? options.threads : describe_machine("").cores;
  plan.builds_at_once = std::min<unsigned>(plan.threads, static_cast<unsigned>(plan.heads.size()));
  plan.truth.offloaded = offloaded_tokens(trace, plan.sink, plan.window);
  plan.truth.k = options.k;
  plan.truth.queries = spread(trace.query_positions().size(), options.queries);
  return plan;
}

ordered_json describe(const Trace& trace, const Options& options) {
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

ordered_json describe(const ComparisonPlan& plan, const Options& options) {
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

void check_files(const Options& options) {
  if (options.json == "-" && options.csv == "-") {
    throw UsageError("--json and --csv cannot both go to standard output");
  }
  if (options.svg == "-") throw UsageError("--svg needs a file");
  for (const std::string& path : {options.json, options.csv, options.svg}) {
    if (!path.empty()) check_writable(path);
  }
}

void print(const Options& options, const Trace& trace, const ComparisonPlan& plan,
           const Machine& machine, const std::vector<Measurement>& results,
           const std::vector<Summary>& summaries) {
  const Style style = style_of(stdout);
  const TraceInfo& info = trace.info();
  std::printf(
      "%s\n%s: %s tokens, %s of them offloaded; %zu KV heads x %u query heads, d = %u; %zu "
      "queries\n\n",
      to_text(machine).c_str(), options.trace.c_str(), format_count(info.tokens).c_str(),
      format_count(plan.truth.offloaded.count()).c_str(), plan.heads.size(), info.group(),
      info.head_dim, plan.truth.queries.size());
  if (options.per_head) std::printf("%s\n", head_table(results, style).c_str());
  std::fputs(summary_table(summaries, style).c_str(), stdout);
  std::printf(
      "\nMeans over heads, weighted by the attention mass of their offloaded tokens. recall@%u; "
      "build: summed over heads.\n",
      options.k);
  if (const size_t heavy = summaries.front().heavy_heads; heavy != 0) {
    std::printf("\n%s\nPlain means over the %zu heads with at least %.0f %% of their mass there.\n",
                heavy_table(summaries, style).c_str(), heavy, 100 * kHeavyMass);
  }
}

void write_files(const Options& options, const Trace& trace, const ComparisonPlan& plan,
                 const Machine& machine, const std::vector<Measurement>& results,
                 const std::vector<Summary>& summaries) {
  if (!options.svg.empty()) {
    write_text(options.svg,
               to_svg(summaries,
                      options.trace + ": " + format_count(plan.truth.offloaded.count()) +
                          " offloaded keys, means over " + std::to_string(plan.heads.size()) +
                          " heads weighted by their mass; " + machine.cpu,
                      options.k));
  }
  if (!options.csv.empty()) write_text(options.csv, to_csv(results));
  if (options.json.empty()) return;
  ordered_json rows = ordered_json::array();
  for (const Measurement& m : results) rows.push_back(to_json(m));
  ordered_json means = ordered_json::array();
  for (const Summary& s : summaries) means.push_back(to_json(s));
  write_json(options.json, {{"machine", to_json(machine)},
                            {"trace", describe(trace, options)},
                            {"options", describe(plan, options)},
                            {"results", rows},
                            {"summary", means}});
}

void run(const Options& options) {
  check_files(options);
  const Trace trace = open_trace(options);
  const ComparisonPlan plan = make_plan(trace, options);
  std::vector<Measurement> results;
  std::string simd;
  {
    Comparison comparison(trace, plan);
    results = comparison.run();
    simd = comparison.simd_level();
  }
  std::vector<Summary> summaries = summarise(results);
  sort(summaries, kSortings.at(options.sort));
  const Machine machine = describe_machine(simd);
  if (options.json != "-" && options.csv != "-") {
    print(options, trace, plan, machine, results, summaries);
  }
  write_files(options, trace, plan, machine, results, summaries);
}

constexpr const char* kDefinitions = R"(What is measured, for each KV head, index and budget:
  error p50, p95  output error ||o - o*|| / ||o*|| of a (query, head), the whole attention o with its
                  resident tokens against exact attention over the recorded elements
  read            bytes that a step loaded / bytes of the offloaded keys and values
  read/step       bytes that the search and the attention of one step loaded, its tail included
  p50, p95, p99   latency of one group's search and attention, one thread, warm, nothing else running
  missing         1 - mass; beside it what the tail or the target estimated of it (means)
  opened          keys that a step read to meet its target, beyond what the search found
  held            share of the (query, head) that kept the target: error at most 1.5 times it, mass at
                  most 0.02 below it
  recall          share of the k offloaded keys of largest inner product that the search returned;
                  a key that ties with the k-th (within fp32 rounding) counts
                  with --attend scored and weight, and with a target: share that was attended
  mass            recovered mass: softmax weight, under exact attention over the whole context, of the
                  sink, the window, and the keys that were attended
  scan            share of the offloaded keys whose score was computed (sparq: from the whole key)
  attended        distinct offloaded keys that one step attended, for all heads of the group
  build_s         of one head, while as many others are built as --threads allows; 1 to time it alone
  bytes/key       held by the index, and by the partitions of its tail, beside K and V
With P tokens at the first recorded query, the tokens [sink, P - window) are offloaded and indexed; all
others up to a query's own position are attended exactly.

Rivals: those that search for keys are asked for K per query head, one head after the other, for each
--attend topk:K (else --k); all heads of a group attend the union, as with an index. attend = own: a
budget of the rival's own decides; recall is then the share that was attended. lsh and random attend a
sample for each head and weigh it: error is that of their estimate. What a rival holds itself is read
as it holds it (Faiss, hnswlib: fp32), K and V of what is attended as --kv-dtype says.)";

void add_inputs(CLI::App& command, Options& options) {
  command
      .add_option("--trace", options.trace,
                  "A trace written by record, or keys in .hdf5 (ann-benchmarks), .fbin or .fvecs")
      ->type_name("FILE")
      ->required();
  command.add_option("--query-file", options.vectors.queries, "Queries of .fbin or .fvecs keys")
      ->type_name("FILE");
  command
      .add_option("--training-file", options.vectors.training,
                  "Training queries of .fbin or .fvecs keys")
      ->type_name("FILE");
  command
      .add_option("--value-file", options.vectors.values,
                  "Values of .fbin or .fvecs keys; without them no output error is reported")
      ->type_name("FILE");
}

void add_measured(CLI::App& command, Options& options) {
  add_repeatable(command, "--index", "SPEC",
                 std::string("An index type with parameters. ") + kSweepHelp +
                     "; what only searches read is swept without building again",
                 options.indexes);
  add_repeatable(command, "--rival", "SPEC",
                 "Someone else's way to show beside them, named below; sweeps as --index does",
                 options.rivals);
  add_budget_lists(command, options.budgets);
  command
      .add_option("--k", options.k,
                  "The k of recall, and the keys that a search is asked for per query head")
      ->type_name("N")
      ->check(CLI::Range(1U, 1U << 20U).description(""))
      ->capture_default_str();
  command.add_option("--sink", options.sink, "Resident tokens at the beginning [128; vectors: 0]")
      ->type_name("N");
  command.add_option("--window", options.window, "Resident newest tokens [512; vectors: 0]")
      ->type_name("N");
  command.add_option("--threads", options.threads, "Heads that are built at once [one per core]")
      ->type_name("N")
      ->check(CLI::Range(1U, 1024U).description(""));
  command.add_option("--layers", options.layers, "Layers to measure, e.g. 0,4,5 [all recorded]")
      ->type_name("N,...")
      ->delimiter(',');
  command.add_option("--heads", options.heads, "KV heads to measure, e.g. 0,1 [all]")
      ->type_name("N,...")
      ->delimiter(',');
  command.add_option("--queries", options.queries, "At most this many queries, evenly spread")
      ->type_name("N")
      ->check(CLI::Range(size_t{1}, std::numeric_limits<size_t>::max()).description(""))
      ->capture_default_str();
  add_kv_dtype_option(command, options.kv_dtype);
  command
      .add_option("--classifiers", options.classifiers,
                  "Trained partitions and query classifiers for saap, written by train-saap")
      ->type_name("FILE");
}

void add_outputs(CLI::App& command, Options& options) {
  command
      .add_option("--sort", options.sort,
                  "Sort the summary by error (median), bytes read or us (p50), the least first")
      ->type_name("BY")
      ->check(CLI::IsMember({"none", "error", "bytes", "us"}))
      ->capture_default_str();
  command.add_flag("--per-head", options.per_head, "Also print a row for every head");
  command.add_option("--json", options.json, "Write all results here (- for standard output)")
      ->type_name("FILE");
  command.add_option("--csv", options.csv, "Write the per-head rows here (- for standard output)")
      ->type_name("FILE");
  command
      .add_option("--svg", options.svg,
                  "Draw output error against bytes read and against time here")
      ->type_name("FILE");
}

}  // namespace

void add_compare(CLI::App& keyhole) {
  auto options = std::make_shared<Options>();
  CLI::App* command = keyhole.add_subcommand("compare",
                                             "Compare index types and budgets on a recorded trace: "
                                             "output error against bytes read and time");
  add_inputs(*command, *options);
  add_measured(*command, *options);
  add_outputs(*command, *options);
  command->footer(
      examples(
          {"keyhole compare --trace t.safetensors --index flat --index ivf:C=1024,probe=32",
           "keyhole compare --trace t.safetensors --index 'hnsw:M=32,ef=32..512*2' --layers 4,5 "
           "--per-head",
           "keyhole compare --trace t.safetensors --index 'ivf:probe=8|16|32|64' --attend topk:100 "
           "--attend scored --attend weight:1e-4 --svg curves.svg",
           "keyhole compare --trace t.safetensors --index ivf --tail none --tail second --target "
           "none "
           "--target error=0.05 --sort bytes",
           "keyhole compare --trace t.safetensors --index ivf --rival 'faiss-ivf:probe=8|32' "
           "--rival pages "
           "--rival lsh",
           "keyhole compare --trace t.safetensors --index flat --json result.json --csv heads.csv",
           "keyhole compare --trace keys.fbin --query-file queries.fbin --index hnsw:M=32,ef=128",
           "keyhole compare --trace llama-128-ip.hdf5 --index flat --queries 200"}) +
      "\n\n" + kDefinitions + "\n\n" + keyhole_index_help() +
      "\nRivals (--rival): other people's ways, here only to be compared with.\n" +
      describe_rivals(rival_types()));
  command->callback([options] { run(*options); });
}

}  // namespace keyhole::tools
