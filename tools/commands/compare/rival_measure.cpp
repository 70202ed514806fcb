#include "tools/commands/compare/rival_measure.h"

#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"

namespace keyhole::tools {
namespace {

ElementType element_of(keyhole_dtype dtype) {
  if (dtype == KEYHOLE_F32) return ElementType::f32;
  return dtype == KEYHOLE_F16 ? ElementType::f16 : ElementType::bf16;
}

void add_step(const RivalStep& step, const HeadTruth& truth, const RowJudge& judge,
              bool credits_own, size_t query, StepSums& sums, HeadAnswers* answers) {
  for (size_t j = 0; j < truth.group; ++j) {
    const size_t row = query * truth.group + j;
    const std::vector<uint32_t> attended = judge.distinct(step.attended_by(j));
    const FoundRows all = judge.look_at(row, attended);
    sums.mass += all.mass + judge.resident_mass(row);
    // A head is credited with its own of the best k; of what a budget took, with all that it attended.
    const std::vector<uint32_t> own =
        credits_own ? judge.distinct(step.answer.heads[j].rows) : attended;
    sums.recall += judge.share(credits_own ? judge.look_at(row, own).hits : all.hits);
    if (answers != nullptr) answers->put(truth, row, own);
    if (truth.output.empty()) continue;
    sums.errors.push_back(output_error(truth, row, step.o.data() + j * truth.dim, step.lse[j]));
  }
  sums.attended += static_cast<double>(step.distinct.size());
  sums.scored += step.keys_scored;
  sums.bytes += step.bytes_read;
}

}  // namespace

RivalShape rival_shape(const Trace& trace, const TraceHead& head, const Offloaded& offloaded) {
  const size_t training =
      head.training_queries ? head.training_queries->shape[0] * head.training_queries->shape[1] : 0;
  return {offloaded.count(), trace.info().head_dim, trace.info().group(), training};
}

std::string rival_attend(const RivalSpec& spec, size_t k) {
  return spec.type().asks_for_k ? "topk:" + std::to_string(k) : "own";
}

BuiltRival::BuiltRival(const RivalSpec& spec, const Trace& trace, const TraceHead& head,
                       const HeadTruth& truth, keyhole_dtype kv_dtype, unsigned threads)
    : truth_(truth),
      kv_dtype_(kv_dtype),
      shape_(rival_shape(trace, head, truth.offloaded)),
      rival_(spec.type().make(spec)) {
  const size_t first = truth.offloaded.begin * truth.dim;
  const ElementType type = element_of(kv_dtype);
  // A set of vectors has no values; its keys take their place, so that a step reads as much memory.
  const std::vector<float>& values = truth.values.empty() ? truth.keys : truth.values;
  stored_ = {StoredMatrix(type, truth.keys.data() + first, shape_.rows, shape_.dim),
             StoredMatrix(type, values.data() + first, shape_.rows, shape_.dim)};
  std::vector<float> keys(shape_.rows * shape_.dim);
  for (size_t row = 0; row < shape_.rows; ++row) {
    stored_.keys.read(row, keys.data() + row * shape_.dim);
  }
  std::vector<float> training;
  if (head.training_queries) training = head.training_queries->to_f32();

  const RivalData data = {.shape = shape_,
                          .keys = keys.data(),
                          .training = training.data(),
                          .training_positions = trace.training_positions(),
                          .first_token = truth.offloaded.begin,
                          .stored = &stored_,
                          .rule = {truth.scale, truth.softcap},
                          .threads = threads};
  const Clock::time_point start = Clock::now();
  rival_->build(data);
  build_seconds_ = seconds_since(start);
}

Measurement BuiltRival::measure(const RivalSpec& spec, size_t k, bool rounds_keys,
                                HeadAnswers* answers) {
  RivalStep step(*rival_, stored_, shape_, {truth_.scale, truth_.softcap}, k);
  const RowJudge judge(truth_, kv_dtype_, rounds_keys);
  const size_t queries = truth_.rows() / truth_.group;
  StepSums sums;
  for (size_t i = 0; i < queries; ++i) {
    throw_if_interrupted();
    step.run(truth_.query(i * truth_.group));
    add_step(step, truth_, judge, spec.type().asks_for_k, i, sums, answers);
  }
  Measurement m;
  m.attend = rival_attend(spec, k);
  m.tail = "none";
  m.target = "none";
  m.params = spec.text();
  m.diagnostics = "{}";
  const auto keys = static_cast<double>(shape_.rows);
  put_means(std::move(sums), truth_, keys, m);
  m.read_share =
      m.bytes_per_step / static_cast<double>(stored_.keys.bytes() + stored_.values.bytes());
  m.latency_us = time_steps(
      truth_, [&](size_t i) { step.run(truth_.query(i * truth_.group)); }, answers);
  m.build_seconds = build_seconds_;
  m.bytes_per_key = static_cast<double>(rival_->bytes()) / keys;
  return m;
}

}  // namespace keyhole::tools
