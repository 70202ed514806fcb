#include "tools/commands/common/recording.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "tools/commands/common/asking.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/commands/common/task_fit.h"
#include "tools/io/trace.h"
#include "tools/llama/engine_config.h"
#include "tools/llama/prefill.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"
#include "tools/tokenizer/token_file.h"

namespace keyhole::tools {
namespace {

struct Prompt {
  std::vector<uint32_t> tokens;
  std::string task;
  std::string description;
};

/// Fewer tokens than any question with its answer has.
constexpr size_t kMinExchangeTokens = 13;

/// A context of the task, followed by questions with their answers until `length` is full: its last
/// tokens are those of decoding steps that retrieve.
std::vector<uint32_t> task_transcript(const RecordOptions& options, const Tokenizer& tokenizer,
                                      uint32_t length) {
  const std::string& kind = options.task.task;
  const Asking asking(tokenizer,
                      options.chat ? std::optional(load_chat(options.model)) : std::nullopt);
  // One question and answer more than the queries cover, because the last may not fit. In a chat they have more words.
  const size_t reserve = options.queries + max_question_bytes(kind) + 48 + (options.chat ? 256 : 0);
  if (length < 2 * reserve + 1) {
    throw UsageError("--length is too short for --queries " + std::to_string(options.queries) +
                     "; allowed: " + std::to_string(2 * reserve + 1) + " or more");
  }
  FittedTask fitted =
      fit_task(options.task, static_cast<uint32_t>(length - reserve), 0,
               reserve / kMinExchangeTokens + 1, token_density(tokenizer, options.task),
               [&](const std::string& context) { return asking.context(context); });
  std::vector<uint32_t>& tokens = fitted.tokens;
  for (size_t i = 0;; ++i) {
    const Question& question = fitted.task.questions[i % fitted.task.questions.size()];
    std::vector<uint32_t> exchange =
        i == 0 ? asking.first_question(question) : asking.next_question(question);
    const std::vector<uint32_t> answer = asking.answer(question);
    exchange.insert(exchange.end(), answer.begin(), answer.end());
    if (tokens.size() + exchange.size() > length) return std::move(tokens);
    tokens.insert(tokens.end(), exchange.begin(), exchange.end());
  }
}

Prompt make_prompt(const RecordOptions& options) {
  const int sources = static_cast<int>(!options.prompt_file.empty()) +
                      static_cast<int>(!options.token_file.empty()) +
                      static_cast<int>(!options.task.task.empty());
  if (sources != 1) throw UsageError("name exactly one of --prompt, --tokens and --task");
  if (options.chat && options.task.task.empty()) throw UsageError("--chat is of --task");
  if (!options.token_file.empty()) {
    return {read_token_file(options.token_file), "prompt", options.token_file};
  }
  const auto tokenizer = load_tokenizer(options.model);
  if (!options.prompt_file.empty()) {
    return {tokenizer->encode_prompt(read_prompt_file(options.prompt_file)), "prompt",
            options.prompt_file};
  }
  return {task_transcript(options, *tokenizer, length_of(options.task)), options.task.task,
          options.task.task + " context with questions and answers at its end"};
}

/// The last `queries` positions, and `training` of those before, evenly spread.
TraceWriter::Options choose_positions(const RecordOptions& options, size_t tokens) {
  TraceWriter::Options chosen;
  chosen.kv_type = options.dtype == "f32" ? ElementType::f32 : ElementType::f16;
  if (options.queries >= tokens) {
    throw UsageError("--queries is " + std::to_string(options.queries) + "; allowed: 1 to " +
                     std::to_string(tokens - 1) + " for a prompt of " + std::to_string(tokens) +
                     " tokens");
  }
  const size_t first_query = tokens - options.queries;
  chosen.query_positions.resize(options.queries);
  std::iota(chosen.query_positions.begin(), chosen.query_positions.end(),
            static_cast<uint32_t>(first_query));
  const size_t training = std::min<size_t>(options.training, first_query);
  for (size_t i = 0; i < training; ++i) {
    chosen.training_positions.push_back(
        static_cast<uint32_t>((i + 1) * first_query / training - 1));
  }
  return chosen;
}

TraceInfo describe(const RecordOptions& options, const LlamaConfig& model, const Prompt& prompt) {
  TraceInfo info;
  info.q_heads = model.q_heads;
  info.kv_heads = model.kv_heads;
  info.head_dim = model.head_dim;
  // A RoPE that the library cannot undo counts as none, as for the library.
  const keyhole_engine_config engine = engine_config(model);
  info.scale = engine.scale;
  info.softcap = engine.softcap;
  info.rope.theta = engine.rope_theta;
  const RopeScaling& scaling = model.rope.scaling;
  if (engine.rope_scaling != KEYHOLE_ROPE_NONE) {
    info.rope.scaling = scaling.kind == RopeScaling::Kind::linear ? "linear" : "llama3";
    info.rope.factor = static_cast<float>(scaling.factor);
    info.rope.low_freq_factor = static_cast<float>(scaling.low_freq_factor);
    info.rope.high_freq_factor = static_cast<float>(scaling.high_freq_factor);
    info.rope.original_context = scaling.original_context;
  }
  const uint32_t layers = model.full_layers();
  if (layers == 0) {
    throw UsageError("every layer of this model has a sliding window: there is nothing to record");
  }
  info.layers = options.layers;
  if (info.layers.empty()) {
    info.layers.resize(layers);
    std::iota(info.layers.begin(), info.layers.end(), 0U);
  }
  std::sort(info.layers.begin(), info.layers.end());
  info.layers.erase(std::unique(info.layers.begin(), info.layers.end()), info.layers.end());
  if (info.layers.back() >= layers) {
    throw UsageError(
        "--layers names layer " + std::to_string(info.layers.back()) + "; allowed: 0 to " +
        std::to_string(layers - 1) +
        (layers < model.layers ? ", which count the layers without a sliding window" : ""));
  }
  info.tokens = static_cast<uint32_t>(prompt.tokens.size());
  info.model = model_name(options.model);
  info.task = prompt.task;
  info.prompt = prompt.description;
  info.seed = options.task.seed;
  return info;
}

/// Collects the chunks of a layer and writes its heads when the layer is complete.
class LayerRecorder {
 public:
  LayerRecorder(const TraceInfo& info, const LlamaConfig& model, TraceWriter::Options positions,
                TraceWriter& writer)
      : info_(info),
        places_(model.places_among_full()),
        positions_(std::move(positions)),
        writer_(writer) {}

