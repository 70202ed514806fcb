// keyhole calibrate: index and budget of every head for a stated output error, measured on this machine.
#include <keyhole/prefill.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>

#include "runtime/files/json.h"
#include "tools/commands/calibrate/page.h"
#include "tools/commands/calibrate/patterns.h"
#include "tools/commands/calibrate/prefill.h"
#include "tools/commands/calibrate/report.h"
#include "tools/commands/calibrate/run.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/bundled_model.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/commands/common/recording.h"
#include "tools/commands/common/sweep.h"
#include "tools/llama/config.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

struct Options {
  ModelOptions model;
  TaskOptions task;
  std::vector<std::string> traces, checks;
  double error = 0.05;
  std::string require = "p95x1.5";
  std::string cost = "us";
  bool no_dense = false;
  std::vector<std::string> indexes;
  BudgetLists budgets;
  uint32_t k = 100;
  size_t queries = 128;
  uint32_t sink = 128, window = 512;
  uint32_t threads = 0;
  std::string kv_dtype = "f16";
  std::string classifiers;
  std::vector<uint32_t> layers;
  std::string out, json, html;
  bool prefill = false;
  std::vector<std::string> patterns;
};

/// Few enough for minutes, far enough apart that most heads find something cheap.
const std::vector<std::string> kDefaultIndexes = {"ivf:probe=8|16|32|64|128",
                                                  "codes:k=4,v=4,lists=64,read=12|25|50"};
const std::vector<std::string> kDefaultAttends = {"topk:32", "topk:128", "weight:0.001", "scored",
                                                  "none"};
const std::vector<std::string> kDefaultTails = {"none", "second"};
const std::vector<std::string> kDefaultTargets = {"none", "search"};

std::vector<CalibrationPlan::Candidate> make_candidates(const Options& options) {
  const auto or_default = [](const std::vector<std::string>& given,
                             const std::vector<std::string>& defaults) {
    return given.empty() ? defaults : given;
  };
  std::vector<std::string> targets = or_default(options.budgets.targets, kDefaultTargets);
  const size_t given = targets.size();
  std::erase(targets, "search");
  const bool searches = targets.size() != given;
  if (given > targets.size() + 1) throw UsageError("--target search is given twice");
  const auto attends =
      parse_attends(or_default(options.budgets.attends, kDefaultAttends), options.k);
  const auto tails = or_default(options.budgets.tails, kDefaultTails);
  // Where only searches for a target are wanted, there is no fixed one.
  std::vector<BudgetChoice> fixed;
  if (!targets.empty()) fixed = cross_budgets(attends, tails, targets);
  // Ways to attend and tails; any target keeps those that need one.
  std::vector<BudgetChoice> bases = cross_budgets(attends, tails, {"error=0.5"});
  if (searches) {
    (void)common_partition(bases);
  } else {
    (void)common_partition(fixed);
  }
  std::vector<CalibrationPlan::Candidate> out;
  for (const std::string& index : or_default(options.indexes, kDefaultIndexes)) {
    for (const std::string& spec : expand_sweep(index)) {
      // Codes have one way, which takes no target.
      if (has_codes(spec)) {
        out.push_back({spec, for_index({parse_attend("topk", 0), {}, {}}, spec), false});
        continue;
      }
      for (BudgetChoice& base : bases) {
        // Without a search all indexes give the same, so one is tried.
        if (base.attend.mode == KEYHOLE_ATTEND_NONE && !out.empty() && out.front().index != spec) {
          continue;
        }
        for (const BudgetChoice& choice : fixed) {
          if (choice.attend == base.attend && choice.tail == base.tail) {
            out.push_back({spec, choice, false});
          }
        }
        if (!searches) continue;
        base.target = {};
        out.push_back({spec, base, true});
      }
    }
  }
  return out;
}

Requirement requirement_of(const Options& options) {
  if (!(options.error > 0 && options.error < 1)) {
    throw UsageError("--error is " + std::to_string(options.error) +
                     "; allowed: above 0 and below 1");
  }
  return parse_requirement(options.require, options.error);
}

