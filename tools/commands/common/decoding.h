// What the commands that run a model share: their common options, the bundled model, tasks as token
// lists, prefill and build with a progress bar.
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

/// `--model`; `--device` of commands that have add_device_option().
struct ModelOptions {
  std::string folder;  ///< empty: the bundled model
  std::string device = "auto";
  std::string gpu_memory;  ///< of commands that have add_gpu_memory_option(); empty: no limit
  std::string prefill = "dense";  ///< of commands that have add_prefill_option()
  bool check_prefill = false;     ///< GpuModel::check_prefill()
  uint32_t chunk = 0;             ///< of commands that have add_chunk_option(), see PrefillChoice
};
void add_model_options(CLI::App& command, ModelOptions& options);

/// Throws UsageError where a model's folder is a file, as GGUF files are.
void check_model_folder(const std::filesystem::path& folder);
/// `options.folder`, or the bundled model's. Throws as check_model_folder().
[[nodiscard]] std::filesystem::path model_folder(const ModelOptions& options);
/// Loads `options.folder` or the bundled model.
[[nodiscard]] LlamaModel load_model(const ModelOptions& options);
/// The same, ready to run.
[[nodiscard]] Runner make_runner(const ModelOptions& options, uint32_t threads);
/// The name under which results mention the model: its folder's last part.
[[nodiscard]] std::string model_name(const ModelOptions& options);

/// The tokenizer of the model's folder; nullptr where it has none. Throws std::runtime_error for one that is broken.
[[nodiscard]] std::unique_ptr<const Tokenizer> find_tokenizer(const ModelOptions& options,
                                                              const LlamaConfig& model);
/// The same; throws std::runtime_error where there is none.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options,
                                                              const LlamaConfig& model);

/// The same by the folder's config.json alone: what is wrong with text is said before gigabytes of weights are read.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options);

/// The chat template of the model's folder. Throws std::runtime_error where there is none, or none that is known.
[[nodiscard]] ChatTemplate load_chat(const ModelOptions& options);

/// The bytes of a file. Throws std::runtime_error that names it.
[[nodiscard]] std::string read_text_file(const std::filesystem::path& path);

/// Throws UsageError where a prompt, of the file `name`, has no token: a model without BOS makes none of an empty text.
void check_not_empty(const std::vector<uint32_t>& tokens, const std::string& name);

/// The text of --prompt FILE. Throws UsageError for "-" and folders, and std::runtime_error
/// where there is no such file, with hints.
[[nodiscard]] std::string read_prompt_file(const std::filesystem::path& path);

/// `bytes` as UTF-8, for JSON and terminals: what is no character, or a control but line ends and tabs, as \xNN for each byte.
[[nodiscard]] std::string printable(const std::string& bytes);

/// `--task`, `--length`, `--seed`, `--haystack`.
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

/// The prose of --haystack, or the bundled one.
[[nodiscard]] std::string haystack_of(const TaskOptions& options);
/// A task whose context has `context_bytes` (kv: a few less). Throws UsageError.
[[nodiscard]] Task make_task(const TaskOptions& options, size_t context_bytes, size_t questions);
/// The longest prompt of a question of this task in bytes.
[[nodiscard]] size_t max_question_bytes(const std::string& task);
/// `wanted`, or fewer if the context is too short for so many different questions.
[[nodiscard]] size_t fitting_questions(const std::string& task, size_t context_bytes,
                                       size_t wanted);

/// `--sink`, `--window`, `--threads`, `--kv-dtype`, `--kv-host`, `--cache-device`, `--dense-layers`, `--classifiers`,
/// `--budgets`, and an option for each setting of a session that has none of these.
struct CacheFlags {
  uint32_t sink = static_cast<uint32_t>(setting(kSessionSettings, "sink").initial);
  uint32_t window = static_cast<uint32_t>(setting(kSessionSettings, "window").initial);
  uint32_t threads = 0;
  std::string kv_dtype = "auto";  ///< auto: set_kv_dtype() names it
  std::string kv_host = "same";
  std::vector<uint32_t> dense_layers;
  std::string classifiers;
  std::string budgets;
  std::string cache_device = "auto";
  keyhole_device device = KEYHOLE_DEVICE_HOST;  ///< no option: Runner::session_device()
  std::vector<SettingValue> settings;           ///< of all other rows of the table of settings
  AuditFlags audit;                             ///< of commands that have add_audit_options()
  ParallelFlags parallel;                       ///< of commands that have add_parallel_options()
};
void add_cache_options(CLI::App& command, CacheFlags& flags);
/// Puts "budgets:FILE" with the file of --budgets in place of --prefill budgets. Throws UsageError where there is no file.
void name_prefill_budgets(ModelOptions& model, const CacheFlags& flags);
/// Puts the dtype of the model's K and V in place of `--kv-dtype auto`.
void set_kv_dtype(CacheFlags& flags, const LlamaConfig& model);

