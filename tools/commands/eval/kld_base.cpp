// Each chunk of the file is a prompt of its own, run once for all ways, and decoded by all of them side by side, so
// that a row of the file is read once.
#include "tools/commands/eval/kld_base.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/model_options.h"
#include "tools/commands/eval/divergence.h"
#include "tools/commands/eval/kld_report.h"
#include "tools/commands/eval/ruler_report.h"
#include "tools/commands/eval/run.h"
#include "tools/commands/eval/scores.h"
#include "tools/io/kld_base_file.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

// --length has no less; memory is planned by it.
constexpr uint32_t kLeastPlanned = 64;

/// What one way has predicted, chunk after chunk, and its cost in each.
struct BaseRow {
  KldRow row;
  std::vector<EvalWay> runs;
};

/// A way in one chunk: the copy of the cache in which it decodes.
struct BaseRunner {
  KeyholeCache cache;
  std::unique_ptr<Decoder> decoder;
  KldRow* row = nullptr;
  EvalWay way;
};

struct BaseResult {
  std::list<BaseRow> rows;
  std::vector<double> bits;  ///< of each predicted token by the file
  uint32_t chunks = 0;       ///< that are whole
};

/// Opens the file for this model. Throws UsageError where the two do not fit.
KldBaseFile open_base(const EvalOptions& options, const LlamaConfig& model) {
  KldBaseFile file(options.base.file);
  if (file.vocabulary() != model.vocab_size) {
    throw UsageError("--base " + file.name() + " is of a vocabulary of " +
                     std::to_string(file.vocabulary()) + " tokens, the model has " +
                     std::to_string(model.vocab_size));
  }
  if (options.base.chunks > file.chunks()) {
    throw UsageError("--chunks is " + std::to_string(options.base.chunks) +
                     "; allowed: at most the " + std::to_string(file.chunks()) + " of " +
                     file.name());
  }
  return file;
}

/// The token that the vocabulary puts in front of a prompt. Of a folder without a tokenizer, as --tokens allows it,
/// none.
std::optional<uint32_t> front_token(const EvalOptions& options, const LlamaConfig& model) {
  const auto tokenizer = find_tokenizer(options.model, model);
  if (!tokenizer) return std::nullopt;
  const std::vector<uint32_t> front = tokenizer->encode_prompt("");
  return front.empty() ? std::nullopt : std::optional(front.front());
}

/// Decodes the second half of a chunk in all ways. `tokens`: of the chunk. progress: takes the share that is done.
void decode_chunk(KldBaseFile& file, uint32_t chunk, const std::vector<uint32_t>& tokens,
                  std::list<BaseRunner>& runners, std::vector<double>& base_bits,
                  const std::function<void(double)>& progress) {
  std::vector<float> base(file.vocabulary());
  for (uint32_t i = 0; i < file.rows(); ++i) {
    throw_if_interrupted();
    progress(static_cast<double>(i) / static_cast<double>(file.rows()));
    const uint32_t token = tokens[file.prompt() + i], next = tokens[file.prompt() + i + 1];
    file.read_row(chunk, i, base);
    const uint32_t best = greedy(base);
    base_bits.push_back(-base[next] / std::log(2.0));
    for (BaseRunner& r : runners) {
      const std::span<const float> logits = r.decoder->step(token);
      const double log_sum = log_sum_exp(logits);
      r.row->tokens.nats.push_back(
          divergence_from_log_probabilities(base, KldBaseFile::kLeastThatCounts, logits, log_sum));
      r.row->tokens.same_best.push_back(greedy(logits) == best);
      r.row->bits.push_back(bits_of(logits, next, log_sum));
    }
  }
}

void run_chunk(EvalRun& run, KldBaseFile& file, uint32_t chunk, std::optional<uint32_t> front,
               BaseResult& result, const std::function<void(double)>& progress) {
  std::vector<uint32_t> tokens = file.tokens(chunk);
  if (front) tokens.front() = *front;
  run.prefill({tokens.begin(), tokens.begin() + file.prompt()}, file.rows());
  std::list<BaseRunner> runners;
  auto at = result.rows.begin();
  run.for_each_way([&](const EvalWay& way, KeyholeCache& cache) {
    if (at == result.rows.end()) at = result.rows.emplace(at);
    BaseRunner& r = runners.emplace_back(BaseRunner{cache.fork(), nullptr, &at->row, way});
    r.decoder = run.runner().decoder(r.cache, file.prompt());
    at->row.way = way;
    ++at;
  });
  decode_chunk(file, chunk, tokens, runners, result.bits, progress);
  at = result.rows.begin();
  for (BaseRunner& r : runners) {
    measure_way(r.cache, *r.decoder, run.model(), file.prompt(), r.way);
    (at++)->runs.push_back(std::move(r.way));
  }
}

