#include "tools/commands/compare/rival_run.h"

#include <algorithm>
#include <optional>

#include "tools/commands/common/sweep.h"
#include "tools/commands/compare/side_by_side.h"
#include "tools/llama/blas.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

using BuiltRivals = std::vector<std::unique_ptr<BuiltRival>>;

BuiltRivals build_all(const RivalSpec& spec, const RivalBatch& batch) {
  // Faiss's k-means calls BLAS, of as many threads at once as there are heads.
  std::optional<SingleThreadedBlas> one_thread_each;
  if (batch.threads_per_build == 1)
    one_thread_each.emplace(static_cast<unsigned>(batch.heads.size()));
  BuiltRivals out(batch.heads.size());
  side_by_side(out.size(), [&](size_t i) {
    out[i] = std::make_unique<BuiltRival>(spec, batch.trace, *batch.heads[i], batch.truths[i],
                                          batch.kv_dtype, batch.threads_per_build);
    batch.done(1);
  });
  return out;
}

}  // namespace

std::vector<SweptRival> expand_rivals(const std::vector<std::string>& rivals) {
  std::vector<SweptRival> out;
  std::string text;  // that is being read
  const auto add = [&](const std::string& series) {
    RivalSpec spec = RivalSpec::parse(text, rival_types());
    const bool known = std::any_of(
        out.begin(), out.end(), [&](const SweptRival& r) { return r.spec.text() == spec.text(); });
    if (known) throw UsageError("it is given twice");
    out.push_back({text, series, std::move(spec)});
  };
  for (const std::string& rival : rivals) {
    text = rival;
    try {
      for (const std::string& one : expand_sweep(rival)) {
        text = one;
        add(rival);
      }
    } catch (const UsageError& e) {
      throw UsageError("--rival " + text + ": " + e.what());
    }
  }
  return out;
}

std::vector<uint32_t> rival_ks(const std::vector<BudgetChoice>& budgets, uint32_t k) {
  std::vector<uint32_t> out;
  for (const BudgetChoice& budget : budgets) {
    const AttendChoice& attend = budget.attend;
    if (attend.mode != KEYHOLE_ATTEND_TOPK) continue;
    if (std::find(out.begin(), out.end(), attend.k) == out.end()) out.push_back(attend.k);
  }
  if (out.empty()) out.push_back(k);
  return out;
}

size_t rows_of(const RivalSpec& spec, const std::vector<uint32_t>& ks) {
  return spec.type().asks_for_k ? ks.size() : 1;
}

void check_rivals(const std::vector<SweptRival>& rivals, const RivalShape& shape) {
  for (const SweptRival& rival : rivals) {
    if (rival.spec.type().check == nullptr) continue;
    try {
      rival.spec.type().check(rival.spec, shape);
    } catch (const UsageError& e) {
      throw UsageError("--rival " + rival.text + ": " + e.what());
    }
  }
}

void measure_rivals(const std::vector<SweptRival>& rivals, const std::vector<uint32_t>& ks,
                    const RivalBatch& batch) {
  BuiltRivals built;
  const RivalSpec* built_by = nullptr;
  for (const auto& [text, series, spec] : rivals) {
    if (built_by != nullptr && spec.built_alike(*built_by)) {
      for (const auto& rival : built) rival->set_spec(spec);
      batch.done(static_cast<double>(built.size()));
    } else {
      built.clear();  // before the next ones take memory
      built = build_all(spec, batch);
      built_by = &spec;
    }
    for (size_t row = 0; row < rows_of(spec, ks); ++row) {
      std::vector<Measurement> rows;
      for (size_t i = 0; i < built.size(); ++i) {
        const TraceHead& head = *batch.heads[i];
        HeadAnswers answers;
        if (batch.answers != nullptr) {
          answers = HeadAnswers(batch.truths[i], batch.answers->count());
        }
        Measurement m = built[i]->measure(spec, ks[row], batch.rounds_keys(head),
                                          batch.answers != nullptr ? &answers : nullptr);
        m.series = series;
        m.index = text;
        m.layer = head.layer;
        m.kv_head = head.kv_head;
        if (batch.answers != nullptr) batch.answers->write(m, batch.truths[i], answers);
        rows.push_back(std::move(m));
        batch.done(1);
      }
      batch.keep(std::move(rows));
    }
  }
}

}  // namespace keyhole::tools
