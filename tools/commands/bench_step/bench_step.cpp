// keyhole bench-step: decoding steps of a whole model's attention, with the memory that it really takes.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/commands/bench_step/report.h"
#include "tools/commands/bench_step/run.h"
#include "tools/commands/commands.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

struct Options {
  StepShape shape;
  std::string context = "128k";
  std::string trace;
  bool synthetic = false;
  std::string turn = "permute";
  std::vector<std::string> indexes, attends, tails, targets;
  std::vector<uint32_t> min_keys;
  uint32_t k = 100;
  uint32_t sink = 128, window = 512;
  uint32_t steps = 32, warmup = 8, audit_steps = 8, training = 4096;
  std::string device = "auto", signal = "auto", partitions = "auto";
  uint32_t ordinal = 0, threads = 0;
  bool weights = false, blocking = false, graph = false;
  std::string device_cap, host_cap;
  std::vector<std::string> compare;
  uint64_t seed = 1;
  std::string json;
};

const std::map<std::string, keyhole_device> kDevices = {
    {"auto", KEYHOLE_DEVICE_AUTO}, {"host", KEYHOLE_DEVICE_HOST}, {"cuda", KEYHOLE_DEVICE_CUDA}};
const std::map<std::string, keyhole_signal> kSignals = {{"auto", KEYHOLE_SIGNAL_AUTO},
                                                        {"wait", KEYHOLE_SIGNAL_WAIT},
                                                        {"launch", KEYHOLE_SIGNAL_LAUNCH}};
const std::map<std::string, keyhole_placement> kPlacements = {
    {"auto", KEYHOLE_PLACE_AUTO}, {"host", KEYHOLE_PLACE_HOST}, {"device", KEYHOLE_PLACE_DEVICE}};
const std::map<std::string, TurnKind> kTurns = {
    {"none", TurnKind::none}, {"permute", TurnKind::permute}, {"rotate", TurnKind::rotate}};

template <class Value>
std::vector<std::string> names(const std::map<std::string, Value>& choices) {
  std::vector<std::string> out;
  out.reserve(choices.size());
  for (const auto& [name, value] : choices) out.push_back(name);
  return out;
}

std::string option_of(const std::map<std::string, TurnKind>& choices, TurnKind value) {
  for (const auto& [name, choice] : choices) {
    if (choice == value) return name;
  }
  return "?";
}

void check_shape(const Options& options) {
  const StepShape& s = options.shape;
  if (s.q_heads % s.kv_heads != 0 || s.group() > 16) {
    throw UsageError("--q-heads " + std::to_string(s.q_heads) + " with --kv-heads " +
                     std::to_string(s.kv_heads) +
                     ": allowed: a multiple, at most 16 query heads for each KV head");
  }
}

// Of RoPE there is nothing left to undo in turned keys, and a classifier knows the heads of its model.
void check_index(const std::string& spec) {
  if (spec.find("rope=undo") != std::string::npos || spec.rfind("saap", 0) == 0) {
    throw UsageError("--index " + spec +
                     ": bench-step's heads are turned copies of others, in which RoPE cannot be "
                     "undone and for which nothing was trained; allowed: all types but saap, "
                     "without rope=undo");
  }
}

std::vector<BudgetChoice> budgets_of(const Options& options) {
  std::vector<BudgetChoice> crossed =
      cross_budgets(parse_attends(options.attends, options.k), options.tails, options.targets);
  if (options.min_keys.empty()) return crossed;
  // The least number of keys says what a tail without a target reads.
  std::vector<BudgetChoice> out;
  for (const BudgetChoice& budget : crossed) {
    const bool takes = budget.tail.mode != KEYHOLE_TAIL_NONE && !budget.target.any();
    if (!takes) {
      out.push_back(budget);
      continue;
    }
    for (const uint32_t keys : options.min_keys) {
      out.push_back(budget);
      out.back().target.min_keys = keys;
    }
  }
  return out;
}

