#include "runtime/step/decode_step.h"

#include <algorithm>
#include <utility>

#include "runtime/step/recording.h"

namespace keyhole::runtime {

DecodeStep::Sizes DecodeStep::sizes_of(const ModelShape& m, Tokens tokens) {
  Sizes sizes;
  for (uint32_t layer = 0; layer < (m.layers_differ() ? m.layers : 1); ++layer) {
    const LayerShape s = m.of(layer);
    const uint32_t most_tokens = tokens_of(tokens, s.group());
    const size_t heads = size_t{s.q_heads} * most_tokens;
    sizes.fewest_heads = std::min(sizes.fewest_heads, s.kv_heads);
    sizes.most_heads = std::max(sizes.most_heads, s.kv_heads);
    sizes.group = std::max(sizes.group, s.group() * most_tokens);
    sizes.tokens = std::max(sizes.tokens, most_tokens);
    sizes.states = std::max(sizes.states, heads);
    sizes.numbers = std::max(sizes.numbers, heads * s.head_dim);
  }
  return sizes;
}

DecodeStep::DecodeStep(const Engine& engine, Tokens tokens)
    : engine_(&engine),
      tokens_(tokens),
      most_(sizes_of(engine.model(), tokens)),
      queries_(most_.numbers),
      work_(most_.most_heads),
      workers_(engine.pool().threads()),
      results_(most_.states, most_.numbers),
      slots_(most_.states, most_.numbers),
      plan_(most_.fewest_heads, most_.most_heads, engine.pool().threads()),
      resident_(most_.most_heads, most_.states, most_.numbers),
      progress_(std::make_unique<Progress[]>(most_.most_heads)) {
  count_bytes();
}

// ---- Memory --------------------------------------------------------------------------------------

void DecodeStep::reserve(std::span<const Selection::Use> uses, uint32_t k) {
  // All memory is made before any of it is used: a worker that stayed small while others grew would run past its end.
  std::vector<Selection> selections(workers_.size());
  for (Selection& s : selections) s.reserve(uses, most_.group, k);
  std::vector<PartHits> hits(plan_.most_parts() > 1 ? most_.most_heads : 0);
  for (PartHits& h : hits) h.reserve(plan_.most_parts(), most_.group, k);

  std::vector<index::CodeParts> codes;
  std::vector<index::ListChoice> choices;
  for (const Selection::Use& use : uses) {
    if (!use.codes) continue;
    codes.resize(most_.most_heads);
    choices.resize(most_.most_heads);
    for (index::ListChoice& c : choices) {
      if (use.codes.lists == nullptr) break;
      c.reserve(use.codes.shape(), use.codes.lists->lists(), most_.group);
    }
    for (index::CodeParts& c : codes) {
      c.reserve(use.codes.shape(), most_.group, std::min(k, index::kMostExactRows));
    }
  }

  for (size_t i = 0; i < workers_.size(); ++i) workers_[i].selection = std::move(selections[i]);
  part_hits_.swap(hits);
  code_parts_.swap(codes);
  choices_.swap(choices);
  capacity_k_ = k;
  count_bytes();
}

void DecodeStep::count_bytes() {
  size_t logs = 0;
  fixed_bytes_ =
      queries_.size() * sizeof(float) + results_.bytes() + resident_.bytes() + slots_.bytes();
  for (const Worker& w : workers_) {
    logs += w.selection.log_bytes();
    fixed_bytes_ += w.selection.bytes() - w.selection.log_bytes();
  }
  for (const PartHits& h : part_hits_) fixed_bytes_ += h.bytes();
  for (const index::CodeParts& c : code_parts_) fixed_bytes_ += c.bytes();
  for (const index::ListChoice& c : choices_) fixed_bytes_ += c.bytes();
  bytes_.store(fixed_bytes_ + logs, std::memory_order_relaxed);
}

// ---- Start and end -------------------------------------------------------------------------------

void DecodeStep::set_shape(uint32_t layer, uint32_t tokens) {
  const LayerShape shape = engine_->model().of(layer);
  layer_ = layer;
  kv_heads_ = shape.kv_heads;
  group_ = tokens * shape.group();
  dim_ = shape.head_dim;
  value_dim_ = shape.value_dim;
  results_.set_shape(group_, dim_);
  slots_.set_shape(group_, dim_);
  resident_.set_heads(kv_heads_, dim_);
}

void DecodeStep::plan(uint32_t layer, const NewTokens& fresh) {
  set_shape(layer, fresh.asking);
  q_ = queries_.data();
  common_cost_ = {};
  plan_tasks();
}

void DecodeStep::plan_tasks() {
  const std::span<HeadWork> works = std::span(work_).first(kv_heads_);
  for (HeadWork& work : works) work.search.k = std::min(work.search.k, capacity_k_);
  plan_.make(works, group_);
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    if (plan_.head(h).codes != 0 && work_[h].common.codes == 0) code_parts_[h].begin();
  }
}

