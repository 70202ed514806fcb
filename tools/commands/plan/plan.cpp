// keyhole plan: the memory of a session before anything is allocated.
#include <keyhole/keyhole.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>

#include "runtime/files/json.h"
#include "runtime/files/settings.h"
#include "tools/api/handles.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/options.h"
#include "tools/commands/plan/card_report.h"
#include "tools/llama/gpu_sizes.h"
#include "tools/llama/keyhole_cache.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

constexpr const Setting& kRowsBy = setting(kSessionSettings, "exact_rows_by");

struct PlanOptions {
  std::string model;
  uint32_t layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  std::string dtype = "auto";
  std::string kv_host = "same";
  std::string exact_rows_by = "auto";
  std::string context;
  std::vector<std::string> indexes;
  std::string budgets;
  std::string weights, gpu_memory, host_memory, pinned_memory;
  uint32_t sink = 128, window = 512;
  uint32_t ranks = 1;
  std::string json;
  std::string card, active_weights;
  uint32_t exact_rows = 16;
};

// Facts of a text that is spread over ranks: what keyhole/parallel.h says of blocks, and of what each rank sends to
// every other in a step of a layer (the states of all query heads, and what names the call).
constexpr uint64_t kBlockTokens = 4096;
constexpr uint64_t kCallBytes = 48;

/// The largest share that a rank has of a text.
uint64_t largest_share(uint64_t tokens, uint64_t ranks) {
  const uint64_t round = kBlockTokens * ranks;
  return tokens / round * kBlockTokens + std::min(tokens % round, kBlockTokens);
}

/// The longest text of which no rank has more than so many tokens.
uint64_t longest_text(uint64_t share, uint64_t ranks) {
  if (ranks == 1) return share;
  // A share that ends within a block is rank 0's, which is where the text ends.
  constexpr uint64_t kMost = uint64_t{1} << 31U;  // tokens of a session, on all ranks together
  return std::min(kMost, share / kBlockTokens * kBlockTokens * ranks + share % kBlockTokens);
}

// Options as numbers.
struct Request {
  keyhole_engine_config engine;
  std::vector<keyhole_layer_config>
      layers;                ///< to which the engine points: of a model with sliding windows
  uint32_t full_layers = 0;  ///< that attend to all tokens
  uint64_t context = 0;      ///< of the rank that holds most
  uint64_t whole_context = 0;
  uint32_t ranks = 1;
  uint64_t weights = 0;
  std::optional<uint64_t> gpu_memory, host_memory, pinned_memory;
  std::optional<Card> card;
  /// What the decoder takes for a prompt of all tokens on the GPU, where the shape is a model's.
  std::optional<GpuPrefillSizes> prompt;
};

uint64_t bytes_sent_per_token(const Request& request) {
  const keyhole_engine_config& e = request.engine;
  return uint64_t{request.full_layers} *
         (kCallBytes + uint64_t{e.q_heads} * (e.head_dim + 1) * sizeof(float));
}

struct Row {
  std::string index;
  keyhole_memory_plan plan;
};

LlamaConfig take_shape_of_model(PlanOptions& options) {
  check_model_folder(options.model);
  const LlamaConfig config =
      load_llama_config(std::filesystem::path(options.model) / "config.json");
  const auto set = [](uint32_t& option, uint32_t value) {
    if (option == 0) option = value;  // what is given on the command line goes first
  };
  if (config.full_layers() == 0 && options.layers == 0) {
    throw UsageError(
        "every layer of this model has a sliding window: a session would hold nothing");
  }
  set(options.layers, config.full_layers());
  set(options.heads, config.q_heads);
  set(options.kv_heads, config.kv_heads);
  set(options.head_dim, config.head_dim);
  if (options.dtype == "auto") options.dtype = dtype_name(kv_dtype_of(config));
  return config;
}

/// The card's memory is the limit where none is given, but for what CUDA and a display take of it.
Card take_card(PlanOptions& options) {
  constexpr uint64_t kOthers = uint64_t{1} << 30U;
  if (options.ranks > 1) throw UsageError("--card estimates one rank; --ranks is more");
  Card card = find_card(options.card);
  if (options.gpu_memory.empty()) {
    options.gpu_memory = std::to_string(card.memory - std::min(card.memory / 2, kOthers));
  }
  return card;
}