/// One way to attend: an index spec, or the name of one of named_ways(), or the file of --budgets.
struct AttendSpec {
  std::string text;
  std::string
      budgets;  ///< the file, which the cache began with; `text` is of heads that it does not name
  [[nodiscard]] keyhole_mode mode() const;
  /// Of a way whose K and V pass through a format: it has a cache of its own, see make_rounded_cache().
  [[nodiscard]] std::optional<KvFormat> format() const;
  [[nodiscard]] bool indexed() const { return mode() == KEYHOLE_MODE_INDEXED; }
  /// For tables: the spec, or the file.
  [[nodiscard]] const std::string& shown() const { return budgets.empty() ? text : budgets; }
  /// The same with the index that is in effect, "auto: codes:k=4,v=4"; empty, or the text: there is nothing to add.
  [[nodiscard]] std::string shown(const std::string& in_effect) const {
    return shown() + (in_effect.empty() || in_effect == text ? "" : ": " + in_effect);
  }
};

/// An empty cache, after a look at every spec: minutes of prefill shall not end in a misspelt index.
/// Throws UsageError with the library's text for flags and specs that it refuses.
/// `specs` begins with that of the budgets where there are any: the first that is applied.
[[nodiscard]] KeyholeCache make_cache(const LlamaConfig& model, const CacheFlags& flags,
                                      uint32_t max_tokens, const std::vector<AttendSpec>& specs,
                                      const std::vector<BudgetChoice>& choices);

/// An empty cache for a spec that has a format: K and V pass through it and are attended exactly, from fp32, so that nothing
/// but the format rounds them. Not audited. Throws UsageError for a model whose heads it does not fit.
[[nodiscard]] KeyholeCache make_rounded_cache(const LlamaConfig& model, const CacheFlags& flags,
                                              uint32_t max_tokens, const AttendSpec& spec);

/// Prefill with a progress bar and Ctrl-C. Returns its seconds; the logits go to `logits` unless
/// null.
double prefill_prompt(Decoder& decoder, const std::vector<uint32_t>& tokens,
                      std::vector<float>* logits);
/// The same without a decoder: `sink` takes every layer's K, V and queries.
double prefill_prompt(Runner& runner, const std::vector<uint32_t>& tokens, const LayerSink& sink);

/// What a later turn took.
struct TurnCost {
  size_t tokens = 0;
  double seconds = 0.0;
  double share = 1.0;  ///< of the blocks that its queries saw those that they attended
};
/// ", a turn of 2,048 tokens 1.2 s (12 % of the blocks)", empty without one; and for machines.
[[nodiscard]] std::string turn_text(const TurnCost& turn);
[[nodiscard]] nlohmann::ordered_json turn_json(const TurnCost& turn);
/// Takes tokens behind the `before` that the cache has, with a progress bar and Ctrl-C, as a later turn of a chat comes: the
/// runner's --chunk of them at once (0: 4096), by the runner's pattern of prompts. logits: as above.
TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, std::span<const uint32_t> tokens,
                        uint32_t before, std::vector<float>* logits = nullptr);
/// The same by the cache's decoder: take() hands it some of the tokens, one piece behind the other, no more than it takes at once.
TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, Decoder& decoder,
                        std::span<const uint32_t> tokens,
                        const std::function<void(std::span<const uint32_t>)>& take);
/// Builds what is pending, with a progress bar that names it. Returns its seconds.
double build_with_progress(KeyholeCache& cache, const std::string& what);

/// Lets the cache attend by `spec`, with the budget of `choice` for every head (not for --budgets, whose heads
/// have their own): for an index, sets it and builds it with a progress bar. Returns the seconds of the build, 0
/// for exact and none.
double apply_spec(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice);
/// Another budget for the same indexes. Returns the seconds of the partitions that it may need.
double apply_budget(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice);

}  // namespace keyhole::tools
