// How many tokens of a draft a model accepts: a smaller model drafts, or the model itself, and either the draft or the
// model that checks it attends through an index.
#include <algorithm>
#include <cmath>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/eval/draft_report.h"
#include "tools/commands/eval/run.h"
#include "tools/commands/eval/tasks.h"
#include "tools/commands/eval/text_source.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint32_t kUsualPassages = 4;

/// A way with a copy of the cache that attends so, behind a prompt.
struct WayCache {
  EvalWay way;
  KeyholeCache cache;
};

/// The prompt in every way to attend, for a model that drafts or checks.
class PreparedModel {
 public:
  /// `prompt` without its last token, with room for `more` tokens behind it.
  void prepare(EvalRun& run, const std::vector<uint32_t>& prompt, uint32_t more) {
    run_ = &run;
    context_ = static_cast<uint32_t>(prompt.size());
    ways_.clear();
    run.prefill(prompt, more);
    run.for_each_way([this](const EvalWay& way, KeyholeCache& cache) {
      ways_.push_back({way, cache.fork()});
    });
  }
  [[nodiscard]] std::list<WayCache>& ways() { return ways_; }
  [[nodiscard]] WayCache& exact() {
    return *std::find_if(ways_.begin(), ways_.end(),
                         [](const WayCache& w) { return w.way.is_exact(); });
  }
  [[nodiscard]] std::unique_ptr<Decoder> decoder(KeyholeCache& cache) {
    return run_->runner().decoder(cache, context_);
  }
  [[nodiscard]] uint32_t context() const { return context_; }
  [[nodiscard]] const LlamaConfig& model() const { return run_->model(); }

 private:
  EvalRun* run_ = nullptr;
  uint32_t context_ = 0;
  std::list<WayCache> ways_;
};

/// Decodes behind one prompt in all ways and roles, and adds what came of it to `rows`.
class Passage {
 public:
  Passage(PreparedModel& target, PreparedModel& draft, uint32_t last, const DraftLimits& limits)
      : target_(target), draft_(draft), last_(last), limits_(limits) {}

  void run(std::vector<DraftRow>& rows, const std::function<void(const std::string&)>& show) {
    const PlainTokens plain = plain_tokens(target_.exact().cache);
    const bool first = rows.empty();
    size_t row = 0;
    const auto add = [&](DraftRole role, WayCache& checks, WayCache& drafts, const EvalWay& way,
                         const PlainTokens& expected) {
      show(way.name());
      if (first) rows.emplace_back().role = role;
      decode(checks, drafts, way, expected, rows[row++]);
    };
    add(DraftRole::both, target_.exact(), draft_.exact(), draft_.exact().way, plain);
    auto drafts = draft_.ways().begin();
    for (WayCache& checks : target_.ways()) {
      WayCache& drafts_so = *drafts++;
      if (checks.way.is_exact()) continue;
      add(DraftRole::draft, target_.exact(), drafts_so, drafts_so.way, plain);
      add(DraftRole::target, checks, draft_.exact(), checks.way, plain_tokens(checks.cache));
    }
  }

 private:
  PlainTokens plain_tokens(const KeyholeCache& cache) {
    KeyholeCache copy = cache.fork();
    return decode_plainly(*target_.decoder(copy), last_, limits_);
  }

  void decode(const WayCache& checks, const WayCache& drafts, const EvalWay& way,
              const PlainTokens& expected, DraftRow& row) {
    KeyholeCache target_cache = checks.cache.fork(), draft_cache = drafts.cache.fork();
    const auto target = target_.decoder(target_cache), draft = draft_.decoder(draft_cache);
    draft_cache.reset_statistics();
    const DraftedTokens& text = row.texts.emplace_back(
        decode_by_drafts(*target, *draft, last_, limits_, [](size_t) { throw_if_interrupted(); }));
    row.as_plain.push_back(compare_with_plain(text.tokens, expected));
    EvalWay& run = row.runs.emplace_back(way);
    if (row.role != DraftRole::target) {
      measure_way(draft_cache, *draft, draft_.model(), draft_.context(), run);
    } else {
      // Steps are the draft's, which attends exactly: nothing to say about this way but its format.
      measure_format(target_.model(), target_.context(), run);
      run.scan_fraction = run.keys_attended = run.bytes_read = run.index_bytes = std::nan("");
      if (way.spec.text == kAutoIndex) run.in_effect = target_cache.config().index;
    }
  }