Request understand(PlanOptions& options) {
  std::optional<LlamaConfig> model;
  if (!options.model.empty()) model = take_shape_of_model(options);
  if (options.dtype == "auto") options.dtype = "f16";
  const auto require = [](uint32_t value, const char* name) {
    if (value == 0)
      throw UsageError(std::string("give ") + name + ", or --model DIR to read the shape from");
  };
  require(options.layers, "--layers");
  require(options.heads, "--heads");
  require(options.kv_heads, "--kv-heads");
  require(options.head_dim, "--head-dim");

  Request request;
  if (!options.card.empty()) request.card = take_card(options);
  keyhole_engine_config& engine = request.engine;
  keyhole_engine_config_init(&engine);
  engine.layers = options.layers;
  engine.q_heads = options.heads;
  engine.kv_heads = options.kv_heads;
  engine.head_dim = options.head_dim;
  engine.kv_dtype = dtype_of(options.dtype);
  request.full_layers = engine.layers;
  // Their rings are memory, too; layers that the command line names are all full.
  const bool is_models_own =
      model && options.layers == model->full_layers() && options.heads == model->q_heads &&
      options.kv_heads == model->kv_heads && options.head_dim == model->head_dim;
  if (is_models_own && model->full_layers() < model->layers) {
    request.layers = add_sliding_layers(*model, engine);
  }
  request.whole_context = parse_tokens(options.context);
  request.ranks = options.ranks;
  request.context = largest_share(request.whole_context, request.ranks);
  if (model) warn_of_context(*model, request.whole_context);
  if (is_models_own && request.whole_context != 0) {
    const size_t of_number = engine.kv_dtype == KEYHOLE_F32 ? 4 : 2;
    request.prompt = gpu_prefill_sizes(*model, request.whole_context, of_number, "dense");
  }
  if (!options.weights.empty()) request.weights = parse_bytes(options.weights);
  if (!options.gpu_memory.empty()) request.gpu_memory = parse_bytes(options.gpu_memory);
  if (!options.host_memory.empty()) request.host_memory = parse_bytes(options.host_memory);
  if (!options.pinned_memory.empty()) request.pinned_memory = parse_bytes(options.pinned_memory);
  engine.device = request.gpu_memory ? KEYHOLE_DEVICE_CUDA : KEYHOLE_DEVICE_HOST;
  if (!request.gpu_memory) request.prompt.reset();
  if (request.card) {
    engine.device_capability =
        static_cast<uint32_t>(10 * request.card->compute_major + request.card->compute_minor);
  }
  return request;
}

// The memory that the weights leave, as the library takes it: 0 would mean no limit, so one byte stands for nothing.
uint64_t left_by_weights(uint64_t memory, uint64_t weights) {
  return memory > weights ? memory - weights : 1;
}

keyhole_memory_plan plan_one(const Request& request, const PlanOptions& options,
                             const std::string& index, const std::string& budgets) {
  keyhole_session_config session;
  keyhole_session_config_init(&session);
  session.sink = options.sink;
  session.window = options.window;
  session.kv_host = kv_host_of(options.kv_host);
  session.exact_rows_by = number_of_word(kRowsBy, options.exact_rows_by).value_or(0);
  session.index = index.c_str();
  if (!budgets.empty()) session.budgets = budgets.c_str();
  // Here, too, 0 bytes are a limit.
  if (request.pinned_memory) {
    session.pinned_memory_limit = std::max<uint64_t>(*request.pinned_memory, 1);
  }
  uint64_t device_limit = 0;
  uint64_t host_limit = 0;
  // Weights lie where the model computes: on the GPU, or without one in host memory.
  if (request.gpu_memory) device_limit = left_by_weights(*request.gpu_memory, request.weights);
  if (request.host_memory) {
    host_limit = left_by_weights(*request.host_memory, request.gpu_memory ? 0 : request.weights);
  }
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  const keyhole_status status =
      keyhole_plan(&request.engine, &session, request.context, device_limit, host_limit, &plan);
  if (status == KEYHOLE_INVALID_ARGUMENT) throw UsageError(keyhole_last_error());
  check(status);
  return plan;
}

std::string limit_text(const std::optional<uint64_t>& limit) {
  return limit ? format_bytes(*limit) : "no limit";
}

/// Layers whose codes lie on the device, the host's those before them.
std::string layers_text(const keyhole_memory_plan& plan, uint32_t layers) {
  if (plan.code_layers == 0) return "none";
  return std::to_string(plan.code_layers) + " of " + std::to_string(layers) + ", from " +
         std::to_string(plan.first_code_layer);
}

/// Who reads the tokens that layers with codes attend exactly: "device" or "host"; "" where no layer has codes.
const char* reader_of_rows(const keyhole_memory_plan& plan) {
  if (plan.code_layers == 0) return "";
  return plan.rows_by_host != 0 ? "host" : "device";
}

