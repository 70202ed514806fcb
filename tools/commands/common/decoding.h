// What the commands that run a model share: common options, the bundled model, tasks as token lists, prefill and
// build with a progress bar.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/commands/common/audit_report.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/parallel.h"
#include "tools/commands/common/runner.h"
#include "tools/commands/common/ways.h"
#include "tools/tasks/task.h"
#include "tools/tokenizer/chat.h"

namespace keyhole::tools {

/// Options of commands that run a model: `--model`, and `--device` of those that have add_device_option().
struct ModelOptions {
  std::string folder;  ///< empty: the bundled model
  std::string device = "auto";
  std::string gpu_memory;  ///< of commands that have add_gpu_memory_option(); empty: no limit
  std::string prefill = "dense";  ///< of commands that have add_prefill_option()
  bool check_prefill = false;     ///< GpuModel::check_prefill()
  std::string products = "auto";  ///< of commands that have add_products_option()
  uint32_t chunk = 0;             ///< of commands that have add_chunk_option(), see PrefillChoice
};
void add_model_options(CLI::App& command, ModelOptions& options);

/// Throws UsageError where a model's folder is a file, as GGUF files are.
void check_model_folder(const std::filesystem::path& folder);
/// Returns `options.folder`, or the bundled model's folder. Throws as check_model_folder().
[[nodiscard]] std::filesystem::path model_folder(const ModelOptions& options);
/// Loads `options.folder` or the bundled model.
[[nodiscard]] LlamaModel load_model(const ModelOptions& options);
/// Loads the model like load_model(), ready to run.
[[nodiscard]] Runner make_runner(const ModelOptions& options, uint32_t threads);
/// The name under which results mention the model: its folder's last part.
[[nodiscard]] std::string model_name(const ModelOptions& options);

/// The tokenizer of the model's folder; nullptr where it has none. Throws std::runtime_error for one that is broken.
[[nodiscard]] std::unique_ptr<const Tokenizer> find_tokenizer(const ModelOptions& options,
                                                              const LlamaConfig& model);
/// find_tokenizer() that throws std::runtime_error where there is none.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options,
                                                              const LlamaConfig& model);

/// load_tokenizer() from the folder's config.json alone, so that errors in text are reported before gigabytes of
/// weights are read.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options);

/// The chat template of the model's folder. Throws std::runtime_error where there is none, or an unknown one.
[[nodiscard]] ChatTemplate load_chat(const ModelOptions& options);

/// Reads the bytes of a file. Throws std::runtime_error that names it.
[[nodiscard]] std::string read_text_file(const std::filesystem::path& path);

/// Throws UsageError where the prompt of file `name` has no token: a model without BOS makes none of an empty text.
void check_not_empty(const std::vector<uint32_t>& tokens, const std::string& name);

/// Reads the text of --prompt FILE. Throws UsageError for "-" and folders, and std::runtime_error, with hints, where
/// there is no such file.
[[nodiscard]] std::string read_prompt_file(const std::filesystem::path& path);

/// Makes UTF-8 of `bytes` for JSON and terminals: each byte that belongs to no character, or to a control character
/// except line ends and tabs, becomes \xNN.
[[nodiscard]] std::string printable(const std::string& bytes);

/// The options `--task`, `--length`, `--seed`, `--haystack`.
struct TaskOptions {
  std::string task;  ///< one of those that the command has, or empty
  std::string length = "8192";
  uint64_t seed = 1;
  std::string haystack;  ///< a file; empty: the bundled prose
};
void add_task_options(CLI::App& command, TaskOptions& options,
                      const std::vector<std::string>& tasks = {"kv", "passkey"});

/// --length as a number of tokens. Throws UsageError.
[[nodiscard]] uint32_t length_of(const TaskOptions& options);

/// The prose of --haystack, or the bundled prose.
[[nodiscard]] std::string haystack_of(const TaskOptions& options);
/// A task whose context has `context_bytes` (kv: a few less). Throws UsageError.
[[nodiscard]] Task make_task(const TaskOptions& options, size_t context_bytes, size_t questions);
/// The number of bytes of the longest prompt of a question of this task.
[[nodiscard]] size_t max_question_bytes(const std::string& task);
/// `wanted`, or fewer if the context is too short for so many different questions.
[[nodiscard]] size_t fitting_questions(const std::string& task, size_t context_bytes,
                                       size_t wanted);

