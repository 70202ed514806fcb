// keyhole compare: index types on recorded heads, against exact attention.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>

#include "tools/commands/commands.h"
#include "tools/commands/compare_measure.h"
#include "tools/commands/compare_report.h"
#include "tools/commands/compare_truth.h"
#include "tools/io/element.h"
#include "tools/io/vector_trace.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::string trace;
  VectorFiles vectors;
  std::vector<std::string> indexes;
  size_t k = 100;
  std::optional<size_t> sink, window;
  unsigned threads = 0;
  std::vector<uint32_t> layers, heads;
  size_t queries = 1000;
  std::string kv_dtype = "f16";
  std::string json, csv;
  bool per_head = false;
};

// The options with everything filled in that depends on the trace.
struct Plan {
  keyhole_dtype kv_dtype = KEYHOLE_F16;
  size_t sink = 0, window = 0;
  unsigned threads = 1;  ///< in all
  unsigned builds_at_once = 1;
  std::vector<const TraceHead*> heads;
  TruthOptions truth;
};

Trace open_trace(const Options& options) {
  VectorFiles vectors = options.vectors;
  const bool has_parts =
      !vectors.queries.empty() || !vectors.training.empty() || !vectors.values.empty();
  if (!is_vector_file(options.trace)) {
    if (has_parts) {
      throw UsageError(
          "--query-file, --training-file and --value-file belong to fbin and fvecs keys; " +
          options.trace + " is a trace, which holds its own");
    }
    return Trace::open(options.trace);
  }
  vectors.keys = options.trace;
  const bool raw = vectors.keys.extension() == ".fbin" || vectors.keys.extension() == ".fvecs";
  if (raw && vectors.queries.empty()) {
    throw UsageError(options.trace + " holds keys only: give --query-file as well");
  }
  if (!raw && has_parts) {
    throw UsageError(
        "--query-file, --training-file and --value-file belong to fbin and fvecs keys; "
        "an HDF5 file holds its own queries");
  }
  return open_vectors(vectors);
}

template <class Range>
std::string listed(const Range& numbers) {
  std::string out;
  for (const uint32_t number : numbers) out += (out.empty() ? "" : ", ") + std::to_string(number);
  return out;
}

std::vector<const TraceHead*> select_heads(const Trace& trace, const Options& options) {
  const auto contains = [](const std::vector<uint32_t>& list, uint32_t number) {
    return std::find(list.begin(), list.end(), number) != list.end();
  };
  for (const uint32_t layer : options.layers) {
    if (!contains(trace.info().layers, layer)) {
      throw UsageError("layer " + std::to_string(layer) + " is not in the trace, which has " +
                       listed(trace.info().layers));
    }
  }
  for (const uint32_t head : options.heads) {
    if (head >= trace.info().kv_heads) {
      throw UsageError("KV head " + std::to_string(head) + " is not in the trace, which has 0.." +
                       std::to_string(trace.info().kv_heads - 1));
    }
  }
  std::vector<const TraceHead*> out;
  for (const TraceHead& head : trace.heads()) {
    if (!options.layers.empty() && !contains(options.layers, head.layer)) continue;
    if (!options.heads.empty() && !contains(options.heads, head.kv_head)) continue;
    out.push_back(&head);
  }
  return out;
}

// `wanted` of `total` rows, evenly spread, the last one included.
std::vector<size_t> spread(size_t total, size_t wanted) {
  const size_t count = std::min(total, wanted);
  std::vector<size_t> out;
  for (size_t i = 1; i <= count; ++i) out.push_back(i * total / count - 1);
  return out;
}

Plan make_plan(const Trace& trace, const Options& options) {
  Plan plan;
  plan.kv_dtype = options.kv_dtype == "f32"   ? KEYHOLE_F32
                  : options.kv_dtype == "f16" ? KEYHOLE_F16
                                              : KEYHOLE_BF16;
  // Sets of vectors have no sequence, so there is nothing to keep resident unless it is asked for.
  const bool vectors = trace.info().task == "vectors";
  plan.sink = options.sink.value_or(vectors ? 0 : 128);
  plan.window = options.window.value_or(vectors ? 0 : 512);
  plan.heads = select_heads(trace, options);
  plan.threads = options.threads != 0 ? options.threads : describe_machine("").cores;
  plan.builds_at_once = std::min<unsigned>(plan.threads, static_cast<unsigned>(plan.heads.size()));
  plan.truth.offloaded = offloaded_tokens(trace, plan.sink, plan.window);
  plan.truth.k = options.k;
  plan.truth.queries = spread(trace.query_positions().size(), options.queries);
  return plan;
}