CalibrationPlan make_plan(const Options& options) {
  CalibrationPlan plan;
  if (options.cost == "blocks") throw UsageError("--cost blocks is of --prefill");
  if (!options.patterns.empty()) throw UsageError("--pattern is of --prefill");
  plan.requirement = requirement_of(options);
  plan.cost = options.cost == "us" ? CalibrationPlan::Cost::us : CalibrationPlan::Cost::bytes;
  plan.may_be_dense = !options.no_dense;
  plan.candidates = make_candidates(options);
  plan.kv_dtype = dtype_of(options.kv_dtype);
  plan.sink = options.sink;
  plan.window = options.window;
  plan.threads = options.threads != 0 ? options.threads : describe_machine("").cores;
  plan.queries = options.queries;
  plan.classifiers = options.classifiers;
  plan.layers = options.layers;
  return plan;
}

/// The first bytes of the bundled prose or of --haystack, as a file in the folder.
std::string write_prose(const Options& options, const fs::path& folder) {
  const fs::path haystack = options.task.haystack.empty() ? bundled_model_folder() / "haystack.txt"
                                                          : fs::path(options.task.haystack);
  const std::string path = (folder / "prose.txt").string();
  std::ofstream file(path, std::ios::binary);
  file << read_text_file(haystack).substr(0, length_of(options.task) - 1);
  file.close();
  if (!file) throw std::runtime_error(path + ": cannot be written");
  return path;
}

/// The task, or one of kv and prose.
void record_prompts(const Options& options, TemporaryTraces& traces) {
  RecordOptions record;
  record.model = options.model;
  record.task = options.task;
  record.layers = options.layers;
  record.queries = static_cast<uint32_t>(
      std::min<size_t>(options.queries, std::numeric_limits<uint32_t>::max()));
  record.threads = options.threads;
  if (!options.task.task.empty()) {
    traces.add(record, options.task.task);
    return;
  }
  record.task.task = "kv";
  traces.add(record, "kv");
  record.task.task = "";
  record.prompt_file = write_prose(options, traces.folder());
  traces.add(record, "text");
}

std::vector<Trace> open_all(const std::vector<std::string>& paths) {
  std::vector<Trace> out;
  for (const std::string& path : paths) out.push_back(Trace::open(path));
  return out;
}

ModelDims dims_of(const Options& options, const TraceInfo& info, bool recorded) {
  ModelDims dims{1 + *std::max_element(info.layers.begin(), info.layers.end()), info.q_heads,
                 info.kv_heads, info.head_dim};
  if (!recorded && options.model.folder.empty()) return dims;
  const fs::path folder =
      options.model.folder.empty() ? bundled_model_folder() : fs::path(options.model.folder);
  const LlamaConfig config = load_llama_config(folder / "config.json");
  if (config.q_heads != dims.q_heads || config.kv_heads != dims.kv_heads ||
      config.head_dim != dims.head_dim || config.full_layers() < dims.layers) {
    throw UsageError("the traces are not of the model in " + folder.string());
  }
  dims.layers = config.full_layers();
  return dims;
}

void check_outputs(const Options& options) {
  if (options.html == "-") throw UsageError("--html needs a file");
  if (options.out == "-" && options.json == "-") {
    throw UsageError("--out and --json cannot both go to standard output");
  }
  for (const std::string& path : {options.out, options.json, options.html}) {
    if (!path.empty()) check_writable(path);
  }
}

void write_results(const Options& options, const nlohmann::ordered_json& document) {
  if (!options.html.empty()) write_text(options.html, calibration_page(document));
  if (!options.json.empty()) write_json(options.json, document);
}

