#include "tools/commands/common/decoding.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "runtime/files/json.h"
#include "tools/commands/common/bundled_model.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/setting_options.h"
#include "tools/llama/config.h"
#include "tools/mpi/ranks.h"
#include "tools/tasks/copy_task.h"
#include "tools/tasks/kv_task.h"
#include "tools/tasks/passkey_task.h"
#include "tools/tasks/ruler_task.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

/// The kind of a task in the manner of RULER.
std::optional<RulerKind> ruler_kind(const std::string& task) {
  if (task == "needles") return RulerKind::needles;
  if (task == "variables") return RulerKind::variables;
  if (task == "words") return RulerKind::words;
  return std::nullopt;
}

ModelTokens tokens_of(const LlamaConfig& model) {
  return {.vocab_size = model.vocab_size, .bos = model.bos_token, .end_tokens = model.eos_tokens};
}

}  // namespace

void add_model_options(CLI::App& command, ModelOptions& options) {
  command
      .add_option(
          "--model", options.folder,
          "Hugging Face folder (config.json and safetensors): llama, mistral, qwen2, qwen3, "
          "gemma2, gemma3 or phi3; default: the bundled "
          "model, or the folder in KEYHOLE_MODEL")
      ->type_name("DIR");
}

std::string read_text_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be opened");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string printable(const std::string& bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size();) {
    const std::string_view character =
        std::string_view(bytes).substr(at, character_bytes(bytes[at]));
    size_t behind = 0;
    const bool is_one = is_utf8(character);
    const uint32_t c = is_one ? next_character(character, behind) : 0;
    // Neither controls of ASCII nor those above it, which move a terminal's cursor.
    if (is_one && (c == '\n' || c == '\t' || (c >= 0x20 && c < 0x7F) || c >= 0xA0)) {
      text += character;
      at += character.size();
      continue;
    }
    char code[5];
    std::snprintf(code, sizeof(code), "\\x%02x", static_cast<unsigned char>(bytes[at++]));
    text += code;
  }
  return text;
}

void check_model_folder(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_regular_file(folder, ignored)) return;
  throw UsageError("--model " + folder.string() +
                   " is a file; needed: a Hugging Face folder with config.json and safetensors" +
                   (folder.extension() == ".gguf"
                        ? " (GGUF files are not read: they are made from such a folder)"
                        : ""));
}

fs::path model_folder(const ModelOptions& options) {
  if (options.folder.empty()) return bundled_model_folder();
  check_model_folder(options.folder);
  return options.folder;
}

void check_not_empty(const std::vector<uint32_t>& tokens, const std::string& name) {
  if (!tokens.empty()) return;
  throw UsageError("the prompt " + name +
                   " is empty, and this model has no token that begins a text (BOS); needed: a "
                   "text of at least one token");
}

std::string read_prompt_file(const fs::path& path) {
  std::error_code ignored;
  const std::string named = "--prompt " + path.string();
  if (path == "-") {
    throw UsageError("--prompt -: needed: a file; standard input is --prompt /dev/stdin");
  }
  if (fs::is_directory(path, ignored)) {
    throw UsageError(named + " is a folder; needed: a text file");
  }
  if (!fs::exists(path, ignored)) {
    throw std::runtime_error(
        named +
        ": there is no such file; needed: the name of a text file. A text itself "
        "comes by standard input: echo TEXT | keyhole ... --prompt /dev/stdin");
  }
  return read_text_file(path);
}

LlamaModel load_model(const ModelOptions& options) { return load_llama(model_folder(options)); }

Runner make_runner(const ModelOptions& options, uint32_t threads) {
  return {load_model(options),
          options.device,
          threads,
          {options.prefill, options.check_prefill, options.chunk, options.products}};
}

std::unique_ptr<const Tokenizer> find_tokenizer(const ModelOptions& options,
                                                const LlamaConfig& model) {
  return find_tokenizer(model_folder(options), tokens_of(model));
}

std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options,
                                                const LlamaConfig& model) {
  return load_tokenizer(model_folder(options), tokens_of(model));
}

std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options) {
  return load_tokenizer(options, load_llama_config(model_folder(options) / "config.json"));
}

ChatTemplate load_chat(const ModelOptions& options) {
  return ChatTemplate::load(model_folder(options));
}

