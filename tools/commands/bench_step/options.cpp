#include "tools/commands/bench_step/options.h"

#include <algorithm>
#include <map>

#include "tools/commands/bench_step/busy.h"
#include "tools/commands/bench_step/share_plan.h"
#include "tools/commands/common/setting_options.h"
#include "tools/commands/common/sweep.h"
#include "tools/commands/common/ways.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

const std::map<std::string, keyhole_device> kDevices = {
    {"auto", KEYHOLE_DEVICE_AUTO}, {"host", KEYHOLE_DEVICE_HOST}, {"cuda", KEYHOLE_DEVICE_CUDA}};
const std::map<std::string, keyhole_signal> kSignals = {{"auto", KEYHOLE_SIGNAL_AUTO},
                                                        {"wait", KEYHOLE_SIGNAL_WAIT},
                                                        {"launch", KEYHOLE_SIGNAL_LAUNCH}};
const std::map<std::string, TurnKind> kTurns = {
    {"none", TurnKind::none}, {"permute", TurnKind::permute}, {"rotate", TurnKind::rotate}};

template <class Value>
std::vector<std::string> names(const std::map<std::string, Value>& choices) {
  std::vector<std::string> out;
  out.reserve(choices.size());
  for (const auto& [name, value] : choices) out.push_back(name);
  return out;
}

void check_shape(const BenchStepOptions& options) {
  const StepShape& s = options.shape;
  if (s.q_heads % s.kv_heads != 0 || s.group() > 128) {
    throw UsageError("--q-heads " + std::to_string(s.q_heads) + " with --kv-heads " +
                     std::to_string(s.kv_heads) +
                     ": allowed: a multiple, at most 128 query heads for each KV head");
  }
}

// Refuses indexes that undo RoPE, of which nothing is left in turned keys, and those with a classifier, which knows
// the heads of its model.
void check_index(const std::string& spec) {
  if (spec.find("rope=undo") != std::string::npos || spec.rfind("saap", 0) == 0) {
    throw UsageError("--index " + spec +
                     ": bench-step's heads are turned copies of others, in which RoPE cannot be "
                     "undone and for which nothing was trained; allowed: all types but saap, "
                     "without rope=undo");
  }
}

// The options that a run file may set: those that say how is measured.
constexpr const char* kFileOptions[] = {"k",       "sink",  "window", "threads",    "layers",
                                        "context", "steps", "warmup", "audit-steps"};

// The runs of one list of sweeps.
void add_runs(const BenchStepOptions& options, const std::vector<std::string>& sweeps,
              const BudgetLists& lists, std::vector<StepRun>& runs) {
  const std::vector<BudgetChoice> budgets = with_numbers(
      cross_budgets(parse_attends(lists.attends, options.k), lists.tails, lists.targets),
      options.budgets.numbers);
  for (const SweptIndex& index : expand_indexes(sweeps)) {
    check_index(index.spec);
    for (const StepRun& run : runs) {
      if (run.index == index.spec) throw UsageError("--index " + index.spec + " is given twice");
    }
    runs.push_back({index.spec, index.series, budgets});
  }
}

void check_context(const StepPlan& plan, const std::string& text) {
  constexpr uint64_t kMostTokens = uint64_t{1} << 31U;
  const uint64_t least = uint64_t{plan.sink} + plan.window + 1;
  if (plan.context < least || plan.context + plan.tokens() > kMostTokens) {
    throw UsageError("--context " + text + ": allowed: from " + std::to_string(least) +
                     " (more than --sink and --window hold) to 2^31 tokens with the steps");
  }
}

// One number of a range.
void add_number(CLI::App& command, const char* name, uint32_t& value, const char* help,
                uint32_t least, uint32_t most) {
  command.add_option(name, value, help)
      ->type_name("N")
      ->check(CLI::Range(least, most).description(""))
      ->capture_default_str();
}

// One of several words.
void add_choice(CLI::App& command, const char* name, std::string& value, const char* help,
                const std::vector<std::string>& allowed) {
  command.add_option(name, value, help)
      ->type_name("WHAT")
      ->check(CLI::IsMember(allowed))
      ->capture_default_str();
}

