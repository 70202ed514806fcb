// keyhole eval: how many questions about a long context a model answers with each way to attend, how well it predicts a
// text, how far its predictions are from those by exact attention, or how many tokens of a draft it accepts.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "runtime/files/json.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/asking.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/task_fit.h"
#include "tools/commands/eval/run.h"
#include "tools/mpi/ranks.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

/// The questions answered in one way.
struct QuestionsRow {
  EvalWay way;
  std::vector<std::string> answers;
  std::vector<bool> right;
  double found = 0.0;  ///< the mean share of what an answer should contain

  [[nodiscard]] size_t correct() const {
    return static_cast<size_t>(std::count(right.begin(), right.end(), true));
  }
  /// The swaps with exact attention; absent where there is none to compare with.
  [[nodiscard]] std::optional<Swaps> swaps(const QuestionsRow* exact) const {
    if (exact == nullptr) return std::nullopt;
    return count_swaps(right, exact->right);
  }
};

std::string answer_question(Decoder& decoder, const Tokenizer& tokenizer, const Asking& asking,
                            const Question& question, uint32_t most) {
  const uint32_t context = decoder.tokens();
  uint32_t next = 0;
  for (const uint32_t token : asking.first_question(question)) next = greedy(decoder.step(token));
  std::string answer;
  // As a text, no answer that counts has more tokens than bytes.
  const size_t bound = asking.free(question) ? most : question.answer.size() + 8;
  StreamDecoder text(tokenizer, DecodeState::in_text());
  for (size_t tokens = 1; !tokenizer.is_special(next) && !tokenizer.ends(next); ++tokens) {
    answer += text.push(next);
    if (tokens == bound || asking.complete(question, answer)) break;
    next = greedy(decoder.step(next));
  }
  answer += text.finish();
  decoder.truncate(context);
  return answer;
}

void answer_all(Decoder& decoder, KeyholeCache& cache, const Tokenizer& tokenizer,
                const Asking& asking, const LlamaConfig& model, const Task& task, uint32_t most,
                QuestionsRow& row) {
  const size_t context = decoder.tokens();
  Progress bar(row.way.name());
  cache.reset_statistics();
  decoder.reset_times();
  for (const Question& question : task.questions) {
    throw_if_interrupted();
    row.answers.push_back(answer_question(decoder, tokenizer, asking, question, most));
    row.right.push_back(asking.right(question, row.answers.back()));
    row.found +=
        Asking::found(question, row.answers.back()) / static_cast<double>(task.questions.size());
    bar.update(static_cast<double>(row.answers.size()) /
               static_cast<double>(task.questions.size()));
  }
  measure_way(cache, decoder, model, context, row.way);
}

std::string table_text(const std::vector<QuestionsRow>& rows, const Task& task) {
  const size_t questions = task.questions.size();
  // Where an answer has several parts, an answer with some of them counts for something.
  const bool parts = task.questions.front().values.size() > 1;
  Table table({{"index", Table::Align::left},
               {"k"},
               {"attend", Table::Align::left},
               {parts ? "correct, found" : "correct"},
               {"lost / won"},
               {"scanned"},
               {"read/token"},
               {"tokens/s"},
               {"attention/token"},
               {"build"},
               {"index size"}});
  const QuestionsRow* exact = find_exact(rows);
  for (const QuestionsRow& row : rows) {
    std::vector<std::string> cells = way_cells(row.way);
    cells.push_back(std::to_string(row.correct()) + "/" + std::to_string(questions) +
                    (parts ? ", " + format_number(100.0 * row.found) + " %" : ""));
    cells.push_back(swaps_cell(row.swaps(exact == &row ? nullptr : exact)));
    for (std::string& cell : cost_cells(row.way)) cells.push_back(std::move(cell));
    table.add_row(std::move(cells));
  }
  return table.text(style_of(stdout)) + (exact == nullptr ? "" : kSwapsNote);
}

Json to_json(const QuestionsRow& row, const QuestionsRow* exact, const Task& task, bool chats) {
  Json wrong = Json::array();
  for (size_t i = 0; i < task.questions.size(); ++i) {
    if (row.right[i]) continue;
    const Question& question = task.questions[i];
    Json expected = question.answer;
    if (question.values.size() > 1) {
      expected = question.values;
    } else if (chats) {
      expected = question.values.front();
    }
    wrong.push_back({{"question", chats ? question.spoken : question.prompt},
                     {"expected", expected},
                     // Bytes of a wrong answer need not be UTF-8.
                     {"answer", printable(row.answers[i])}});
  }
  const auto questions = static_cast<double>(task.questions.size());
  const auto swaps = row.swaps(exact);
  return way_json(row.way, {{"correct", row.correct()},
                            {"questions", task.questions.size()},
                            {"accuracy", static_cast<double>(row.correct()) / questions},
                            {"found", row.found},
                            {"lost", swaps ? Json(swaps->lost) : Json(nullptr)},
                            {"won", swaps ? Json(swaps->won) : Json(nullptr)},
                            {"wrong", wrong}});
}

