#include "tools/commands/compare_measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "tools/terminal/interrupt.h"

namespace keyhole::tools {
namespace {

double dot(const float* a, const float* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

double norm(const float* a, size_t n) { return std::sqrt(dot(a, a, n)); }

// How far the score of a key may lie below the k-th best and still count as found, relative to
// |q| |k|. Two fp32 sums of the same products in another order differ by about 1e-6; rounding the
// components of a key independently by up to u moves its score by about u / sqrt(d), of which we
// grant four.
double tie_tolerance(keyhole_dtype kv_dtype, bool rounds_keys, size_t dim) {
  constexpr double kSummation = 1e-5;
  if (!rounds_keys) return kSummation;
  const double unit = kv_dtype == KEYHOLE_BF16 ? 0x1p-9 : 0x1p-12;
  return kSummation + 4 * unit / std::sqrt(static_cast<double>(dim));
}

// Buffers and the call of one group search with attention.
class Step {
 public:
  Step(const IndexHandle& index, const HeadTruth& truth)
      : index_(index),
        truth_(truth),
        o(truth.group * truth.dim),
        lse(truth.group),
        ids(truth.group * truth.k),
        counts(truth.group) {
    keyhole_search_cost_init(&cost);
  }

  void run(size_t query, bool search_too) {
    const int64_t shape[] = {static_cast<int64_t>(truth_.group), static_cast<int64_t>(truth_.dim)};
    const keyhole_tensor queries =
        keyhole_tensor_host(truth_.query(query * truth_.group), KEYHOLE_F32, 2, shape);
    keyhole_search_options options;
    keyhole_search_options_init(&options);
    options.k = static_cast<uint32_t>(truth_.k);
    options.position = truth_.positions[query];
    if (search_too) {
      check(keyhole_index_search(index_.get(), &queries, &options, ids.data(), nullptr,
                                 counts.data(), nullptr));
    }
    check(keyhole_index_attend(index_.get(), &queries, &options, o.data(), lse.data(), nullptr,
                               nullptr, &cost));
  }

  [[nodiscard]] std::vector<uint32_t> found(size_t head) const {
    const auto begin = ids.begin() + static_cast<ptrdiff_t>(head * truth_.k);
    std::vector<uint32_t> out(begin, begin + counts[head]);
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    if (!out.empty() && out.back() >= truth_.offloaded.count()) {
      throw std::runtime_error("the index returned row " + std::to_string(out.back()) + " of " +
                               std::to_string(truth_.offloaded.count()));
    }
    return out;
  }

 private:
  const IndexHandle& index_;
  const HeadTruth& truth_;

 public:
  std::vector<float> o;    ///< `[g, d]`
  std::vector<float> lse;  ///< `[g]`
  std::vector<uint32_t> ids, counts;
  keyhole_search_cost cost{};
};

// ||o - o*|| / ||o*||, o being the index's state merged with the resident tokens' exact state.
double output_error(const HeadTruth& truth, size_t row, const float* o, double lse) {
  const double resident_lse = truth.resident_lse[row];
  const double top = std::max(lse, resident_lse);
  // Both sets empty: the output is zero, and all of the truth is missing.
  double index_share = 0;
  double resident_share = 0;
  if (std::isfinite(top)) {
    index_share = std::exp(lse - top);
    resident_share = std::exp(resident_lse - top);
    const double sum = index_share + resident_share;
    index_share /= sum;
    resident_share /= sum;
  }
  const float* exact = truth.output.data() + row * truth.dim;
  const float* resident = truth.resident_output.data() + row * truth.dim;
  double difference = 0;
  for (size_t i = 0; i < truth.dim; ++i) {
    const double error = index_share * o[i] + resident_share * resident[i] - exact[i];
    difference += error * error;
  }
  return std::sqrt(difference) / norm(exact, truth.dim);
}

// Quality of one step's answer, added up over steps.
struct Quality {
  double recall = 0, mass = 0, attended = 0;
  uint64_t scored = 0;
  std::vector<double> errors;

  void add(const HeadTruth& truth, size_t query, const Step& step, double tolerance) {
    std::vector<uint32_t> attended_ids;
    for (size_t j = 0; j < truth.group; ++j) {
      const size_t row = query * truth.group + j;
      const std::vector<uint32_t> found = step.found(j);
      recall += share_found(truth, row, found, tolerance);
      attended_ids.insert(attended_ids.end(), found.begin(), found.end());
    }
    std::sort(attended_ids.begin(), attended_ids.end());
    attended_ids.erase(std::unique(attended_ids.begin(), attended_ids.end()), attended_ids.end());
    for (size_t j = 0; j < truth.group; ++j) {
      const size_t row = query * truth.group + j;
      mass += recovered(truth, row, attended_ids);
      if (!truth.output.empty()) {
        errors.push_back(output_error(truth, row, step.o.data() + j * truth.dim, step.lse[j]));
      }
    }
    attended += step.cost.keys_attended;
    scored += step.cost.keys_scored;
  }

 private:
  static double share_found(const HeadTruth& truth, size_t row, const std::vector<uint32_t>& found,
                            double tolerance) {
    const float* q = truth.query(row);
    const double q_norm = norm(q, truth.dim);
    size_t hits = 0;
    for (const uint32_t id : found) {
      const float* key = truth.offloaded_key(id);
      const double slack = tolerance * q_norm * norm(key, truth.dim);
      if (dot(q, key, truth.dim) >= truth.kth_score[row] - slack) ++hits;
    }
    return static_cast<double>(std::min(hits, truth.k)) / static_cast<double>(truth.k);
  }

  static double recovered(const HeadTruth& truth, size_t row, const std::vector<uint32_t>& ids) {
    double sum = std::exp(truth.resident_lse[row] - truth.lse[row]);
    for (const uint32_t id : ids) {
      const double score = dot(truth.query(row), truth.offloaded_key(id), truth.dim);
      sum += std::exp(truth.logit(score) - truth.lse[row]);
    }
    return sum;
  }
};

OutputError summarise(std::vector<double> errors) {
  const double mean =
      std::accumulate(errors.begin(), errors.end(), 0.0) / static_cast<double>(errors.size());
  const Percentiles p = percentiles(std::move(errors));
  return {mean, p.p50, p.p95};
}

keyhole_rope_scaling scaling_of(const TraceRope& rope) {
  if (rope.scaling == "linear") return KEYHOLE_ROPE_LINEAR;
  if (rope.scaling == "llama3") return KEYHOLE_ROPE_LLAMA3;
  return KEYHOLE_ROPE_NONE;
}

}  // namespace

Percentiles percentiles(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(samples.size())));
    return samples[std::max<size_t>(rank, 1) - 1];
  };
  return {at(0.50), at(0.95), at(0.99)};
}

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