/// Leaves what is of whole chunks alone.
void drop_unfinished(const KldBaseFile& file, BaseResult& result) {
  const size_t tokens = size_t{result.chunks} * file.rows();
  result.bits.resize(tokens);
  for (BaseRow& r : result.rows) {
    r.row.tokens.nats.resize(tokens);
    r.row.tokens.same_best.resize(tokens);
    r.row.bits.resize(tokens);
  }
}

/// Runs the first `chunks` chunks. A signal ends the work behind the last whole one, where there is one.
BaseResult run_chunks(EvalRun& run, KldBaseFile& file, uint32_t chunks,
                      std::optional<uint32_t> front) {
  BaseResult result;
  Progress bar("side by side");
  const auto progress = [&](double share) {
    bar.update((result.chunks + share) / chunks,
               "chunk " + std::to_string(result.chunks + 1) + " of " + std::to_string(chunks));
  };
  try {
    for (; result.chunks < chunks; ++result.chunks) {
      run_chunk(run, file, result.chunks, front, result, progress);
    }
  } catch (const Interrupted&) {
    if (result.chunks == 0) throw;
  } catch (const std::exception&) {
    // The library may have seen the signal first.
    if (!interrupted() || result.chunks == 0) throw;
  }
  drop_unfinished(file, result);
  for (BaseRow& r : result.rows) r.row.way = mean_way(r.runs);
  return result;
}

}  // namespace

void add_kld_base_options(CLI::App& command, KldBaseOptions& options) {
  command
      .add_option(
          "--base", options.file,
          "File that llama.cpp's llama-perplexity --kl-divergence-base wrote, for --task "
          "kld: the tokens are its own, and every way, exact attention too, is held against "
          "its log-probabilities")
      ->type_name("FILE");
  command.add_option("--chunks", options.chunks, "Chunks of --base, the first ones; default: all")
      ->check(CLI::Range(1U, (1U << 31U) - 1));
}

void check_kld_base(const CLI::App& command, const KldBaseOptions& options) {
  if (options.file.empty()) {
    if (options.chunks != 0) throw UsageError("--chunks is of --base");
    return;
  }
  for (const char* name : {"--prompt", "--tokens", "--length", "--bytes"}) {
    if (command.count(name) == 0) continue;
    throw UsageError(std::string("--base and ") + name +
                     ": one of them is allowed; the file of --base has its own tokens");
  }
  for (const char* name : {"--bins", "--audit"}) {
    if (command.count(name) == 0) continue;
    throw UsageError(std::string(name) +
                     " is of --task kld without --base: every chunk has its own session");
  }
}

void eval_kld_base(const EvalOptions& asked) {
  EvalOptions options = with_exact(asked);
  const LlamaConfig config = load_llama_config(model_folder(options.model) / "config.json");
  KldBaseFile file = open_base(options, config);
  const std::optional<uint32_t> front = front_token(options, config);
  options.task.length = std::to_string(std::max(file.prompt(), kLeastPlanned));
  options.bytes = file.rows();
  EvalRun run(options);
  warn_of_context(run.model(), file.context());
  const BaseResult result =
      run_chunks(run, file, options.base.chunks == 0 ? file.chunks() : options.base.chunks, front);

  std::vector<const KldRow*> rows;
  for (const BaseRow& r : result.rows) rows.push_back(&r.row);
  const KldRow& exact = **std::find_if(rows.begin(), rows.end(),
                                       [](const KldRow* row) { return row->way.is_exact(); });
  const size_t decoded = result.bits.size();
  std::string notes = "base: " + format_number(mean_of(result.bits), 5) + " bits/token of " +
                      format_count(decoded) + "; its probabilities up to e^-16 do not count\n";
  for (const KldRow* row : rows) notes += emulation_text(row->way);
  run.print("divergence from " + file.name() + ", " + std::to_string(result.chunks) + " of " +
                std::to_string(file.chunks()) + " chunks of " + format_count(file.context()) +
                " tokens, " + format_count(decoded) + " tokens decoded",
            kld_table(rows, exact, "the file's") + notes);
  if (run.writes()) {
    nlohmann::ordered_json json = run.header();
    json["base"] = {{"file", file.name()},
                    {"context", file.context()},
                    {"vocabulary", file.vocabulary()},
                    {"chunks", result.chunks},
                    {"chunks_in_file", file.chunks()},
                    {"bits_per_token", mean_of(result.bits)}};
    json["decoded"] = decoded;
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    const std::vector<size_t> ends = {decoded};
    for (const KldRow* row : rows) results.push_back(kld_json(*row, exact, ends, 0));
    json["results"] = results;
    run.write(json);
  }
  throw_if_interrupted();
}

}  // namespace keyhole::tools