void eval_questions(const EvalOptions& options) {
  const auto tokenizer = load_tokenizer(options.model);
  const uint32_t length = length_of(options.task);
  const size_t usual = options.task.task == "kv" ? 64 : 16;
  const Asking asking(*tokenizer,
                      options.chat ? std::optional(load_chat(options.model)) : std::nullopt);
  const FittedTask fitted = fit_task(
      options.task, length, options.questions, usual, token_density(*tokenizer, options.task),
      [&](const std::string& context) { return asking.context(context); });
  const Task& task = fitted.task;
  const std::vector<uint32_t>& tokens = fitted.tokens;
  const size_t questions = task.questions.size();
  EvalRun run(options);
  const LlamaConfig& model = run.model();

  // A question is truncated away before the next one, so the cache holds one of them at a time.
  size_t longest = 0;
  for (const Question& question : task.questions) {
    longest = std::max(longest, asking.first_question(question).size());
  }
  const auto more = std::max(256U, static_cast<uint32_t>(longest) + options.answer_tokens);
  warn_of_context(model, tokens.size());
  run.prefill(tokens, more);

  std::vector<QuestionsRow> rows;
  run.for_each_way([&](const EvalWay& way, KeyholeCache& cache) {
    QuestionsRow& row = rows.emplace_back();
    row.way = way;
    const auto decoder = run.runner().decoder(cache, static_cast<uint32_t>(tokens.size()));
    answer_all(*decoder, cache, *tokenizer, asking, model, task, options.answer_tokens, row);
  });

  run.print(options.task.task + (options.chat ? " as a chat, " : ", ") +
                format_count(tokens.size()) + " tokens, " + std::to_string(questions) +
                " questions, seed " + std::to_string(options.task.seed),
            table_text(rows, task) + way_notes(rows));
  if (run.writes()) {
    Json results = Json::array();
    for (const QuestionsRow& row : rows)
      results.push_back(to_json(row, find_exact(rows), task, asking.chats()));
    Json json = run.header();
    json["chat"] = options.chat;
    json["results"] = results;
    run.write(json);
  }
}

void eval(const EvalOptions& options) {
  const std::string& task = options.task.task;
  if (task.empty())
    throw UsageError(
        "--task is missing; allowed: kv, passkey, needles, variables, words, copy, text, kld, "
        "drafts, ruler");
  if (task != "ruler" && options.ruler.given())
    throw UsageError("--ruler and --data are of --task ruler");
  if (task != "drafts" && options.drafts.given())
    throw UsageError("--draft and --ahead are of --task drafts");
  if (task != "kld" && options.base.given())
    throw UsageError("--base and --chunks are of --task kld");
  if (task != "kld" && options.bins > 1) throw UsageError("--bins is of --task kld");
  const bool is_text = task == "text" || task == "kld" || task == "drafts";
  if ((is_text || task == "copy") && options.chat)
    throw UsageError("--chat is of tasks with questions: kv, passkey, needles, variables, words");
  if (!is_text && (!options.prompt_file.empty() || !options.token_file.empty()))
    throw UsageError("--prompt and --tokens are of --task text, --task kld and --task drafts");
  if (task == "text") return eval_text(options);
  if (task == "kld") return eval_kld(options);
  if (task == "drafts") return eval_drafts(options);
  if (task == "copy") return eval_copy(options);
  if (task == "ruler") return eval_ruler(options);
  eval_questions(options);
}

}  // namespace

