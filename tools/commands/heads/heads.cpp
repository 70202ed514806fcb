// keyhole heads: where the attention of a model's heads lies, from a trace or from the model itself.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>

#include "runtime/files/json.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/number_check.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/recording.h"
#include "tools/commands/heads/profile.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/command_line.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

struct HeadsOptions {
  RecordOptions record;  ///< where there is no trace
  std::string trace;
  double mass = kUsualCoverage;
  uint32_t sink = 128, window = 512;
  size_t queries = 64;
  std::string json, csv, html;
};

void check_options(const HeadsOptions& options) {
  if (!(options.mass > 0 && options.mass < 1)) {
    throw UsageError("--mass is " + format_number(options.mass) + "; allowed: above 0 and below 1");
  }
  if (!options.trace.empty() && !options.record.task.task.empty()) {
    throw UsageError("--task is what is recorded where no --trace is given");
  }
  if (options.json == "-" && options.csv == "-") {
    throw UsageError("--json and --csv cannot both go to standard output");
  }
  if (options.html == "-") throw UsageError("--html needs a file");
  for (const std::string& path : {options.json, options.csv, options.html}) {
    if (!path.empty()) check_writable(path);
  }
}

std::vector<HeadProfile> profiles_of(const Trace& trace, const HeadsOptions& options,
                                     const TruthOptions& truth) {
  const unsigned threads =
      options.record.threads != 0 ? options.record.threads : describe_machine("").cores;
  Team team(threads);
  Progress bar("heads");
  std::vector<HeadProfile> out;
  for (const TraceHead& head : trace.heads()) {
    throw_if_interrupted();
    out.push_back(profile_of(compute_truth(trace, head, truth, team), head.layer, head.kv_head));
    bar.update(static_cast<double>(out.size()) / static_cast<double>(trace.heads().size()));
  }
  return out;
}

void run(const HeadsOptions& options) {
  check_options(options);
  std::optional<TemporaryTraces> recorded;
  if (options.trace.empty()) {
    RecordOptions record = options.record;
    if (record.task.task.empty()) record.task.task = "kv";
    recorded.emplace().add(record, record.task.task);
  }
  const Trace trace = Trace::open(recorded ? recorded->paths().front() : options.trace);
  TruthOptions truth;
  truth.offloaded = offloaded_tokens(trace, options.sink, options.window);
  truth.k = 1;
  truth.outputs = false;
  truth.coverage = options.mass;
  const size_t total = trace.query_positions().size();
  const size_t count = std::min(total, options.queries);
  for (size_t i = 1; i <= count; ++i) truth.queries.push_back(i * total / count - 1);
  const std::vector<HeadProfile> profiles = profiles_of(trace, options, truth);

  const TraceInfo& info = trace.info();
  const Machine machine = describe_machine("");
  ordered_json rows = ordered_json::array();
  for (const HeadProfile& profile : profiles) rows.push_back(to_json(profile));
  const ordered_json document = {{"format", "keyhole-heads"},
                                 {"version", 1},
                                 {"command", command_line()},
                                 {"machine", to_json(machine)},
                                 {"trace",
                                  {{"path", options.trace},
                                   {"model", info.model},
                                   {"task", info.task},
                                   {"tokens", info.tokens},
                                   {"q_heads", info.q_heads},
                                   {"kv_heads", info.kv_heads},
                                   {"head_dim", info.head_dim}}},
                                 {"options",
                                  {{"mass", options.mass},
                                   {"sink", options.sink},
                                   {"window", options.window},
                                   {"offloaded", truth.offloaded.count()},
                                   {"queries", truth.queries.size()}}},
                                 {"heads", rows}};
  if (options.json != "-" && options.csv != "-") {
    std::printf(
        "%s\n%s, %s: %s tokens, %s of them in the middle (sink %u, window %u); %zu queries\n\n%s",
        to_text(machine).c_str(), info.model.c_str(), info.task.c_str(),
        format_count(info.tokens).c_str(), format_count(truth.offloaded.count()).c_str(),
        options.sink, options.window, truth.queries.size(),
        profile_table(profiles, options.mass, style_of(stdout)).c_str());
  }
  if (!options.csv.empty()) write_text(options.csv, to_csv(profiles));
  if (!options.html.empty()) write_text(options.html, heads_page(document));
  if (!options.json.empty()) write_json(options.json, document);
}

constexpr const char* kDefinitions =
    R"(Of each (layer, KV head), means over the queries of its query heads:
  sink, window, middle  shares of the softmax weight: of the first tokens, of the newest, and of those between,
                        which a session would offload
  largest               weight of the heaviest token
  tokens for 90 %       the fewest tokens that hold this share (--mass) of the weight, mean and 95th percentile
  of the middle's       the same among the tokens of the middle, for their weight alone
  sparsity              share of all tokens up to the query that is not among the tokens for 90 %)";

}  // namespace

void add_heads(CLI::App& keyhole) {
  auto options = std::make_shared<HeadsOptions>();
  CLI::App* command = keyhole.add_subcommand(
      "heads", "Show where the attention of a model's heads lies, and how sparse it is");
  command
      ->add_option("--trace", options->trace,
                   "A trace written by record; without one the model runs over a task")
      ->type_name("FILE");
  add_model_options(*command, options->record.model);
  add_device_option(*command, options->record.model.device);
  add_task_options(*command, options->record.task);
  command->add_option("--mass", options->mass, "Share of the weight that tokens are counted for")
      ->type_name("X")
      ->check(no_nan("above 0 and below 1"))
      ->capture_default_str();
  command->add_option("--sink", options->sink, "First tokens")->capture_default_str();
  command->add_option("--window", options->window, "Newest tokens")->capture_default_str();
  command->add_option("--queries", options->queries, "At most this many queries, evenly spread")
      ->check(CLI::Range(size_t{1}, std::numeric_limits<size_t>::max()).description(""))
      ->capture_default_str();
  command->add_option("--threads", options->record.threads, "Threads; 0: one per core")
      ->check(CLI::Range(0U, 1024U).description(""))
      ->capture_default_str();
  command->add_option("--json", options->json, "Write the result here (- for standard output)")
      ->type_name("FILE");
  command->add_option("--csv", options->csv, "Write a row for each head here (- likewise)")
      ->type_name("FILE");
  add_html_option(*command, "maps of the heads", options->html);
  command->footer(examples({"keyhole heads --trace kv32k.safetensors --html heads.html",
                            "keyhole heads --model DIR --task kv --length 32k",
                            "keyhole heads --length 8k --mass 0.95 --csv heads.csv"}) +
                  "\n\n" + kDefinitions);
  command->callback([options] { run(*options); });
}

}  // namespace keyhole::tools
