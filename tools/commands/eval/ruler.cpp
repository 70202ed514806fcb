// The tasks of RULER and InfiniteBench, and what needles miss: every sample is a prompt of its own, run once and
// answered in all ways. Follow-ups come into the sessions that have answered the questions before them.
#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <span>

#include "runtime/files/json.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/eval/ruler_prompts.h"
#include "tools/commands/eval/ruler_report.h"
#include "tools/commands/eval/run.h"
#include "tools/commands/eval/tasks.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
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

/// All prompts as JSON lines.
std::string prompts_text(const std::vector<RulerPart>& parts, uint32_t samples) {
  std::string text;
  for (const RulerPart& part : parts) {
    for (uint32_t i = 0; i < samples; ++i) {
      throw_if_interrupted();
      Json json = {{"length", part.length}, {"sample", i}};
      json.update(RulerPrompts::to_json(*part.task, part.samples->next()));
      text += json.dump() + "\n";
    }
  }
  return text;
}

/// Whether a line has ended behind white space that may begin it.
bool has_whole_line(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin != std::string::npos && text.find('\n', begin) != std::string::npos;
}

/// Decodes greedily behind `last`, the prompt's last token, up to the answer's most tokens or its end. Returns the
/// answer as it is scored.
std::string continue_prompt(Decoder& decoder, const Tokenizer& tokenizer, uint32_t last,
                            const ruler::TaskInfo& task) {
  StreamDecoder text(tokenizer, DecodeState::in_text());
  std::string answer;
  uint32_t next = greedy(decoder.step(last));
  for (uint32_t tokens = 1; !tokenizer.is_special(next) && !tokenizer.ends(next); ++tokens) {
    answer += text.push(next);
    if (tokens == task.answer_tokens || (task.one_line && has_whole_line(answer))) break;
    next = greedy(decoder.step(next));
  }
  const std::string whole = ruler::cleaned(answer + text.finish());
  return task.one_line ? whole.substr(0, whole.find('\n')) : whole;
}

void take(Decoder& decoder, std::span<const uint32_t> tokens) {
  while (!tokens.empty()) {
    const size_t count = std::min(decoder.tokens_at_once(), tokens.size());
    (void)decoder.extend(tokens.first(count));
    tokens = tokens.subspan(count);
  }
}

/// The questions of one sample.
struct SampleQuestions {
  const ruler::TaskInfo& task;
  std::vector<std::vector<uint32_t>> turns;          ///< RulerPrompts::turns()
  std::vector<std::vector<std::string>> references;  ///< of each question
};

/// Asks the questions of a sample one after the other in one session, a copy of `cache`, which holds the first turn but
/// for its last token. The session goes on behind the right answers: each question but the last is answered in a copy
/// of it, which is dropped with the answer. Adds the answers and their cost to the row.
void answer_sample(EvalRun& run, const KeyholeCache& cache, const EvalWay& way,
                   const Tokenizer& tokenizer, const SampleQuestions& sample, RulerRow& row) {
  // Works in a copy: an answer pushes as many tokens out of the window, which the next way must find there.
  KeyholeCache session = cache.fork();
  const auto prefilled = static_cast<uint32_t>(sample.turns.front().size() - 1);
  const std::unique_ptr<Decoder> decoder = run.runner().decoder(session, prefilled);
  // The last token's step is a way's own: it predicts the first token of the answer.
  uint32_t last = sample.turns.front().back();
  std::vector<EvalWay> runs;
  std::vector<double> scores;
  for (size_t t = 0; t < sample.turns.size(); ++t) {
    throw_if_interrupted();
    const uint32_t before = t == 0 ? 0 : decoder->tokens();
    if (t > 0) {
      std::vector<uint32_t> tokens = {last};
      tokens.insert(tokens.end(), sample.turns[t].begin(), sample.turns[t].end());
      last = tokens.back();
      tokens.pop_back();
      take(*decoder, tokens);
    }
    RulerAnswer& answer = row.answers.emplace_back();
    answer.taken = decoder->tokens() - before;
    const auto ask = [&](KeyholeCache& own, Decoder& own_decoder) {
      own.reset_statistics();
      own_decoder.reset_times();
      answer.prediction = continue_prompt(own_decoder, tokenizer, last, sample.task);
      measure_way(own, own_decoder, run.model(), prefilled, runs.emplace_back(way));
    };
    if (t + 1 == sample.turns.size()) {
      ask(session, *decoder);
    } else {
      KeyholeCache copy = session.fork();
      const HeldTokens held(decoder->tokens(), decoder->rope_tokens());
      ask(copy, *run.runner().decoder(copy, held));
    }
    answer.score = ruler::score(sample.task.scoring, answer.prediction, sample.references[t]);
    scores.push_back(answer.score);
  }
  row.scores.push_back(mean_of(scores));
  row.runs.push_back(mean_way(runs));
}