std::string model_name(const ModelOptions& options) {
  if (options.folder.empty() && std::getenv("KEYHOLE_MODEL") == nullptr) return "bundled";
  const fs::path folder = fs::absolute(model_folder(options)).lexically_normal();
  return folder.has_filename() ? folder.filename() : folder.parent_path().filename();
}

void add_task_options(CLI::App& command, TaskOptions& options,
                      const std::vector<std::string>& tasks) {
  const auto has = [&tasks](const char* task) {
    return std::find(tasks.begin(), tasks.end(), task) != tasks.end();
  };
  std::string help = "Make the prompt: kv (key=value lines) or passkey (numbers hidden in prose)";
  if (has("copy")) help += " or copy (prose, passages of which are to be continued)";
  if (has("needles")) {
    help +=
        ", needles (several numbers of a name), variables (chains of assignments), words (the most "
        "frequent of a list)";
  }
  if (has("text")) help += "; or text: take it from a file";
  if (has("ruler")) help += "; or ruler: benchmarks with a prompt for each question, see --ruler";
  command.add_option("--task", options.task, help)->check(CLI::IsMember(tasks));
  command
      .add_option(
          "--length", options.length,
          std::string("Tokens of the task's context, by the model's vocabulary, e.g. 8192 ") +
              (has("ruler") ? "or 32k; of ruler with the answer, and several: 8k,16k" : "or 32k"))
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--seed", options.seed, "Seed of the task")->capture_default_str();
  command
      .add_option("--haystack", options.haystack,
                  "Text file of the prose of tasks that have some; default: the bundled prose")
      ->type_name("FILE");
}

uint32_t length_of(const TaskOptions& options) {
  const uint64_t length = parse_tokens(options.length);
  if (length < 64 || length > (uint64_t{1} << 26)) {
    throw UsageError("--length is " + std::to_string(length) + "; allowed: 64 to 67108864");
  }
  return static_cast<uint32_t>(length);
}

std::string haystack_of(const TaskOptions& options) {
  return read_text_file(options.haystack.empty() ? bundled_model_folder() / "haystack.txt"
                                                 : fs::path(options.haystack));
}

Task make_task(const TaskOptions& options, size_t context_bytes, size_t questions) {
  if (options.task == "kv") {
    return make_kv_task(
        {.context_bytes = context_bytes, .questions = questions, .seed = options.seed});
  }
  const std::string haystack = options.task == "words" ? "" : haystack_of(options);
  if (const auto kind = ruler_kind(options.task)) {
    return make_ruler_task({.kind = *kind,
                            .context_bytes = context_bytes,
                            .questions = questions,
                            .seed = options.seed,
                            .haystack = haystack});
  }
  return make_passkey_task({.context_bytes = context_bytes,
                            .questions = questions,
                            .seed = options.seed,
                            .haystack = haystack});
}

size_t max_question_bytes(const std::string& task) {
  return task == "kv" ? kKvQuestionBytes : kMaxPasskeyQuestionBytes;
}

size_t fitting_questions(const std::string& task, size_t context_bytes, size_t wanted) {
  const size_t most = task == "kv"       ? min_kv_lines(context_bytes)
                      : task == "copy"   ? max_copy_passages(context_bytes)
                      : ruler_kind(task) ? max_ruler_questions(context_bytes)
                                         : max_passkeys(context_bytes);
  return std::max<size_t>(1, std::min(wanted, most));
}

void add_cache_options(CLI::App& command, CacheFlags& flags) {
  command.add_option("--sink", flags.sink, setting(kSessionSettings, "sink").help)
      ->capture_default_str();
  command.add_option("--window", flags.window, setting(kSessionSettings, "window").help)
      ->capture_default_str();
  command
      .add_option("--threads", flags.threads,
                  "Worker threads; 0: one per core, two fewer with a GPU")
      ->capture_default_str();
  command
      .add_option("--kv-dtype", flags.kv_dtype,
                  "How K and V are stored: f16, bf16, f32, or auto: as the model's weights are")
      ->check(CLI::IsMember({"auto", "f16", "bf16", "f32"}))
      ->capture_default_str();
  add_kv_host_option(command, flags.kv_host);
  command
      .add_option("--cache-device", flags.cache_device,
                  "Where sink and window lie: host, cuda, or auto: where the model runs")
      ->check(CLI::IsMember({"auto", "host", "cuda"}))
      ->capture_default_str();
  command
      .add_option(
          "--dense-layers", flags.dense_layers,
          "Layers that always attend exactly, e.g. 0,1; those with a sliding window are not "
          "counted")
      ->delimiter(',')
      ->type_name("L,...");
  command
      .add_option("--classifiers", flags.classifiers,
                  "Trained partitions and query classifiers for saap, written by train-saap")
      ->type_name("FILE");
  command
      .add_option(
          "--budgets", flags.budgets,
          "Index and budget of each head, written by calibrate; --index, --attend, --tail and "
          "--target are those of what it does not name")
      ->type_name("FILE");
  command
      .add_option("--calibration", flags.calibration,
                  "A trace of this model, written by record, to which --index oscar2 fits its "
                  "rotations; best of another text")
      ->type_name("FILE");
  add_session_settings(command, flags.settings);
}

