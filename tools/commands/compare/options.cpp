#include "tools/commands/compare/options.h"

#include <keyhole/keyhole.h>

#include <algorithm>
#include <limits>

#include "tools/commands/commands.h"
#include "tools/commands/common/sweep.h"
#include "tools/commands/compare/advice.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

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
sample for each head and weigh it: error is that of their estimate. Caches in few bits (q8_0 to oscar2)
attend all rows as they give them back; read is what their bits take, scales included, their time that of
the same rows in fp32. What a rival holds itself is read
as it holds it (Faiss, hnswlib: fp32), K and V of what is attended as --kv-dtype says.

Results of files (--ann-results): recall, mass and, where there are values, the error of exact attention to
their neighbours are computed here; times, build and memory are as the file says, of whatever machine they
were taken on. What nobody knows is -.)";

void add_inputs(CLI::App& command, CompareOptions& options) {
  command
      .add_option("--trace", options.trace,
                  "A trace written by record, or keys in .hdf5 (ann-benchmarks), .fbin or .fvecs")
      ->type_name("FILE");
  command
      .add_option("--runs", options.runs,
                  "Indexes, rivals, budgets, options and goals from a run file, beside what is "
                  "given here (docs/formats.md)")
      ->type_name("FILE");
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

void add_measured(CLI::App& command, CompareOptions& options) {
  add_repeatable(command, "--index", "SPEC",
                 std::string("An index type with parameters. ") + kSweepHelp +
                     "; what only searches read is swept without building again",
                 options.indexes);
  add_repeatable(command, "--rival", "SPEC",
                 "Someone else's way to show beside them, named below; sweeps as --index does",
                 options.rivals);
  add_repeatable(command, "--ann-results", "PATH",
                 "Results of other systems over the same vectors to show beside them: a file of "
                 "ann-benchmarks or VIBE, or a folder of such files",
                 options.ann_results);
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

void add_outputs(CLI::App& command, CompareOptions& options) {
  command
      .add_option("--resume", options.resume,
                  "Append every row to this file as it is measured; where it is there already, "
                  "measure only what it lacks")
      ->type_name("FILE");
  command
      .add_option("--sort", options.sort,
                  "Sort the summary by error (median), bytes read or us (p50), the least first")
      ->type_name("BY")
      ->check(CLI::IsMember({"none", "error", "bytes", "us"}))
      ->capture_default_str();
  add_repeatable(command, "--goal", "GOAL", kGoalHelp, options.goals);
  command.add_flag("--per-head", options.per_head, "Also print a row for every head");
  command.add_option("--json", options.json, "Write all results here (- for standard output)")
      ->type_name("FILE");
  command.add_option("--csv", options.csv, "Write the per-head rows here (- for standard output)")
      ->type_name("FILE");
  command
      .add_option("--ann-csv", options.ann_csv,
                  "Write the summary here under the names of ann-benchmarks and VIBE (recall, qps, "
                  "build_time, index_size, ...)")
      ->type_name("FILE");
  command
      .add_option("--ann-hdf5", options.ann_hdf5,
                  "Write what each way answered to every query here, a file a way and head in the "
                  "layout of ann-benchmarks' results (docs/formats.md)")
      ->type_name("FOLDER");
  command
      .add_option("--ann-layout", options.ann_layout,
                  "Of those files: ann-benchmarks, or vibe, whose results lie in groups")
      ->type_name("NAME")
      ->check(CLI::IsMember({"ann-benchmarks", "vibe"}))
      ->capture_default_str();
  command
      .add_option("--svg", options.svg,
                  "Draw output error against bytes read and against time here")
      ->type_name("FILE");
  add_html_option(command, "curves, maps of the heads", options.html);
}

// The options that a run file may set: those that say how is measured.
constexpr const char* kFileOptions[] = {
    "k",        "sink",        "window", "threads",    "layers",        "heads",     "queries",
    "kv-dtype", "classifiers", "sort",   "query-file", "training-file", "value-file"};

}  // namespace

CompareOptions resolve_runs(const CLI::App& command, CompareOptions given) {
  if (!given.runs.empty()) {
    CompareOptions resolved;
    const RunFile file = resolve_run_file(command, given.runs, kFileOptions, [&](CLI::App& both) {
      add_compare_options(both, resolved);
    });
    given = std::move(resolved);
    if (given.trace.empty()) given.trace = file.trace;
    if (given.goals.empty()) given.goals = file.goals;
    given.groups = file.runs;
  }
  if (given.trace.empty())
    throw UsageError(
        "--trace is missing, and no run file names a trace (see keyhole compare --help)");
  for (const std::string& index : given.indexes) {
    given.groups.push_back({index, false, given.budgets});
  }
  for (const std::string& rival : given.rivals) given.groups.push_back({rival, true, {}});
  if (given.groups.empty() && given.ann_results.empty()) {
    throw UsageError(
        "nothing to compare: give --index, e.g. --index ivf, --rival, --runs or --ann-results");
  }
  return given;
}

void add_compare_options(CLI::App& command, CompareOptions& options) {
  add_inputs(command, options);
  add_measured(command, options);
  add_outputs(command, options);
  command.footer(
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
           "keyhole compare --trace t.safetensors --index 'ivf:probe=8..128*2' --index flat --goal "
           "error=0.05 --html compare.html",
           "keyhole compare --runs sweep.json --resume sweep.jsonl --html sweep.html",
           "keyhole compare --trace t.safetensors --index flat --json result.json --csv heads.csv",
           "keyhole compare --trace keys.fbin --query-file queries.fbin --index hnsw:M=32,ef=128",
           "keyhole compare --trace llama-128-ip.hdf5 --index flat --queries 200",
           "keyhole compare --trace llama-128-ip.hdf5 --index 'ivf:probe=8..128*2' --ann-results "
           "results/llama-128-ip --ann-hdf5 results"}) +
      "\n\n" + kDefinitions + "\n\n" + keyhole_index_help() +
      "\nRivals (--rival): other people's ways, here only to be compared with.\n" +
      describe_rivals(rival_types()));
}

}  // namespace keyhole::tools
