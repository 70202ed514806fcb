#include "tools/commands/plan/plan_report.h"

#include <algorithm>
#include <cstdio>
#include <optional>

#include "tools/terminal/style.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

// What each rank sends to every other in a step of a layer (keyhole/parallel.h): the states of all query heads, and
// what names the call.
constexpr uint64_t kCallBytes = 48;

uint64_t bytes_sent_per_token(const PlanRequest& request) {
  const keyhole_engine_config& e = request.engine;
  return uint64_t{request.full_layers} *
         (kCallBytes + uint64_t{e.q_heads} * (e.head_dim + 1) * sizeof(float));
}

/// The longest text of which no rank has more than so many tokens.
uint64_t longest_text(uint64_t share, uint64_t ranks) {
  if (ranks == 1) return share;
  // A share that ends within a block is rank 0's, which is where the text ends.
  constexpr uint64_t kMost = uint64_t{1} << 31U;  // tokens of a session, on all ranks together
  return std::min(kMost, share / kBlockTokens * kBlockTokens * ranks + share % kBlockTokens);
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

}  // namespace

void print_plan(const PlanRequest& request, const std::vector<PlanRow>& rows) {
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
  for (const auto& [index, plan, ignored] : rows) {
    table.add_row(
        {index, format_bytes(plan.device_bytes), format_bytes(plan.code_bytes),
         layers_text(plan, request.full_layers), reader_of_rows(plan),
         format_bytes(plan.pinned_bytes + plan.pinned_kv_bytes), format_bytes(plan.host_bytes),
         format_bytes(plan.index_bytes),
         plan.fits != 0 ? tinted("yes", Tint::green, style) : tinted("no", Tint::red, style),
         format_count(longest_text(plan.longest_context, request.ranks))});
  }
  std::fputs(table.text(style).c_str(), stdout);
  for (const PlanRow& row : rows) {
    if (!row.codes.lists_lack_room) continue;
    std::printf(
        "\nLists of %s do not fit in the memory of the GPU, or in what may be pinned: its steps "
        "read "
        "all codes.\n",
        row.index.c_str());
  }
  const bool auto_on_gpu = std::any_of(rows.begin(), rows.end(), [](const PlanRow& row) {
    return row.index.rfind("auto: ", 0) == 0 && row.plan.code_layers != 0;
  });
  if (auto_on_gpu && !lacks_lists(request)) {
    // bench/RESULTS.md, "Lists of codes on a device".
    std::puts(
        "\nauto takes no lists of codes on a GPU: a layer whose heads look at everything takes a "
        "seventh longer with\nthem, and 4 bits lose more. Where heads look at little, lists=64 "
        "takes "
        "44 us a layer in place of 68 (an H100,\n8 KV heads of 128 at 128k) and two and a half "
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

ordered_json plan_json(const PlanRequest& request, const PlanOptions& options,
                       const std::vector<PlanRow>& rows) {
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
  for (const auto& [index, plan, codes] : rows) {
    plans.push_back({{"index", index},
                     {"kv_bytes", plan.kv_bytes},
                     {"host_bytes", plan.host_bytes},
                     {"index_bytes", plan.index_bytes},
                     {"device_bytes", plan.device_bytes},
                     {"code_bytes", plan.code_bytes},
                     {"code_layers", plan.code_layers},
                     {"first_code_layer", plan.first_code_layer},
                     {"rows_by_host", plan.rows_by_host != 0},
                     {"lists", codes.lists},
                     {"lists_lack_room", codes.lists_lack_room},
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

}  // namespace keyhole::tools