// Progress over all builds, several of which report at once.
class Work {
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
struct BuildProgress {
  Work& work;
  double told = 0;

  static int32_t callback(void* user, double fraction, const char*) {
    auto& self = *static_cast<BuildProgress*>(user);
    if (fraction > self.told) {
      self.work.done(fraction - self.told);
      self.told = fraction;
    }
    return interrupted() ? 1 : 0;
  }
};

class Comparison {
 public:
  Comparison(const Trace& trace, const Plan& plan, const std::vector<std::string>& indexes)
      : trace_(trace),
        plan_(plan),
        indexes_(indexes),
        engine_(make_head_engine(trace.info(), plan.kv_dtype, plan.threads / plan.builds_at_once)),
        team_(plan.threads),
        // A build and a measurement count one step each; so does a head's truth.
        work_(plan.heads.size() * (1 + 2 * indexes.size())) {
    // Every spec is tried before hours of work begin.
    for (const std::string& spec : indexes) {
      try {
        (void)make_index(engine_, spec);
      } catch (const LibraryError& e) {
        if (e.status() != KEYHOLE_INVALID_ARGUMENT) throw;
        throw UsageError("--index " + spec + ": " + e.what());
      }
    }
  }

  std::vector<Measurement> run() {
    std::vector<Measurement> out;
    for (size_t first = 0; first < plan_.heads.size(); first += plan_.builds_at_once) {
      const size_t count = std::min<size_t>(plan_.builds_at_once, plan_.heads.size() - first);
      run_batch(std::span(plan_.heads).subspan(first, count), out);
    }
    const auto order = [&](const Measurement& m) {
      const auto at = std::find(indexes_.begin(), indexes_.end(), m.index) - indexes_.begin();
      return std::tuple(at, m.layer, m.kv_head);
    };
    std::stable_sort(out.begin(), out.end(), [&](const Measurement& a, const Measurement& b) {
      return order(a) < order(b);
    });
    return out;
  }

  [[nodiscard]] std::string simd_level() const {
    keyhole_engine_config config;
    keyhole_engine_config_init(&config);
    check(keyhole_engine_get_config(engine_.get(), &config));
    return config.cpu_level;
  }

 private:
  void run_batch(std::span<const TraceHead* const> heads, std::vector<Measurement>& out) {
    std::vector<HeadTruth> truths;
    for (const TraceHead* head : heads) {
      throw_if_interrupted();
      truths.push_back(compute_truth(trace_, *head, plan_.truth, team_));
      work_.done(1);
    }
    for (const std::string& spec : indexes_) {
      std::vector<IndexHandle> built = build_all(heads, truths, spec);
      // One at a time and on one thread, so that latencies are those of an idle machine.
      for (size_t i = 0; i < heads.size(); ++i) {
        const bool rounds = plan_.kv_dtype != KEYHOLE_F32 && heads[i]->keys.type != stored_type();
        Measurement m = measure_index(built[i], truths[i], plan_.kv_dtype, rounds);
        built[i].reset();
        m.index = spec;
        m.layer = heads[i]->layer;
        m.kv_head = heads[i]->kv_head;
        out.push_back(std::move(m));
        work_.done(1);
      }
    }
  }

  // One thread per head, beside which the engine's own threads are few: builds of graphs are
  // sequential inside, so heads are what runs in parallel.
  std::vector<IndexHandle> build_all(std::span<const TraceHead* const> heads,
                                     const std::vector<HeadTruth>& truths,
                                     const std::string& spec) {
    std::vector<IndexHandle> out(heads.size());
    std::vector<std::exception_ptr> errors(heads.size());
    const auto build = [&](size_t i) {
      try {
        out[i] = make_index(engine_, spec);
        BuildProgress progress{work_};
        build_index(out[i], trace_, *heads[i], truths[i], BuildProgress::callback, &progress);
        BuildProgress::callback(&progress, 1, "");
      } catch (...) {
        errors[i] = std::current_exception();
      }
    };
    std::vector<std::thread> threads;
    for (size_t i = 1; i < heads.size(); ++i) threads.emplace_back(build, i);
    build(0);
    for (std::thread& thread : threads) thread.join();
    throw_if_interrupted();
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
    return out;
  }