/// `command`: options that are about decoding only must not have been given.
void calibrate_patterns(const Options& options, const CLI::App& command) {
  for (const char* name :
       {"--trace", "--check", "--index", "--attend", "--tail", "--target", "--k", "--queries",
        "--sink", "--window", "--no-dense", "--kv-dtype", "--classifiers"}) {
    if (command.count(name) > 0) {
      throw UsageError(std::string(name) + " is of decoding, and --prefill of prompts");
    }
  }
  if (options.cost == "bytes") throw UsageError("--cost bytes: allowed with --prefill: blocks, us");
  PrefillPlan plan;
  plan.model = options.model;
  plan.task = options.task;
  plan.requirement = requirement_of(options);
  plan.cost =
      options.cost == "us" && command.count("--cost") > 0 ? PatternCost::us : PatternCost::blocks;
  plan.patterns = expand_patterns(options.patterns.empty()
                                      ? default_patterns(pattern_types(keyhole_prompt_help()))
                                      : options.patterns);
  plan.layers = options.layers;
  plan.threads = options.threads;
  check_outputs(options);
  const std::vector<PatternChoice> choices = calibrate_prefill(plan);
  const std::string machine = to_text(describe_machine(""));
  write_text(options.out, budgets_text(to_budgets(choices, plan, machine)));
  write_results(options, calibration_document(choices, plan, describe_machine("")));
  if (options.out == "-" || options.json == "-") return;
  std::printf("%s\n%s\n\n%s\n%s", machine.c_str(), plan.requirement.text().c_str(),
              pattern_table(choices, style_of(stdout)).c_str(),
              pattern_summary(choices, plan).c_str());
}

void calibrate(const Options& options) {
  const CalibrationPlan plan = make_plan(options);
  if (!options.traces.empty() && !options.task.task.empty()) {
    throw UsageError("--task is what is recorded where no --trace is given");
  }
  check_outputs(options);
  std::optional<TemporaryTraces> recordings;
  if (options.traces.empty()) record_prompts(options, recordings.emplace());
  const std::vector<Trace> traces = open_all(recordings ? recordings->paths() : options.traces);
  const std::vector<Trace> checks = open_all(options.checks);
  const ModelDims dims = dims_of(options, traces.front().info(), recordings.has_value());
  Calibration calibration(traces, checks, plan);
  const std::vector<HeadChoice> choices = calibration.run();
  const Machine machine = describe_machine(calibration.simd_level());
  write_text(options.out, budgets_text(to_budgets(choices, plan, dims, to_text(machine))));
  write_results(options, calibration_document(choices, plan, machine));
  if (options.out == "-" || options.json == "-") return;
  std::printf("%s\n%s, by %s\n\n%s\n%s", to_text(machine).c_str(), plan.requirement.text().c_str(),
              options.cost.c_str(), choice_table(choices, style_of(stdout)).c_str(),
              choice_summary(choices, plan).c_str());
}

constexpr const char* kExplanation =
    R"(Of each (layer, KV head), every index is tried with every way to attend, tail and target, and the
cheapest that meets the error on every trace is written to --out; `--budgets` of decode, eval and plan, and the
library's keyhole_session_config.budgets, take that file.
  --target search   looks for the error target that gives the stated error: a target is kept by the step's own
                    estimate, which errs by head. So the file's error_target may differ from --error
  --require         pNN, or median, of the errors of single query heads shall be at most the error times F
  exact             heads for which exact attention over all offloaded tokens is the cheapest, or all that
                    meets the error (--no-dense: then what comes nearest is taken, with a warning)
  held              the requirement was met by queries that had no part in the choice too: every second one, or
                    those of --check; median and p95 are theirs
With --prefill the model runs over prompts where --device says, and of each (layer, query head) every pattern is tried
there beside dense attention to the same q, k and v (in fp16 on a GPU): the one that attends the fewest blocks and
meets the error on every prompt is written, with its share of the blocks (what attends more than 90 % is taken for
dense). Every second tile of 128 queries chooses, the others check.
  mass              recovered attention: the share of the softmax's weight that was attended
Without --trace, the model runs over a task's context, or (without --task) over one of kv and over prose.)";

}  // namespace

