#include "runtime/plan/auto_index.h"

#include "gpu/codes.h"
#include "index/scan/code_scan.h"
#include "index/types/factory.h"
#include "runtime/plan/code_plan.h"
#include "runtime/plan/list_gain.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kMostBits = 4, kFewestBits = 2;
/// On a host: at 128k as many answers as by all rows (60 and 60 of 64 on kv and pass key, exact attention 60 and 60) at
/// a third of the time. Up to 8,192 rows, which a step would read whole, exact attention takes as long, and needs no
/// build of seconds.
constexpr const char* kHostCodes = "codes:k=4,v=4,lists=64,from=8192";

std::string codes_spec(uint32_t bits) {
  return "codes:k=" + std::to_string(bits) + ",v=" + std::to_string(bits);
}

/// Codes of the most bits that keep no layer from the device.
std::string choose_codes(const SessionParams& params, const ModelShape& model,
                         const CodeRoom& room) {
  if (!room || params.offload_placement == KEYHOLE_PLACE_HOST || params.row_block() != kCodeBlock) {
    return kHostCodes;
  }
  const CodeBytes there{room(params.resident_shape(model)), pinned_room(params, model)};
  const auto plan_with = [&](uint32_t bits) {
    CodePlan plan;
    plan.shape = {model.head_dim, bits, bits};
    plan.exact_rows = gpu::kMostDeviceRows;
    plan.rows_by_host = params.exact_rows_by == KEYHOLE_ROWS_BY_HOST;
    for (uint32_t l = 0; l < model.layers; ++l) plan.layers.push_back(params.is_dense(l) ? 0 : 1);
    return fitting(std::move(plan), there, params.max_tokens, params, model);
  };
  const CodePlan most = plan_with(kMostBits), fewest = plan_with(kFewestBits);
  if (most.count() == 0 && fewest.count() == 0) return kHostCodes;
  const CodePlan& plan = most.count() < fewest.count() ? fewest : most;
  const std::string spec = codes_spec(plan.shape.key_bits);
  if (!kAutoTakesLists) return spec;
  const std::string listed = spec + ",lists=64";
  const bool gains =
      gains_by_lists(plan, index::code_listing(listed), there, params.max_tokens, params, model);
  return gains ? listed : spec;
}

/// Whether codes can stand for what the budget does not read.
bool takes_codes(const Budget& budget) {
  const bool chosen = budget.attend == KEYHOLE_ATTEND_TOPK || budget.attend == KEYHOLE_ATTEND_NONE;
  const bool replaced = budget.tail == KEYHOLE_TAIL_NONE || budget.reads_codes();
  return chosen && replaced && !budget.has_target() && budget.top_k <= index::kMostExactRows;
}

}  // namespace

void check_index(std::string_view spec) { index::check_spec(spec, ", auto, exact"); }

void check_undone(std::string_view spec, bool has_rope) {
  if (has_rope || !index::undoes_rope(spec)) return;
  throw Error(
      Status::invalid_argument,
      "index '" + std::string(spec) +
          "' undoes RoPE, and the engine knows of none: rope_theta is 0; allowed: rope=keep, "
          "or an engine with the model's rope_theta");
}

Budget with_code_tail(Budget budget) {
  // A budget as its init function leaves it is completed as that of any index with codes.
  if (takes_codes(budget) && budget != Budget()) budget.tail = KEYHOLE_TAIL_CODES;
  return budget;
}

void check_code_tail(const Budget& budget, std::string_view spec) {
  if (budget.tail != KEYHOLE_TAIL_NONE) return;
  throw Error(Status::invalid_argument,
              "top_k is " + std::to_string(budget.top_k) + ", attend " +
                  std::to_string(budget.attend) + ", error_target " +
                  std::to_string(budget.error_target) + ", mass_target " +
                  std::to_string(budget.mass_target) + " without a tail, and index auto is '" +
                  std::string(spec) + "', whose codes are the tail of top_k 1.." +
                  std::to_string(index::kMostExactRows) +
                  ", attend KEYHOLE_ATTEND_TOPK (0) or KEYHOLE_ATTEND_NONE (3), no target; "
                  "allowed: such a budget, one with a tail, or an index by its name");
}

void resolve_auto(std::string& spec, Budget& budget, const SessionParams& params,
                  const ModelShape& model, const CodeRoom& room) {
  if (spec != kAutoIndex) return;
  if (!takes_codes(budget)) {
    spec = "ivf";
    return;
  }
  spec = choose_codes(params, model, room);
  budget = with_code_tail(budget);
}

}  // namespace keyhole::runtime
