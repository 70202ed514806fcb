#include "tools/commands/plan/plan_rows.h"

#include <algorithm>
#include <iterator>

#include "runtime/files/settings.h"
#include "tools/api/handles.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/options.h"
#include "tools/commands/plan/budgets_codes.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr const Setting& kReaderOfRows = setting(kSessionSettings, "exact_rows_by");

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
  session.exact_rows_by = number_of_word(kReaderOfRows, options.exact_rows_by).value_or(0);
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

/// The plan where a card has too few multiprocessors for lists, of which the library does not know: the card's part is
/// that of the same codes without (`less`), layers that the host attends keep theirs (`with`).
keyhole_memory_plan lists_on_host_alone(const PlanRequest& request, const keyhole_memory_plan& with,
                                        const keyhole_memory_plan& less) {
  if (less.code_layers == 0) return with;
  keyhole_memory_plan plan = less;
  std::copy(std::begin(with.index), std::end(with.index), plan.index);
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

/// plan_row() but for CardCodes::lists_lack_room.
PlanRow limited_row(const PlanRequest& request, const PlanOptions& options,
                    const std::string& index, const std::string& budgets) {
  PlanRow row{
      budgets.empty() ? index : budgets, plan_by_library(request, options, index, budgets), {}};
  const bool is_auto = index == kAutoIndex;
  const std::string spec = is_auto ? row.plan.index : index;
  if (is_auto && budgets.empty()) row.index = "auto: " + spec;
  keyhole_memory_plan less;
  if (budgets.empty()) {
    row.codes = codes_of(spec);
    if (row.codes.list_rows == 0) return row;
    less = plan_by_library(request, options, without_lists(spec), {});
  } else {
    const BudgetsFile file = read_budgets(budgets);
    row.codes = codes_of(file, spec, options.exact_rows);
    if (row.codes.list_rows == 0) return row;
    const std::string others = without_lists(spec);
    const TemporaryBudgets temporary(without_lists(file));
    less = plan_by_library(request, options, others.empty() ? spec : others, temporary.path());
  }
  if (lacks_lists(request)) {
    row.plan = lists_on_host_alone(request, row.plan, less);
    return row;
  }
  // The device has lists where they take memory of it.
  row.codes.lists = row.plan.code_layers != 0 && row.plan.code_layers == less.code_layers &&
                    row.plan.code_bytes > less.code_bytes;
  return row;
}

/// The same without limits of the card, where the library plans codes on the device whether they fit it or not.
PlanRequest without_limits(PlanRequest request) {
  request.gpu_memory = uint64_t{1} << 62;
  request.pinned_memory.reset();
  return request;
}

}  // namespace

PlanRow plan_row(const PlanRequest& request, const PlanOptions& options, const std::string& index,
                 const std::string& budgets) {
  PlanRow row = limited_row(request, options, index, budgets);
  const bool lost = row.codes.list_rows != 0 && !row.codes.lists && row.plan.code_layers != 0;
  if (!lost || lacks_lists(request)) return row;
  row.codes.lists_lack_room =
      limited_row(without_limits(request), options, index, budgets).codes.lists;
  return row;
}

void add_next_better(const PlanRequest& request, const PlanOptions& options,
                     std::vector<PlanRow>& rows) {
  constexpr const char* kFewest = "codes:k=2,v=2";
  constexpr const char* kBest = "codes:k=4,v=4";
  const bool was_auto = rows.back().index.rfind("auto: ", 0) == 0;
  const keyhole_memory_plan& plan = rows.back().plan;
  const std::string index = was_auto ? plan.index : rows.back().index;
  if (!request.gpu_memory || index.rfind("codes", 0) != 0) return;
  const PlanRequest unlimited = without_limits(request);
  const auto all_layers_of = [&](const std::string& spec) {
    return plan_row(unlimited, options, spec);
  };
  std::string next = was_auto && plan.code_layers == 0 ? kFewest : index;
  if (plan.code_layers == all_layers_of(next).plan.code_layers &&
      !rows.back().codes.lists_lack_room) {
    if (!was_auto || index.rfind(kBest, 0) == 0) return;
    next = kBest;
  }
  PlanRow row = all_layers_of(next);
  row.index = "next better: " + next;
  if (row.plan.code_layers == 0) return;
  row.plan.fits = 0;
  row.plan.longest_context = plan_row(request, options, next).plan.longest_context;
  rows.push_back(row);
}

}  // namespace keyhole::tools
