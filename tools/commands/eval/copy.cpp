// Passages of a long prompt, copied byte by byte: how many bytes a way to attend gets right, and how sure it is.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "tools/commands/common/context_warning.h"
#include "tools/commands/eval/run.h"
#include "tools/tasks/copy_task.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

/// What was predicted of all passages in one way, byte after byte, passage after passage.
struct Row {
  EvalWay way;
  std::vector<bool> right;   ///< the likeliest byte is the passage's
  std::vector<double> bits;  ///< of the passage's byte

  [[nodiscard]] size_t bytes_right() const {
    return static_cast<size_t>(std::count(right.begin(), right.end(), true));
  }
  [[nodiscard]] double share() const {
    return static_cast<double>(bytes_right()) / static_cast<double>(right.size());
  }
  [[nodiscard]] std::vector<size_t> right_by_passage() const {
    std::vector<size_t> out(right.size() / kCopyBytes);
    for (size_t i = 0; i < right.size(); ++i) out[i / kCopyBytes] += static_cast<size_t>(right[i]);
    return out;
  }
  [[nodiscard]] std::vector<double> bits_by_passage() const {
    std::vector<double> out;
    for (size_t i = 0; i < bits.size(); i += kCopyBytes) {
      out.push_back(mean_of(std::span(bits).subspan(i, kCopyBytes)));
    }
    return out;
  }
  /// Of the bytes behind the cue, where the passage is known: what was right, and what it took.
  struct AfterCue {
    double share = 0.0, bits = 0.0;
  };
  [[nodiscard]] AfterCue after_cue() const {
    AfterCue sum;
    double bytes = 0.0;
    for (size_t i = 0; i < right.size(); ++i) {
      if (i % kCopyBytes < kCopyCueBytes) continue;
      sum.share += right[i] ? 1.0 : 0.0;
      sum.bits += bits[i];
      bytes += 1.0;
    }
    return {sum.share / bytes, sum.bits / bytes};
  }
  /// Passage by passage, whose bytes are right and wrong together; absent without exact attention.
  [[nodiscard]] std::optional<Difference> above(const Row* exact) const {
    if (exact == nullptr) return std::nullopt;
    return paired_difference(bits_by_passage(), exact->bits_by_passage());
  }
  [[nodiscard]] std::optional<Swaps> swaps(const Row* exact) const {
    if (exact == nullptr) return std::nullopt;
    return count_swaps(right, exact->right);
  }
};

// The passage's own bytes go in, whatever was predicted: an error does not make the bytes behind it another task.
void copy_passage(Decoder& decoder, const Tokenizer& tokenizer, const CopyPassage& passage,
                  Row& row) {
  const uint32_t context = decoder.tokens();
  const std::vector<uint32_t> bytes = tokenizer.encode(passage.text);
  std::span<const float> logits;
  for (const uint32_t token : tokenizer.encode(kCopyPrompt)) logits = decoder.step(token);
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i > 0) logits = decoder.step(bytes[i - 1]);
    row.right.push_back(greedy(logits) == bytes[i]);
    row.bits.push_back(bits_of(logits, bytes[i]));
  }
  decoder.truncate(context);
}

std::string table_text(const std::vector<Row>& rows) {
  Table table({{"index", Table::Align::left},
               {"k"},
               {"attend", Table::Align::left},
               {"bytes right"},
               {"lost / won"},
               {"bits/byte"},
               {"above exact"},
               {"after cue"},
               {"scanned"},
               {"read/token"},
               {"tokens/s"},
               {"attention/token"},
               {"build"},
               {"index size"}});
  const Row* exact = find_exact(rows);
  for (const Row& row : rows) {
    const Row* other = exact == &row ? nullptr : exact;
    std::vector<std::string> cells = way_cells(row.way);
    cells.push_back(format_number(100.0 * row.share()) + " %");
    cells.push_back(swaps_cell(row.swaps(other)));
    cells.push_back(format_number(mean_of(row.bits), 4));
    cells.push_back(above_exact_cell(row.above(other)));
    const Row::AfterCue after = row.after_cue();
    cells.push_back(format_number(100.0 * after.share) + " %, " + format_number(after.bits));
    for (std::string& cell : cost_cells(row.way)) cells.push_back(std::move(cell));
    table.add_row(std::move(cells));
  }
  return table.text(style_of(stdout)) + (exact == nullptr ? "" : kSwapsNote) +
         "after cue: bytes right and bits/byte behind the first " + std::to_string(kCopyCueBytes) +
         " bytes of each passage, which say which one it is\n";
}

