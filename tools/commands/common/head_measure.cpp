#include "tools/commands/common/head_measure.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>

#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"

namespace keyhole::tools {
namespace {

// Buffers and the call of one group search with attention.
class Step {
 public:
  Step(const IndexHandle& index, const HeadTruth& truth, const BudgetChoice& budget)
      : options(budget.search_options()),
        o(truth.group * truth.dim),
        lse(truth.group),
        index_(index),
        truth_(truth),
        ids_(truth.group * options.budget.top_k),
        counts_(truth.group) {
    keyhole_search_cost_init(&cost);
    if (!budget.needs_partitions()) return;
    // Targets are about all of the attention, so the resident part is told. Without values there is no output for it.
    resident_lse_.assign(truth.resident_lse.begin(), truth.resident_lse.end());
    if (truth.resident_output.empty()) no_output_.resize(truth.group * truth.dim);
  }

  void run(size_t query) {
    const keyhole_tensor queries = prepare(query);
    uint32_t count = 0;
    const uint32_t* attended = nullptr;
    check(keyhole_index_attend(index_.get(), &queries, &options, o.data(), lse.data(), &attended,
                               &count, &cost));
    rows = {attended, count};
  }

  // What the search returned to each head. Leaves `rows` invalid.
  void search(size_t query) {
    const keyhole_tensor queries = prepare(query);
    check(keyhole_index_search(index_.get(), &queries, &options, ids_.data(), nullptr,
                               counts_.data(), nullptr));
  }
  [[nodiscard]] std::span<const uint32_t> found(size_t head) const {
    return {ids_.data() + head * options.budget.top_k, counts_[head]};
  }

  keyhole_search_options options;
  std::vector<float> o;            // [g, d]
  std::vector<float> lse;          // [g]
  std::span<const uint32_t> rows;  // attended; valid until the next call
  keyhole_search_cost cost{};

 private:
  keyhole_tensor prepare(size_t query) {
    options.position = truth_.positions[query];
    if (!resident_lse_.empty()) {
      const size_t row = query * truth_.group;
      options.other_o =
          no_output_.empty() ? truth_.resident_output.data() + row * truth_.dim : no_output_.data();
      options.other_lse = resident_lse_.data() + row;
    }
    const int64_t shape[] = {static_cast<int64_t>(truth_.group), static_cast<int64_t>(truth_.dim)};
    return keyhole_tensor_host(truth_.query(query * truth_.group), KEYHOLE_F32, 2, shape);
  }

  const IndexHandle& index_;
  const HeadTruth& truth_;
  std::vector<uint32_t> ids_, counts_;
  std::vector<float> resident_lse_;  // [rows], with partitions
  std::vector<float> no_output_;     // [g, d] zeros, where there are no values
};

// Quality of one step's answer, added up over steps.
class Quality {
 public:
  Quality(const HeadTruth& truth, const BudgetChoice& budget, const RowJudge& judge,
          HeadAnswers* answers)
      : truth_(truth),
        budget_(budget),
        judge_(judge),
        answers_(answers),
        credits_all_(budget.attend.mode != KEYHOLE_ATTEND_TOPK || budget.target.any()) {}

  StepSums sums;
  MissingMass missing;   // sums
  size_t estimates = 0;  // that `missing` is about
  size_t held = 0;       // samples

