#include "tools/saap/train_head.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <numeric>
#include <random>

#include "tools/saap/query_mlp.h"

namespace keyhole::tools {
namespace {

// Beyond it more points do not move a centroid noticeably (Faiss subsamples to the same number).
constexpr size_t kPointsPerPartition = 256;
// A query that spends less of its attention far away says next to nothing about where to look.
constexpr float kLeastMass = 1e-3F;
constexpr size_t kEvaluationRows = 512;

std::vector<float> sample_keys(std::span<const Trace> traces, size_t head,
                               const SaapTraining& training) {
  size_t total = 0;
  for (const Trace& t : traces)
    total += t.info().tokens - std::min<size_t>(training.range.sink, t.info().tokens);
  const size_t wanted = std::min(total, training.partitions.partitions * kPointsPerPartition);
  std::vector<float> points;
  for (const Trace& t : traces) {
    const size_t n = t.info().tokens;
    const size_t d = t.info().head_dim;
    const size_t sink = std::min(training.range.sink, n);
    const std::vector<float> keys = unroped_keys(t.info(), t.heads()[head], sink, n);
    const size_t share = (n - sink) * wanted / std::max<size_t>(total, 1);
    for (size_t i = 0; i < share; ++i) {
      const float* row = keys.data() + i * (n - sink) / share * d;
      points.insert(points.end(), row, row + d);
    }
  }
  return points;
}

// Rows that teach something, of all prompts.
struct Row {
  uint32_t prompt, row;
};
std::vector<Row> useful_rows(const std::vector<PromptHead>& prompts) {
  std::vector<Row> rows;
  for (uint32_t p = 0; p < prompts.size(); ++p) {
    for (uint32_t r = 0; r < prompts[p].rows(); ++r) {
      if (prompts[p].mass[r] >= kLeastMass) rows.push_back({p, r});
    }
  }
  return rows;
}

// A mini-batch's rows side by side.
class BatchRows {
 public:
  BatchRows(const std::vector<PromptHead>& prompts, std::span<const Row> rows) {
    for (const Row& row : rows) {
      const PromptHead& p = prompts[row.prompt];
      const size_t c = p.sizes.size();
      const auto query = p.queries.begin() + static_cast<ptrdiff_t>(row.row * p.dim);
      const auto target = p.targets.begin() + static_cast<ptrdiff_t>(row.row * c);
      inputs_.insert(inputs_.end(), query, query + static_cast<ptrdiff_t>(p.dim));
      targets_.insert(targets_.end(), target, target + static_cast<ptrdiff_t>(c));
      const auto prior = p.log_sizes.begin() + static_cast<ptrdiff_t>(row.row / p.group * c);
      priors_.insert(priors_.end(), prior, prior + static_cast<ptrdiff_t>(c));
      weights_.push_back(p.mass[row.row]);
    }
  }
  [[nodiscard]] MlpBatch view() const {
    return {weights_.size(), inputs_.data(), priors_.data(), targets_.data(), weights_.data()};
  }
  [[nodiscard]] const std::vector<float>& inputs() const { return inputs_; }

 private:
  std::vector<float> inputs_, priors_, targets_, weights_;
};

// scale times the mean key of each partition over all prompts: q . k grows linearly in q, so with the
// partition's size as the prior this predicts its share of the attention up to the spread of its keys and
// RoPE. The network learns the rest.
std::vector<float> linear_start(const std::vector<PromptHead>& prompts, double scale) {
  const size_t count = prompts.front().sizes.size();
  const size_t d = prompts.front().dim;
  std::vector<double> sums(count * d);
  std::vector<double> sizes(count);
  for (const PromptHead& p : prompts) {
    for (size_t c = 0; c < count; ++c) {
      sizes[c] += p.sizes[c];
      for (size_t j = 0; j < d; ++j) sums[c * d + j] += double{p.means[c * d + j]} * p.sizes[c];
    }
  }
  std::vector<float> out(count * d);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<float>(scale * sums[i] / std::max(sizes[i / d], 1.0));
  }
  return out;
}

// The sum of t (log t - log p) over a row.
template <class LogP>
double divergence(const float* target, size_t n, LogP log_p) {
  double sum = 0;
  for (size_t c = 0; c < n; ++c) {
    if (target[c] > 0) sum += target[c] * (std::log(target[c]) - log_p(c));
  }
  return sum;
}

double validation_loss(const std::vector<PromptHead>& prompts, const FoldedMlp& mlp) {
  double loss = 0;
  double total = 0;
  std::vector<float> log_p;
  for (const PromptHead& p : prompts) {
    const size_t c = p.sizes.size();
    for (size_t first = 0; first < p.rows(); first += kEvaluationRows) {
      const size_t n = std::min(kEvaluationRows, p.rows() - first);
      mlp.log_probabilities(p.queries.data() + first * p.dim, p.priors(first, n).data(), n, log_p);
      for (size_t i = 0; i < n; ++i) {
        const double weight = p.mass[first + i];
        const float* row = log_p.data() + i * c;
        loss += weight * divergence(p.targets.data() + (first + i) * c, c,
                                    [&](size_t j) { return double{row[j]}; });
        total += weight;
      }
    }
  }
  return total > 0 ? loss / total : 0;
}

// The validation loss of the mean target of the training rows.
double prior_loss(const std::vector<PromptHead>& train, const std::vector<PromptHead>& validate,
                  size_t count) {
  std::vector<double> prior(count, 1e-6);
  for (const PromptHead& p : train) {
    for (size_t r = 0; r < p.rows(); ++r) {
      for (size_t c = 0; c < count; ++c) prior[c] += double{p.mass[r]} * p.targets[r * count + c];
    }
  }
  const double sum = std::accumulate(prior.begin(), prior.end(), 0.0);
  for (double& x : prior) x = std::log(x / sum);
  double loss = 0;
  double total = 0;
  for (const PromptHead& p : validate) {
    for (size_t r = 0; r < p.rows(); ++r) {
      loss += p.mass[r] *
              divergence(p.targets.data() + r * count, count, [&](size_t c) { return prior[c]; });
      total += p.mass[r];
    }
  }
  return total > 0 ? loss / total : 0;
}

double mean_mass(const std::vector<PromptHead>& prompts) {
  double sum = 0;
  size_t rows = 0;
  for (const PromptHead& p : prompts) {
    sum = std::accumulate(p.mass.begin(), p.mass.end(), sum);
    rows += p.rows();
  }
  return rows > 0 ? sum / static_cast<double>(rows) : 0;
}

}  // namespace

