// keyhole eval: how many questions about a long context a model answers with each way to attend.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "tools/commands/commands.h"
#include "tools/commands/decoding.h"
#include "tools/llama/blas.h"
#include "tools/llama/tokenizer.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

struct EvalOptions {
  ModelOptions model;
  TaskOptions task;
  CacheFlags cache;
  std::vector<std::string> indexes;
  std::vector<uint32_t> ks{100};
  std::vector<std::string> attends, tails, targets;
  uint32_t questions = 0;  // 0: the task's usual number
  std::string json;
};

/// The questions answered with one index, one k and one way to attend.
struct Row {
  AttendSpec spec;
  BudgetChoice budget;
  size_t correct = 0;
  std::vector<std::string> answers;
  double build_seconds = 0.0;
  double index_bytes = 0.0;
  double scan_fraction = 0.0;
  double keys_attended = 0.0;  // offloaded tokens per query head and layer step
  StepTimes times;

  /// Whether all heads have the budget of the command line.
  bool has_budget() const { return spec.indexed() && spec.budgets.empty(); }
  double tokens_per_second() const { return static_cast<double>(times.steps) / times.total(); }
  double attention_ms() const { return 1e3 * times.attention / static_cast<double>(times.steps); }
};

std::string answer_question(Decoder& decoder, const ByteTokenizer& tokenizer,
                            const Question& question) {
  const uint32_t context = decoder.tokens();
  uint32_t next = 0;
  for (const uint32_t token : tokenizer.encode(question.prompt)) next = greedy(decoder.step(token));
  std::string answer;
  const char end = question.answer.back();
  // A wrong answer may be longer than the right one; a few tokens more show what it was.
  const size_t most = question.answer.size() + 8;
  while (next < 256) {
    answer.push_back(static_cast<char>(next));
    if (answer.back() == end || answer.size() == most) break;
    next = greedy(decoder.step(next));
  }
  decoder.truncate(context);
  return answer;
}

void answer_all(Decoder& decoder, KeyholeCache& cache, const LlamaConfig& model, const Task& task,
                Row& row) {
  const ByteTokenizer tokenizer(model);
  Progress bar(row.spec.shown() + (row.has_budget() ? ", " + row.budget.text() : ""));
  cache.reset_statistics();
  decoder.reset_times();
  for (const Question& question : task.questions) {
    throw_if_interrupted();
    row.answers.push_back(answer_question(decoder, tokenizer, question));
    if (row.answers.back() == question.answer) ++row.correct;
    bar.update(static_cast<double>(row.answers.size()) /
               static_cast<double>(task.questions.size()));
  }
  row.times = decoder.times();
  const keyhole_statistics statistics = cache.statistics();
  row.index_bytes = static_cast<double>(statistics.index_bytes);
  const double heads_steps = static_cast<double>(statistics.attends) * model.q_heads;
  row.keys_attended = static_cast<double>(statistics.keys_attended) / heads_steps;
  if (row.spec.mode() == KEYHOLE_MODE_EXACT) row.scan_fraction = 1.0;
  if (row.spec.indexed()) {
    row.scan_fraction = statistics.keys_offered == 0
                            ? std::nan("")  // everything is resident or pending
                            : static_cast<double>(statistics.keys_scored) /
                                  static_cast<double>(statistics.keys_offered);
  }
}

std::string table_text(const std::vector<Row>& rows, size_t questions) {
  Table table({{"index", Table::Align::left},
               {"k"},
               {"attend", Table::Align::left},
               {"correct"},
               {"scanned"},
               {"tokens/s"},
               {"attention/token"},
               {"build"},
               {"index size"}});
  for (const Row& row : rows) {
    const bool indexed = row.spec.indexed();
    table.add_row(
        {row.spec.shown(), row.has_budget() ? std::to_string(row.budget.attend.k) : "-",
         row.has_budget() ? row.budget.text() : "-",
         std::to_string(row.correct) + "/" + std::to_string(questions),
         std::isnan(row.scan_fraction) ? "-" : format_number(100.0 * row.scan_fraction) + " %",
         format_number(row.tokens_per_second()), format_duration(1e-3 * row.attention_ms()),
         indexed ? format_duration(row.build_seconds) : "-",
         indexed ? format_bytes(static_cast<uint64_t>(row.index_bytes)) : "-"});
  }
  return table.text(style_of(stdout));
}

Json to_json(const Row& row, const Task& task) {
  Json wrong = Json::array();
  for (size_t i = 0; i < task.questions.size(); ++i) {
    if (row.answers[i] == task.questions[i].answer) continue;
    wrong.push_back({{"question", task.questions[i].prompt},
                     {"expected", task.questions[i].answer},
                     // Bytes of a wrong answer need not be UTF-8.
                     {"answer", printable(row.answers[i])}});
  }
  return {
      {"index", row.spec.text},
      {"budgets", row.spec.budgets},
      {"k", row.has_budget() ? Json(row.budget.attend.k) : Json(nullptr)},
      {"attend", row.has_budget() ? Json(row.budget.attend.text()) : Json(nullptr)},
      {"tail", row.has_budget() ? Json(row.budget.tail.text()) : Json(nullptr)},
      {"target", row.has_budget() ? Json(row.budget.target.text()) : Json(nullptr)},
      {"correct", row.correct},
      {"questions", task.questions.size()},
      {"accuracy", static_cast<double>(row.correct) / static_cast<double>(task.questions.size())},
      {"scan_fraction", row.scan_fraction},
      {"keys_attended", row.keys_attended},
      {"tokens_per_second", row.tokens_per_second()},
      {"attention_ms_per_token", row.attention_ms()},
      {"build_s", row.build_seconds},
      {"index_bytes", row.index_bytes},
      {"wrong", wrong}};
}

