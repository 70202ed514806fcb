// keyhole bench-step: decoding steps of a whole model's attention, with the memory that it really takes.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "runtime/files/settings.h"
#include "tools/commands/bench_step/options.h"
#include "tools/commands/bench_step/page.h"
#include "tools/commands/bench_step/report.h"
#include "tools/commands/bench_step/run.h"
#include "tools/commands/commands.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/command_line.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

ordered_json describe(const BenchStepOptions& options, const StepPlan& plan,
                      const HeadSource& source, const StepBench& bench) {
  const auto limit = [](uint64_t bytes) {
    return bytes == 0 ? ordered_json(nullptr) : ordered_json(bytes);
  };
  return {{"layers", plan.shape.layers},
          {"q_heads", plan.shape.q_heads},
          {"kv_heads", plan.shape.kv_heads},
          {"head_dim", plan.shape.head_dim},
          {"kv_dtype", "f16"},
          {"kv_host", word_of_number(setting(kSessionSettings, "kv_host"), plan.kv_host)},
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
          {"turn", options.turn},
          {"seed", plan.seed},
          {"threads", plan.threads},
          {"busy", plan.busy},
          {"device", bench.stream_steps() ? "cuda" : options.device},
          {"steps_in", bench.stream_steps() ? (plan.graph ? "graph" : "stream") : "host"},
          {"weights", plan.weights},
          {"parallel", plan.ranks.any() ? ordered_json(plan.ranks.way()) : ordered_json(nullptr)},
          {"ranks", plan.ranks.size()},
          {"context_block", bench.context_block()},
          {"device_cap", limit(plan.device_cap)},
          {"host_cap", limit(plan.host_cap)},
          {"pinned_cap", limit(plan.pinned_cap)}};
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
          "; " + std::to_string(plan.threads) + " threads" + (plan.ranks.any() ? " a rank" : "") +
          (plan.busy == 0 ? "" : " beside " + std::to_string(plan.busy) + " busy with copies") +
          "\n";
  if (plan.ranks.any()) {
    text += plan.ranks.description(plan.shape, bench.context_block()) + "\n";
  }
  return text;
}

void run(BenchStepOptions options) {
  if (options.html == "-") throw UsageError("--html needs a file");
  if (options.svg == "-") throw UsageError("--svg needs a file");
  if (!options.svg.empty() && options.audit_steps == 0) {
    throw UsageError("--svg draws errors, which --audit-steps 0 does not measure; allowed: 1 to " +
                     std::to_string(options.warmup + options.steps));
  }
  const StepPlan wanted = make_step_plan(options);
  if (!wanted.ranks.speaks()) options.json = options.svg = options.html = "";
  for (const std::string& path : {options.json, options.svg, options.html}) {
    if (!path.empty()) check_writable(path);
  }
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
  if (!options.json.empty() || !options.svg.empty() || !options.html.empty()) {
    save = [&] {
      ordered_json rows = ordered_json::array();
      for (const StepResult& result : results) rows.push_back(to_json(result));
      ordered_json times = ordered_json::object();
      for (const Phase& phase : phases) times[phase.name] = phase.seconds;
      const ordered_json document = {{"command", command_line()},
                                     {"machine", to_json(machine)},
                                     {"options", describe(options, plan, *source, bench)},
                                     {"phases_s", times},
                                     {"floors", to_json(bench.floors())},
                                     {"results", rows},
                                     {"warnings", warnings}};
      if (!options.html.empty()) write_text(options.html, bench_step_page(document));
      const std::string svg = options.svg.empty() ? "" : bench_step_svg(document);
      if (!svg.empty()) write_text(options.svg, svg);
      if (!options.json.empty()) write_json(options.json, document);
    };
  }
  print(to_text(machine) + "\n" + heading(plan, *source, bench));
  bench.run();

  print("\n" + to_table(results, style_of(stdout)) + "\n" + to_text(bench.floors()));
  for (const std::string& warning : warnings) print("warning: " + warning + "\n");
  save();
  const auto is_missing = [](const StepResult& r) { return !r.comparison && !r.timing; };
  const auto missing = std::find_if(results.begin(), results.end(), is_missing);
  if (missing != results.end() && plan.ranks.speaks()) {
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
                  host's clock. With --graph, tokens whose layers are clocked and others take turns, and this is of the
                  others: events in a graph keep kernels apart, which costs some 6 us a layer
  --parallel      of several processes (mpirun): the time of each attend and of each token is that of the slowest rank, the
                  merge of states (context) or the gather of outputs (tensor) included. Memory, bytes read and worker
                  time are sums over the ranks; --threads, --busy and the caps are each rank's. The error is that of what
                  the steps wrote in fp16, all heads, beside exact attention of all ranks. --compare full and resident are
                  shared alike. With context, --k and budgets are each rank's, and recall and mass are not measured
  --busy          the timed steps, those of --compare full and resident too, run while so many threads copy 64 MiB each
                  over and over, beyond what cores cache; builds, audits and bandwidths are measured without them
  q8_0, q4_0      of --compare: bytes of K and V in that format (34 or 18 for 32 numbers) over the card's measured copy
                  bandwidth. No kernel reads so fast, and none was timed
  search, ...     keyhole's own statistics of the measured steps, means of one attend. Worker time is summed
                  over threads
  error, recall, mass  after the timing, in a session of its own that holds the first layers (as many as it takes
                  to see all heads of the trace). Of audits: steps that the library computes again exactly.
                  Medians and quantiles are over (step, layer, query head); recall is that of the true k best
                  offloaded keys among those that were attended, 0 where codes on the device stand for keys. Of
                  stream steps the error is that of what they wrote in fp16, beside exact attention

Every (layer, KV head) has keys, values and queries of its own in memory. They are those of a recorded head, in
turn, with components permuted and their signs changed at random (--turn permute), which keeps all inner products
and what each component is like; or rotated at random (--turn rotate), which keeps all inner products but makes
components alike: 8-bit codes get better by it, sparq and variances by component worse. A context longer than the
trace is filled up with noisy copies of its tokens, and the output says of how many.)";

}  // namespace

void add_bench_step(CLI::App& keyhole) {
  auto options = std::make_shared<BenchStepOptions>();
  CLI::App* command = keyhole.add_subcommand(
      "bench-step",
      "Time decoding steps of a whole model's attention with the memory that it really takes");
  add_bench_step_options(*command, *options);
  command->footer(
      examples(
          {"keyhole bench-step --trace t.safetensors --index ivf:probe=32 --layers 8 --context 32k",
           "keyhole bench-step --trace t.safetensors --index flat --attend none --tail second "
           "--min-keys 512,1024,2048",
           "keyhole bench-step --trace t.safetensors --index 'roargraph:ef=64' --weights "
           "--device-cap 24GiB --compare full,pcie,resident --json step.json",
           "keyhole bench-step --runs steps.json --trace t.safetensors --html steps.html",
           "keyhole bench-step --synthetic --index ivf --device host --layers 2 --context 16k",
           "mpirun -n 2 --bind-to none keyhole bench-step --parallel tensor --synthetic --index "
           "ivf "
           "--device host --layers 2 --context 16k --compare full"}) +
      "\n\n" + kDefinitions + "\n\n" + keyhole_index_help());
  command->callback([options, command] { run(resolve_runs(*command, *options)); });
}

}  // namespace keyhole::tools
