// Passages of a long prompt, copied token by token: how many bytes a way to attend gets right, and how sure it is.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "runtime/files/json.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/task_fit.h"
#include "tools/commands/eval/run.h"
#include "tools/commands/eval/tasks.h"
#include "tools/tasks/copy_task.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

/// A passage's tokens, and how many of its bytes each stands for.
struct PassageTokens {
  std::vector<uint32_t> tokens;
  std::vector<size_t> bytes;
};

std::vector<PassageTokens> encode_passages(const Tokenizer& tokenizer, const CopyTask& task) {
  std::vector<PassageTokens> out;
  for (const CopyPassage& passage : task.passages) {
    PassageTokens& all = out.emplace_back();
    all.tokens = tokenizer.encode_inside(passage.text);
    DecodeState state = DecodeState::in_text();
    for (const uint32_t token : all.tokens) {
      std::string text;
      tokenizer.decode_next(token, state, text);
      all.bytes.push_back(text.size());
    }
  }
  return out;
}

/// What was predicted of all passages in one way, token after token, passage after passage.
struct CopyRow {
  EvalWay way;
  const std::vector<PassageTokens>* passages = nullptr;
  std::vector<bool> right;   ///< the likeliest token is the passage's
  std::vector<double> bits;  ///< of the passage's token

  /// Sums over some tokens: their bytes, those of the tokens that were right, their bits.
  struct Sum {
    double bytes = 0.0, right = 0.0, bits = 0.0;
    [[nodiscard]] double share() const { return right / bytes; }
    [[nodiscard]] double bits_per_byte() const { return bits / bytes; }
  };
  /// The sum over the tokens of one passage that begin `from` bytes behind its beginning, or later.
  [[nodiscard]] Sum sum(size_t passage, size_t from = 0) const {
    size_t i = 0;
    for (size_t p = 0; p < passage; ++p) i += (*passages)[p].tokens.size();
    Sum sum;
    size_t at = 0;
    for (const size_t bytes : (*passages)[passage].bytes) {
      if (at >= from) {
        sum.bytes += static_cast<double>(bytes);
        if (right[i]) sum.right += static_cast<double>(bytes);
        sum.bits += bits[i];
      }
      at += bytes;
      ++i;
    }
    return sum;
  }
  /// The sum over all passages. Behind the cue the passage is known.
  [[nodiscard]] Sum all(size_t from = 0) const {
    Sum all;
    for (size_t p = 0; p < passages->size(); ++p) {
      const Sum one = sum(p, from);
      all.bytes += one.bytes;
      all.right += one.right;
      all.bits += one.bits;
    }
    return all;
  }
  [[nodiscard]] std::vector<size_t> right_by_passage() const {
    std::vector<size_t> out;
    for (size_t p = 0; p < passages->size(); ++p) out.push_back(static_cast<size_t>(sum(p).right));
    return out;
  }
  [[nodiscard]] std::vector<double> bits_by_passage() const {
    std::vector<double> out;
    for (size_t p = 0; p < passages->size(); ++p) out.push_back(sum(p).bits_per_byte());
    return out;
  }
  /// The difference to exact attention, by passages, whose bytes are right and wrong together; absent without exact
  /// attention.
  [[nodiscard]] std::optional<Difference> above(const CopyRow* exact) const {
    if (exact == nullptr) return std::nullopt;
    return paired_difference(bits_by_passage(), exact->bits_by_passage());
  }
  [[nodiscard]] std::optional<Swaps> swaps(const CopyRow* exact) const {
    if (exact == nullptr) return std::nullopt;
    return count_swaps(right, exact->right);
  }
};

// The passage's own tokens go in, whatever was predicted: an error does not make the tokens behind it another task.
void copy_passage(Decoder& decoder, const std::vector<uint32_t>& prompt,
                  const std::vector<uint32_t>& passage, CopyRow& row) {
  const uint32_t context = decoder.tokens();
  std::span<const float> logits;
  for (const uint32_t token : prompt) logits = decoder.step(token);
  for (size_t i = 0; i < passage.size(); ++i) {
    if (i > 0) logits = decoder.step(passage[i - 1]);
    row.right.push_back(greedy(logits) == passage[i]);
    row.bits.push_back(bits_of(logits, passage[i]));
  }
  decoder.truncate(context);
}