/// Every way to attend with every --k (topk:K has its own), tail and target.
std::vector<BudgetChoice> all_budgets(const EvalOptions& options) {
  std::vector<AttendChoice> out;
  for (const uint32_t k : options.ks) {
    for (const AttendChoice& choice : parse_attends(options.attends, k)) {
      if (std::find(out.begin(), out.end(), choice) == out.end()) out.push_back(choice);
    }
  }
  return cross_budgets(out, options.tails, options.targets);
}

/// --budgets first, as the cache begins with it, then every --index.
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

void eval(const EvalOptions& options) {
  if (options.task.task.empty()) throw UsageError("--task is missing; allowed: kv, passkey");
  const std::vector<BudgetChoice> budgets = all_budgets(options);
  const std::vector<AttendSpec> specs = all_specs(options);
  const LlamaModel model = load_model(options.model);
  const ByteTokenizer tokenizer(model.config);
  const uint32_t length = length_of(options.task);
  const size_t usual = options.task.task == "kv" ? 64 : 16;
  const size_t questions = options.questions != 0
                               ? options.questions
                               : fitting_questions(options.task.task, length - 1, usual);
  const Task task = make_task(options.task, length - 1, questions);
  const std::vector<uint32_t> tokens = tokenizer.encode_prompt(task.context);

  Team team(options.cache.threads);
  // Questions are truncated away, so that there need be room for one of them only.
  KeyholeCache cache = make_cache(model.config, options.cache,
                                  static_cast<uint32_t>(tokens.size()) + 256, specs, budgets);
  Decoder decoder(model, cache, team);
  const double prefill_seconds = prefill_prompt(decoder, tokens, nullptr);

  std::vector<Row> rows;
  for (const AttendSpec& spec : specs) {
    double build_seconds = 0.0;
    for (size_t i = 0; i < budgets.size(); ++i) {
      Row row;
      row.spec = spec;
      row.budget = budgets[i];
      if (i > 0 && !row.has_budget()) break;  // nothing to choose
      build_seconds +=
          i == 0 ? apply_spec(cache, spec, budgets[i]) : apply_budget(cache, spec, budgets[i]);
      row.build_seconds = build_seconds;
      answer_all(decoder, cache, model.config, task, row);
      rows.push_back(std::move(row));
    }
  }

  const keyhole_statistics statistics = cache.statistics();
  const Machine machine = describe_machine(statistics.cpu_level);
  if (options.json != "-") {
    std::printf(
        "%s, %s tokens, %zu questions, sink %u, window %u, K and V in %s, prefill %s\n%s\n\n%s",
        options.task.task.c_str(), format_count(tokens.size()).c_str(), questions,
        options.cache.sink, options.cache.window, options.cache.kv_dtype.c_str(),
        format_duration(prefill_seconds).c_str(), to_text(machine).c_str(),
        table_text(rows, questions).c_str());
  }
  if (!options.json.empty()) {
    Json results = Json::array();
    for (const Row& row : rows) results.push_back(to_json(row, task));
    write_json(options.json, {{"machine", to_json(machine)},
                              {"model", model_name(options.model)},
                              {"task", options.task.task},
                              {"tokens", tokens.size()},
                              {"seed", options.task.seed},
                              {"sink", options.cache.sink},
                              {"window", options.cache.window},
                              {"kv_dtype", options.cache.kv_dtype},
                              {"threads", statistics.threads},
                              {"blas", blas_kernels()},
                              {"prefill_s", prefill_seconds},
                              {"results", results}});
  }
}

}  // namespace

void add_eval(CLI::App& keyhole) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command = keyhole.add_subcommand(
      "eval",
      "Ask questions about a long context and count exact answers, for each index type.\n"
      "The context is run once; every question is answered by decoding steps and then truncated "
      "away.");
  add_model_options(*command, options->model);
  add_task_options(*command, options->task);
  command
      ->add_option("--questions", options->questions,
                   "Number of questions; default: 64 for kv, 16 for passkey")
      ->check(CLI::Range(1U, 1U << 20));
  command
      ->add_option(
          "--index", options->indexes,
          "Index spec, or exact (full attention), or none (sink and window only); repeatable")
      ->type_name("SPEC");
  command
      ->add_option("--k", options->ks,
                   "Keys that a search is asked for per query head, e.g. 25,50,100")
      ->delimiter(',')
      ->check(CLI::Range(1U, 1U << 30))
      ->capture_default_str();
  command->add_option("--attend", options->attends, std::string(kAttendHelp) + "; repeatable")
      ->allow_extra_args(false)
      ->type_name("WAY");
  command->add_option("--tail", options->tails, std::string(kTailHelp) + "; repeatable")
      ->allow_extra_args(false)
      ->type_name("TAIL");
  command->add_option("--target", options->targets, std::string(kTargetHelp) + "; repeatable")
      ->allow_extra_args(false)
      ->type_name("TARGET");
  add_cache_options(*command, options->cache);
  command->add_option("--json", options->json, "Write the results as JSON; - is standard output")
      ->type_name("FILE");
  command->footer(examples(
      {"keyhole eval --task kv --length 8192 --questions 64 --index exact --index none "
       "--index flat",
       "keyhole eval --task passkey --length 32k --index exact --index ivf --k 50,100,200",
       "keyhole eval --task kv --length 32k --index ivf:probe=32 --attend topk:100 --attend scored",
       "keyhole eval --task kv --length 32k --index ivf --tail none --tail second --target none "
       "--target error=0.05",
       "keyhole eval --task kv --length 32k --index exact --budgets budgets.json",
       "keyhole eval --task kv --length 128k --index hnsw:M=32,ef=128 --json result.json"}));
  command->callback([options] { eval(*options); });
}

}  // namespace keyhole::tools
