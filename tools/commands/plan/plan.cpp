// keyhole plan: the memory of a session before anything is allocated.
#include <keyhole/keyhole.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "runtime/files/json.h"
#include "runtime/files/settings.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/options.h"
#include "tools/commands/plan/card_report.h"
#include "tools/commands/plan/plan_report.h"
#include "tools/commands/plan/plan_request.h"
#include "tools/commands/plan/plan_rows.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

constexpr const Setting& kRowsBy = setting(kSessionSettings, "exact_rows_by");

CardQuestion question_of(const PlanRequest& request, const PlanOptions& options) {
  CardQuestion question;
  question.card = *request.card;
  question.engine = request.engine;
  question.full_layers = request.full_layers;
  question.context = request.context;
  question.weights = request.active_weights;
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
  for (const PlanRow& row : rows) {
    all.push_back(estimate_codes(question, row.index, row.plan, row.codes));
  }
  all.push_back(estimate_full(question));
  return all;
}

void run(PlanOptions options) {
  // Not by the parser, which asks for options before it names those that it does not know.
  if (options.context.empty()) throw UsageError("--context is required");
  const PlanRequest request = understand(options);
  std::vector<PlanRow> rows;
  if (options.indexes.empty() && options.budgets.empty()) options.indexes.push_back(kAutoIndex);
  for (const std::string& index : options.indexes) {
    rows.push_back(plan_row(request, options, index));
    add_next_better(request, options, rows);
  }
  if (!options.budgets.empty()) {
    const std::string others = options.indexes.empty() ? kAutoIndex : options.indexes.front();
    rows.push_back(plan_row(request, options, others, options.budgets));
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
                   "Components of a head: a multiple of 16 from 64 to 576")
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
      ->type_name("TOKENS");
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
      ->check(CLI::Range(0U, 1024U).description(""))
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
