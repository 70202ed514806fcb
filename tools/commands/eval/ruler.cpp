// The tasks of RULER and InfiniteBench: every sample is a prompt of its own, run once and answered in all ways.
#include <algorithm>
#include <memory>

#include "runtime/files/json.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/eval/ruler_prompts.h"
#include "tools/commands/eval/ruler_report.h"
#include "tools/commands/eval/run.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

/// A task at a length, with what makes its prompts.
struct RulerPart {
  uint32_t length = 0;
  const ruler::TaskInfo* task = nullptr;
  std::unique_ptr<ruler::Samples> samples;
};

std::vector<RulerPart> ruler_parts(const EvalOptions& options, const RulerPrompts& prompts) {
  std::vector<RulerPart> parts;
  Progress bar("sizes of haystacks");
  const std::vector<uint32_t> lengths = lengths_of(options.task.length);
  const std::vector<const ruler::TaskInfo*> tasks = tasks_of(options.ruler);
  for (const uint32_t length : lengths) {
    for (const ruler::TaskInfo* task : tasks) {
      throw_if_interrupted();
      parts.push_back({length, task, prompts.samples(*task, length)});
      bar.update(static_cast<double>(parts.size()) /
                 static_cast<double>(lengths.size() * tasks.size()));
    }
  }
  return parts;
}

/// Decodes greedily behind `last`, the prompt's last token, up to `most` tokens or the end of the answer.
std::string continue_prompt(Decoder& decoder, const Tokenizer& tokenizer, uint32_t last,
                            uint32_t most) {
  StreamDecoder text(tokenizer, DecodeState::in_text());
  std::string answer;
  uint32_t next = greedy(decoder.step(last));
  for (uint32_t tokens = 1; !tokenizer.is_special(next) && !tokenizer.ends(next); ++tokens) {
    answer += text.push(next);
    if (tokens == most) break;
    next = greedy(decoder.step(next));
  }
  return answer + text.finish();
}

}  // namespace

void eval_ruler(const EvalOptions& asked) {
  EvalOptions options = asked;
  const std::vector<uint32_t> lengths = lengths_of(asked.task.length);
  options.task.length = std::to_string(lengths.back());  // for which memory is planned
  if (options.cache.audit.share > 0) {
    throw UsageError("--audit is of other tasks: of --task ruler every sample has its own session");
  }
  const auto tokenizer = load_tokenizer(options.model);
  const RulerPrompts prompts(asked, *tokenizer);
  const std::vector<RulerPart> parts = ruler_parts(asked, prompts);
  const uint32_t samples = options.ruler.samples;

  EvalRun run(options);
  const LlamaConfig& model = run.model();
  warn_of_context(model, lengths.back());
  Progress bar("ruler");
  size_t done = 0;
  std::vector<RulerGroup> groups;
  for (const RulerPart& part : parts) {
    RulerGroup& group = groups.emplace_back();
    group.length = part.length;
    group.task = part.task->name;
    group.units = part.samples->units();
    for (uint32_t i = 0; i < samples; ++i) {
      throw_if_interrupted();
      const ruler::Sample sample = part.samples->next();
      std::vector<uint32_t> tokens = prompts.encode(sample);
      // The last token's step is a way's own: it predicts the first token of the answer.
      const uint32_t last = tokens.back();
      tokens.pop_back();
      const auto context = static_cast<uint32_t>(tokens.size());
      run.prefill(tokens, part.task->answer_tokens + 1);
      group.references.push_back(sample.references);
      size_t row = 0;
      run.for_each_way([&](const EvalWay& way, KeyholeCache& cache) {
        throw_if_interrupted();
        bar.update(static_cast<double>(done) / static_cast<double>(parts.size() * samples),
                   group.task + " at " + format_count(part.length) + ", sample " +
                       std::to_string(i + 1) + " of " + std::to_string(samples) + ", " +
                       way.name());
        if (i == 0) group.rows.emplace_back();
        RulerRow& out = group.rows[row++];
        // Works in a copy: an answer pushes as many tokens out of the window, which the next way must find there.
        KeyholeCache copy = cache.fork();
        const std::unique_ptr<Decoder> decoder = run.runner().decoder(copy, context);
        const std::string prediction =
            ruler::cleaned(continue_prompt(*decoder, *tokenizer, last, part.task->answer_tokens));
        out.scores.push_back(ruler::score(part.task->scoring, prediction, sample.references));
        out.predictions.push_back(prediction);
        out.runs.push_back(way);
        measure_way(copy, *decoder, model, context, out.runs.back());
      });
      ++done;
    }
  }

  const std::string note = prompts.note();
  run.print("ruler" + std::string(options.chat ? " as a chat, " : ", ") + std::to_string(samples) +
                (samples == 1 ? " sample" : " samples") + " of each task and length, seed " +
                std::to_string(options.task.seed),
            ruler_text(groups) + (note.empty() ? "" : note + "\n"));
  if (run.writes()) {
    Json json = run.header();
    json["tokens"] = lengths.back();
    json["chat"] = options.chat;
    json["lengths"] = lengths;
    Json tasks = Json::array();
    for (const ruler::TaskInfo* task : tasks_of(options.ruler)) tasks.push_back(task->name);
    json["ruler"] = tasks;
    json["samples"] = samples;
    json["note"] = note;
    json["results"] = ruler_json(groups);
    json["means"] = ruler_json(mean_groups(groups));
    run.write(json);
  }
}

}  // namespace keyhole::tools