Measurement measure_index(const IndexHandle& index, const HeadTruth& truth, keyhole_dtype kv_dtype,
                          bool rounds_keys) {
  const size_t queries = truth.rows() / truth.group;
  const double tolerance = tie_tolerance(kv_dtype, rounds_keys, truth.dim);
  Step step(index, truth);

  Quality quality;
  for (size_t i = 0; i < queries; ++i) {
    throw_if_interrupted();
    step.run(i, true);
    quality.add(truth, i, step, tolerance);
  }

  using Clock = std::chrono::steady_clock;
  std::vector<double> microseconds;
  microseconds.reserve(queries);
  for (size_t i = 0; i < queries; ++i) {
    throw_if_interrupted();
    const Clock::time_point start = Clock::now();
    step.run(i, false);
    microseconds.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }

  keyhole_index_info info;
  keyhole_index_info_init(&info);
  check(keyhole_index_get_info(index.get(), &info));

  const auto rows = static_cast<double>(truth.rows());
  const auto keys = static_cast<double>(truth.offloaded.count());
  Measurement m;
  m.params = info.params;
  m.diagnostics = info.diagnostics;
  m.middle_mass = truth.middle_mass;
  m.recall = quality.recall / rows;
  m.recovered_mass = quality.mass / rows;
  if (!quality.errors.empty()) m.output_error = summarise(std::move(quality.errors));
  m.scan_fraction = static_cast<double>(quality.scored) / (rows * keys);
  m.keys_attended = quality.attended / static_cast<double>(queries);
  m.latency_us = percentiles(std::move(microseconds));
  m.build_seconds = info.build_seconds;
  m.bytes_per_key = static_cast<double>(info.bytes) / keys;
  return m;
}

}  // namespace keyhole::tools