void print(const Request& request, const std::vector<Row>& rows) {
  const Style style = style_of(stdout);
  const keyhole_engine_config& e = request.engine;
  if (request.ranks > 1) {
    const uint64_t sent = bytes_sent_per_token(request);
    std::printf(
        "%s tokens over %u ranks, by blocks of %s; what follows is of the rank that holds most\n"
        "a token: every rank sends %s to each other in %u messages, and receives %s\n",
        format_count(request.whole_context).c_str(), request.ranks,
        format_count(kBlockTokens).c_str(), format_bytes(sent).c_str(), request.full_layers,
        format_bytes(sent * (request.ranks - 1)).c_str());
  }
  const std::string sliding =
      request.layers.empty()
          ? ""
          : " (" + std::to_string(e.layers - request.full_layers) + " with a sliding window)";
  std::printf("%u layers%s, %u query and %u KV heads of %u; %s tokens hold %s of K and V\n",
              e.layers, sliding.c_str(), e.q_heads, e.kv_heads, e.head_dim,
              format_count(request.context).c_str(),
              format_bytes(rows.front().plan.kv_bytes).c_str());
  std::printf("weights %s, GPU memory %s, host memory %s, to be pinned %s\n\n",
              format_bytes(request.weights).c_str(),
              request.gpu_memory ? format_bytes(*request.gpu_memory).c_str() : "not used",
              limit_text(request.host_memory).c_str(), limit_text(request.pinned_memory).c_str());
  Table table({{"index", Table::Align::left},
               {"device"},
               {"of it codes"},
               {"in layers"},
               {"rows read by"},
               {"pinned"},
               {"host"},
               {"of it indexes"},
               {"fits", Table::Align::left},
               {"longest context"}});
  for (const auto& [index, plan] : rows) {
    table.add_row(
        {index, format_bytes(plan.device_bytes), format_bytes(plan.code_bytes),
         layers_text(plan, request.full_layers), reader_of_rows(plan),
         format_bytes(plan.pinned_bytes + plan.pinned_kv_bytes), format_bytes(plan.host_bytes),
         format_bytes(plan.index_bytes),
         plan.fits != 0 ? tinted("yes", Tint::green, style) : tinted("no", Tint::red, style),
         format_count(longest_text(plan.longest_context, request.ranks))});
  }
  std::fputs(table.text(style).c_str(), stdout);
  const bool auto_on_gpu = std::any_of(rows.begin(), rows.end(), [](const Row& row) {
    return row.index.rfind("auto: ", 0) == 0 && row.plan.code_layers != 0;
  });
  if (auto_on_gpu) {
    // bench/RESULTS.md, "Lists of codes on a device".
    std::puts(
        "\nauto takes no lists of codes on a GPU: a layer whose heads look at everything takes a "
        "seventh longer with\nthem, and 4 bits lose more. Where heads look at little, lists=64 "
        "takes "
        "44 us a layer in place of 70 (an H100,\n8 KV heads of 128 at 128k) and two and a half "
        "times "
        "the memory of codes.");
  }
  if (request.prompt) {
    std::printf(
        "\nA prompt of all tokens, computed by keyhole, takes %s of the GPU and pins %s beside "
        "these until its first token.\n",
        format_bytes(request.prompt->device_bytes()).c_str(),
        format_bytes(request.prompt->pinned_bytes(true)).c_str());
  }
  if (!request.gpu_memory) {
    std::puts("\nWithout --gpu-memory the resident tokens (device) lie in host memory as well.");
  }
}

ordered_json to_json(const Request& request, const PlanOptions& options,
                     const std::vector<Row>& rows) {
  const auto limit = [](const std::optional<uint64_t>& bytes) {
    return bytes ? ordered_json(*bytes) : ordered_json(nullptr);
  };
  const keyhole_engine_config& e = request.engine;
  const auto prompt = [&]() -> ordered_json {
    if (!request.prompt) return nullptr;
    return {{"device_bytes", request.prompt->device_bytes()},
            {"pinned_bytes", request.prompt->pinned_bytes(true)}};
  };
  ordered_json plans = ordered_json::array();
  for (const auto& [index, plan] : rows) {
    plans.push_back({{"index", index},
                     {"kv_bytes", plan.kv_bytes},
                     {"host_bytes", plan.host_bytes},
                     {"index_bytes", plan.index_bytes},
                     {"device_bytes", plan.device_bytes},
                     {"code_bytes", plan.code_bytes},
                     {"code_layers", plan.code_layers},
                     {"first_code_layer", plan.first_code_layer},
                     {"rows_by_host", plan.rows_by_host != 0},
                     {"pinned_bytes", plan.pinned_bytes},
                     {"pinned_kv_bytes", plan.pinned_kv_bytes},
                     {"fits", plan.fits != 0},
                     {"longest_context", longest_text(plan.longest_context, request.ranks)}});
  }
  return {{"layers", e.layers},
          {"sliding_layers", e.layers - request.full_layers},
          {"heads", e.q_heads},
          {"kv_heads", e.kv_heads},
          {"head_dim", e.head_dim},
          {"dtype", options.dtype},
          {"kv_host", options.kv_host},
          {"context", request.whole_context},
          {"ranks", request.ranks},
          {"rank_context", request.context},
          {"rank_sends_per_token", request.ranks > 1 ? bytes_sent_per_token(request) : 0},
          {"sink", options.sink},
          {"window", options.window},
          {"weights", request.weights},
          {"gpu_memory", limit(request.gpu_memory)},
          {"host_memory", limit(request.host_memory)},
          {"pinned_memory", limit(request.pinned_memory)},
          {"prompt", prompt()},
          {"plans", plans}};
}