void add_calibrate(CLI::App& keyhole) {
  auto options = std::make_shared<Options>();
  CLI::App* command = keyhole.add_subcommand(
      "calibrate",
      "Choose index and budget of every head for a stated output error, on this machine");
  add_model_options(*command, options->model);
  add_device_option(*command, options->model.device);
  add_task_options(*command, options->task);
  command
      ->add_option("--trace", options->traces,
                   "A trace written by record; repeatable: the error shall hold on each")
      ->allow_extra_args(false)
      ->type_name("FILE");
  command
      ->add_option("--check", options->checks,
                   "A trace that has no part in the choice, to check it with; repeatable")
      ->allow_extra_args(false)
      ->type_name("FILE");
  command->add_option("--error", options->error, "Output error |o - o*| / |o*| that is wanted")
      ->type_name("X")
      ->capture_default_str();
  command
      ->add_option(
          "--require", options->require,
          "Which quantile of the errors must meet --error: median or pNN, with xF for F times the "
          "error")
      ->type_name("WHAT")
      ->capture_default_str();
  command
      ->add_option(
          "--cost", options->cost,
          "What is minimised: us (time), bytes (read), or of --prefill blocks (its default) "
          "or us")
      ->check(CLI::IsMember({"us", "bytes", "blocks"}))
      ->capture_default_str();
  command->add_flag("--prefill", options->prefill,
                    "A pattern for the prompts of every query head, in place of indexes: for "
                    "--prefill budgets:FILE of decode and eval");
  add_repeatable(*command, "--pattern", "PATTERN",
                 "With --prefill: a pattern to try beside dense; name=a|b|c sweeps a parameter",
                 options->patterns, default_patterns(pattern_types(keyhole_prompt_help())));
  command->add_flag("--no-dense", options->no_dense, "Never choose exact attention for a head");
  add_repeatable(*command, "--index", "SPEC",
                 "An index type with parameters; name=a|b|c sweeps a parameter", options->indexes,
                 kDefaultIndexes);
  add_repeatable(*command, "--attend", "WAY", kAttendHelp, options->budgets.attends,
                 kDefaultAttends);
  add_repeatable(*command, "--tail", "TAIL", kTailHelp, options->budgets.tails, kDefaultTails);
  add_repeatable(*command, "--target", "TARGET",
                 std::string(kTargetHelp) + ", or search: the error target that meets the error",
                 options->budgets.targets, kDefaultTargets);
  command
      ->add_option("--k", options->k,
                   "Keys that one search finds: of each query head, with codes of the KV head")
      ->check(CLI::Range(1U, 1U << 30))
      ->capture_default_str();
  command
      ->add_option("--queries", options->queries, "At most this many of each trace, evenly spread")
      ->check(CLI::Range(size_t{2}, size_t{1} << 20))
      ->capture_default_str();
  command->add_option("--sink", options->sink, "First tokens that stay resident")
      ->capture_default_str();
  command->add_option("--window", options->window, "Newest tokens that stay resident")
      ->capture_default_str();
  command
      ->add_option("--threads", options->threads, "Threads of truths and builds; 0: one per core")
      ->capture_default_str();
  add_kv_dtype_option(*command, options->kv_dtype);
  command
      ->add_option("--classifiers", options->classifiers,
                   "Trained partitions and query classifiers for saap, written by train-saap")
      ->type_name("FILE");
  command->add_option("--layers", options->layers, "Layers to calibrate; default: all recorded")
      ->delimiter(',')
      ->type_name("L,...");
  command->add_option("--out", options->out, "The file of budgets (- for standard output)")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--json", options->json,
                   "Write what the table shows here (- for standard output)")
      ->type_name("FILE");
  add_html_option(*command, "maps of the heads", options->html);
  command->footer(
      examples(
          {"keyhole calibrate --length 32k --error 0.05 --out budgets.json",
           "keyhole calibrate --trace kv.safetensors --trace text.safetensors --error 0.02 \\",
           "    --check other.safetensors --out budgets.json",
           "keyhole calibrate --prefill --length 16k --error 0.01 --out patterns.json",
           "keyhole calibrate --trace t.safetensors --index 'ivf:probe=16|64' --index roargraph \\",
           "    --attend topk:100 --tail none --target none --cost bytes --out budgets.json"}) +
      "\n\n" + kExplanation);
  command->callback([options, command] {
    options->prefill ? calibrate_patterns(*options, *command) : calibrate(*options);
  });
}

}  // namespace keyhole::tools