void add_model_and_data(CLI::App& command, BenchStepOptions& options) {
  add_number(command, "--layers", options.shape.layers, "Layers", 1, 1024);
  add_number(command, "--q-heads", options.shape.q_heads, "Query heads", 1, 4096);
  add_number(command, "--kv-heads", options.shape.kv_heads, "KV heads", 1, 4096);
  command
      .add_option("--head-dim", options.shape.head_dim,
                  "Components of a head: a multiple of 16 from 64 to 576")
      ->type_name("N")
      ->check(CLI::Range(64, 576).description(""))
      ->capture_default_str();
  command.add_option("--context", options.context, "Tokens before the steps, e.g. 131072 or 1M")
      ->type_name("TOKENS")
      ->capture_default_str();
  command
      .add_option("--trace", options.trace,
                  "A trace written by record, whose heads the model is made of")
      ->type_name("FILE");
  command.add_flag("--synthetic", options.synthetic,
                   "Synthetic heads in place of a trace: times, but no figures of quality");
  add_choice(command, "--turn", options.turn, "How heads that come from the same one differ",
             names(kTurns));
}

void add_ways(CLI::App& command, BenchStepOptions& options) {
  add_repeatable(command, "--index", "SPEC",
                 std::string("An index type with parameters, or auto. ") + kSweepHelp + " [auto]",
                 options.indexes);
  command
      .add_option("--runs", options.runs,
                  "Indexes, each with budgets of its own, and options from a run file "
                  "(docs/formats.md), before what is given here")
      ->type_name("FILE");
  add_budget_lists(command, options.budgets);
  add_number(command, "--k", options.k,
             "Keys that one search finds: of each query head, with codes of the KV head", 1,
             1U << 20U);
}

void add_tokens(CLI::App& command, BenchStepOptions& options) {
  add_number(command, "--sink", options.sink, "Resident tokens at the beginning", 0, 1U << 20U);
  add_number(command, "--window", options.window, "Resident newest tokens", 1, 1U << 20U);
  add_number(command, "--training", options.training, "Prefill queries kept for each KV head", 0,
             1U << 20U);
  add_number(command, "--steps", options.steps, "Tokens that are timed", 1, 1U << 16U);
  add_number(command, "--warmup", options.warmup, "Tokens before them", 1, 1U << 16U);
  add_number(
      command, "--audit-steps", options.audit_steps,
      "Tokens whose attention is computed again exactly, at most --warmup and --steps together; "
      "0: none",
      0, 1U << 16U);
}

void add_places(CLI::App& command, BenchStepOptions& options) {
  add_choice(command, "--device", options.device, "Where resident tokens are attended",
             names(kDevices));
  add_number(command, "--device-ordinal", options.ordinal, "Which CUDA device", 0, 1024);
  add_choice(command, "--signal", options.signal, "How the stream learns that the host is done",
             names(kSignals));
  add_kv_host_option(command, options.kv_host);
  add_session_settings(
      command, options.settings,
      {"training_queries", "host_memory_limit", "pinned_memory_limit", "tail_partition"});
  command.add_flag("--blocking", options.blocking,
                   "Tensors in host memory and calls that wait, also on a CUDA device");
  command.add_flag("--graph", options.graph, "Replay a token as a CUDA graph");
  command.add_flag("--weights", options.weights,
                   "The model's matrix products between the attends (CUDA): bf16, random, in the "
                   "proportions of Llama-3-8B");
  add_number(command, "--threads", options.threads, "Worker threads; 0: one per core", 0, 1024);
  add_number(command, "--busy", options.busy,
             "Threads of other work that copy memory without a pause while steps are timed: a host "
             "that is not idle",
             0, 1024);
  command
      .add_option("--device-cap", options.device_cap,
                  "Device memory for weights and session together, e.g. 24GiB")
      ->type_name("BYTES");
  command
      .add_option("--gpu-memory", options.device_cap,
                  "The same as --device-cap, as other commands name it")
      ->type_name("BYTES");
  command.add_option("--host-cap", options.host_cap, "Host memory of the session, e.g. 64GiB")
      ->type_name("BYTES");
  command
      .add_option("--pinned-cap", options.pinned_cap,
                  "Host memory that the session may pin for the device, e.g. 8GiB")
      ->type_name("BYTES");
}

void add_results(CLI::App& command, BenchStepOptions& options) {
  command
      .add_option(
          "--compare", options.compare,
          "Beside them: full (attention to everything on the same device, no cap), pcie (K "
          "and V copied from pinned memory), resident (sink and window alone), q8_0 and q4_0 "
          "(floors, not "
          "measured: K and V in 8 or 4 bits on the card, their bytes at the card's copy speed)")
      ->delimiter(',')
      ->check(CLI::IsMember({"full", "pcie", "resident", "q8_0", "q4_0"}).description(""))
      ->type_name("WHAT,...");
  command.add_option("--seed", options.seed, "Of turns, noise and synthetic heads")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--json", options.json, "Write the results here (- for standard output)")
      ->type_name("FILE");
  command
      .add_option("--svg", options.svg,
                  "Draw output error against the time of a layer and against memory here")
      ->type_name("FILE");
  add_html_option(command, "times by stage, curves", options.html);
}

}  // namespace

