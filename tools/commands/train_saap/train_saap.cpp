// keyhole train-saap: trains the partitions and query classifiers of the `saap` index from traces.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "tools/commands/commands.h"
#include "tools/commands/common/number_check.h"
#include "tools/llama/blas.h"
#include "tools/llama/team.h"
#include "tools/saap/classifier_writer.h"
#include "tools/saap/train_head.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

struct TrainOptions {
  std::vector<std::string> traces, validate;
  std::string out;
  std::vector<uint32_t> layers, heads;
  unsigned threads = 0;
  SaapTraining training;
};

struct Data {
  std::vector<Trace> train, validate;
  std::vector<size_t> heads;  ///< numbers in Trace::heads()
};

void check_alike(const TraceInfo& a, const TraceInfo& b, const std::string& path) {
  if (a.q_heads != b.q_heads || a.kv_heads != b.kv_heads || a.head_dim != b.head_dim ||
      a.layers != b.layers || a.rope.theta != b.rope.theta || a.rope.scaling != b.rope.scaling) {
    throw UsageError(path + " is of another model, or of other layers, than the first trace");
  }
}

Data open(const TrainOptions& options) {
  Data data;
  for (const std::string& path : options.traces) {
    data.train.push_back(Trace::open(path));
    check_alike(data.train.front().info(), data.train.back().info(), path);
  }
  for (const std::string& path : options.validate) {
    data.validate.push_back(Trace::open(path));
    check_alike(data.train.front().info(), data.validate.back().info(), path);
  }
  if (data.validate.empty()) {
    if (data.train.size() < 2) {
      throw UsageError(
          "one --trace alone leaves no prompt for validation: give a second, or --validate");
    }
    data.validate.push_back(std::move(data.train.back()));
    data.train.pop_back();
  }
  const auto& heads = data.train.front().heads();
  const auto wanted = [](const std::vector<uint32_t>& list, uint32_t number) {
    return list.empty() || std::find(list.begin(), list.end(), number) != list.end();
  };
  for (size_t i = 0; i < heads.size(); ++i) {
    if (wanted(options.layers, heads[i].layer) && wanted(options.heads, heads[i].kv_head)) {
      data.heads.push_back(i);
    }
  }
  if (data.heads.empty()) throw UsageError("--layers and --heads leave no head of the traces");
  return data;
}

// Heads are trained side by side, one thread each: their matrix products are too small to share.
std::vector<SaapHead> train_all(const TrainOptions& options, const Data& data) {
  Team team(options.threads);
  Progress bar("training " + std::to_string(data.heads.size()) + " heads");
  std::mutex mutex;
  double done = 0;
  std::atomic<bool> stop = false;
  std::vector<SaapHead> out(data.heads.size());
  std::vector<std::exception_ptr> errors(data.heads.size());
  std::optional<SingleThreadedBlas> one_thread_each;
  if (data.heads.size() > 1) one_thread_each.emplace(team.size());
  team.for_each(data.heads.size(), [&](size_t item, unsigned) {
    if (stop) return;
    double told = 0;
    try {
      out[item] = train_head(data.train, data.validate, data.heads[item], options.training,
                             [&](double fraction) {
                               const std::lock_guard lock(mutex);
                               done += fraction - told;
                               told = fraction;
                               bar.update(done / static_cast<double>(data.heads.size()));
                               if (interrupted()) stop = true;
                               return !stop;
                             });
    } catch (...) {
      errors[item] = std::current_exception();
      stop = true;
    }
  });
  throw_if_interrupted();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return out;
}

std::string percent_text(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", 100 * share);
  return text;
}

// Means over heads, weighted by the long-range mass.
std::vector<ProbeFigures> mean_figures(const std::vector<SaapHead>& heads) {
  std::vector<ProbeFigures> out = heads.front().figures;
  double total = 0;
  for (const SaapHead& h : heads) total += h.middle_mass;
  const auto mean = [&](size_t i, double ProbeFigures::*figure) {
    double sum = 0;
    for (const SaapHead& h : heads) sum += h.middle_mass * h.figures[i].*figure;
    return total > 0 ? sum / total : 0;
  };
  for (size_t i = 0; i < out.size(); ++i) {
    for (const auto figure :
         {&ProbeFigures::classifier, &ProbeFigures::centroids, &ProbeFigures::best})
      out[i].*figure = mean(i, figure);
  }
  return out;
}