  void add(size_t query, Step& step) {
    const std::vector<uint32_t> rows = judge_.distinct(step.rows);
    for (size_t j = 0; j < truth_.group; ++j) {
      const size_t row = query * truth_.group + j;
      const FoundRows all = judge_.look_at(row, rows);
      const double read = all.mass + judge_.resident_mass(row);
      sums.mass += read;
      // A head is credited with its own of the best k; where all heads share what was scored, with all of that.
      if (credits_all_) {
        sums.recall += judge_.share(all.hits);
        if (answers_ != nullptr) answers_->put(truth_, row, rows);
      }
      double error = 0;
      if (!truth_.output.empty()) {
        error = output_error(truth_, row, step.o.data() + j * truth_.dim, step.lse[j]);
        sums.errors.push_back(error);
      }
      if (keeps_target(error, read)) ++held;
      if (j >= std::size(step.cost.missing)) continue;
      ++estimates;
      missing.estimated += step.cost.missing[j];
      missing.estimate_error += std::abs(step.cost.missing[j] - (1 - read));
    }
    missing.bytes_per_step += static_cast<double>(step.cost.tail_bytes_read);
    missing.keys_opened += step.cost.keys_opened;
    sums.attended += step.cost.keys_attended;
    sums.scored += step.cost.keys_scored;
    sums.bytes += step.cost.bytes_read;
    if (credits_all_) return;
    step.search(query);
    for (size_t j = 0; j < truth_.group; ++j) {
      const std::vector<uint32_t> own = judge_.distinct(step.found(j));
      const size_t row = query * truth_.group + j;
      sums.recall += judge_.share(judge_.look_at(row, own).hits);
      if (answers_ != nullptr) answers_->put(truth_, row, own);
    }
  }

 private:
  [[nodiscard]] bool keeps_target(double error, double read) const {
    const TargetChoice& target = budget_.target;
    return (target.error == 0 || error <= kErrorSlack * target.error) &&
           (target.mass == 0 || read >= target.mass - kMassSlack);
  }