std::string table_text(const std::vector<CopyRow>& rows) {
  Table table(way_columns(
      {{"bytes right"}, {"lost / won"}, {"bits/byte"}, {"above exact"}, {"after cue"}}));
  const CopyRow* exact = find_exact(rows);
  for (const CopyRow& row : rows) {
    const CopyRow* other = exact == &row ? nullptr : exact;
    std::vector<std::string> cells = way_cells(row.way);
    const CopyRow::Sum all = row.all();
    const CopyRow::Sum after = row.all(kCopyCueBytes);
    cells.push_back(format_number(100.0 * all.share()) + " %");
    cells.push_back(swaps_cell(row.swaps(other)));
    cells.push_back(format_number(all.bits_per_byte(), 4));
    cells.push_back(above_exact_cell(row.above(other)));
    cells.push_back(format_number(100.0 * after.share()) + " %, " +
                    format_number(after.bits_per_byte()));
    for (std::string& cell : cost_cells(row.way)) cells.push_back(std::move(cell));
    table.add_row(std::move(cells));
  }
  return table.text(style_of(stdout)) + (exact == nullptr ? "" : kSwapsNote) +
         "after cue: bytes right and bits/byte behind the first " + std::to_string(kCopyCueBytes) +
         " bytes of each passage, which say which one it is\n";
}

Json to_json(const CopyRow& row, const CopyRow* exact) {
  const auto swaps = row.swaps(exact);
  const CopyRow::Sum all = row.all();
  const CopyRow::Sum after = row.all(kCopyCueBytes);
  Json json = {
      {"bytes_right", static_cast<size_t>(all.right)},
      {"bytes", static_cast<size_t>(all.bytes)},
      {"tokens", row.right.size()},
      {"share_right", all.share()},
      {"lost", swaps ? Json(swaps->lost) : Json(nullptr)},
      {"won", swaps ? Json(swaps->won) : Json(nullptr)},
      {"bits_per_byte", all.bits_per_byte()},
      {"after_cue", {{"share_right", after.share()}, {"bits_per_byte", after.bits_per_byte()}}}};
  if (const auto d = row.above(exact)) {
    json["above_exact"] = {{"bits_per_byte", d->mean}, {"standard_error", d->error}};
  }
  json["right_by_passage"] = row.right_by_passage();
  json["bits_by_passage"] = row.bits_by_passage();
  return way_json(row.way, json);
}

}  // namespace

void eval_copy(const EvalOptions& options) {
  const auto tokenizer = load_tokenizer(options.model);
  const std::string prose = haystack_of(options.task);
  CopyTask task;
  std::vector<uint32_t> tokens;
  const size_t frame = tokenizer->encode_prompt("").size();
  (void)fit_bytes(
      length_of(options.task) - frame, token_density(*tokenizer, options.task), [&](size_t bytes) {
        const size_t passages =
            options.questions != 0 ? options.questions : fitting_questions("copy", bytes, 64);
        task = make_copy_task({.context_bytes = bytes,
                               .passages = passages,
                               .seed = options.task.seed,
                               .haystack = prose});
        tokens = tokenizer->encode_prompt(task.context);
        return tokens.size() - frame;
      });
  const size_t passages = task.passages.size();
  EvalRun run(options);
  const LlamaConfig& model = run.model();
  const std::vector<uint32_t> prompt = tokenizer->encode_inside(kCopyPrompt);
  const std::vector<PassageTokens> passage_tokens = encode_passages(*tokenizer, task);
  const auto context = static_cast<uint32_t>(tokens.size());
  warn_of_context(model, context);
  run.prefill(tokens, 256);

  std::vector<CopyRow> rows;
  run.for_each_way([&](const EvalWay& way, KeyholeCache& cache) {
    CopyRow& row = rows.emplace_back();
    row.way = way;
    row.passages = &passage_tokens;
    Progress bar(way.name());
    // Works in a copy: a passage pushes as many tokens out of the window, which the next way must find there.
    KeyholeCache copy = cache.fork();
    const std::unique_ptr<Decoder> decoder = run.runner().decoder(copy, context);
    for (size_t i = 0; i < passages; ++i) {
      throw_if_interrupted();
      copy_passage(*decoder, prompt, passage_tokens[i].tokens, row);
      bar.update(static_cast<double>(i + 1) / static_cast<double>(passages));
    }
    measure_way(copy, *decoder, model, context, row.way);
  });

  run.print("copy, " + format_count(context) + " tokens, " + std::to_string(passages) +
                " passages of " + std::to_string(kCopyBytes) + " bytes, seed " +
                std::to_string(options.task.seed),
            table_text(rows) + way_notes(rows));
  if (run.writes()) {
    Json results = Json::array();
    for (const CopyRow& row : rows) results.push_back(to_json(row, find_exact(rows)));
    Json json = run.header();
    Json places = Json::array();
    for (const CopyPassage& passage : task.passages) places.push_back(passage.place);
    json["passage_bytes"] = kCopyBytes;
    json["cue_bytes"] = kCopyCueBytes;
    json["passage_places"] = places;
    json["results"] = results;
    run.write(json);
  }
}

}  // namespace keyhole::tools