void print(const std::vector<SaapHead>& heads) {
  const Style style = style_of(stdout);
  Table table(
      {{"layer"}, {"kv"}, {"middle %"}, {"KL prior"}, {"start"}, {"KL"}, {"epochs"}, {"seconds"}});
  for (const SaapHead& h : heads) {
    table.add_row({std::to_string(h.layer), std::to_string(h.kv_head), percent_text(h.middle_mass),
                   format_number(h.prior_loss), format_number(h.start_loss), format_number(h.loss),
                   std::to_string(h.epochs), format_number(h.seconds)});
  }
  std::fputs(table.text(style).c_str(), stdout);
  std::printf(
      "\n%% of the long-range attention of held-out prompts in the partitions that hold so many %% "
      "of "
      "the keys,\nchosen by the classifier (q), by the partitions' mean keys (k), and with "
      "hindsight (best):\n\n");
  std::vector<Table::Column> columns = {{"layer"}, {"kv"}};
  for (const ProbeFigures& f : heads.front().figures) {
    columns.push_back({percent_text(f.share) + ": q"});
    columns.push_back({"k"});
    columns.push_back({"best"});
  }
  Table probes(columns);
  const auto add_row = [&](const std::string& layer, const std::string& kv,
                           const std::vector<ProbeFigures>& figures) {
    std::vector<std::string> cells = {layer, kv};
    for (const ProbeFigures& f : figures) {
      for (const double x : {f.classifier, f.centroids, f.best}) cells.push_back(percent_text(x));
    }
    probes.add_row(std::move(cells));
  };
  for (const SaapHead& h : heads) {
    add_row(std::to_string(h.layer), std::to_string(h.kv_head), h.figures);
  }
  add_row("all", "", mean_figures(heads));
  std::fputs(probes.text(style).c_str(), stdout);
}

void run(const TrainOptions& options) {
  check_writable(options.out);
  const Data data = open(options);
  const std::vector<SaapHead> heads = train_all(options, data);
  write_classifiers(options.out, data.train.front().info(), heads);
  print(heads);
  std::printf("\n%s: %zu heads, %s\n", options.out.c_str(), heads.size(),
              file_size_text(options.out).c_str());
}

constexpr const char* kAbout =
    R"(A classifier file holds, for every head, fixed partitions of the keys and a small network that predicts
from a query in which of them its attention lies. Engines that are given the file (--classifiers) use it for
every context; record traces of many different prompts with `keyhole record --training 1024 ...`.
Heads are trained side by side, one thread each.)";

}  // namespace

void add_train_saap(CLI::App& keyhole) {
  auto options = std::make_shared<TrainOptions>();
  SaapTraining& training = options->training;
  CLI::App* command = keyhole.add_subcommand(
      "train-saap", "Train the partitions and query classifiers of the saap index from traces");
  command->add_option("--trace", options->traces, "A trace to learn from; give many")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--validate", options->validate,
                   "Traces of other prompts, which decide when to stop [the last --trace]")
      ->type_name("FILE");
  command->add_option("--out", options->out, "The classifier file to write")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--centroids", training.partitions.partitions,
                   "Partitions C; a search probes some of them")
      ->check(CLI::Range(size_t{2}, size_t{65536}).description(""))
      ->capture_default_str();
  command->add_option("--hidden", training.hidden, "Width of the hidden layer, a multiple of 64")
      ->check(CLI::Range(size_t{64}, size_t{8192}).description(""))
      ->capture_default_str();
  command->add_option("--iters", training.partitions.iterations, "k-means iterations")
      ->check(CLI::Range(1U, 1000U).description(""))
      ->capture_default_str();
  command->add_option("--epochs", training.epochs, "Passes over the queries, at most")
      ->check(CLI::Range(1U, 100000U).description(""))
      ->capture_default_str();
  command->add_option("--patience", training.patience, "Stop after so many epochs without progress")
      ->check(CLI::Range(1U, 100000U).description(""))
      ->capture_default_str();
  command->add_option("--lr", training.rate, "Learning rate of Adam at the start")
      ->check(CLI::Range(1e-8F, 1.0F).description(""))
      ->check(no_nan("1e-8 to 1"))
      ->capture_default_str();
  command->add_option("--decay", training.decay, "Decoupled weight decay")
      ->check(CLI::Range(0.0F, 10.0F).description(""))
      ->check(no_nan("0 to 10"))
      ->capture_default_str();
  command->add_option("--batch", training.batch, "Queries per step")
      ->check(CLI::Range(size_t{2}, size_t{1} << 20U).description(""))
      ->capture_default_str();
  command
      ->add_option("--sink", training.range.sink,
                   "First tokens, which are attended exactly and not learned from")
      ->capture_default_str();
  command->add_option("--window", training.range.window, "Newest tokens, likewise")
      ->capture_default_str();
  command->add_option("--layers", options->layers, "Layers to train [all recorded]")
      ->delimiter(',')
      ->type_name("L,...");
  command->add_option("--heads", options->heads, "KV heads to train [all]")
      ->delimiter(',')
      ->type_name("H,...");
  command->add_option("--threads", options->threads, "Heads trained at once [one per core]")
      ->check(CLI::Range(1U, 64U).description(""));
  command->add_option("--seed", training.seed, "Of k-means and the network's start")
      ->capture_default_str();
  command->footer(examples({"keyhole train-saap --trace a.safetensors --trace b.safetensors "
                            "--validate c.safetensors "
                            "--out classifiers.safetensors",
                            "keyhole compare --trace d.safetensors --classifiers "
                            "classifiers.safetensors --index saap"}) +
                  "\n\n" + kAbout);
  command->callback([options] {
    if (options->training.hidden % 64 != 0) {
      throw UsageError("--hidden is " + std::to_string(options->training.hidden) +
                       "; allowed: multiples of 64");
    }
    options->training.partitions.seed = options->training.seed;
    run(*options);
  });
}

}  // namespace keyhole::tools