  const HeadTruth& truth_;
  const BudgetChoice& budget_;
  const RowJudge& judge_;
  HeadAnswers* const answers_;  // or null
  const bool credits_all_;      // a head's recall counts what any head found
};

keyhole_rope_scaling scaling_of(const TraceRope& rope) {
  if (rope.scaling == "linear") return KEYHOLE_ROPE_LINEAR;
  if (rope.scaling == "llama3") return KEYHOLE_ROPE_LLAMA3;
  return KEYHOLE_ROPE_NONE;
}

}  // namespace

Engine make_trace_engine(const TraceInfo& info, keyhole_dtype kv_dtype, uint32_t threads,
                         const std::string& classifiers) {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  // A classifier file is of the whole model, of which a trace may tell some layers only; an engine keeps
  // nothing for the others.
  config.layers =
      classifiers.empty() ? 1 + *std::max_element(info.layers.begin(), info.layers.end()) : 1024;
  config.q_heads = info.q_heads;
  config.kv_heads = info.kv_heads;
  config.head_dim = info.head_dim;
  config.kv_dtype = kv_dtype;
  config.scale = info.scale;
  config.softcap = info.softcap;
  config.rope_theta = info.rope.theta;
  config.rope_scaling = scaling_of(info.rope);
  config.rope_factor = info.rope.factor;
  config.rope_low_freq_factor = info.rope.low_freq_factor;
  config.rope_high_freq_factor = info.rope.high_freq_factor;
  config.rope_original_context = info.rope.original_context;
  config.device = KEYHOLE_DEVICE_HOST;
  config.threads = threads;
  if (!classifiers.empty()) config.classifiers = classifiers.c_str();
  return make_engine(config);
}

void build_index(const IndexHandle& index, const Trace& trace, const TraceHead& head,
                 const HeadTruth& truth, keyhole_progress_fn progress, void* user) {
  const auto d = static_cast<int64_t>(truth.dim);
  const int64_t shape[] = {static_cast<int64_t>(truth.offloaded.count()), d};
  // A set of vectors has no values; its keys take their place, so that a step reads as much memory.
  const std::vector<float>& values = truth.values.empty() ? truth.keys : truth.values;
  const size_t first = truth.offloaded.begin * truth.dim;
  const keyhole_tensor k = keyhole_tensor_host(truth.keys.data() + first, KEYHOLE_F32, 2, shape);
  const keyhole_tensor v = keyhole_tensor_host(values.data() + first, KEYHOLE_F32, 2, shape);

  std::vector<float> training;
  std::vector<uint32_t> positions;
  keyhole_tensor t{};
  if (head.training_queries) {
    training = head.training_queries->to_f32();
    const int64_t training_shape[] = {static_cast<int64_t>(training.size()) / d, d};
    t = keyhole_tensor_host(training.data(), KEYHOLE_F32, 2, training_shape);
    for (const uint32_t position : trace.training_positions()) {
      positions.insert(positions.end(), truth.group, position);
    }
  }
  check(keyhole_index_build(index.get(), &k, &v, training.empty() ? nullptr : &t,
                            positions.empty() ? nullptr : positions.data(),
                            static_cast<uint32_t>(truth.offloaded.begin), progress, user));
}

void put_means(StepSums sums, const HeadTruth& truth, double keys, Measurement& m) {
  const auto rows = static_cast<double>(truth.rows());
  const double steps = rows / static_cast<double>(truth.group);
  m.middle_mass = truth.middle_mass;
  m.sparsity = truth.sparsity();
  m.recall = sums.recall / rows;
  m.recovered_mass = sums.mass / rows;
  m.missing_mass = 1 - m.recovered_mass;
  if (!sums.errors.empty()) m.output_error = summarise(std::move(sums.errors));
  m.scan_fraction = static_cast<double>(sums.scored) / (rows * keys);
  m.keys_attended = sums.attended / steps;
  m.bytes_per_step = static_cast<double>(sums.bytes) / steps;
}

Measurement measure_index(const IndexHandle& index, const HeadTruth& truth,
                          const BudgetChoice& budget, keyhole_dtype kv_dtype, bool rounds_keys,
                          HeadAnswers* answers) {
  const size_t queries = truth.rows() / truth.group;
  BudgetChoice bounded = budget;
  bounded.attend.k =
      static_cast<uint32_t>(std::min<size_t>(budget.attend.k, truth.offloaded.count()));
  Step step(index, truth, bounded);

  const RowJudge judge(truth, kv_dtype, rounds_keys);
  Quality quality(truth, bounded, judge, answers);
  for (size_t i = 0; i < queries; ++i) {
    throw_if_interrupted();
    step.run(i);
    quality.add(i, step);
  }

  const Percentiles latency = time_steps(
      truth, [&](size_t i) { step.run(i); }, answers);

  keyhole_index_info info;
  keyhole_index_info_init(&info);
  check(keyhole_index_get_info(index.get(), &info));

  const auto rows = static_cast<double>(truth.rows());
  const auto steps = static_cast<double>(queries);
  const auto keys = static_cast<double>(truth.offloaded.count());
  const double element_bytes = kv_dtype == KEYHOLE_F32 ? 4 : 2;
  Measurement m;
  m.attend = budget.attend.text();
  m.tail = budget.tail.text();
  m.target = budget.target.text();
  m.params = info.params;
  m.diagnostics = info.diagnostics;
  put_means(std::move(quality.sums), truth, keys, m);
  m.read_share = m.bytes_per_step / (2 * keys * static_cast<double>(truth.dim) * element_bytes);
  m.latency_us = latency;
  m.build_seconds = info.build_seconds;
  m.bytes_per_key = static_cast<double>(info.bytes) / keys;
  if (budget.target.any()) m.held = static_cast<double>(quality.held) / rows;
  if (budget.needs_partitions()) {
    const auto estimates = static_cast<double>(quality.estimates);
    m.missing = {.estimated = quality.missing.estimated / estimates,
                 .estimate_error = quality.missing.estimate_error / estimates,
                 .bytes_per_step = quality.missing.bytes_per_step / steps,
                 .keys_opened = quality.missing.keys_opened / steps};
    m.tail_build_seconds = info.tail_build_seconds;
    m.tail_bytes_per_key = static_cast<double>(info.tail_bytes) / keys;
  }
  return m;
}

}  // namespace keyhole::tools
