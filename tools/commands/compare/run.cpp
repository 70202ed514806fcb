#include "tools/commands/compare/run.h"

#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>

#include "tools/commands/compare/side_by_side.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"

namespace keyhole::tools {

// Progress over all steps, several of which report at once.
class Comparison::Work {
 public:
  explicit Work(size_t steps) : steps_(static_cast<double>(steps)) {}

  void done(double steps) {
    const double sum = done_.fetch_add(steps) + steps;
    bar_.update(sum / steps_);
  }

 private:
  Progress bar_{"comparing"};
  const double steps_;
  std::atomic<double> done_{0};
};

// One build's share of the progress: a callback tells fractions, Work wants increments.
struct Comparison::BuildProgress {
  Work& work;
  double told = 0;

  void tell(double fraction) {
    if (fraction <= told) return;
    work.done(fraction - told);
    told = fraction;
  }

  static int32_t callback(void* user, double fraction, const char* /*what*/) {
    static_cast<BuildProgress*>(user)->tell(fraction);
    return interrupted() ? 1 : 0;
  }
};

Comparison::Comparison(const Trace& trace, const ComparisonPlan& plan)
    : trace_(trace),
      plan_(plan),
      engine_(make_trace_engine(trace.info(), plan.kv_dtype, plan.threads_per_build(),
                                plan.classifiers)),
      team_(plan.threads) {
  for (const auto& [spec, series] : plan.indexes) {
    try {
      (void)make_index(engine_, spec, 0, 0);
    } catch (const LibraryError& e) {
      if (e.status() != KEYHOLE_INVALID_ARGUMENT) throw;
      throw UsageError("--index " + spec + ": " + e.what());
    }
  }
  for (const TraceHead* head : plan.heads) {
    check_rivals(plan.rivals, rival_shape(trace, *head, plan.truth.offloaded));
  }
}

std::vector<Measurement> Comparison::run() {
  // Of each head the truth, and of each index and rival on it the build and the measurements.
  size_t steps = 1 + plan_.indexes.size() * (1 + plan_.budgets.size());
  for (const SweptRival& rival : plan_.rivals) steps += 1 + rows_of(rival.spec, plan_.rival_ks);
  Work work(plan_.heads.size() * steps);
  std::vector<Measurement> out;
  for (size_t first = 0; first < plan_.heads.size(); first += plan_.builds_at_once) {
    const size_t count = std::min<size_t>(plan_.builds_at_once, plan_.heads.size() - first);
    run_batch(Heads(plan_.heads).subspan(first, count), work, out);
  }
  const auto order = [&](const Measurement& m) {
    const auto index = std::find_if(plan_.indexes.begin(), plan_.indexes.end(),
                                    [&](const auto& i) { return i.spec == m.index; });
    if (index == plan_.indexes.end()) {  // rivals come last
      const auto rival = std::find_if(plan_.rivals.begin(), plan_.rivals.end(),
                                      [&](const SweptRival& r) { return r.text == m.index; });
      size_t at = 0;  // of its number of keys
      while (at + 1 < plan_.rival_ks.size() &&
             rival_attend(rival->spec, plan_.rival_ks[at]) != m.attend) {
        ++at;
      }
      return std::tuple(
          static_cast<ptrdiff_t>(plan_.indexes.size()) + (rival - plan_.rivals.begin()),
          static_cast<ptrdiff_t>(at), m.layer, m.kv_head);
    }
    const auto budget =
        std::find_if(plan_.budgets.begin(), plan_.budgets.end(), [&](const BudgetChoice& b) {
          return b.attend.text() == m.attend && b.tail.text() == m.tail &&
                 b.target.text() == m.target;
        });
    return std::tuple(index - plan_.indexes.begin(), budget - plan_.budgets.begin(), m.layer,
                      m.kv_head);
  };
  std::stable_sort(out.begin(), out.end(),
                   [&](const Measurement& a, const Measurement& b) { return order(a) < order(b); });
  return out;
}

std::string Comparison::simd_level() const {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  check(keyhole_engine_get_config(engine_.get(), &config));
  return config.cpu_level;
}

void Comparison::run_batch(Heads heads, Work& work, std::vector<Measurement>& out) {
  std::vector<HeadTruth> truths;
  for (const TraceHead* head : heads) {
    throw_if_interrupted();
    truths.push_back(compute_truth(trace_, *head, plan_.truth, team_));
    work.done(1);
  }
  const std::vector<BudgetChoice> budgets = by_partition();
  std::vector<IndexHandle> indexes;
  constexpr uint32_t kNoPartitions = UINT32_MAX;
  uint32_t partition = kNoPartitions;  // of the indexes as they are now
  for (const auto& [spec, series] : plan_.indexes) {
    if (set_spec(indexes, spec)) {
      work.done(static_cast<double>(heads.size()));
    } else {
      indexes.clear();  // before the next ones take memory
      indexes = build_all(heads, truths, spec, work);
      partition = kNoPartitions;
    }
    for (const BudgetChoice& choice : budgets) {
      // Of several indexes, --tail codes is of those that have codes.
      if (choice.reads_codes() && !has_codes(spec) && plan_.indexes.size() > 1) {
        work.done(static_cast<double>(heads.size()));
        continue;
      }
      const BudgetChoice budget = for_index(choice, spec);
      if (budget.needs_partitions() && partition != budget.tail.keys_per_partition) {
        build_tails(indexes, budget.tail.keys_per_partition);
        partition = budget.tail.keys_per_partition;
      }
      for (size_t i = 0; i < heads.size(); ++i) {
        Measurement m =
            measure_index(indexes[i], truths[i], budget, plan_.kv_dtype, rounds(*heads[i]));
        m.series = series;
        m.index = spec;
        m.layer = heads[i]->layer;
        m.kv_head = heads[i]->kv_head;
        out.push_back(std::move(m));
        work.done(1);
      }
    }
  }
  indexes.clear();
  const std::vector<Measurement> rows =
      measure_rivals(plan_.rivals, plan_.rival_ks,
                     {.trace = trace_,
                      .heads = heads,
                      .truths = truths,
                      .kv_dtype = plan_.kv_dtype,
                      .threads_per_build = plan_.threads_per_build(),
                      .rounds_keys = [this](const TraceHead& head) { return rounds(head); },
                      .done = [&work](double steps) { work.done(steps); }});
  out.insert(out.end(), rows.begin(), rows.end());
}

bool Comparison::set_spec(const std::vector<IndexHandle>& indexes, const std::string& spec) {
  for (const IndexHandle& index : indexes) {
    const keyhole_status status = keyhole_index_set_spec(index.get(), spec.c_str());
    // The spec itself is good: it was tried in the constructor.
    if (status == KEYHOLE_INVALID_ARGUMENT) return false;
    check(status);
  }
  return !indexes.empty();
}

std::vector<IndexHandle> Comparison::build_all(Heads heads, const std::vector<HeadTruth>& truths,
                                               const std::string& spec, Work& work) const {
  std::vector<IndexHandle> out(heads.size());
  side_by_side(heads.size(), [&](size_t i) {
    out[i] = make_index(engine_, spec, heads[i]->layer, heads[i]->kv_head);
    BuildProgress progress{work};
    build_index(out[i], trace_, *heads[i], truths[i], BuildProgress::callback, &progress);
    progress.tell(1);
  });
  return out;
}

void Comparison::build_tails(const std::vector<IndexHandle>& indexes, uint32_t keys_per_partition) {
  const auto stop = [](void*, double, const char*) -> int32_t { return interrupted() ? 1 : 0; };
  side_by_side(indexes.size(), [&](size_t i) {
    check(keyhole_index_build_tail(indexes[i].get(), keys_per_partition, stop, nullptr));
  });
}

std::vector<BudgetChoice> Comparison::by_partition() const {
  std::vector<BudgetChoice> out = plan_.budgets;
  const auto size = [](const BudgetChoice& b) {
    return b.needs_partitions() ? b.tail.keys_per_partition : 0;
  };
  std::stable_sort(out.begin(), out.end(),
                   [&](const BudgetChoice& a, const BudgetChoice& b) { return size(a) < size(b); });
  return out;
}

bool Comparison::rounds(const TraceHead& head) const {
  switch (plan_.kv_dtype) {
    case KEYHOLE_F16: return head.keys.type != ElementType::f16;
    case KEYHOLE_BF16: return head.keys.type != ElementType::bf16;
    default: return false;
  }
}

}  // namespace keyhole::tools