  void take(const LayerChunk& chunk) {
    const std::optional<uint32_t> place = places_[chunk.layer];
    if (!place || !std::binary_search(info_.layers.begin(), info_.layers.end(), *place)) return;
    const size_t kv_width = size_t{info_.kv_heads} * info_.head_dim;
    keys_.insert(keys_.end(), chunk.k, chunk.k + chunk.tokens * kv_width);
    values_.insert(values_.end(), chunk.v, chunk.v + chunk.tokens * kv_width);
    pick(chunk, positions_.query_positions, queries_);
    pick(chunk, positions_.training_positions, training_);
    if (chunk.first_token + chunk.tokens == info_.tokens) write_layer();
  }

 private:
  void pick(const LayerChunk& chunk, const std::vector<uint32_t>& positions,
            std::vector<float>& rows) const {
    const size_t q_width = size_t{info_.q_heads} * info_.head_dim;
    auto at = std::lower_bound(positions.begin(), positions.end(), chunk.first_token);
    for (; at != positions.end() && *at < chunk.first_token + chunk.tokens; ++at) {
      const float* row = chunk.q + (*at - chunk.first_token) * q_width;
      rows.insert(rows.end(), row, row + q_width);
    }
  }

  void write_layer() {
    const size_t d = info_.head_dim;
    const size_t kv_width = info_.kv_heads * d;
    const size_t q_width = info_.q_heads * d;
    for (uint32_t head = 0; head < info_.kv_heads; ++head) {
      const size_t q_offset = head * info_.group() * d;
      writer_.write_head(
          {keys_.data() + head * d, info_.tokens, kv_width},
          {values_.data() + head * d, info_.tokens, kv_width},
          {queries_.data() + q_offset, positions_.query_positions.size(), q_width},
          {training_.data() + q_offset, positions_.training_positions.size(), q_width});
    }
    for (std::vector<float>* rows : {&keys_, &values_, &queries_, &training_}) rows->clear();
  }

  const TraceInfo& info_;
  std::vector<std::optional<uint32_t>> places_;  // of the model's layers among those of a trace
  TraceWriter::Options positions_;
  TraceWriter& writer_;
  std::vector<float> keys_, values_, queries_, training_;
};

}  // namespace

std::vector<uint32_t> prompt_tokens(const RecordOptions& options) {
  return make_prompt(options).tokens;
}

std::string record_trace(const RecordOptions& options) {
  const LlamaConfig model = load_llama_config(model_folder(options.model) / "config.json");
  const Prompt prompt = make_prompt(options);
  check_not_empty(prompt.tokens, prompt.description);
  GpuMemoryRequest memory;
  memory.prompt = prompt.tokens.size();
  CacheFlags no_session;
  (void)apply_gpu_memory(options.model, memory, no_session);
  const TraceInfo info = describe(options, model, prompt);
  const TraceWriter::Options positions = choose_positions(options, prompt.tokens.size());
  warn_of_context(model, prompt.tokens.size());
  Runner runner = make_runner(options.model, options.threads);
  TraceWriter writer(options.out, info, positions);
  LayerRecorder recorder(info, model, positions, writer);
  {
    Progress bar("recording " + format_count(info.tokens) + " tokens");
    (void)runner.prefill(
        prompt.tokens, [&](const LayerChunk& chunk) { recorder.take(chunk); },
        [&](double fraction) {
          throw_if_interrupted();
          bar.update(fraction);
        });
  }
  writer.finish();
  return options.out + ": " + format_count(info.tokens) + " tokens, " +
         std::to_string(info.layers.size()) + " layers x " + std::to_string(info.kv_heads) +
         " KV heads, " + std::to_string(positions.query_positions.size()) + " decode-time and " +
         std::to_string(positions.training_positions.size()) + " training positions, " +
         file_size_text(options.out);
}

TemporaryTraces::TemporaryTraces() {
  std::string pattern = (std::filesystem::temp_directory_path() / "keyhole_traces_XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw std::runtime_error(pattern + ": a folder for traces cannot be made");
  }
  folder_ = pattern;
}

TemporaryTraces::~TemporaryTraces() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void TemporaryTraces::add(RecordOptions options, const std::string& name) {
  options.out = (folder_ / (name + ".safetensors")).string();
  (void)record_trace(options);
  paths_.push_back(options.out);
}

}  // namespace keyhole::tools
