// `keyhole eval` of tasks with questions: how many of them the model answers with each way to attend.
#include <algorithm>
#include <cstdio>
#include <optional>

#include "runtime/files/json.h"
#include "tools/commands/common/asking.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/commands/common/task_fit.h"
#include "tools/commands/eval/run.h"
#include "tools/commands/eval/tasks.h"
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
  Table table(way_columns({{parts ? "correct, found" : "correct"}, {"lost / won"}}));
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

}  // namespace

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

}  // namespace keyhole::tools