/// The options `--sink`, `--window`, `--threads`, `--kv-dtype`, `--kv-host`, `--cache-device`, `--dense-layers`,
/// `--classifiers`, `--budgets`, `--calibration`, and one for each setting of a session that has none of these.
struct CacheFlags {
  uint32_t sink = static_cast<uint32_t>(setting(kSessionSettings, "sink").initial);
  uint32_t window = static_cast<uint32_t>(setting(kSessionSettings, "window").initial);
  uint32_t threads = 0;
  std::string kv_dtype = "auto";  ///< auto: set_kv_dtype() names it
  std::string kv_host = "same";
  std::vector<uint32_t> dense_layers;
  std::string classifiers;
  std::string budgets;
  std::string calibration;  ///< a trace of the model, for oscar2
  std::string model;        ///< no option: model_name(), of which a calibration must be
  std::string cache_device = "auto";
  keyhole_device device = KEYHOLE_DEVICE_HOST;  ///< no option: Runner::session_device()
  std::vector<SettingValue> settings;           ///< of all other rows of the table of settings
  AuditFlags audit;                             ///< of commands that have add_audit_options()
  ParallelFlags parallel;                       ///< of commands that have add_parallel_options()
};
void add_cache_options(CLI::App& command, CacheFlags& flags);
/// Puts "budgets:FILE" with the file of --budgets in place of --prefill budgets. Throws UsageError where there is no
/// file.
void name_prefill_budgets(ModelOptions& model, const CacheFlags& flags);
/// Puts the dtype of the model's K and V in place of `--kv-dtype auto`.
void set_kv_dtype(CacheFlags& flags, const LlamaConfig& model);

/// A way to attend: an index spec, the name of one of named_ways(), or the file of --budgets.
struct AttendSpec {
  std::string text;
  std::string
      budgets;  ///< the file, which the cache began with; `text` is of heads that it does not name
  [[nodiscard]] keyhole_mode mode() const;
  /// The format through which the way's K and V pass, if they do: such a way has a cache of its own, see
  /// rounded_cache.h.
  [[nodiscard]] std::optional<KvFormat> format() const;
  [[nodiscard]] bool indexed() const { return mode() == KEYHOLE_MODE_INDEXED; }
  /// The way for tables: the spec, or the file.
  [[nodiscard]] const std::string& shown() const { return budgets.empty() ? text : budgets; }
  /// The way with the index in effect, "auto: codes:k=4,v=4". in_effect empty, or the same text: there is nothing to
  /// add.
  [[nodiscard]] std::string shown(const std::string& in_effect) const {
    return shown() + (in_effect.empty() || in_effect == text ? "" : ": " + in_effect);
  }
};

/// Makes an empty cache after checking every spec, so that minutes of prefill do not end in a misspelt index. `specs`
/// begins with that of the budgets where there are any: the first is applied. Throws UsageError with the library's
/// text for flags and specs that it refuses.
[[nodiscard]] KeyholeCache make_cache(const LlamaConfig& model, const CacheFlags& flags,
                                      uint32_t max_tokens, const std::vector<AttendSpec>& specs,
                                      const std::vector<BudgetChoice>& choices);

/// Prefills with a progress bar and Ctrl-C. Returns its seconds; the logits go to `logits` unless that is null.
double prefill_prompt(Decoder& decoder, const std::vector<uint32_t>& tokens,
                      std::vector<float>* logits);
/// Prefills without a decoder: `sink` takes every layer's K, V and queries.
double prefill_prompt(Runner& runner, const std::vector<uint32_t>& tokens, const LayerSink& sink);

/// The cost of a later turn.
struct TurnCost {
  size_t tokens = 0;
  double seconds = 0.0;
  double share = 1.0;  ///< of the blocks that its queries saw those that they attended
};
/// The turn as text: ", a turn of 2,048 tokens 1.2 s (12 % of the blocks)", empty without one; below, as JSON.
[[nodiscard]] std::string turn_text(const TurnCost& turn);
[[nodiscard]] nlohmann::ordered_json turn_json(const TurnCost& turn);
/// How several tokens of a turn attend: by the runner's pattern of prompts, or by no pattern, as steps do.
enum class TurnWay : uint8_t { prompt, steps };
/// Takes tokens behind the `before` that the cache has, as a later turn of a chat comes, with a progress bar and
/// Ctrl-C. The runner takes --chunk of them at once (0: 4096), by its pattern of prompts, or as steps do: by no
/// pattern. logits: as in prefill_prompt().
TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, std::span<const uint32_t> tokens,
                        uint32_t before, std::vector<float>* logits = nullptr,
                        TurnWay way = TurnWay::prompt);
/// extend_by_turn() with the cache's decoder: take() hands it some of the tokens, one piece after the other, each no
/// more than it takes at once.
TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, Decoder& decoder,
                        std::span<const uint32_t> tokens,
                        const std::function<void(std::span<const uint32_t>)>& take,
                        TurnWay way = TurnWay::prompt);
/// Builds the indexes of pending tokens, with a progress bar that names it. Returns its seconds.
double build_with_progress(KeyholeCache& cache, const std::string& what);

/// Makes the cache attend by `spec`, with the budget of `choice` for every head (not for --budgets, whose heads have
/// their own). For an index it sets and builds it with a progress bar. Returns the seconds of the build, 0 for exact
/// and none.
double apply_spec(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice);
/// Sets another budget for the same indexes. Returns the seconds of building partitions that it may need.
double apply_budget(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice);

}  // namespace keyhole::tools