void DecodeStep::start(uint32_t layer, gpu::Resident& resident, gpu::Codes* codes,
                       const NewTokens* fresh) {
  set_shape(layer, fresh != nullptr ? fresh->asking : 1);
  q_ = queries_.data();
  begin_records();
  resident_.begin(resident, layer, q_, group_, codes, fresh, engine_->model().sinks_of(layer));
  start_tasks(results_);
}

void DecodeStep::start(uint32_t layer, const float* q, ResultSink& sink) {
  set_shape(layer, 1);
  q_ = q;
  start_without_resident(sink, engine_->model().sinks_of(layer));
}

void DecodeStep::start_offloaded(uint32_t layer) {
  set_shape(layer, 1);
  q_ = queries_.data();
  start_without_resident(results_, nullptr);
}

void DecodeStep::start_without_resident(ResultSink& sink, const float* learned_sinks) {
  begin_records();
  resident_.begin_without(group_, learned_sinks);
  start_tasks(sink);
  // There is no resident part to wait for.
  for (uint32_t h = 0; h < kv_heads_; ++h) end_state(h);
}

void DecodeStep::begin_records() {
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    HeadRecord* record = work_[h].record;
    if (record != nullptr) begin_record(*record, query_of(h), work_[h].exact_begin);
  }
}

void DecodeStep::start_tasks(ResultSink& sink) {
  sink_ = &sink;
  for (Worker& w : workers_) w.cost = {};
  plan_tasks();
  // The rest of an earlier step that was planned and did not start must not count in this one.
  const std::span<const HeadWork> works = std::span(work_).first(kv_heads_);
  if (std::all_of(works.begin(), works.end(), [](const HeadWork& w) { return w.common.none(); })) {
    common_cost_ = {};
  }
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    const HeadPlan& head = plan_.head(h);
    progress_[h].parts.store(head.parts + head.code_tasks(), std::memory_order_relaxed);
    progress_[h].ranks.store(head.ranks, std::memory_order_relaxed);
    progress_[h].has_chosen.store(work_[h].common.has_chosen, std::memory_order_relaxed);
    if (head.ranks != 0) begin_choice(h);
    progress_[h].states.store(head.tasks() + 1, std::memory_order_relaxed);
    progress_[h].failed.store(false, std::memory_order_relaxed);
  }
  engine_->pool().start(
      job_, static_cast<uint32_t>(plan_.tasks().size()) + resident_.tasks(),
      [](void* self, uint32_t task, uint32_t worker) {
        auto* step = static_cast<DecodeStep*>(self);
        step->run_task(task, step->workers_[worker]);
      },
      this);
}

StepCost DecodeStep::finish() {
  engine_->pool().finish(job_);
  if (resident_.is_there()) {
    resident_.end();
    for (uint32_t h = 0; h < kv_heads_; ++h) end_state(h);
  }
  StepCost sum = std::exchange(common_cost_, {});
  size_t logs = 0;
  for (const Worker& w : workers_) {
    sum += w.cost;
    logs += w.selection.log_bytes();
  }
  bytes_.store(fixed_bytes_ + logs, std::memory_order_relaxed);
  return sum;
}

// ---- Tasks ---------------------------------------------------------------------------------------

void DecodeStep::run_task(uint32_t task, Worker& worker) {
  const std::span<const StepTask> tasks = plan_.tasks();
  if (task >= tasks.size()) {
    return resident_.run(task - static_cast<uint32_t>(tasks.size()), worker.cost);
  }
  const uint32_t kv_head = tasks[task].kv_head;
  try {
    run_task(tasks[task], worker);
  } catch (...) {
    progress_[kv_head].failed.store(true, std::memory_order_relaxed);
    progress_[kv_head].has_chosen.store(true, std::memory_order_release);
    end_state(kv_head);
    throw;
  }
  end_state(kv_head);
}

void DecodeStep::run_task(const StepTask& task, Worker& worker) {
  switch (task.kind) {
    case StepTask::Kind::search: return run_search(task.kv_head, task.number, worker);
    case StepTask::Kind::ranks: return run_ranks(task.kv_head, task.number, worker);
    case StepTask::Kind::codes: return run_codes(task.kv_head, task.number, worker);
    case StepTask::Kind::exact: return run_chunk(task.kv_head, task.number, worker);
  }
}

GroupQuery DecodeStep::query_of(uint32_t kv_head) const {
  return {.kernels = &engine_->kernels(),
          .kv = work_[kv_head].kv,
          .queries = q_ + size_t{kv_head} * group_ * dim_,
          .group = group_,
          .logits = engine_->model().logits_of(layer_),
          .position = work_[kv_head].position};
}