void add_bench_step_options(CLI::App& command, BenchStepOptions& options) {
  add_model_and_data(command, options);
  add_ways(command, options);
  add_tokens(command, options);
  add_places(command, options);
  add_parallel_options(command, options.parallel);
  add_results(command, options);
}

BenchStepOptions resolve_runs(const CLI::App& command, BenchStepOptions given) {
  if (given.runs.empty()) return given;
  BenchStepOptions out;
  const RunFile file = resolve_run_file(command, given.runs, kFileOptions,
                                        [&](CLI::App& both) { add_bench_step_options(both, out); });
  for (const RunFile::Run& run : file.runs) {
    if (run.rival) {
      throw UsageError("--runs " + given.runs + ": rival " + run.spec +
                       ": bench-step measures indexes alone; rivals are compare's");
    }
  }
  if (!file.goals.empty()) {
    throw UsageError("--runs " + given.runs + ": goals: bench-step gives no advice; compare does");
  }
  if (out.trace.empty() && !out.synthetic) out.trace = file.trace;
  out.groups = file.runs;
  return out;
}

StepPlan make_step_plan(const BenchStepOptions& options) {
  check_shape(options);
  StepPlan plan;
  plan.shape = options.shape;
  plan.context = parse_tokens(options.context);
  plan.sink = options.sink;
  plan.window = options.window;
  plan.steps = options.steps;
  plan.warmup = options.warmup;
  plan.audit_steps = options.audit_steps;
  plan.training_queries = options.training;
  plan.turn = kTurns.at(options.turn);
  plan.seed = options.seed;
  for (const RunFile::Run& run : options.groups) {
    add_runs(options, {run.spec}, run.budgets, plan.runs);
  }
  if (!options.indexes.empty() || plan.runs.empty()) {
    add_runs(options,
             options.indexes.empty() ? std::vector<std::string>{kAutoIndex} : options.indexes,
             options.budgets, plan.runs);
  }
  plan.device = kDevices.at(options.device);
  plan.signal = kSignals.at(options.signal);
  plan.kv_host = kv_host_of(options.kv_host);
  plan.settings = options.settings;
  plan.device_ordinal = options.ordinal;
  plan.threads = options.threads != 0 ? options.threads : describe_machine("").cores;
  plan.busy = options.busy;
  if (const std::string wrong = busy_refusal(plan.busy, available_memory()); !wrong.empty()) {
    throw UsageError(wrong);
  }
  plan.weights = options.weights;
  plan.blocking = options.blocking;
  plan.graph = options.graph;
  if (!options.device_cap.empty()) plan.device_cap = parse_bytes(options.device_cap);
  if (!options.host_cap.empty()) plan.host_cap = parse_bytes(options.host_cap);
  if (!options.pinned_cap.empty()) plan.pinned_cap = parse_bytes(options.pinned_cap);
  for (const std::string& name : options.compare) {
    plan.compare_full |= name == "full";
    plan.compare_resident |= name == "resident";
    plan.compare_pcie |= name == "pcie";
    const NamedWay* way = find_way(name);
    if (way != nullptr && way->format) plan.compare_formats.push_back(*way->format);
  }
  check_context(plan, options.context);
  share_plan(plan, options.parallel);
  return plan;
}

std::unique_ptr<HeadSource> make_source(const BenchStepOptions& options, const StepPlan& plan) {
  if (options.synthetic == !options.trace.empty()) {
    throw UsageError("give --trace FILE or --synthetic");
  }
  if (options.synthetic) return make_synthetic_source(plan.shape.head_dim, plan.seed);
  const Trace trace = Trace::open(options.trace);
  if (trace.info().head_dim != plan.shape.head_dim) {
    throw UsageError("--head-dim is " + std::to_string(plan.shape.head_dim) + ", but heads of " +
                     options.trace + " have " + std::to_string(trace.info().head_dim) +
                     " components");
  }
  return make_trace_source(trace, plan.context, plan.sink, plan.seed);
}

}  // namespace keyhole::tools
