#include "tools/commands/decode/report.h"

#include <algorithm>
#include <cmath>

#include "runtime/files/json.h"
#include "tools/caches/aging_format.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/llama/blas.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

std::string time_table(const DecodeRun& run) {
  Table table({{"where the time went", Table::Align::left}, {"per token"}, {"share"}});
  const double steps = static_cast<double>(std::max<uint64_t>(1, run.times.steps));
  const auto row = [&](const char* name, double seconds) {
    table.add_row({name, format_duration(seconds / steps),
                   format_number(100.0 * seconds / std::max(1e-12, run.times.total())) + " %"});
  };
  row("attention (Keyhole)", run.times.attention);
  row("projections", run.times.projections);
  row("MLP", run.times.mlp);
  row("logits", run.times.logits);
  return table.text(style_of(stdout));
}

std::string worker_line(const keyhole_statistics& s, uint64_t steps) {
  const double n = static_cast<double>(std::max<uint64_t>(1, steps));
  return "workers per token: search " + format_duration(s.search_seconds / n) +
         ", offloaded attention " + format_duration(s.offload_seconds / n) +
         ", resident attention " + format_duration(s.resident_seconds / n) + ", appends " +
         format_duration(s.append_seconds / n) + "\n" +
         (s.append_blocks == 0
              ? ""
              : "appends: " + format_count(s.append_blocks) + " blocks, " +
                    format_duration(s.background_seconds) + " in the background, " +
                    format_count(s.append_waits) + " steps waited " +
                    format_duration(s.append_wait_seconds) + "\n");
}

double scan_fraction(const keyhole_statistics& s) {
  return s.keys_offered == 0
             ? std::nan("")
             : static_cast<double>(s.keys_scored) / static_cast<double>(s.keys_offered);
}

bool is_right(const DecodeRun& run, const Prompt& prompt) {
  return run.text.starts_with(prompt.expected);
}

std::string prompt_line(const Runner& runner, const DecodeRun& run) {
  const Sequence::Work& work = run.taken.work;
  std::string text = "weights loaded in " + format_duration(runner.load_seconds()) + "\nprompt ";
  if (work.reused > 0) {
    text += format_count(work.reused + work.stepped) + " tokens, " + format_count(work.reused) +
            " of them from the session and " + format_count(work.stepped) + " new, in " +
            format_duration(work.seconds) + " on " + runner.device();
  } else {
    text += format_count(work.prefilled) + " tokens in " + format_duration(work.seconds) + " (" +
            format_number(static_cast<double>(work.prefilled) / work.seconds) + " tokens/s) on " +
            runner.device() + prefill_text(runner);
  }
  return text + ", index build " + format_duration(run.taken.build_seconds) + turn_text(run.turn) +
         "\n";
}

}  // namespace

std::string report_text(const DecodeOptions& options, const Runner& runner, const DecodeRun& run,
                        const Prompt& prompt) {
  std::string text;
  if (!prompt.expected.empty()) {
    text += "answer expected: " + prompt.expected.substr(0, prompt.expected.find('\n')) +
            "; this is " + (is_right(run, prompt) ? "right" : "wrong") + "\n";
  }
  text += prompt_line(runner, run) + "decoded " + std::to_string(run.tokens.size()) +
          " tokens with " + options.index.shown(run.index) +
          (has_budget(options.index) ? ", " + options.budget.text() : "") +
          (options.sampling.greedy() ? "" : ", " + options.sampling.text()) +
          ", sink and window on " + run.statistics.device + ": " +
          format_number(run.tokens_per_second()) + " tokens/s";
  if (const double scanned = scan_fraction(run.statistics); !std::isnan(scanned)) {
    text += ", scanned " + format_number(100.0 * scanned) + " % of the indexed keys";
  }
  if (options.index.format()) {
    text += std::string("\nK and V of ") + (ages(*options.index.format()) ? "older" : "all") +
            " tokens went through " + options.index.text +
            " and back; the times are not those of such a cache";
  }
  if (run.memory) text += "\n" + to_text(*run.memory, runner.gpu_memory_peak());
  text += "\n\n" + time_table(run) + worker_line(run.statistics, run.times.steps);
  if (run.audit) text += "\n" + audit_text(*run.audit);
  if (run.check) text += "\n" + to_text(*run.check);
  return text;
}

Json report_json(const DecodeOptions& options, const Runner& runner, const DecodeRun& run,
                 const Prompt& prompt, bool has_text) {
  const keyhole_statistics& s = run.statistics;
  const Sequence::Work& work = run.taken.work;
  Json json = {{"machine", to_json(describe_machine(s.cpu_level))},
               {"model", model_name(options.model)},
               {"device", runner.device()},
               {"session_device", s.device},
               {"index", options.index.text},
               {"index_in_effect", run.index.empty() ? options.index.text : run.index},
               {"k", options.budget.attend.k},
               {"attend", options.budget.attend.text()},
               {"tail", options.budget.tail.text()},
               {"target", options.budget.target.text()},
               {"budgets", options.index.budgets},
               {"sink", options.cache.sink},
               {"window", options.cache.window},
               {"kv_dtype", options.cache.kv_dtype},
               {"kv_host", options.cache.kv_host},
               {"sampling", options.sampling.text()},
               {"seed", options.sampling.seed},
               {"threads", s.threads},
               {"blas", blas_kernels()},
               {"prompt_tokens", work.reused + work.prefilled + work.stepped + run.turn.tokens},
               {"reused_tokens", work.reused},
               {"generated_ids", run.tokens},
               {"stop", to_text(run.stop)},
               {"load_s", runner.load_seconds()},
               {"prefill_s", work.seconds},
               {"prefill", runner.prefill_pattern()},
               {"prefill_share", runner.prefill_share()},
               {"products", options.model.products},
               {"build_s", run.taken.build_seconds},
               {"turn", turn_json(run.turn)},
               {"tokens_per_second", run.tokens_per_second()},
               {"steps", run.times.steps},
               {"seconds",
                {{"attention", run.times.attention},
                 {"projections", run.times.projections},
                 {"mlp", run.times.mlp},
                 {"logits", run.times.logits}}},
               {"worker_seconds",
                {{"search", s.search_seconds},
                 {"offloaded_attention", s.offload_seconds},
                 {"resident_attention", s.resident_seconds},
                 {"append", s.append_seconds},
                 {"append_wait", s.append_wait_seconds},
                 {"background", s.background_seconds}}},
               {"append_blocks", s.append_blocks},
               {"append_waits", s.append_waits},
               {"scan_fraction", scan_fraction(s)},
               {"host_bytes", s.host_bytes},
               {"index_bytes", s.index_bytes},
               {"device_bytes", s.device_bytes}};
  if (has_text) json["generated"] = printable(run.text);
  if (!prompt.expected.empty()) {
    json["expected"] = prompt.expected;
    json["correct"] = is_right(run, prompt);
  }
  if (run.memory) json["gpu_memory"] = to_json(*run.memory, runner.gpu_memory_peak());
  if (run.audit) json["audit"] = audit_json(*run.audit);
  if (run.check) json["check"] = to_json(*run.check);
  return json;
}

}  // namespace keyhole::tools
