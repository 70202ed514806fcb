// keyhole plan: the memory of a session before anything is allocated.
#include <keyhole/keyhole.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/files/json.h"
#include "runtime/files/settings.h"
#include "tools/api/handles.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/options.h"
#include "tools/commands/plan/card_report.h"
#include "tools/commands/plan/plan_report.h"
#include "tools/commands/plan/plan_request.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

constexpr const Setting& kRowsBy = setting(kSessionSettings, "exact_rows_by");

// The memory that the weights leave, as the library takes it: 0 would mean no limit, so one byte stands for nothing.
uint64_t left_by_weights(uint64_t memory, uint64_t weights) {
  return memory > weights ? memory - weights : 1;
}

keyhole_memory_plan plan_by_library(const PlanRequest& request, const PlanOptions& options,
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

/// The spec with "lists=0"; empty where it names no lists.
std::string without_lists(std::string spec) {
  for (const char* key : {":lists=", ",lists="}) {
    const size_t at = spec.find(key);
    if (at == std::string::npos) continue;
    const size_t value = at + std::string_view(key).size();
    return spec.replace(value, std::min(spec.find(',', value), spec.size()) - value, "0");
  }
  return {};
}

/// The library's plan; it knows a card's compute capability, not its multiprocessors: where these are too few for
/// lists, the card's part is that of the same codes without. Layers that the host attends keep their lists.
keyhole_memory_plan plan_one(const PlanRequest& request, const PlanOptions& options,
                             const std::string& index, const std::string& budgets) {
  const keyhole_memory_plan with = plan_by_library(request, options, index, budgets);
  const std::string less = without_lists(index);
  if (less.empty() || !lacks_lists(request)) return with;
  keyhole_memory_plan plan = plan_by_library(request, options, less, budgets);
  std::copy(std::begin(with.index), std::end(with.index), plan.index);
  if (plan.code_layers == 0) return with;
  // The card has room for as many layers without lists as with them, or more.
  const uint64_t of_host = request.full_layers - plan.code_layers;
  if (of_host != 0 && with.code_layers < request.full_layers) {
    const uint64_t indexes = with.index_bytes / (request.full_layers - with.code_layers) * of_host;
    plan.host_bytes += indexes - plan.index_bytes;
    plan.index_bytes = indexes;
  }
  if (request.host_memory) {
    if (plan.host_bytes + plan.pinned_bytes > *request.host_memory) plan.fits = 0;
    // Of a longer text the host may have layers, with lists: what fits with lists everywhere fits, and so may this one.
    plan.longest_context = std::max(with.longest_context,
                                    plan.fits != 0 ? static_cast<uint32_t>(request.context) : 0U);
  }
  return plan;
}

/// Adds what the next better choice would take, where some codes of an index are not on the device, or where `auto`
/// has chosen fewer bits than there are.
void add_next_better(const PlanRequest& request, const PlanOptions& options,
                     std::vector<PlanRow>& rows) {
  constexpr const char* kFewest = "codes:k=2,v=2";
  constexpr const char* kBest = "codes:k=4,v=4";
  const bool was_auto = rows.back().index.rfind("auto: ", 0) == 0;
  const keyhole_memory_plan& plan = rows.back().plan;
  const std::string index = plan.index;
  if (!request.gpu_memory || index.rfind("codes", 0) != 0) return;
  // Without limits the library plans them on the device, whether they fit it or not.
  PlanRequest unlimited = request;
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
  PlanRow row{"next better: " + next, all_layers_of(next)};
  if (row.plan.code_layers == 0) return;
  row.plan.fits = 0;
  row.plan.longest_context = plan_one(request, options, next, "").longest_context;
  rows.push_back(row);
}

CardQuestion question_of(const PlanRequest& request, const PlanOptions& options) {
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

std::vector<CardEstimate> estimates_of(const CardQuestion& question,
                                       const std::vector<PlanRow>& rows) {
  std::vector<CardEstimate> all;
  for (const auto& [index, plan] : rows) {
    all.push_back(estimate_codes(question, index, plan));
  }
  all.push_back(estimate_full(question));
  return all;
}

void run(PlanOptions options) {
  const PlanRequest request = understand(options);
  std::vector<PlanRow> rows;
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
    print_plan(request, rows);
    if (question) {
      std::printf("\n%s", card_text(*question, estimates, style_of(stdout)).c_str());
    }
  }
  if (options.json.empty()) return;
  ordered_json json = plan_json(request, options, rows);
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
