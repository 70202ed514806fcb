#include "tools/commands/eval/run.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/eval/page.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/json.h"

namespace keyhole::tools {

namespace {

/// Plans memory. The prompt is not there yet, but its greatest length and what follows it are known.
std::optional<GpuMemoryPlan> plan_memory(EvalOptions& options, const std::vector<AttendSpec>& specs,
                                         const std::vector<BudgetChoice>& budgets) {
  GpuMemoryRequest request;
  request.prompt = length_of(options.task);
  request.session = true;
  request.context = request.prompt + std::max(options.bytes, 256U);
  request.specs = specs;
  request.budgets = budgets;
  return apply_gpu_memory(options.model, std::move(request), options.cache);
}

EvalOptions checked(const EvalOptions& options) {
  if (options.html == "-") throw UsageError("--html needs a file");
  for (const std::string& path : {options.json, options.html}) {
    if (!path.empty()) check_writable(path);
  }
  check_calibration_has_use(options.cache, all_specs(options));
  check_turn(options.turn, options.cache.parallel);
  if (options.turn_as == "steps" && (options.turn == 0 || !options.cache.parallel.kind.empty())) {
    throw UsageError("--turn-as steps: needed: --turn, and one process");
  }
  return options;
}

}  // namespace

EvalRun::EvalRun(const EvalOptions& options)
    : options_(checked(options)),
      budgets_(all_budgets(options)),
      specs_(all_specs(options)),
      memory_(plan_memory(options_, specs_, budgets_)),
      runner_(make_runner(options.model, options.cache.threads)) {
  options_.cache.device = runner_.session_device(options_.cache.cache_device);
  set_kv_dtype(options_.cache, model());
  options_.cache.model = model_name(options.model);
}

void EvalRun::prefill(const std::vector<uint32_t>& prompt, uint32_t more) {
  prompt_tokens_ = prompt.size();
  caches_.emplace(model(), options_, static_cast<uint32_t>(prompt.size()) + more, specs_, budgets_,
                  rounded_);
  prefill_seconds_ += caches_->prefill(runner_, prompt, options_.turn);
}

void EvalRun::for_each_way(const std::function<void(const EvalWay&, KeyholeCache&)>& run) {
  tools::for_each_way(*caches_, specs_, budgets_, run);
}

void EvalRun::print(const std::string& what, const std::string& result) {
  if (options_.json == "-") return;
  const std::string heading = eval_heading(what, options_, runner_, caches_->main().statistics(),
                                           prefill_seconds_, caches_->turn());
  std::printf("%s%s%s", heading.c_str(), result.c_str(), prefill_errors_text(runner_).c_str());
}

void EvalRun::write(const nlohmann::ordered_json& document) const {
  if (!options_.html.empty()) write_text(options_.html, eval_page(document));
  if (!options_.json.empty()) write_json(options_.json, document);
}

nlohmann::ordered_json EvalRun::header() {
  const KeyholeCache& cache = caches_->main();
  nlohmann::ordered_json header = eval_header(options_, runner_, cache, cache.statistics(),
                                              prompt_tokens_, prefill_seconds_, caches_->turn());
  if (options_.model.check_prefill) header["prefill_errors"] = prefill_errors_json(runner_);
  if (memory_) header["gpu_memory"] = to_json(*memory_, runner_.gpu_memory_peak());
  return header;
}

}  // namespace keyhole::tools
