#include "tools/commands/calibrate/run.h"

#include <algorithm>
#include <optional>

#include "tools/commands/common/head_measure.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"

namespace keyhole::tools {
namespace {

/// Exact attention over the offloaded tokens, as the library does it for a dense head: all are scored, and all
/// that was scored is attended.
CalibrationPlan::Candidate exact_candidate() {
  CalibrationPlan::Candidate out{"flat", {}, false};
  out.budget.attend.mode = KEYHOLE_ATTEND_SCORED;
  out.budget.attend.k = 1;
  return out;
}

void require_same_model(const Trace& first, const Trace& other) {
  const TraceInfo& a = first.info();
  const TraceInfo& b = other.info();
  if (a.q_heads == b.q_heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim &&
      a.scale == b.scale && a.softcap == b.softcap && a.rope.theta == b.rope.theta &&
      a.rope.scaling == b.rope.scaling && a.model == b.model) {
    return;
  }
  throw UsageError("the traces are of different models: " + a.model + " and " + b.model +
                   ", or differ in heads, head_dim or RoPE");
}

const TraceHead& find_head(const Trace& trace, const TraceHead& like) {
  for (const TraceHead& head : trace.heads()) {
    if (head.layer == like.layer && head.kv_head == like.kv_head) return head;
  }
  throw UsageError("layer " + std::to_string(like.layer) + " is in one trace and not in another");
}

/// `wanted` of `total` rows, evenly spread, the last one included.
std::vector<size_t> spread(size_t total, size_t wanted) {
  const size_t count = std::min(total, wanted);
  std::vector<size_t> out;
  for (size_t i = 1; i <= count; ++i) out.push_back(i * total / count - 1);
  return out;
}

}  // namespace

/// One head while its candidates are tried.
class Calibration::Head {
 public:
  Head(const Calibration& owner, std::vector<CalibrationHead> heads,
       std::vector<CalibrationHead> checks)
      : plan_(owner.plan_),
        engine_(owner.engine_),
        heads_(std::move(heads)),
        checks_(std::move(checks)) {
    choice_.layer = heads_.front().head->layer;
    choice_.kv_head = heads_.front().head->kv_head;
    for (const CalibrationHead& head : heads_) {
      choice_.middle_mass += head.truth.middle_mass / static_cast<double>(heads_.size());
    }
  }

  void try_exact() {
    const CalibrationPlan::Candidate exact = exact_candidate();
    give(exact);
    const Measured measured = measure(exact.budget, true);
    choice_.dense_us = measured.us;
    choice_.dense_bytes = measured.bytes;
    if (!plan_.may_be_dense) return;
    take(exact, exact.budget, measured);
    choice_.dense = true;
    choice_.held_bytes = 0;
  }

  void attempt(const CalibrationPlan::Candidate& candidate) {
    const std::string same = candidate.index + " " + candidate.budget.text();
    // A target can only make a step read more.
    if (candidate.searches && met_without_ == same) return;
    give(candidate);
    BudgetChoice budget = candidate.budget;
    if (candidate.searches) {
      const auto meets = [&](float target) {
        budget.target.error = target;
        give_partitions(budget);
        return measure(budget, false).ratio <= 1;
      };
      const std::optional<float> target = search_target(plan_.requirement.error, meets);
      if (!target && has_choice_ && choice_.met()) return;
      // Where nothing meets it, the strictest that was tried may come nearest.
      budget.target.error =
          target.value_or(static_cast<float>(plan_.requirement.error * kStrictestShare));
    }
    give_partitions(budget);
    Measured measured = measure(budget, false);
    if (!candidate.searches && measured.ratio <= 1) met_without_ = same;
    const bool by_time = plan_.cost == CalibrationPlan::Cost::us;
    // The time of a budget that does not meet the error matters only where nothing else is left.
    if (by_time && (measured.ratio <= 1 || !has_choice_)) measured = measure(budget, true);
    if (has_choice_ && choose_cheapest({verdict(), {measured.ratio, cost(measured)}}) == 0) return;
    if (!by_time) measured.us = measure(budget, true).us;
    take(candidate, budget, measured);
  }

  [[nodiscard]] const HeadChoice& choice() const { return choice_; }

 private:
  struct Measured {
    double ratio = 0;  // worst of the traces
    double us = 0, bytes = 0, attended = 0;
  };

  [[nodiscard]] double cost(const Measured& m) const {
    return plan_.cost == CalibrationPlan::Cost::us ? m.us : m.bytes;
  }
  [[nodiscard]] Verdict verdict() const {
    return {choice_.ratio, plan_.cost == CalibrationPlan::Cost::us ? choice_.us : choice_.bytes};
  }

  void give(const CalibrationPlan::Candidate& candidate) {
    for (CalibrationHead& head : heads_) give_index(head, engine_, candidate.index);
  }
  void give_partitions(const BudgetChoice& budget) {
    for (CalibrationHead& head : heads_) tools::give_partitions(head, budget);
  }

  [[nodiscard]] Measured measure(const BudgetChoice& budget, bool timed) const {
    const QueryChoice queries = checks_.empty() ? QueryChoice{1, 2} : QueryChoice{};
    const auto share = 1.0 / static_cast<double>(heads_.size());
    Measured out;
    for (const CalibrationHead& head : heads_) {
      StepFigures figures = measure_steps(head, budget, queries, timed);
      const size_t steps = figures.errors.size() / head.truth.group;
      out.ratio =
          std::max(out.ratio, plan_.requirement.cautious_ratio(std::move(figures.errors), steps));
      out.us += share * figures.us;
      out.bytes += share * figures.bytes;
      out.attended += share * figures.attended;
    }
    return out;
  }