/// Adds what the next better choice would take, where some codes of an index are not on the device, or where `auto`
/// has chosen fewer bits than there are.
void add_next_better(const Request& request, const PlanOptions& options, std::vector<Row>& rows) {
  constexpr const char* kFewest = "codes:k=2,v=2";
  constexpr const char* kBest = "codes:k=4,v=4";
  const bool was_auto = rows.back().index.rfind("auto: ", 0) == 0;
  const keyhole_memory_plan& plan = rows.back().plan;
  const std::string index = plan.index;
  if (!request.gpu_memory || index.rfind("codes", 0) != 0) return;
  // Without limits the library plans them on the device, whether they fit it or not.
  Request unlimited = request;
  unlimited.gpu_memory = uint64_t{1} << 62;
  unlimited.pinned_memory.reset();
  const auto all_layers_of = [&](const std::string& spec) {
    return plan_one(unlimited, options, spec, "");
  };
  std::string next = was_auto && plan.code_layers == 0 ? kFewest : index;
  if (plan.code_layers == all_layers_of(next).code_layers) {
    if (!was_auto || index.rfind(kBest, 0) == 0) return;
    next = kBest;
  }
  Row row{"next better: " + next, all_layers_of(next)};
  if (row.plan.code_layers == 0) return;
  row.plan.fits = 0;
  row.plan.longest_context = plan_one(request, options, next, "").longest_context;
  rows.push_back(row);
}

CardQuestion question_of(const Request& request, const PlanOptions& options) {
  CardQuestion question;
  question.card = *request.card;
  question.engine = request.engine;
  question.full_layers = request.full_layers;
  question.context = request.context;
  question.weights =
      options.active_weights.empty() ? request.weights : parse_bytes(options.active_weights);
  question.all_weights = request.weights;
  question.memory = request.gpu_memory.value_or(question.card.memory);
  question.resident = std::min(uint64_t{options.sink} + options.window, request.context);
  question.exact_rows = options.exact_rows;
  question.int8_on_host = options.kv_host == "int8";
  return question;
}

std::vector<CardEstimate> estimates_of(const CardQuestion& question, const std::vector<Row>& rows) {
  std::vector<CardEstimate> all;
  for (const auto& [index, plan] : rows) {
    all.push_back(estimate_codes(question, index, plan));
  }
  all.push_back(estimate_full(question));
  return all;
}

void run(PlanOptions options) {
  const Request request = understand(options);
  std::vector<Row> rows;
  if (options.indexes.empty() && options.budgets.empty()) options.indexes.push_back(kAutoIndex);
  for (const std::string& index : options.indexes) {
    rows.push_back({index, plan_one(request, options, index, "")});
    if (index == kAutoIndex) rows.back().index = std::string("auto: ") + rows.back().plan.index;
    add_next_better(request, options, rows);
  }
  if (!options.budgets.empty()) {
    const std::string others = options.indexes.empty() ? kAutoIndex : options.indexes.front();
    rows.push_back({options.budgets, plan_one(request, options, others, options.budgets)});
  }
  std::optional<CardQuestion> question;
  std::vector<CardEstimate> estimates;
  if (request.card) {
    question = question_of(request, options);
    estimates = estimates_of(*question, rows);
  }
  if (options.json != "-") {
    print(request, rows);
    if (question) {
      std::printf("\n%s", card_text(*question, estimates, style_of(stdout)).c_str());
    }
  }
  if (options.json.empty()) return;
  ordered_json json = to_json(request, options, rows);
  if (question) json["card"] = card_json(*question, estimates);
  write_json(options.json, json);
}

}  // namespace