  [[nodiscard]] ElementType stored_type() const {
    return plan_.kv_dtype == KEYHOLE_F16 ? ElementType::f16 : ElementType::bf16;
  }

  const Trace& trace_;
  const Plan& plan_;
  const std::vector<std::string>& indexes_;
  Engine engine_;
  Team team_;
  Work work_;
};

ordered_json describe(const Trace& trace, const Options& options) {
  const TraceInfo& info = trace.info();
  return {{"path", options.trace},
          {"model", info.model},
          {"task", info.task},
          {"prompt", info.prompt},
          {"seed", info.seed},
          {"tokens", info.tokens},
          {"layers", info.layers},
          {"q_heads", info.q_heads},
          {"kv_heads", info.kv_heads},
          {"head_dim", info.head_dim},
          {"scale", info.scale},
          {"dtype", element_name(trace.heads().front().keys.type)},
          {"queries", trace.query_positions().size()},
          {"first_query_position", trace.query_positions().front()},
          {"last_query_position", trace.query_positions().back()},
          {"training_positions", trace.training_positions().size()}};
}

ordered_json describe(const Plan& plan, const Options& options) {
  return {{"k", options.k},
          {"sink", plan.sink},
          {"window", plan.window},
          {"offloaded", plan.truth.offloaded.count()},
          {"queries", plan.truth.queries.size()},
          {"kv_dtype", options.kv_dtype},
          {"threads", plan.threads},
          {"builds_at_once", plan.builds_at_once},
          {"threads_per_build", plan.threads / plan.builds_at_once}};
}

void run(const Options& options) {
  if (options.json == "-" && options.csv == "-") {
    throw UsageError("--json and --csv cannot both go to standard output");
  }
  for (const std::string& path : {options.json, options.csv}) {
    if (!path.empty()) check_writable(path);
  }
  const Trace trace = open_trace(options);
  const Plan plan = make_plan(trace, options);
  std::vector<Measurement> results;
  std::string simd;
  {
    Comparison comparison(trace, plan, options.indexes);
    results = comparison.run();
    simd = comparison.simd_level();
  }
  const std::vector<Summary> summaries = summarise(results);
  const Machine machine = describe_machine(simd);

  if (options.json != "-" && options.csv != "-") {
    const Style style = style_of(stdout);
    const TraceInfo& info = trace.info();
    std::printf(
        "%s\n%s: %s tokens, %s of them offloaded; %zu KV heads x %u query heads, d = %u; %zu "
        "queries\n\n",
        to_text(machine).c_str(), options.trace.c_str(), format_count(info.tokens).c_str(),
        format_count(plan.truth.offloaded.count()).c_str(), plan.heads.size(), info.group(),
        info.head_dim, plan.truth.queries.size());
    if (options.per_head) std::printf("%s\n", head_table(results, style).c_str());
    std::fputs(summary_table(summaries, style).c_str(), stdout);
    std::printf(
        "\nMeans over heads, weighted by the attention mass of their offloaded tokens. recall@%zu; "
        "build: all heads.\n",
        options.k);
  }
  if (!options.csv.empty()) write_text(options.csv, to_csv(results));
  if (!options.json.empty()) {
    ordered_json rows = ordered_json::array();
    for (const Measurement& m : results) rows.push_back(to_json(m));
    ordered_json means = ordered_json::array();
    for (const Summary& s : summaries) means.push_back(to_json(s));
    write_json(options.json, {{"machine", to_json(machine)},
                              {"trace", describe(trace, options)},
                              {"options", describe(plan, options)},
                              {"results", rows},
                              {"summary", means}});
  }
}

constexpr const char* kDefinitions = R"(What is measured, for each KV head and index:
  recall          share of the k offloaded keys of largest inner product that the search returned;
                  a key that ties with the k-th (within fp32 rounding) counts
  mass            recovered mass: softmax weight, under exact attention over the whole context, of the
                  sink, the window, and the keys that the group's searches returned
  error           output error ||o - o*|| / ||o*|| against exact attention over the recorded elements
  scan            share of the offloaded keys whose score was computed
  p50, p95, p99   latency of one group's search and attention, one thread, warm, nothing else running
  build_s         of one head, while as many others are built as --threads allows; 1 to time it alone
  bytes/key       held by the index beside K and V
With P tokens at the first recorded query, the tokens [sink, P - window) are offloaded and indexed; all
others up to a query's own position are attended exactly.)";

}  // namespace