Json to_json(const Row& row, const Row* exact) {
  const auto swaps = row.swaps(exact);
  Json json = {{"bytes_right", row.bytes_right()},
               {"bytes", row.right.size()},
               {"share_right", row.share()},
               {"lost", swaps ? Json(swaps->lost) : Json(nullptr)},
               {"won", swaps ? Json(swaps->won) : Json(nullptr)},
               {"bits_per_byte", mean_of(row.bits)},
               {"after_cue",
                {{"share_right", row.after_cue().share}, {"bits_per_byte", row.after_cue().bits}}}};
  if (const auto d = row.above(exact)) {
    json["above_exact"] = {{"bits_per_byte", d->mean}, {"standard_error", d->error}};
  }
  json["right_by_passage"] = row.right_by_passage();
  json["bits_by_passage"] = row.bits_by_passage();
  return to_json(row.way, json);
}

}  // namespace

void eval_copy(const EvalOptions& options) {
  EvalRun run(options);
  const LlamaConfig& model = run.model();
  const auto tokenizer = load_tokenizer(options.model, model);
  const size_t context_bytes = length_of(options.task) - 1;
  const size_t passages =
      options.questions != 0 ? options.questions : fitting_questions("copy", context_bytes, 64);
  const std::string prose = haystack_of(options.task);
  const CopyTask task = make_copy_task({.context_bytes = context_bytes,
                                        .passages = passages,
                                        .seed = options.task.seed,
                                        .haystack = prose});
  const std::vector<uint32_t> tokens = tokenizer->encode_prompt(task.context);
  const auto context = static_cast<uint32_t>(tokens.size());
  warn_of_context(model, context);
  run.prefill(tokens, 256);

  std::vector<Row> rows;
  run.for_each_way([&](const EvalWay& way, KeyholeCache& cache) {
    Row& row = rows.emplace_back();
    row.way = way;
    Progress bar(way.name());
    // In a copy: a passage pushes as many tokens out of the window, which the next way shall find there.
    KeyholeCache copy = cache.fork();
    const std::unique_ptr<Decoder> decoder = run.runner().decoder(copy, context);
    for (size_t i = 0; i < task.passages.size(); ++i) {
      throw_if_interrupted();
      copy_passage(*decoder, *tokenizer, task.passages[i], row);
      bar.update(static_cast<double>(i + 1) / static_cast<double>(passages));
    }
    measure_way(copy, *decoder, model, context, row.way);
  });

  run.print("copy, " + format_count(context) + " tokens, " + std::to_string(passages) +
                " passages of " + std::to_string(kCopyBytes) + " bytes, seed " +
                std::to_string(options.task.seed),
            table_text(rows) + way_notes(rows));
  if (!options.json.empty()) {
    Json results = Json::array();
    for (const Row& row : rows) results.push_back(to_json(row, find_exact(rows)));
    Json json = run.header();
    Json places = Json::array();
    for (const CopyPassage& passage : task.passages) places.push_back(passage.place);
    json["passage_bytes"] = kCopyBytes;
    json["cue_bytes"] = kCopyCueBytes;
    json["passage_places"] = places;
    json["results"] = results;
    write_json(options.json, json);
  }
}

}  // namespace keyhole::tools