  /// Takes the best so far, and measures it on the queries that have not been used to choose.
  void take(const CalibrationPlan::Candidate& candidate, const BudgetChoice& budget,
            const Measured& measured) {
    has_choice_ = true;
    choice_.dense = false;
    choice_.index = candidate.index;
    choice_.budget = budget;
    choice_.ratio = measured.ratio;
    choice_.us = measured.us;
    choice_.bytes = measured.bytes;
    choice_.attended = measured.attended;
    choice_.held_bytes = 0;
    for (const CalibrationHead& head : heads_) {
      choice_.held_bytes +=
          static_cast<double>(held_bytes(head, budget)) / static_cast<double>(heads_.size());
    }
    std::vector<double> errors;
    choice_.check_ratio = 0;
    const auto check = [&](const CalibrationHead& head, QueryChoice queries) {
      const std::vector<double> some = measure_steps(head, budget, queries, false).errors;
      if (some.empty()) return;
      choice_.check_ratio = std::max(choice_.check_ratio, plan_.requirement.ratio(some));
      errors.insert(errors.end(), some.begin(), some.end());
    };
    if (checks_.empty()) {
      for (const CalibrationHead& head : heads_) check(head, {0, 2});
    }
    for (CalibrationHead& head : checks_) {
      give_index(head, engine_, candidate.index);
      tools::give_partitions(head, budget);
      check(head, {});
    }
    choice_.error_median = quantile_of(errors, 0.5);
    choice_.error_p95 = quantile_of(std::move(errors), 0.95);
  }

  const CalibrationPlan& plan_;
  const Engine& engine_;
  std::vector<CalibrationHead> heads_, checks_;
  std::string met_without_;  // the last candidate that met the requirement without a target
  bool has_choice_ = false;
  HeadChoice choice_;
};

Calibration::Calibration(const std::vector<Trace>& traces, const std::vector<Trace>& checks,
                         const CalibrationPlan& plan)
    : traces_(traces),
      checks_(checks),
      plan_(plan),
      engine_(
          make_trace_engine(traces.front().info(), plan.kv_dtype, plan.threads, plan.classifiers)),
      team_(plan.threads) {
  for (const CalibrationPlan::Candidate& candidate : plan.candidates) {
    try {
      (void)make_index(engine_, candidate.index, 0, 0);
    } catch (const LibraryError& e) {
      if (e.status() != KEYHOLE_INVALID_ARGUMENT) throw;
      throw UsageError("--index " + candidate.index + ": " + e.what());
    }
  }
  for (const std::vector<Trace>* list : {&traces, &checks}) {
    for (const Trace& trace : *list) {
      require_same_model(traces.front(), trace);
      (void)offloaded_tokens(trace, plan.sink, plan.window);
      if (!trace.heads().front().values) {
        throw UsageError("a trace without values tells no output error");
      }
      if (list == &traces && checks.empty() && trace.query_positions().size() < 2) {
        throw UsageError("a trace with one query has none to check the choice with: give --check");
      }
    }
  }
  const std::vector<uint32_t>& recorded = traces.front().info().layers;
  for (const uint32_t layer : plan.layers) {
    if (std::find(recorded.begin(), recorded.end(), layer) == recorded.end()) {
      throw UsageError("layer " + std::to_string(layer) + " is not in the trace");
    }
  }
}

std::string Calibration::simd_level() const {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  check(keyhole_engine_get_config(engine_.get(), &config));
  return config.cpu_level;
}

std::vector<CalibrationHead> Calibration::open_heads(const std::vector<Trace>& traces,
                                                     const TraceHead& like) {
  std::vector<CalibrationHead> out;
  for (const Trace& trace : traces) {
    throw_if_interrupted();
    CalibrationHead& head = out.emplace_back();
    head.trace = &trace;
    head.head = &find_head(trace, like);
    TruthOptions options;
    options.offloaded = offloaded_tokens(trace, plan_.sink, plan_.window);
    options.k = 1;
    options.queries = spread(trace.query_positions().size(), plan_.queries);
    head.truth = compute_truth(trace, *head.head, options, team_);
  }
  return out;
}

std::vector<HeadChoice> Calibration::run() {
  std::vector<const TraceHead*> wanted;
  for (const TraceHead& head : traces_.front().heads()) {
    if (plan_.layers.empty() ||
        std::find(plan_.layers.begin(), plan_.layers.end(), head.layer) != plan_.layers.end()) {
      wanted.push_back(&head);
    }
  }
  Progress bar("calibrating");
  const auto steps = static_cast<double>(wanted.size() * (plan_.candidates.size() + 2));
  double done = 0;
  const auto tell = [&](const TraceHead& head) {
    bar.update(++done / steps, "calibrating layer " + std::to_string(head.layer) + ", KV head " +
                                   std::to_string(head.kv_head));
  };
  std::vector<HeadChoice> out;
  for (const TraceHead* head : wanted) {
    Head work(*this, open_heads(traces_, *head), open_heads(checks_, *head));
    tell(*head);
    work.try_exact();
    tell(*head);
    for (const CalibrationPlan::Candidate& candidate : plan_.candidates) {
      throw_if_interrupted();
      work.attempt(candidate);
      tell(*head);
    }
    out.push_back(work.choice());
  }
  return out;
}

}  // namespace keyhole::tools