  PreparedModel &target_, &draft_;
  uint32_t last_;
  const DraftLimits& limits_;
};

EvalOptions draft_model_options(const EvalOptions& options) {
  EvalOptions draft = options;
  draft.model.folder = options.drafts.folder;
  return draft;
}

}  // namespace

void eval_drafts(const EvalOptions& asked) {
  const EvalOptions options = with_exact(asked);
  if (options.cache.audit.share > 0) {
    throw UsageError("--audit is of other tasks: drafts come in copies of the cache");
  }
  const bool two_models = !options.drafts.folder.empty();
  const EvalOptions draft_options = draft_model_options(options);
  if (two_models) {
    if (!options.model.gpu_memory.empty()) {
      throw UsageError("--gpu-memory with --draft: memory is planned for one model");
    }
    if (!options.cache.budgets.empty() || !options.cache.classifiers.empty()) {
      throw UsageError("--budgets and --classifiers with --draft: they are of one model's heads");
    }
    if (!options.cache.calibration.empty()) {
      throw UsageError("--calibration with --draft: it is of one model's heads");
    }
    check_same_tokens(draft_options.model, options.model);
  }
  const uint32_t passages = options.questions == 0 ? kUsualPassages : options.questions;
  const std::vector<std::vector<uint32_t>> prompts = make_passages(options, passages);
  const auto tokenizer =
      find_tokenizer(options.model, load_llama_config(model_folder(options.model) / "config.json"));
  DraftLimits limits;
  limits.ahead = options.drafts.tokens_ahead();
  limits.tokens = options.answer_tokens;
  if (tokenizer) limits.ends = [&tokenizer](uint32_t token) { return tokenizer->ends(token); };

  EvalRun run(options);
  std::optional<EvalRun> draft_run;
  if (two_models) draft_run.emplace(draft_options);
  const uint32_t more = options.answer_tokens + limits.ahead + 2;
  warn_of_context(run.model(), prompts.front().size() + more);
  if (draft_run) warn_of_context(draft_run->model(), prompts.front().size() + more);

  std::vector<DraftRow> rows;
  Progress bar("drafts");
  for (size_t i = 0; i < prompts.size(); ++i) {
    std::vector<uint32_t> prompt = prompts[i];
    // The first step takes the last token, in the way of a row.
    const uint32_t last = prompt.back();
    prompt.pop_back();
    PreparedModel target, other;
    target.prepare(run, prompt, more);
    if (draft_run) other.prepare(*draft_run, prompt, more);
    Passage(target, draft_run ? other : target, last, limits)
        .run(rows, [&](const std::string& way) {
          throw_if_interrupted();
          bar.update(static_cast<double>(i) / static_cast<double>(prompts.size()),
                     "prompt " + std::to_string(i + 1) + " of " + std::to_string(prompts.size()) +
                         ", " + way);
        });
  }

  const std::string drafter = two_models ? model_name(draft_options.model) : "the model itself";
  run.print(
      "drafts of " + std::to_string(limits.ahead) + " tokens by " + drafter + ", " +
          std::to_string(options.answer_tokens) + " tokens behind each of " +
          std::to_string(prompts.size()) + (prompts.size() == 1 ? " prompt of " : " prompts of ") +
          format_count(prompts.front().size()) + ", seed " + std::to_string(options.task.seed),
      draft_text(rows));
  if (run.writes()) {
    Json json = run.header();
    json["tokens"] = prompts.front().size();
    json["draft"] = two_models ? Json(drafter) : Json(nullptr);
    json["ahead"] = limits.ahead;
    json["prompts"] = prompts.size();
    json["results"] = draft_json(rows);
    run.write(json);
  }
}

}  // namespace keyhole::tools