void add_plan(CLI::App& keyhole) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = keyhole.add_subcommand(
      "plan",
      "Tell host, device and pinned memory, and the longest context, before allocating anything");
  command->add_option("--model", options->model, "Take the shape from this folder's config.json")
      ->type_name("DIR");
  command->add_option("--layers", options->layers, "Layers")->type_name("N");
  command->add_option("--heads", options->heads, "Query heads")->type_name("N");
  command->add_option("--kv-heads", options->kv_heads, "KV heads")->type_name("N");
  command
      ->add_option("--head-dim", options->head_dim,
                   "Components of a head: a multiple of 16 from 64 to 512")
      ->type_name("N");
  command
      ->add_option(
          "--dtype", options->dtype,
          "How keys and values are stored: f16, bf16, f32, or auto: as the weights of --model "
          "are, else f16")
      ->type_name("TYPE")
      ->check(CLI::IsMember({"auto", "f16", "bf16", "f32"}))
      ->capture_default_str();
  add_kv_host_option(*command, options->kv_host);
  command->add_option("--context", options->context, "Tokens, e.g. 131072, 128k or 1M")
      ->type_name("TOKENS")
      ->required();
  command
      ->add_option("--index", options->indexes,
                   "An index type with parameters, or auto; may be repeated [auto]")
      ->allow_extra_args(false)
      ->type_name("SPEC");
  command
      ->add_option(
          "--budgets", options->budgets,
          "Index and budget of each head, written by calibrate; of heads that it does not name "
          "the first --index")
      ->type_name("FILE");
  command->add_option("--weights", options->weights, "Bytes of the model's weights, e.g. 15GiB")
      ->type_name("BYTES");
  command
      ->add_option("--gpu-memory", options->gpu_memory,
                   "Bytes of the GPU; without it everything lies in host memory")
      ->type_name("BYTES");
  command->add_option("--host-memory", options->host_memory, "Bytes that the host may give")
      ->type_name("BYTES");
  command
      ->add_option("--pinned-memory", options->pinned_memory,
                   "Bytes of host memory that a session may pin for the GPU")
      ->type_name("BYTES");
  command
      ->add_option("--exact-rows-by", options->exact_rows_by,
                   std::string(kRowsBy.help) + ": " + words_help(kRowsBy))
      ->type_name("WHAT")
      ->check(CLI::IsMember(words_of(kRowsBy)))
      ->capture_default_str();
  command->add_option("--sink", options->sink, "Resident tokens at the beginning")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--window", options->window, "Resident newest tokens")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option(
          "--ranks", options->ranks,
          "Processes over which the tokens are spread (--parallel context): memory of the one "
          "that holds most, and what they send")
      ->check(CLI::Range(1U, 65536U))
      ->capture_default_str();
  command
      ->add_option("--card", options->card,
                   "Estimate tokens/s on this GPU, whose memory is the limit where --gpu-memory is "
                   "not given: a name (RTX 4090, 3090, H100, ...), or MEMORY,BANDWIDTH,BUS of "
                   "another (24GiB,1008GB,25GB), and its compute capability where it is above 8.0 "
                   "(24GiB,1008GB,25GB,8.9)")
      ->type_name("CARD");
  command
      ->add_option("--active-weights", options->active_weights,
                   "With --card: bytes of the weights that a token reads, of mixtures of experts "
                   "[--weights]")
      ->type_name("BYTES")
      ->needs("--card");
  command
      ->add_option("--exact-rows", options->exact_rows,
                   "With --card: tokens of a KV head that are read exactly in a step; sharp heads "
                   "ask for hundreds")
      ->type_name("N")
      ->needs("--card")
      ->capture_default_str();
  command->add_option("--json", options->json, "Write the plan here (- for standard output)")
      ->type_name("FILE");
  command->footer(examples(
      {"keyhole plan --layers 32 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --context 1M "
       "\\",
       "    --index ivf:C=1024,probe=32 --weights 15GiB --gpu-memory 24GiB --host-memory 256GiB",
       "keyhole plan --layers 32 --heads 32 --kv-heads 8 --head-dim 128 --context 128k --weights "
       "15GiB "
       "--gpu-memory 24GiB --pinned-memory 8GiB",
       "keyhole plan --model MODEL --context 128k --card \"RTX 4090\" --weights 15GiB",
       "keyhole plan --layers 32 --heads 32 --kv-heads 8 --head-dim 128 --context 16M --ranks 16",
       "keyhole plan --model MODEL --context 128k --index flat --index hnsw:M=32,ef=128"}));
  command->callback([options] { run(*options); });
}

}  // namespace keyhole::tools
