// How far the predictions of a model that attends through an index are from those by exact attention, over a real text:
// all ways decode the same tokens side by side, so that each is held against exact attention token by token and no
// logits are kept.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <list>
#include <memory>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/eval/divergence.h"
#include "tools/commands/eval/kld_base.h"
#include "tools/commands/eval/kld_bins.h"
#include "tools/commands/eval/kld_report.h"
#include "tools/commands/eval/run.h"
#include "tools/commands/eval/scores.h"
#include "tools/commands/eval/tasks.h"
#include "tools/commands/eval/text_source.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

/// A way with the copy of the cache in which it decodes.
struct SideRun {
  KeyholeCache cache;
  std::unique_ptr<Decoder> decoder;
  KldRow* row = nullptr;
};

/// Returns where each part of the text ends, in tokens. A signal ends the text behind its last whole part, where there
/// is one; of a text that is one part, behind any token.
std::vector<size_t> decode_side_by_side(std::list<SideRun>& runners, const Text& text,
                                        size_t bins) {
  const auto exact = std::find_if(runners.begin(), runners.end(),
                                  [](const SideRun& r) { return r.row->way.is_exact(); });
  Progress bar("side by side");
  const size_t n = text.decoded.size() - 1;
  std::vector<size_t> ends;
  const auto end_part = [&](size_t end) {
    ends.push_back(end);
    for (SideRun& r : runners) {
      if (!r.cache.audited()) continue;
      const keyhole_audit audit = r.cache.audit();
      r.row->tokens.audited.push_back({audit.audits, audit.error_mean});
    }
  };
  for (size_t i = 0; i < n; ++i) {
    if (interrupted()) {
      if (bins == 1 && i > 0) end_part(i);
      if (ends.empty()) throw_if_interrupted();
      break;
    }
    bar.update(static_cast<double>(i) / static_cast<double>(n));
    const std::span<const float> truth = exact->decoder->step(text.decoded[i]);
    const double truth_log_sum = log_sum_exp(truth);
    const uint32_t best = greedy(truth);
    for (SideRun& r : runners) {
      const bool is_truth = &r == &*exact;
      const std::span<const float> logits = is_truth ? truth : r.decoder->step(text.decoded[i]);
      const double log_sum = is_truth ? truth_log_sum : log_sum_exp(logits);
      r.row->tokens.nats.push_back(is_truth ? 0.0
                                            : divergence(truth, truth_log_sum, logits, log_sum));
      r.row->bits.push_back(bits_of(logits, text.decoded[i + 1], log_sum));
      r.row->tokens.same_best.push_back(greedy(logits) == best);
    }
    if (i + 1 == bin_end(n, bins, ends.size())) end_part(i + 1);
  }
  for (SideRun& r : runners) {
    r.row->tokens.nats.resize(ends.back());
    r.row->tokens.same_best.resize(ends.back());
    r.row->bits.resize(ends.back());
  }
  return ends;
}

/// The tables of --bins; empty without.
std::string bins_text(const std::list<KldRow>& rows, const KldRow& exact,
                      const std::vector<size_t>& ends) {
  if (ends.size() == 1) return "";
  KldBinTable table(std::any_of(rows.begin(), rows.end(),
                                [](const KldRow& row) { return !row.tokens.audited.empty(); }));
  for (const KldRow& row : rows) {
    if (&row != &exact) table.add(row.way.name(), kld_bins(row.tokens, ends));
  }
  return "\nby position, in tokens decoded behind the prompt\n" + table.text();
}

}  // namespace

void eval_kld(const EvalOptions& asked) {
  if (asked.base.given()) return eval_kld_base(asked);
  const EvalOptions options = with_exact(asked);
  if (options.bins > options.bytes) {
    throw UsageError("--bins is " + std::to_string(options.bins) + "; allowed: at most the " +
                     std::to_string(options.bytes) + " tokens of --bytes");
  }
  const Text text = make_text(options);
  EvalRun run(options);
  const LlamaConfig& model = run.model();
  const auto context = static_cast<uint32_t>(text.context.size());
  warn_of_context(model, uint64_t{context} + options.bytes);
  run.prefill(text.context, options.bytes);

  std::list<KldRow> rows;
  std::list<SideRun> runners;
  run.for_each_way([&](const EvalWay& way, KeyholeCache& cache) {
    KldRow& row = rows.emplace_back();
    row.way = way;
    SideRun& runner = runners.emplace_back(SideRun{cache.fork(), nullptr, &row});
    runner.decoder = run.runner().decoder(runner.cache, context);
  });
  const std::vector<size_t> ends = decode_side_by_side(runners, text, options.bins);
  const size_t decoded = ends.back();
  for (SideRun& r : runners) measure_way(r.cache, *r.decoder, model, context, r.row->way);
  const KldRow& exact =
      *std::find_if(rows.begin(), rows.end(), [](const KldRow& row) { return row.way.is_exact(); });

  std::string notes;
  std::vector<const KldRow*> shown;
  for (const KldRow& row : rows) shown.push_back(&row);
  for (const KldRow& row : rows) notes += emulation_text(row.way) + audit_lines(row.way);
  run.print("divergence from exact attention, " + std::to_string(decoded) +
                (decoded < options.bytes ? " of " + std::to_string(options.bytes) : "") +
                " tokens decoded after " + format_count(context),
            kld_table(shown, exact, "exact attention's") + bins_text(rows, exact, ends) + notes);
  if (run.writes()) {
    Json results = Json::array();
    const size_t bytes = ends.back() + 1 == text.decoded.size() ? text.bytes : 0;
    for (const KldRow& row : rows) results.push_back(kld_json(row, exact, ends, bytes));
    Json json = run.header();
    json["decoded"] = decoded;
    json["results"] = results;
    run.write(json);
  }
  throw_if_interrupted();
}

}  // namespace keyhole::tools