void name_prefill_budgets(ModelOptions& model, const CacheFlags& flags) {
  if (model.prefill != "budgets") return;
  if (flags.budgets.empty()) {
    throw UsageError("--prefill budgets: needed: --budgets FILE, or --prefill budgets:FILE");
  }
  model.prefill = "budgets:" + flags.budgets;
}

void set_kv_dtype(CacheFlags& flags, const LlamaConfig& model) {
  if (flags.kv_dtype != "auto") return;
  flags.kv_dtype = dtype_name(kv_dtype_of(model));
}

KeyholeCache make_cache(const LlamaConfig& model, const CacheFlags& flags, uint32_t max_tokens,
                        const std::vector<AttendSpec>& specs,
                        const std::vector<BudgetChoice>& choices) {
  KeyholeCacheOptions options;
  options.max_tokens = max_tokens;
  options.sink = flags.sink;
  options.window = flags.window;
  options.threads = flags.threads;
  options.ranks = cache_ranks(flags.parallel, flags.device);
  options.device = flags.device;
  if (flags.kv_dtype != "auto") options.kv_dtype = dtype_of(flags.kv_dtype);
  options.kv_host = kv_host_of(flags.kv_host);
  options.dense_layers = flags.dense_layers;
  options.classifiers = flags.classifiers;
  options.tail_partition = common_partition(choices);
  options.settings = flags.settings;
  options.audit_share = flags.audit.share;
  options.audit_action = flags.audit.action_code();
  options.audit_bound = flags.audit.bound;
  std::string prefix;
  const auto make = [&] {
    KeyholeCache cache(model, options);
    for (const AttendSpec& spec : specs) {
      prefix = "--index " + spec.text + ": ";
      if (spec.indexed()) cache.set_index(spec.text);
    }
    prefix.clear();
    const std::string last = specs.empty() ? "" : specs.back().text;
    for (const BudgetChoice& choice : choices) {
      if (!choice.reads_codes() || has_codes(last)) cache.set_budget(choice.budget());
    }
    return cache;
  };
  try {
    KeyholeCache cache = make();
    if (flags.budgets.empty()) return cache;
    // The list has one way more, because it begins with the budgets; heads that these do not name have the first spec
    // and choice.
    options.budgets = flags.budgets;
    options.index = specs.front().text;
    if (!choices.empty()) options.budget = for_index(choices.front(), options.index).budget();
    return {model, options};
  } catch (const LibraryError& error) {
    if (error.status() == KEYHOLE_INVALID_ARGUMENT) throw UsageError(prefix + error.what());
    throw;
  }
}

keyhole_mode AttendSpec::mode() const {
  const NamedWay* way = find_way(text);
  return way == nullptr ? KEYHOLE_MODE_INDEXED : way->mode;
}

std::optional<KvFormat> AttendSpec::format() const {
  const NamedWay* way = find_way(text);
  return way == nullptr ? std::nullopt : way->format;
}

namespace {

/// Times `run`, which is given a progress function.
template <class Run>
double prefill_with_progress(size_t tokens, const Run& run) {
  Progress bar("prefill of " + format_count(tokens) + " tokens");
  const Clock::time_point start = Clock::now();
  run([&](double fraction) {
    throw_if_interrupted();
    bar.update(fraction);
  });
  return seconds_since(start);
}

}  // namespace

double prefill_prompt(Decoder& decoder, const std::vector<uint32_t>& tokens,
                      std::vector<float>* logits) {
  return prefill_with_progress(tokens.size(), [&](const PrefillProgress& progress) {
    const std::span<const float> last = decoder.prefill(tokens, progress);
    if (logits != nullptr) logits->assign(last.begin(), last.end());
  });
}