void add_compare(CLI::App& keyhole) {
  auto options = std::make_shared<Options>();
  CLI::App* command = keyhole.add_subcommand(
      "compare", "Compare index types on a recorded trace: recall, mass, output error, latency");
  command
      ->add_option("--trace", options->trace,
                   "A trace written by record, or keys in .hdf5 (ann-benchmarks), .fbin or .fvecs")
      ->type_name("FILE")
      ->required();
  command->add_option("--query-file", options->vectors.queries, "Queries of .fbin or .fvecs keys")
      ->type_name("FILE");
  command
      ->add_option("--training-file", options->vectors.training,
                   "Training queries of .fbin or .fvecs keys")
      ->type_name("FILE");
  command
      ->add_option("--value-file", options->vectors.values,
                   "Values of .fbin or .fvecs keys; without them no output error is reported")
      ->type_name("FILE");
  command->add_option("--index", options->indexes, "An index type with parameters; may be repeated")
      ->required()
      ->allow_extra_args(false)
      ->type_name("SPEC");
  command->add_option("--k", options->k, "Keys that the index returns per query head")
      ->type_name("N")
      ->check(CLI::Range(size_t{1}, size_t{1} << 20U).description(""))
      ->capture_default_str();
  command->add_option("--sink", options->sink, "Resident tokens at the beginning [128; vectors: 0]")
      ->type_name("N");
  command->add_option("--window", options->window, "Resident newest tokens [512; vectors: 0]")
      ->type_name("N");
  command->add_option("--threads", options->threads, "Heads that are built at once [one per core]")
      ->type_name("N")
      ->check(CLI::Range(1U, 1024U).description(""));
  command->add_option("--layers", options->layers, "Layers to measure, e.g. 0,4,5 [all recorded]")
      ->type_name("N,...")
      ->delimiter(',');
  command->add_option("--heads", options->heads, "KV heads to measure, e.g. 0,1 [all]")
      ->type_name("N,...")
      ->delimiter(',');
  command->add_option("--queries", options->queries, "At most this many queries, evenly spread")
      ->type_name("N")
      ->check(CLI::Range(size_t{1}, std::numeric_limits<size_t>::max()).description(""))
      ->capture_default_str();
  command->add_option("--kv-dtype", options->kv_dtype, "How keys and values are stored")
      ->type_name("TYPE")
      ->check(CLI::IsMember({"f16", "bf16", "f32"}))
      ->capture_default_str();
  command->add_flag("--per-head", options->per_head, "Also print a row for every head");
  command->add_option("--json", options->json, "Write all results here (- for standard output)")
      ->type_name("FILE");
  command->add_option("--csv", options->csv, "Write the per-head rows here (- for standard output)")
      ->type_name("FILE");
  command->footer(
      examples(
          {"keyhole compare --trace t.safetensors --index flat --index ivf:C=1024,probe=32",
           "keyhole compare --trace t.safetensors --index hnsw:M=32,ef=128 --layers 4,5 --per-head",
           "keyhole compare --trace t.safetensors --index flat --json result.json --csv heads.csv",
           "keyhole compare --trace keys.fbin --query-file queries.fbin --index hnsw:M=32,ef=128",
           "keyhole compare --trace llama-128-ip.hdf5 --index flat --queries 200"}) +
      "\n\n" + kDefinitions + "\n\n" + keyhole_index_help());
  command->callback([options] { run(*options); });
}

}  // namespace keyhole::tools