SaapHead train_head(std::span<const Trace> train, std::span<const Trace> validate, size_t head,
                    const SaapTraining& training, const TrainingProgress& progress) {
  const auto start = std::chrono::steady_clock::now();
  SaapHead out;
  out.layer = train.front().heads()[head].layer;
  out.kv_head = train.front().heads()[head].kv_head;
  // Preparing the prompts takes about as long as three epochs.
  const double steps = 3.0 + training.epochs;
  bool stop = false;
  const auto stopped = [&](double done) {
    stop = stop || (progress && !progress(std::min(done / steps, 1.0)));
    return stop;
  };
  {
    const std::vector<float> points = sample_keys(train, head, training);
    const size_t d = train.front().info().head_dim;
    out.partitions = train_partitions(points.data(), points.size() / d, d, training.partitions);
  }
  if (stopped(1)) return out;
  double prepared = 0;
  const auto prepare = [&](std::span<const Trace> traces) {
    std::vector<PromptHead> prompts;
    for (const Trace& trace : traces) {
      if (stop) break;
      prompts.push_back(
          attend_by_partition(trace, trace.heads()[head], out.partitions, training.range));
      ++prepared;
      (void)stopped(1 + 2 * prepared / static_cast<double>(train.size() + validate.size()));
    }
    return prompts;
  };
  const std::vector<PromptHead> prompts = prepare(train);
  const std::vector<PromptHead> held_out = prepare(validate);
  if (stop) return out;

  const size_t count = out.partitions.count();
  std::vector<Row> rows = useful_rows(prompts);
  std::mt19937_64 random(training.seed);
  std::shuffle(rows.begin(), rows.end(), random);
  const MlpShape shape{prompts.front().dim, training.hidden, count};
  out.middle_mass = mean_mass(held_out);
  out.prior_loss = prior_loss(prompts, held_out, count);
  const BatchRows sample(prompts, std::span(rows).first(std::min<size_t>(rows.size(), 4096)));
  QueryMlp mlp(shape, linear_start(prompts, train.front().info().scale), sample.inputs().data(),
               sample.inputs().size() / shape.dim, training.seed);
  out.mlp = mlp.fold();
  out.loss = validation_loss(held_out, out.mlp);
  out.start_loss = out.loss;
  const size_t batch = std::min(training.batch, rows.size());
  const size_t batches = batch < 2 ? 0 : rows.size() / batch;
  uint32_t idle = 0;
  for (uint32_t epoch = 0; epoch < training.epochs && batches > 0 && idle < training.patience;
       ++epoch) {
    std::shuffle(rows.begin(), rows.end(), random);
    for (size_t b = 0; b < batches; ++b) {
      const double done =
          (epoch + static_cast<double>(b) / static_cast<double>(batches)) / training.epochs;
      (void)mlp.learn(BatchRows(prompts, std::span(rows).subspan(b * batch, batch)).view());
      mlp.adam_step(
          training.rate * 0.5F * static_cast<float>(1 + std::cos(std::numbers::pi * done)),
          training.decay);
      if (stopped(3 + epoch + static_cast<double>(b) / static_cast<double>(batches))) return out;
    }
    FoldedMlp now = mlp.fold();
    const double loss = validation_loss(held_out, now);
    ++idle;
    if (loss < out.loss) {
      out.loss = loss;
      out.mlp = std::move(now);
      out.epochs = epoch + 1;
      idle = 0;
    }
  }

  out.figures = measure_probing(held_out, out.mlp);
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  (void)stopped(steps);
  return out;
}

}  // namespace keyhole::tools