StepPlan make_plan(const Options& options) {
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
  for (const std::string& index : options.indexes) {
    for (const std::string& spec : expand_sweep(index)) {
      check_index(spec);
      if (std::find(plan.indexes.begin(), plan.indexes.end(), spec) != plan.indexes.end()) {
        throw UsageError("--index " + spec + " is given twice");
      }
      plan.indexes.push_back(spec);
    }
  }
  plan.budgets = budgets_of(options);
  plan.device = kDevices.at(options.device);
  plan.signal = kSignals.at(options.signal);
  plan.partitions = kPlacements.at(options.partitions);
  plan.device_ordinal = options.ordinal;
  plan.threads = options.threads != 0 ? options.threads : describe_machine("").cores;
  plan.weights = options.weights;
  plan.blocking = options.blocking;
  plan.graph = options.graph;
  if (!options.device_cap.empty()) plan.device_cap = parse_bytes(options.device_cap);
  if (!options.host_cap.empty()) plan.host_cap = parse_bytes(options.host_cap);
  for (const std::string& name : options.compare) {
    plan.compare_full |= name == "full";
    plan.compare_resident |= name == "resident";
    plan.compare_pcie |= name == "pcie";
  }
  constexpr uint64_t kMostTokens = uint64_t{1} << 31U;
  const uint64_t least = uint64_t{plan.sink} + plan.window + 1;
  if (plan.context < least || plan.context + plan.steps + plan.warmup > kMostTokens) {
    throw UsageError("--context " + options.context + ": allowed: from " + std::to_string(least) +
                     " (more than --sink and --window hold) to 2^31 tokens with the steps");
  }
  return plan;
}

std::unique_ptr<HeadSource> make_source(const Options& options, const StepPlan& plan) {
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

ordered_json describe(const Options& options, const StepPlan& plan, const HeadSource& source,
                      const StepBench& bench) {
  const auto limit = [](uint64_t bytes) {
    return bytes == 0 ? ordered_json(nullptr) : ordered_json(bytes);
  };
  return {{"layers", plan.shape.layers},
          {"q_heads", plan.shape.q_heads},
          {"kv_heads", plan.shape.kv_heads},
          {"head_dim", plan.shape.head_dim},
          {"kv_dtype", "f16"},
          {"context", plan.context},
          {"sink", plan.sink},
          {"window", plan.window},
          {"steps", plan.steps},
          {"warmup", plan.warmup},
          {"audit_steps", plan.audit_steps},
          {"training_queries", plan.training_queries},
          {"data", options.synthetic ? "synthetic" : options.trace},
          {"data_description", source.description()},
          {"data_heads", source.heads()},
          {"copied_tokens", source.copied_tokens()},
          {"turn", option_of(kTurns, plan.turn)},
          {"seed", plan.seed},
          {"threads", plan.threads},
          {"device", bench.stream_steps() ? "cuda" : options.device},
          {"steps_in", bench.stream_steps() ? (plan.graph ? "graph" : "stream") : "host"},
          {"weights", plan.weights},
          {"device_cap", limit(plan.device_cap)},
          {"host_cap", limit(plan.host_cap)}};
}

std::string heading(const StepPlan& plan, const HeadSource& source, const StepBench& bench) {
  const StepShape& s = plan.shape;
  std::string text = std::to_string(s.layers) + " layers, " + std::to_string(s.q_heads) +
                     " query and " + std::to_string(s.kv_heads) + " KV heads of " +
                     std::to_string(s.head_dim) + ", f16; " + format_count(plan.context) +
                     " tokens hold " +
                     format_bytes(uint64_t{4} * s.layers * plan.context * s.kv_elements()) +
                     " of K and V; sink " + std::to_string(plan.sink) + ", window " +
                     std::to_string(plan.window) + "\n" + source.description() + ", turned by " +
                     (plan.turn == TurnKind::none      ? "nothing"
                      : plan.turn == TurnKind::permute ? "signed permutations"
                                                       : "rotations") +
                     "\n";
  text += std::to_string(plan.steps) + " steps after " + std::to_string(plan.warmup) + ", " +
          (bench.stream_steps() ? (plan.graph ? "as a graph on a CUDA stream" : "on a CUDA stream")
                                : "calls that wait, tensors in host memory") +
          "; " + std::to_string(plan.threads) + " threads\n";
  return text;
}

void run(const Options& options) {
  if (!options.json.empty()) check_writable(options.json);
  const StepPlan wanted = make_plan(options);
  const std::unique_ptr<HeadSource> source = make_source(options, wanted);
  const bool to_people = options.json != "-";
  const auto print = [to_people](const std::string& text) {
    if (!to_people) return;
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  };

  std::vector<Phase> phases;
  std::vector<StepResult> results;
  std::vector<std::string> warnings;
  std::function<void()> save = [] {};
  StepListener listener;
  listener.phase = [&](const Phase& phase) {
    phases.push_back(phase);
    print(phase.name + ": " + format_duration(phase.seconds) + "\n");
  };
  listener.result = [&](const StepResult& result) {
    results.push_back(result);
    print("\n" + to_text(result));
    if (to_people) save();  // what is known stays known where a run is cut short
  };
  listener.log = [&](const std::string& text) {
    if (std::find(warnings.begin(), warnings.end(), text) == warnings.end()) {
      warnings.push_back(text);
    }
  };

  StepBench bench(*source, wanted, listener);
  const StepPlan& plan = bench.plan();
  const Machine machine = describe_machine(bench.cpu_level());
  if (!options.json.empty()) {
    save = [&] {
      ordered_json rows = ordered_json::array();
      for (const StepResult& result : results) rows.push_back(to_json(result));
      ordered_json times = ordered_json::object();
      for (const Phase& phase : phases) times[phase.name] = phase.seconds;
      write_json(options.json, {{"machine", to_json(machine)},
                                {"options", describe(options, plan, *source, bench)},
                                {"phases_s", times},
                                {"floors", to_json(bench.floors())},
                                {"results", rows},
                                {"warnings", warnings}});
    };
  }
  print(to_text(machine) + "\n" + heading(plan, *source, bench));
  bench.run();

  print("\n" + to_table(results, style_of(stdout)) + "\n" + to_text(bench.floors()));
  for (const std::string& warning : warnings) print("warning: " + warning + "\n");
  save();
  const auto is_missing = [](const StepResult& r) { return !r.comparison && !r.timing; };
  const auto missing = std::find_if(results.begin(), results.end(), is_missing);
  if (missing != results.end()) {
    const auto count = std::count_if(results.begin(), results.end(), is_missing);
    throw std::runtime_error(std::to_string(count) + " of " + std::to_string(results.size()) +
                             " could not be measured, the first (" + missing->name + ") because " +
                             missing->note);
  }
}

constexpr const char* kDefinitions = R"(What is measured:
  layer           one attend of one layer: with stream steps by events on the stream right before and after it,
                  else the call
  token           all attends of a token, with --weights and the products of the model between them, by the
                  host's clock
  search, ...     keyhole's own statistics of the measured steps, means of one attend. Worker time is summed
                  over threads
  error, recall, mass  after the timing, in a session of its own that holds the first layers (as many as it takes
                  to see all heads of the trace). Of audits: steps that the library computes again exactly.
                  Medians and quantiles are over (step, layer, query head); recall is that of the true k best
                  offloaded keys among those that were attended. Stream steps are not audited: recall and mass are
                  then those of the same steps with tensors in host memory (where partitions are scored on the
                  host), and error compares what stream steps wrote with exact attention

Every (layer, KV head) has keys, values and queries of its own in memory. They are those of a recorded head, in
turn, with components permuted and their signs changed at random (--turn permute), which keeps all inner products
and what each component is like; or rotated at random (--turn rotate), which keeps all inner products but makes
components alike: 8-bit codes get better by it, sparq and variances by component worse. A context longer than the
trace is filled up with noisy copies of its tokens, and the output says of how many.)";

}  // namespace