void DecodeStep::run_search(uint32_t kv_head, uint32_t part, Worker& worker) {
  const HeadWork& work = work_[kv_head];
  const HeadPlan& head = plan_.head(kv_head);
  const SearchPart share{part, head.parts};
  if (part == 0) worker.cost.keys_offered += uint64_t{group_} * work.index->count();
  if (head.merges_hits && !keep_hits(kv_head, share, worker)) return;

  const SearchParams params = params_of(kv_head, worker);
  const GroupQuery query = query_of(kv_head);
  Selection& selection = worker.selection;
  const SearchStates out{slots_.part(kv_head, head.merges_hits ? 0 : part), slots_.tail(kv_head)};
  worker.cost +=
      head.merges_hits
          ? selection.attend_parts(part_hits_[kv_head].first(head.parts), query, params, out)
          : selection.search_and_attend(*work.index, query, params, share, out);
  if (work.record != nullptr) record_search(kv_head, params, selection);
}

bool DecodeStep::keep_hits(uint32_t kv_head, SearchPart part, Worker& worker) {
  const HeadWork& work = work_[kv_head];
  const Stopwatch watch;
  const index::Hits& found =
      worker.selection.search(*work.index, query_of(kv_head), work.search, part);
  part_hits_[kv_head].keep(part.number, found, group_, work.search.k);
  worker.cost.keys_scored += found.keys_scored;
  worker.cost.bytes_read += found.bytes_read;
  worker.cost.search_seconds += watch.seconds();
  // Release what this part has found; the task that ends last acquires what the others have.
  return progress_[kv_head].parts.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

SearchParams DecodeStep::params_of(uint32_t kv_head, Worker& worker) {
  SearchParams params = work_[kv_head].search;
  const index::ReadGoal& goal = params.tail.goal;
  if (params.tail.tree != nullptr && (goal.error > 0.0F || goal.mass > 0.0F)) {
    params.tail.other = resident_.state_now(kv_head, worker.cost);
  }
  return params;
}

void DecodeStep::record_search(uint32_t kv_head, const SearchParams& params,
                               const Selection& selection) {
  HeadRecord& record = *work_[kv_head].record;
  record.attended.add(selection.attended());
  if (params.tail.tree == nullptr) return;
  record_unread(record, slots_.part(kv_head, 0).lse, params.tail.other,
                selection.tail_figures().missing);
}

void DecodeStep::run_chunk(uint32_t kv_head, uint32_t chunk, Worker& worker) {
  const Stopwatch watch;
  const HeadWork& work = work_[kv_head];
  const uint32_t rows = plan_.head(kv_head).chunk_rows;
  const size_t begin = work.exact_begin + size_t{chunk} * rows;
  const size_t n = std::min<size_t>(rows, work.kv.keys.tokens - begin);
  query_of(kv_head).attend_range(begin, n, slots_.chunk(kv_head, chunk));
  worker.cost.keys_attended += uint64_t{group_} * n;
  worker.cost.bytes_read += 2 * n * work.kv.keys.row_bytes();
  worker.cost.offload_seconds += watch.seconds();
}

// ---- Merge ---------------------------------------------------------------------------------------

HeadStates DecodeStep::states_of(uint32_t kv_head) {
  const HeadWork& work = work_[kv_head];
  const HeadPlan& head = plan_.head(kv_head);
  HeadStates s;
  if (resident_.is_there()) {
    s.resident = resident_.state(kv_head);
    s.add(s.resident);
  } else if (resident_.has_state()) {
    s.add(resident_.state(kv_head));
  }
  for (uint32_t p = 0; p < head.part_states(); ++p) s.add(slots_.part(kv_head, p));
  for (uint32_t c = 0; c < head.chunks; ++c) s.add(slots_.chunk(kv_head, c));
  if (head.codes != 0 || (head.parts != 0 && work.search.tail.tree != nullptr)) {
    s.tail = slots_.tail(kv_head);
    s.add(s.tail);
  }
  return s;
}

void DecodeStep::end_state(uint32_t kv_head) {
  Progress& progress = progress_[kv_head];
  // Release this task's slot; the task that ends last acquires those of all.
  if (progress.states.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (progress.failed.load(std::memory_order_relaxed)) return;  // finish() throws
  const HeadStates states = states_of(kv_head);
  const StateView out = sink_->slot(kv_head);
  cpu::merge_states(states.all(), group_, dim_, out);
  // Codes of values leave traces in the components that values do not have.
  for (uint32_t h = 0; h < group_ && value_dim_ < dim_; ++h) {
    std::fill_n(out.o + size_t{h} * dim_ + value_dim_, dim_ - value_dim_, 0.0F);
  }
  HeadRecord* record = work_[kv_head].record;
  if (record != nullptr) end_record(*record, states, out);
  sink_->deliver(kv_head);
}

}  // namespace keyhole::runtime
