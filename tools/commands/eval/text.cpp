// How well a model that attends through an index predicts a real text, beside exact attention.
#include <cmath>
#include <cstdio>
#include <memory>

#include "tools/commands/common/context_warning.h"
#include "tools/commands/eval/options.h"
#include "tools/llama/tokenizer.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

/// A text cut into what is prefilled and what is decoded. Its last token is never decoded, only predicted.
struct Text {
  std::vector<uint32_t> context;
  std::vector<uint32_t> decoded;
  bool bytes = true;  ///< a token is a byte
};

/// The text decoded in one way.
struct Row {
  EvalWay way;
  std::vector<double> bits;  ///< of each predicted token

  double mean() const {
    double sum = 0.0;
    for (const double b : bits) sum += b;
    return sum / static_cast<double>(bits.size());
  }
};

/// Mean of the differences of two rows, and its standard error: token by token, as the text's own spread is
/// a hundred times larger.
struct Difference {
  double mean = 0.0, error = 0.0;
};

Difference difference(const Row& row, const Row& exact) {
  const auto n = static_cast<double>(row.bits.size());
  const double mean = row.mean() - exact.mean();
  double squares = 0.0;
  for (size_t i = 0; i < row.bits.size(); ++i) {
    const double d = row.bits[i] - exact.bits[i] - mean;
    squares += d * d;
  }
  return {mean, n > 1 ? std::sqrt(squares / (n * (n - 1))) : 0.0};
}

Text make_text(const EvalOptions& options, const LlamaConfig& model) {
  if (!options.prompt_file.empty() && !options.token_file.empty())
    throw UsageError("--prompt and --tokens: one of them is allowed");
  const uint32_t length = length_of(options.task);
  std::vector<uint32_t> tokens;
  Text text;
  text.bytes = options.token_file.empty();
  std::string name = options.token_file;
  if (!text.bytes) {
    tokens = read_token_file(options.token_file);
  } else {
    const std::filesystem::path path = options.prompt_file.empty()
                                           ? bundled_model_folder() / "haystack.txt"
                                           : std::filesystem::path(options.prompt_file);
    name = path.string();
    tokens = ByteTokenizer(model).encode_prompt(read_text_file(path));
  }
  const uint64_t needed = uint64_t{length} + options.bytes + 1;
  if (tokens.size() < needed) {
    throw UsageError(name + " has " + format_count(tokens.size()) + " tokens; --length " +
                     options.task.length + " and --bytes " + std::to_string(options.bytes) +
                     " need " + format_count(needed));
  }
  const auto end = tokens.begin() + length;
  text.context.assign(tokens.begin(), end);
  text.decoded.assign(end, end + options.bytes + 1);
  return text;
}

/// Bits of `token` by logits.
double bits_of(std::span<const float> logits, uint32_t token) {
  double largest = -INFINITY;
  for (const float x : logits) largest = std::max(largest, double{x});
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(x - largest);
  return (largest + std::log(sum) - logits[token]) / std::log(2.0);
}

void decode_text(Decoder& decoder, const Text& text, Row& row) {
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

const Row* find_exact(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    if (row.way.spec.mode() == KEYHOLE_MODE_EXACT) return &row;
  }
  return nullptr;
}

std::string signed_number(double value) {
  return (value < 0 ? "-" : "+") + format_number(std::abs(value));
}

std::string table_text(const std::vector<Row>& rows, const Text& text) {
  Table table({{"index", Table::Align::left},
               {"k"},
               {"attend", Table::Align::left},
               {text.bytes ? "bits/byte" : "bits/token"},
               {"above exact"},
               {"perplexity"},
               {"scanned"},
               {"read/token"},
               {"tokens/s"},
               {"attention/token"},
               {"build"},
               {"index size"}});
  const Row* exact = find_exact(rows);
  for (const Row& row : rows) {
    std::vector<std::string> cells = way_cells(row.way);
    cells.push_back(format_number(row.mean(), 5));
    if (exact == nullptr || exact == &row) {
      cells.emplace_back("-");
    } else {
      const Difference d = difference(row, *exact);
      cells.push_back(signed_number(d.mean) + " +- " + format_number(d.error, 2));
    }
    cells.push_back(format_number(std::exp2(row.mean()), 5));
    for (std::string& cell : cost_cells(row.way)) cells.push_back(std::move(cell));
    table.add_row(std::move(cells));
  }
  return table.text(style_of(stdout));
}

Json to_json(const Row& row, const Row* exact, const Text& text) {
  Json json = {{"bits_per_token", row.mean()}, {"perplexity", std::exp2(row.mean())}};
  if (text.bytes) json["bits_per_byte"] = row.mean();
  if (exact != nullptr) {
    const Difference d = difference(row, *exact);
    json["above_exact"] = {{"bits_per_token", d.mean}, {"standard_error", d.error}};
  }
  return to_json(row.way, json);
}

}  // namespace

void eval_text(EvalOptions options) {
  const std::vector<BudgetChoice> budgets = all_budgets(options);
  const std::vector<AttendSpec> specs = all_specs(options);
  Runner runner = make_runner(options.model, options.cache.threads);
  options.cache.device = runner.session_device(options.cache.cache_device);
  set_kv_dtype(options.cache, runner.model().config);
  const LlamaConfig& model = runner.model().config;
  const Text text = make_text(options, model);
  const auto context = static_cast<uint32_t>(text.context.size());
  warn_of_context(model, uint64_t{context} + options.bytes);
  KeyholeCache cache = make_cache(model, options.cache, context + options.bytes, specs, budgets);
  const double prefill_seconds = prefill_prompt(*runner.decoder(cache), text.context, nullptr);

  std::vector<Row> rows;
  for_each_way(cache, specs, budgets, [&](const EvalWay& way) {
    Row& row = rows.emplace_back();
    row.way = way;
    // In a copy: what is decoded pushes the prompt's end out of the window, and truncating it would not
    // bring it back.
    KeyholeCache copy = cache.fork();
    const std::unique_ptr<Decoder> decoder = runner.decoder(copy, context);
    decode_text(*decoder, text, row);
    measure_way(copy, *decoder, model, row.way);
  });

  const keyhole_statistics statistics = cache.statistics();
  if (options.json != "-") {
    std::vector<const EvalWay*> ways;
    for (const Row& row : rows) ways.push_back(&row.way);
    std::printf(
        "text, %u %s decoded after %s tokens, sink %u, window %u, K and V in %s, model on %s, "
        "sink and window on %s, prefill %s\n%s\n\n%s%s",
        options.bytes, text.bytes ? "bytes" : "tokens", format_count(context).c_str(),
        options.cache.sink, options.cache.window, options.cache.kv_dtype.c_str(),
        runner.device().c_str(), statistics.device, format_duration(prefill_seconds).c_str(),
        to_text(describe_machine(statistics.cpu_level)).c_str(), table_text(rows, text).c_str(),
        audit_texts(ways).c_str());
  }
  if (!options.json.empty()) {
    Json results = Json::array();
    for (const Row& row : rows) results.push_back(to_json(row, find_exact(rows), text));
    Json json = eval_header(options, runner, cache, statistics, context, prefill_seconds);
    json["decoded"] = options.bytes;
    json["results"] = results;
    write_json(options.json, json);
  }
}

}  // namespace keyhole::tools
