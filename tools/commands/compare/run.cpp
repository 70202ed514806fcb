#include "tools/commands/compare/run.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "tools/commands/compare/side_by_side.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"

namespace keyhole::tools {
namespace {

/// The choice as the library is given it. With codes it takes a budget as its init function leaves it, 100 keys and no
/// tail, for one that nobody has set; a number of keys, which means nothing without partitions, says that it was.
BudgetChoice as_meant(BudgetChoice choice, const std::string& spec) {
  const bool means_none = choice.tail.given && choice.tail.mode == KEYHOLE_TAIL_NONE;
  if (means_none && !choice.target.any() && has_codes(spec)) choice.target.min_keys = 1;
  return choice;
}

}  // namespace

// Progress over all parts, of which several threads report steps at once.
class Comparison::Work {
 public:
  explicit Work(std::vector<SweepClock::Part> parts) : clock_(std::move(parts)) {}

  void done(double steps) {
    const std::lock_guard lock(mutex_);
    clock_.done(steps, seconds_since(start_));
    bar_.update(clock_.fraction(seconds_since(start_)), "comparing " + clock_.current());
  }

 private:
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  SweepClock clock_;
  Progress bar_{"comparing"};
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
  for (const std::string& spec : plan.specs()) {
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

struct Comparison::Todo {
  struct Index {
    const IndexRun* run;
    std::vector<BudgetChoice> budgets;
  };
  std::vector<Index> indexes;
  std::vector<SweptRival> rivals;

  bool others = false;  // the truth is needed for results of files

  [[nodiscard]] bool empty() const { return indexes.empty() && rivals.empty() && !others; }
};

std::vector<SweepClock::Part> Comparison::parts_of(Heads heads, const Todo& todo) const {
  std::vector<SweepClock::Part> out;
  if (todo.empty()) return out;
  const auto steps = static_cast<double>(heads.size());
  const auto add = [&](const std::string& kind, const std::string& spec, const std::string& more) {
    out.push_back({kind + spec.substr(0, spec.find(':')), spec + more, steps});
  };
  add("truth", "", "exact attention");
  for (const Todo::Index& index : todo.indexes) {
    const std::string& spec = index.run->index.spec;
    add("build ", spec, "");
    for (const BudgetChoice& b : index.budgets) {
      add("measure ", spec, " " + b.attend.text() + " " + b.tail.text() + " " + b.target.text());
    }
  }
  for (const SweptRival& rival : todo.rivals) {
    add("build ", rival.text, "");
    for (size_t i = 0; i < rows_of(rival.spec, plan_.rival_ks); ++i) {
      add("measure ", rival.text, " " + rival_attend(rival.spec, plan_.rival_ks[i]));
    }
  }
  return out;
}

Comparison::Todo Comparison::todo_of(Heads heads, const ResultsFile* kept) const {
  // A row is measured for all heads; where some heads have it already it is measured again, but not kept twice.
  const auto is_known = [&](Measurement row) {
    return kept != nullptr && std::all_of(heads.begin(), heads.end(), [&](const TraceHead* head) {
             row.layer = head->layer;
             row.kv_head = head->kv_head;
             return kept->knows(row_key(row)) &&
                    (plan_.answers == nullptr || plan_.answers->has(row));
           });
  };
  Todo todo;
  for (const IndexRun& run : plan_.indexes) {
    Todo::Index index{&run, {}};
    for (const BudgetChoice& budget : by_partition(run)) {
      Measurement row;
      row.index = run.index.spec;
      row.attend = budget.attend.text();
      row.tail = budget.tail.text();
      row.target = budget.target.text();
      if (!is_known(row)) index.budgets.push_back(budget);
    }
    if (!index.budgets.empty()) todo.indexes.push_back(std::move(index));
  }
  for (const SweptRival& rival : plan_.rivals) {
    bool known = true;
    for (size_t i = 0; i < rows_of(rival.spec, plan_.rival_ks); ++i) {
      Measurement row;
      row.index = rival.text;
      row.attend = rival_attend(rival.spec, plan_.rival_ks[i]);
      row.tail = row.target = "none";
      known = known && is_known(row);
    }
    if (!known) todo.rivals.push_back(rival);
  }
  todo.others = std::any_of(plan_.others.begin(), plan_.others.end(), [&](const OtherResult& o) {
    return std::any_of(heads.begin(), heads.end(),
                       [&](const TraceHead* head) { return is_of(o, *head); });
  });
  return todo;
}

std::vector<Measurement> Comparison::run(ResultsFile* kept) {
  std::vector<Heads> batches;
  std::vector<Todo> todos;
  std::vector<SweepClock::Part> parts;
  for (size_t first = 0; first < plan_.heads.size(); first += plan_.builds_at_once) {
    const size_t count = std::min<size_t>(plan_.builds_at_once, plan_.heads.size() - first);
    batches.push_back(Heads(plan_.heads).subspan(first, count));
    todos.push_back(todo_of(batches.back(), kept));
    const std::vector<SweepClock::Part> more = parts_of(batches.back(), todos.back());
    parts.insert(parts.end(), more.begin(), more.end());
  }
  Work work(std::move(parts));
  std::vector<Measurement> out, of_others;
  const auto keep = [&](std::vector<Measurement> rows) {
    if (kept != nullptr) {
      kept->append(rows);
    } else {
      std::move(rows.begin(), rows.end(), std::back_inserter(out));
    }
  };
  for (size_t i = 0; i < batches.size(); ++i) {
    if (!todos[i].empty()) run_batch(batches[i], todos[i], work, keep, of_others);
  }
  if (kept != nullptr) out = kept->rows();
  std::move(of_others.begin(), of_others.end(), std::back_inserter(out));
  put_in_order(out);
  return out;
}

void Comparison::put_in_order(std::vector<Measurement>& rows) const {
  std::map<std::string, size_t> places;  // of a way, without its head
  const auto way = [](const Measurement& m) {
    return m.index + "\n" + m.attend + "\n" + m.tail + "\n" + m.target;
  };
  const auto add = [&](const Measurement& m) { places.emplace(way(m), places.size()); };
  for (const IndexRun& run : plan_.indexes) {
    Measurement m;
    m.index = run.index.spec;
    for (const BudgetChoice& choice : run.budgets) {
      const BudgetChoice budget = for_index(choice, run.index.spec);
      m.attend = budget.attend.text();
      m.tail = budget.tail.text();
      m.target = budget.target.text();
      add(m);
    }
  }
  for (const SweptRival& rival : plan_.rivals) {
    Measurement m;
    m.index = rival.text;
    m.tail = m.target = "none";
    for (size_t i = 0; i < rows_of(rival.spec, plan_.rival_ks); ++i) {
      m.attend = rival_attend(rival.spec, plan_.rival_ks[i]);
      add(m);
    }
  }
  for (const OtherResult& other : plan_.others) add(other.way());
  // A file of results may hold more than is asked for now.
  std::erase_if(rows, [&](const Measurement& m) {
    const bool head = std::any_of(plan_.heads.begin(), plan_.heads.end(), [&](const TraceHead* h) {
      return h->layer == m.layer && h->kv_head == m.kv_head;
    });
    return !head || places.count(way(m)) == 0;
  });
  const auto order = [&](const Measurement& m) {
    return std::tuple(places.at(way(m)), m.layer, m.kv_head);
  };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const Measurement& a, const Measurement& b) { return order(a) < order(b); });
}

std::string Comparison::simd_level() const {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  check(keyhole_engine_get_config(engine_.get(), &config));
  return config.cpu_level;
}

void Comparison::run_batch(Heads heads, const Todo& todo, Work& work,
                           const std::function<void(std::vector<Measurement>)>& keep,
                           std::vector<Measurement>& of_others) {
  std::vector<HeadTruth> truths;
  for (const TraceHead* head : heads) {
    throw_if_interrupted();
    truths.push_back(compute_truth(trace_, *head, plan_.truth, team_));
    work.done(1);
  }
  // This comes first, so that a file that does not fit is reported before hours of work.
  for (const OtherResult& other : plan_.others) {
    for (size_t i = 0; i < heads.size(); ++i) {
      if (!is_of(other, *heads[i])) continue;
      of_others.push_back(measure_other(other, trace_, *heads[i], truths[i], plan_.truth.queries));
    }
  }
  std::vector<IndexHandle> indexes;
  constexpr uint32_t kNoPartitions = UINT32_MAX;
  uint32_t partition = kNoPartitions;  // of the indexes as they are now
  for (const auto& [run, budgets] : todo.indexes) {
    const std::string& spec = run->index.spec;
    if (set_spec(indexes, spec)) {
      work.done(static_cast<double>(heads.size()));
    } else {
      indexes.clear();  // before the next ones take memory
      indexes = build_all(heads, truths, spec, work);
      partition = kNoPartitions;
    }
    for (const BudgetChoice& budget : budgets) {
      if (budget.needs_partitions() && partition != budget.tail.keys_per_partition) {
        build_tails(indexes, budget.tail.keys_per_partition);
        partition = budget.tail.keys_per_partition;
      }
      std::vector<Measurement> rows;
      for (size_t i = 0; i < heads.size(); ++i) {
        HeadAnswers answers;
        if (plan_.answers != nullptr) answers = HeadAnswers(truths[i], plan_.answers->count());
        Measurement m =
            measure_index(indexes[i], truths[i], as_meant(budget, spec), plan_.kv_dtype,
                          rounds(*heads[i]), plan_.answers != nullptr ? &answers : nullptr);
        m.series = run->index.series;
        m.index = spec;
        m.layer = heads[i]->layer;
        m.kv_head = heads[i]->kv_head;
        if (plan_.answers != nullptr) plan_.answers->write(m, truths[i], answers);
        rows.push_back(std::move(m));
        work.done(1);
      }
      keep(std::move(rows));
    }
  }
  indexes.clear();
  measure_rivals(todo.rivals, plan_.rival_ks,
                 {.trace = trace_,
                  .heads = heads,
                  .truths = truths,
                  .kv_dtype = plan_.kv_dtype,
                  .threads_per_build = plan_.threads_per_build(),
                  .rounds_keys = [this](const TraceHead& head) { return rounds(head); },
                  .done = [&work](double steps) { work.done(steps); },
                  .keep = keep,
                  .answers = plan_.answers});
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

std::vector<BudgetChoice> Comparison::by_partition(const IndexRun& run) const {
  std::vector<BudgetChoice> out;
  for (const BudgetChoice& choice : run.budgets) {
    // With several indexes, --tail codes is meant for those that have codes.
    const bool of_others =
        choice.reads_codes() && !has_codes(run.index.spec) && plan_.indexes.size() > 1;
    if (!of_others) out.push_back(for_index(choice, run.index.spec));
  }
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