void add_bench_step(CLI::App& keyhole) {
  auto options = std::make_shared<Options>();
  CLI::App* command = keyhole.add_subcommand(
      "bench-step",
      "Time decoding steps of a whole model's attention with the memory that it really takes");
  const auto number = [&](const char* name, auto& value, const char* help, uint32_t least,
                          uint32_t most) {
    command->add_option(name, value, help)
        ->type_name("N")
        ->check(CLI::Range(least, most).description(""))
        ->capture_default_str();
  };
  const auto choice = [&](const char* name, std::string& value, const char* help,
                          const std::vector<std::string>& allowed) {
    command->add_option(name, value, help)
        ->type_name("WHAT")
        ->check(CLI::IsMember(allowed))
        ->capture_default_str();
  };
  number("--layers", options->shape.layers, "Layers", 1, 1024);
  number("--q-heads", options->shape.q_heads, "Query heads", 1, 4096);
  number("--kv-heads", options->shape.kv_heads, "KV heads", 1, 4096);
  command
      ->add_option("--head-dim", options->shape.head_dim,
                   "Components of a head: 64, 80, 96, 128 or 256")
      ->type_name("N")
      ->check(CLI::IsMember({64, 80, 96, 128, 256}).description(""))
      ->capture_default_str();
  command->add_option("--context", options->context, "Tokens before the steps, e.g. 131072 or 1M")
      ->type_name("TOKENS")
      ->capture_default_str();
  command
      ->add_option("--trace", options->trace,
                   "A trace written by record, whose heads the model is made of")
      ->type_name("FILE");
  command->add_flag("--synthetic", options->synthetic,
                    "Synthetic heads in place of a trace: times, but no figures of quality");
  choice("--turn", options->turn, "How heads that come from the same one differ", names(kTurns));
  command
      ->add_option("--index", options->indexes,
                   "An index type with parameters; may be repeated. name=a|b|c sweeps a parameter")
      ->required()
      ->allow_extra_args(false)
      ->type_name("SPEC");
  command->add_option("--attend", options->attends, std::string(kAttendHelp) + "; may be repeated")
      ->allow_extra_args(false)
      ->type_name("WAY");
  command->add_option("--tail", options->tails, std::string(kTailHelp) + "; may be repeated")
      ->allow_extra_args(false)
      ->type_name("TAIL");
  command->add_option("--target", options->targets, std::string(kTargetHelp) + "; may be repeated")
      ->allow_extra_args(false)
      ->type_name("TARGET");
  command
      ->add_option("--min-keys", options->min_keys,
                   "Keys that a step with a tail and no target reads at least, e.g. 512,1024")
      ->delimiter(',')
      ->type_name("N,...")
      ->check(CLI::Range(1U, std::numeric_limits<uint32_t>::max() / 2).description(""));
  number("--k", options->k, "Keys that a search is asked for per query head", 1, 1U << 20U);
  number("--sink", options->sink, "Resident tokens at the beginning", 0, 1U << 20U);
  number("--window", options->window, "Resident newest tokens", 1, 1U << 20U);
  number("--training", options->training, "Prefill queries kept for each KV head", 0, 1U << 20U);
  number("--steps", options->steps, "Tokens that are timed", 1, 1U << 16U);
  number("--warmup", options->warmup, "Tokens before them", 1, 1U << 16U);
  number("--audit-steps", options->audit_steps,
         "Tokens whose attention is computed again exactly, at most --warmup and --steps together; "
         "0: none",
         0, 1U << 16U);
  choice("--device", options->device, "Where resident tokens are attended", names(kDevices));
  number("--device-ordinal", options->ordinal, "Which CUDA device", 0, 1024);
  choice("--signal", options->signal, "How the stream learns that the host is done",
         names(kSignals));
  choice("--partitions", options->partitions, "Where partitions of tails are scored",
         names(kPlacements));
  command->add_flag("--blocking", options->blocking,
                    "Tensors in host memory and calls that wait, also on a CUDA device");
  command->add_flag("--graph", options->graph, "Replay a token as a CUDA graph");
  command->add_flag("--weights", options->weights,
                    "The model's matrix products between the attends (CUDA): fp16, random, in the "
                    "proportions of Llama-3-8B");
  number("--threads", options->threads, "Worker threads; 0: one per core", 0, 1024);
  command
      ->add_option("--device-cap", options->device_cap,
                   "Device memory for weights and session together, e.g. 24GiB")
      ->type_name("BYTES");
  command->add_option("--host-cap", options->host_cap, "Host memory of the session, e.g. 64GiB")
      ->type_name("BYTES");
  command
      ->add_option(
          "--compare", options->compare,
          "Beside them: full (attention to everything on the same device, no cap), pcie (K "
          "and V copied from pinned memory), resident (sink and window alone)")
      ->delimiter(',')
      ->check(CLI::IsMember({"full", "pcie", "resident"}).description(""))
      ->type_name("WHAT,...");
  command->add_option("--seed", options->seed, "Of turns, noise and synthetic heads")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--json", options->json, "Write the results here (- for standard output)")
      ->type_name("FILE");
  command->footer(
      examples(
          {"keyhole bench-step --trace t.safetensors --index ivf:probe=32 --layers 8 --context 32k",
           "keyhole bench-step --trace t.safetensors --index flat --attend none --tail second "
           "--min-keys 512,1024,2048",
           "keyhole bench-step --trace t.safetensors --index 'roargraph:ef=64' --weights "
           "--device-cap 24GiB --compare full,pcie,resident --json step.json",
           "keyhole bench-step --synthetic --index ivf --device host --layers 2 --context 16k"}) +
      "\n\n" + kDefinitions + "\n\n" + keyhole_index_help());
  command->callback([options] { run(*options); });
}

}  // namespace keyhole::tools
