// How well a model that attends through an index predicts a real text, beside exact attention.
#include <cmath>
#include <cstdio>
#include <memory>

#include "runtime/files/json.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/eval/run.h"
#include "tools/commands/eval/tasks.h"
#include "tools/commands/eval/text_source.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

/// The text decoded in one way.
struct TextRow {
  EvalWay way;
  std::vector<double> bits;  ///< of each predicted token

  double mean() const { return mean_of(bits); }
  double per_byte(const Text& text) const {
    return mean() * static_cast<double>(bits.size()) / static_cast<double>(text.bytes);
  }
  /// The difference to exact attention, token by token; absent for exact attention itself.
  std::optional<Difference> above(const TextRow* exact) const {
    if (exact == nullptr) return std::nullopt;
    return paired_difference(bits, exact->bits);
  }
};

void decode_text(Decoder& decoder, const Text& text, TextRow& row) {
  Progress bar(row.way.name());
  const size_t n = text.decoded.size() - 1;
  for (size_t i = 0; i < n; ++i) {
    if (i % 32 == 0) {
      throw_if_interrupted();
      bar.update(static_cast<double>(i) / static_cast<double>(n));
    }
    row.bits.push_back(bits_of(decoder.step(text.decoded[i]), text.decoded[i + 1]));
  }
}

std::string table_text(const std::vector<TextRow>& rows, const Text& text) {
  Table table(way_columns({{text.of_bytes() ? "bits/byte" : "bits/token"},
                           {"above exact"},
                           {text.bytes == 0 || text.of_bytes() ? "perplexity" : "bits/byte"}}));
  const TextRow* exact = find_exact(rows);
  for (const TextRow& row : rows) {
    std::vector<std::string> cells = way_cells(row.way);
    cells.push_back(format_number(row.mean(), 5));
    cells.push_back(above_exact_cell(row.above(exact == &row ? nullptr : exact)));
    cells.push_back(format_number(
        text.bytes == 0 || text.of_bytes() ? std::exp2(row.mean()) : row.per_byte(text), 5));
    for (std::string& cell : cost_cells(row.way)) cells.push_back(std::move(cell));
    table.add_row(std::move(cells));
  }
  return table.text(style_of(stdout));
}

Json to_json(const TextRow& row, const TextRow* exact, const Text& text) {
  Json json = {{"bits_per_token", row.mean()}, {"perplexity", std::exp2(row.mean())}};
  if (text.bytes != 0) json["bits_per_byte"] = row.per_byte(text);
  if (const auto d = row.above(exact)) {
    json["above_exact"] = {{"bits_per_token", d->mean}, {"standard_error", d->error}};
  }
  return way_json(row.way, json);
}

}  // namespace

void eval_text(const EvalOptions& options) {
  const Text text = make_text(options);
  EvalRun run(options);
  const LlamaConfig& model = run.model();
  const auto context = static_cast<uint32_t>(text.context.size());
  warn_of_context(model, uint64_t{context} + options.bytes);
  run.prefill(text.context, options.bytes);

  std::vector<TextRow> rows;
  run.for_each_way([&](const EvalWay& way, KeyholeCache& cache) {
    TextRow& row = rows.emplace_back();
    row.way = way;
    // Works in a copy: decoding pushes the prompt's end out of the window, and truncating would not bring it back.
    KeyholeCache copy = cache.fork();
    const std::unique_ptr<Decoder> decoder = run.runner().decoder(copy, context);
    decode_text(*decoder, text, row);
    measure_way(copy, *decoder, model, context, row.way);
  });

  run.print("text, " + std::to_string(options.bytes) + (text.of_bytes() ? " bytes" : " tokens") +
                " decoded after " + format_count(context) + " tokens",
            table_text(rows, text) + way_notes(rows));
  if (run.writes()) {
    Json results = Json::array();
    for (const TextRow& row : rows) results.push_back(to_json(row, find_exact(rows), text));
    Json json = run.header();
    json["decoded"] = options.bytes;
    json["results"] = results;
    run.write(json);
  }
}

}  // namespace keyhole::tools