double prefill_prompt(Runner& runner, const std::vector<uint32_t>& tokens, const LayerSink& sink) {
  return prefill_with_progress(tokens.size(), [&](const PrefillProgress& progress) {
    (void)runner.prefill(tokens, sink, progress);
  });
}

std::string turn_text(const TurnCost& turn) {
  if (turn.tokens == 0) return "";
  constexpr double kPercent = 100.0;
  const std::string share =
      turn.share < 1.0 ? " (" + format_number(kPercent * turn.share) + " % of the blocks)" : "";
  return ", a turn of " + format_count(turn.tokens) + " tokens " + format_duration(turn.seconds) +
         share;
}

nlohmann::ordered_json turn_json(const TurnCost& turn) {
  return {{"tokens", turn.tokens}, {"seconds", turn.seconds}, {"share", turn.share}};
}

TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, std::span<const uint32_t> tokens,
                        uint32_t before, std::vector<float>* logits, TurnWay way) {
  const std::unique_ptr<Decoder> decoder = runner.decoder(cache, before);
  const auto take = [&](std::span<const uint32_t> some) {
    const std::span<const float> last = decoder->extend(some);
    if (logits != nullptr) logits->assign(last.begin(), last.end());
  };
  return extend_by_turn(runner, cache, *decoder, tokens, take, way);
}

TurnCost extend_by_turn(Runner& runner, KeyholeCache& cache, Decoder& decoder,
                        std::span<const uint32_t> tokens,
                        const std::function<void(std::span<const uint32_t>)>& take, TurnWay way) {
  // More new tokens at once are not attended by codes on a GPU.
  constexpr size_t kUsualChunk = 4096, kChunkOfSteps = 1024;
  const size_t usual_chunk = way == TurnWay::steps ? kChunkOfSteps : kUsualChunk;
  const size_t chunk = runner.prefill_chunk() == 0 ? usual_chunk : runner.prefill_chunk();
  const size_t usual = decoder.tokens_at_once();
  decoder.take_at_once(std::min(chunk, tokens.size()));
  cache.set_extend_pattern(way == TurnWay::prompt ? runner.prefill_pattern() : "");
  const PromptBlocks blocks_before = cache.extend_blocks();
  TurnCost cost;
  cost.tokens = tokens.size();
  Progress bar("turn of " + format_count(tokens.size()) + " tokens");
  const Clock::time_point start = Clock::now();
  for (size_t i = 0; i < tokens.size();) {
    throw_if_interrupted();
    bar.update(static_cast<double>(i) / static_cast<double>(tokens.size()));
    const size_t count = std::min(decoder.tokens_at_once(), tokens.size() - i);
    take(tokens.subspan(i, count));
    i += count;
  }
  cost.seconds = seconds_since(start);
  const PromptBlocks blocks = cache.extend_blocks();
  cost.share =
      PromptBlocks{blocks.attended - blocks_before.attended, blocks.seen - blocks_before.seen}
          .share();
  cache.set_extend_pattern("");
  decoder.take_at_once(usual);
  return cost;
}

double build_with_progress(KeyholeCache& cache, const std::string& what) {
  Progress bar("build of " + what);
  const keyhole_progress_fn show = [](void* user, double fraction, const char*) -> int32_t {
    static_cast<Progress*>(user)->update(fraction);
    return interrupted() ? 1 : 0;
  };
  const Clock::time_point start = Clock::now();
  try {
    cache.build(show, &bar);
  } catch (const LibraryError&) {
    throw_if_interrupted();  // what the library calls cancelled
    throw;
  }
  return seconds_since(start);
}

double apply_spec(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice) {
  cache.set_mode(spec.mode(), 0);
  if (!spec.budgets.empty()) return build_with_progress(cache, "the budgets' indexes");
  // The index first: a budget may ask for what only that has.
  if (spec.indexed()) cache.set_index(spec.text);
  cache.set_budget(choice.budget());
  return spec.indexed() ? build_with_progress(cache, spec.text) : 0.0;
}

double apply_budget(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice) {
  cache.set_budget(choice.budget());
  return choice.needs_partitions() ? build_with_progress(cache, "partitions of " + spec.text) : 0.0;
}

}  // namespace keyhole::tools