/// Leaves the first `samples` samples in the group, which were answered in all ways.
void keep_first(RulerGroup& group, size_t samples) {
  if (samples == 0) group.rows.clear();
  group.references.resize(samples * group.turns);
  for (RulerRow& row : group.rows) {
    row.runs.erase(row.runs.begin() + static_cast<std::ptrdiff_t>(samples), row.runs.end());
    row.scores.resize(samples);
    row.answers.resize(samples * group.turns);
  }
}

/// Calls answer_next(i) for each sample of the group. Returns false where a signal ends the work: then the group has
/// the samples that were answered in all ways before it.
bool all_answered(uint32_t samples, RulerGroup& group,
                  const std::function<void(uint32_t)>& answer_next) {
  for (uint32_t i = 0; i < samples; ++i) {
    try {
      answer_next(i);
    } catch (const Interrupted&) {
      keep_first(group, i);
      return false;
    } catch (const std::exception&) {
      if (!interrupted()) throw;  // the library may have seen the signal first
      keep_first(group, i);
      return false;
    }
  }
  return true;
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
  if (!options.ruler.prompts.empty()) {
    write_text(options.ruler.prompts, prompts_text(parts, samples));
    return;
  }

  EvalRun run(options);
  const LlamaConfig& model = run.model();
  warn_of_context(model, lengths.back());
  Progress bar("ruler");
  size_t done = 0;
  std::vector<RulerGroup> groups;
  const auto answer_next = [&](const RulerPart& part, uint32_t i, RulerGroup& group) {
    throw_if_interrupted();
    const ruler::Sample drawn = part.samples->next();
    SampleQuestions sample{*part.task, prompts.turns(drawn), {drawn.references}};
    for (const ruler::FollowUp& next : drawn.follow_ups) {
      sample.references.push_back(next.references);
    }
    size_t more = part.task->answer_tokens + 1;
    for (size_t t = 1; t < sample.turns.size(); ++t) more += sample.turns[t].size();
    const std::vector<uint32_t>& first = sample.turns.front();
    run.prefill({first.begin(), first.end() - 1}, static_cast<uint32_t>(more));
    group.turns = sample.turns.size();
    group.references.insert(group.references.end(), sample.references.begin(),
                            sample.references.end());
    size_t row = 0;
    run.for_each_way([&](const EvalWay& way, const KeyholeCache& cache) {
      bar.update(static_cast<double>(done) / static_cast<double>(parts.size() * samples),
                 "sample " + std::to_string(i + 1) + " of " + std::to_string(samples) + ", " +
                     group.task + " at " + format_count(part.length) + ", " + way.name());
      if (i == 0) group.rows.emplace_back();
      answer_sample(run, cache, way, *tokenizer, sample, group.rows[row++]);
    });
    ++done;
  };
  for (const RulerPart& part : parts) {
    RulerGroup& group = groups.emplace_back();
    group.length = part.length;
    group.task = part.task->name;
    group.units = part.samples->units();
    if (!all_answered(samples, group, [&](uint32_t i) { answer_next(part, i, group); })) break;
  }
  if (groups.back().rows.empty()) groups.pop_back();
  if (groups.empty()) throw_if_interrupted();

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
  throw_if_interrupted();
}

}  // namespace keyhole::tools