void add_eval(CLI::App& keyhole) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command = keyhole.add_subcommand("eval",
                                             "Count right answers about a long context, or measure "
                                             "how well a text is predicted, by index");
  add_model_options(*command, options->model);
  add_device_option(*command, options->model.device);
  add_gpu_memory_option(*command, options->model.gpu_memory);
  add_prefill_option(*command, options->model.prefill);
  add_chunk_option(*command, options->model.chunk);
  add_products_option(*command, options->model.products);
  command->add_option("--turn", options->turn,
                      "Tokens of the prompt, the last ones, that come as a later turn: behind the "
                      "build of the last --index, --chunk at once (default: 4096)");
  command
      ->add_option("--turn-as", options->turn_as,
                   "How its queries attend: as a prompt's, by the pattern of --prefill; or as "
                   "steps do, by the last --index with the first budget (codes on a GPU up to "
                   "1024 tokens at once, which is then the default of --chunk). A token alone "
                   "attends as steps do in any case. Compare with --index full, whose turn is "
                   "exact")
      ->check(CLI::IsMember({"prompt", "steps"}))
      ->capture_default_str();
  command->add_flag("--check-prefill", options->model.check_prefill,
                    "Compare the prompt's attention with dense attention, layer by layer");
  add_task_options(
      *command, options->task,
      {"kv", "passkey", "needles", "variables", "words", "copy", "text", "kld", "drafts", "ruler"});
  add_ruler_options(*command, options->ruler);
  add_draft_options(*command, options->drafts);
  add_kld_base_options(*command, options->base);
  command
      ->add_option("--prompt", options->prompt_file,
                   "Text file of --task text, kld and drafts; default: the bundled prose")
      ->type_name("FILE");
  command
      ->add_option("--tokens", options->token_file,
                   "File of token ids for --task text, kld and drafts, in place of --prompt")
      ->type_name("FILE");
  command
      ->add_option("--bytes", options->bytes,
                   "Tokens, not bytes, of --task text and kld that are decoded and predicted after "
                   "the first "
                   "--length; the bundled model's tokens are bytes")
      ->type_name("TOKENS")
      ->check(CLI::Range(1U, 1U << 24))
      ->capture_default_str();
  command
      ->add_option(
          "--bins", options->bins,
          "Equal parts of the --bytes tokens of --task kld, in order, that have a row each: "
          "whether errors grow with what was appended")
      ->type_name("PARTS")
      ->check(CLI::Range(1U, 1U << 10))
      ->capture_default_str();
  command
      ->add_option("--questions", options->questions,
                   "Number of questions, of passages to copy, or of prompts of drafts; default: 64 "
                   "of kv and copy, 4 of drafts, 16 of others")
      ->check(CLI::Range(1U, 1U << 20));
  command
      ->add_option("--index", options->indexes,
                   "Index spec (keyhole compare --help lists the types), or what indexes are "
                   "compared with: " +
                       ways_help() + "; repeatable; default: exact and auto")
      ->type_name("SPEC");
  command
      ->add_option("--k", options->ks,
                   "Keys that one search finds, e.g. 25,50,100: of each query head, with codes of "
                   "the KV head")
      ->delimiter(',')
      ->check(CLI::Range(1U, 1U << 30))
      ->capture_default_str();
  command->add_flag(
      "--chat", options->chat,
      "Ask in the model's chat template, as instruct models are asked; right is an answer that "
      "contains the values");
  command
      ->add_option("--answer-tokens", options->answer_tokens,
                   "Tokens of an answer at most, in a chat and of needles, variables and words, "
                   "and of what is decoded by drafts")
      ->check(CLI::Range(1U, 1U << 16))
      ->capture_default_str();
  add_budget_lists(*command, options->budgets);
  add_cache_options(*command, options->cache);
  add_parallel_options(*command, options->cache.parallel);
  add_audit_options(*command, options->cache.audit);
  command->add_option("--json", options->json, "Write the results as JSON; - is standard output")
      ->type_name("FILE");
  add_html_option(*command, "answers, curves", options->html);
  command->footer(
      examples(
          {"keyhole eval --task kv --length 8192 --questions 64 --index exact --index none "
           "--index flat",
           "keyhole eval --task passkey --length 32k --index exact --index ivf --k 50,100,200",
           "keyhole eval --task kv --length 32k --index ivf:probe=32 --attend topk:100 --attend "
           "scored",
           "keyhole eval --task kv --length 32k --index ivf --tail none --tail second --target "
           "none "
           "--target error=0.05",
           "keyhole eval --task kv --length 32k --index exact --budgets budgets.json",
           "keyhole eval --task copy --length 32k --index exact --index none --index q4_0 --index "
           "ivf",
           "keyhole eval --task text --length 16k --bytes 2000 --index exact --index none --index "
           "ivf",
           "keyhole eval --task kld --length 16k --bytes 1000 --index auto --index codes:k=2,v=2 "
           "--index q4_0",
           "keyhole eval --model DIR --task kld --base llama.kld --chunks 2 --index codes:k=4,v=4",
           "keyhole eval --model DIR --task drafts --draft SMALL_DIR --length 4k --index exact "
           "--index codes:k=2,v=2",
           "keyhole eval --task kld --length 4k --bytes 32768 --bins 8 --index auto --index ivf "
           "--tail second",
           "keyhole eval --task ruler --ruler turns,records,enumerate,mqar --length 8k --chat "
           "--model DIR",
           "keyhole eval --task ruler --ruler niah_multikey_3,vt,cwe --length 8k,16k --samples 50 "
           "--seed 42 --index exact --index auto",
           "keyhole eval --task kv --length 128k --index hnsw:M=32,ef=128 --json result.json"}) +
      "\n\nThe context is run once for all ways to attend (of ruler, each of its prompts). Every "
      "question is answered by\ndecoding steps, which are then truncated away; a text, passages to "
      "copy, and ruler's prompts, in copies of the cache.");
  command->callback([options, command] {
    check_kld_base(*command, options->base);
    if (!ranks().speaks()) options->json = options->html = "";
    name_prefill_budgets(options->model, options->cache);
    eval(*options);
  });
}

}  // namespace keyhole::tools
