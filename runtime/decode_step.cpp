#include "runtime/decode_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// Searches a step aims at where the parts change the answer, so that their number may depend on the shape
// alone: a part repeats work of the others (a graph walk in two parts takes about a third more in sum), which has
// to pay on few threads too.
constexpr uint32_t kSearchesPerStep = 8;
// A part of fewer rows is not worth its hand-off.
constexpr size_t kRowsPerPart = 4096;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

DecodeStep::DecodeStep(const Engine& engine)
    : engine_(&engine), group_(engine.model().group()), dim_(engine.model().head_dim) {
  const ModelShape& m = engine.model();
  const size_t slots = size_t{m.kv_heads} * kSlots * group_;
  most_parts_ =
      std::clamp(std::max(kSearchesPerStep, engine.pool().threads()) / m.kv_heads, 1U, kMaxParts);
  parts_ = std::make_unique<Parts[]>(m.kv_heads);
  host_tasks_ = std::make_unique<HostTask[]>(m.kv_heads);
  left_ = std::make_unique<Left[]>(m.kv_heads);
  queries_.resize(size_t{m.q_heads} * dim_);
  o_.resize(queries_.size());
  lse_.resize(m.q_heads);
  resident_o_.resize(queries_.size());
  resident_lse_.resize(m.q_heads);
  work_.resize(m.kv_heads);
  workers_.resize(engine.pool().threads());
  chunk_rows_.resize(m.kv_heads);
  chunks_.resize(m.kv_heads);
  tasks_.reserve(size_t{m.kv_heads} * kSlots);
  slot_o_.resize(slots * dim_);
  slot_lse_.resize(slots);
}

void DecodeStep::prepare(std::span<const Selection::Use> uses, uint32_t k) {
  for (Worker& w : workers_) w.selection.prepare(uses, group_, k);
  room_k_ = k;
  if (most_parts_ == 1) return;
  for (uint32_t h = 0; h < work_.size(); ++h) {
    Parts& p = parts_[h];
    const size_t stride = size_t{group_} * k;
    p.ids.resize(most_parts_ * stride);
    p.scores.resize(most_parts_ * stride);
    p.counts.resize(size_t{most_parts_} * group_);
    p.hits.clear();
    for (size_t i = 0; i < most_parts_; ++i) {
      p.hits.push_back({p.ids.data() + i * stride, p.scores.data() + i * stride,
                        p.counts.data() + i * group_, 0, 0});
    }
  }
}

uint32_t DecodeStep::search_parts(const HeadWork& work) const {
  const index::Index& index = *work.index;
  if (work.search.attend == KEYHOLE_ATTEND_NONE) return 1;
  const bool top = work.search.attend == KEYHOLE_ATTEND_TOPK;
  const auto kv_heads = static_cast<uint32_t>(work_.size());
  uint32_t parts = kSearchesPerStep / kv_heads;
  // The best k are merged before they are attended: nothing of the parts is left in the result.
  if (top && index.same_in_parts()) parts = engine_->pool().threads() / kv_heads;
  switch (index.sharing()) {
    case index::Sharing::none: parts = 1; break;
    // All that was scored is attended once: parts that may have scored the same keys cannot say which.
    case index::Sharing::heads: parts = top ? std::min(parts, group_) : 1; break;
    // Weights are relative to all that was scored.
    case index::Sharing::rows:
      parts = work.search.attend == KEYHOLE_ATTEND_WEIGHT ? 1 : parts;
      break;
  }
  // What was not read is known to one who has all that was.
  if (work.search.tail.tree != nullptr && !top) parts = 1;
  parts = std::min(parts, most_parts_);
  return static_cast<uint32_t>(
      std::clamp<size_t>(index.count() / kRowsPerPart, 1, std::max(parts, 1U)));
}

StateView DecodeStep::slot(uint32_t kv_head, uint32_t i) {
  const size_t s = (size_t{kv_head} * kSlots + i) * group_;
  return {slot_o_.data() + s * dim_, slot_lse_.data() + s};
}

void DecodeStep::start(uint32_t layer, gpu::Resident& resident) {
  resident_ = &resident;
  delivery_ = nullptr;
  q_ = queries_.data();
  for (uint32_t h = 0; h < work_.size(); ++h) {
    if (work_[h].record != nullptr) begin_record(h);
    host_tasks_[h].taken.store(false, std::memory_order_relaxed);
    host_tasks_[h].done.store(false, std::memory_order_relaxed);
  }
  resident.attend_begin(layer, q_);
  start_tasks(resident.host_tasks());
}

void DecodeStep::start(const float* q, Delivery& delivery) {
  resident_ = nullptr;
  delivery_ = &delivery;
  q_ = q;
  start_tasks(0);
}

void DecodeStep::start_tasks(uint32_t host_tasks) {
  for (HeadWork& work : work_) work.search.k = std::min(work.search.k, room_k_);
  for (Worker& w : workers_) w.cost = {};
  tasks_.clear();
  // A task is (kv head, slot): slot p is part p of the search, slot kMaxParts + c the exact chunk c; resident
  // tasks come last. Searches first: they take longest.
  const auto kv_heads = static_cast<uint32_t>(work_.size());
  for (uint32_t h = 0; h < kv_heads; ++h) {
    Parts& parts = parts_[h];
    const HeadWork& work = work_[h];
    parts.count = work.partitions != nullptr ? chosen_parts()
                  : work.index != nullptr    ? search_parts(work)
                                             : 0;
    parts.left.store(parts.count, std::memory_order_relaxed);
  }
  // The first parts of all heads before the second ones: where the device chooses, heads come one by one.
  for (uint32_t p = 0; p < kMaxParts; ++p) {
    for (uint32_t h = 0; h < kv_heads; ++h) {
      if (p < parts_[h].count) tasks_.push_back(h * kSlots + p);
    }
  }
  for (uint32_t h = 0; h < kv_heads; ++h) {
    const auto rows = static_cast<uint32_t>(work_[h].kv.keys.count) - work_[h].exact_begin;
    chunk_rows_[h] = std::max(kMinChunk, (rows + kMaxChunks - 1) / kMaxChunks);
    chunks_[h] = (rows + chunk_rows_[h] - 1) / chunk_rows_[h];
    for (uint32_t c = 0; c < chunks_[h]; ++c) tasks_.push_back(h * kSlots + kMaxParts + c);
    left_[h].failed.store(false, std::memory_order_relaxed);
    left_[h].tasks.store(parts_[h].count + chunks_[h], std::memory_order_relaxed);
  }
  engine_->pool().start(
      job_, static_cast<uint32_t>(tasks_.size()) + host_tasks,
      [](void* self, uint32_t task, uint32_t worker) {
        static_cast<DecodeStep*>(self)->run_task(task, worker);
      },
      this);
  if (delivery_ == nullptr) return;
  for (uint32_t h = 0; h < kv_heads; ++h) {
    if (parts_[h].count + chunks_[h] != 0) continue;
    cpu::clear_state(delivery_->slot(h), group_, dim_);
    delivery_->deliver(h);
  }
}

uint32_t DecodeStep::chosen_parts() const {
  const auto kv_heads = static_cast<uint32_t>(work_.size());
  return std::clamp(engine_->pool().threads() / kv_heads, 1U, kMaxParts);
}

void DecodeStep::reserve_rows(size_t rows) {
  for (Worker& w : workers_) w.rows.reserve(rows);
}

void DecodeStep::begin_record(uint32_t kv_head) {
  const HeadWork& work = work_[kv_head];
  HeadRecord& record = *work.record;
  record.kv = work.kv;
  record.exact_begin = work.exact_begin;
  record.attended.clear(work.exact_begin);
  std::fill(record.unread_lse.begin(), record.unread_lse.end(), kMinusInf);
  std::copy_n(queries_of(kv_head), record.queries.size(), record.queries.data());
}

void DecodeStep::end_record(uint32_t kv_head, std::span<const StateView> read, StateView tail) {
  HeadRecord& record = *work_[kv_head].record;
  const size_t q = size_t{kv_head} * group_;
  std::copy_n(resident_o_.data() + q * dim_, record.o.size(), record.resident_o.data());
  std::copy_n(resident_lse_.data() + q, group_, record.resident_lse.data());
  std::copy_n(o_.data() + q * dim_, record.o.size(), record.o.data());
  for (uint32_t h = 0; h < group_; ++h) {
    double largest = kMinusInf;
    for (const StateView& s : read) largest = std::max<double>(largest, s.lse[h]);
    double sum = 0.0;
    for (const StateView& s : read) sum += std::exp(s.lse[h] - largest);
    record.read_lse[h] =
        largest == kMinusInf ? kMinusInf : static_cast<float>(largest + std::log(sum));
    // What has entered the output, where something has.
    if (tail.lse != nullptr && tail.lse[h] != kMinusInf) record.unread_lse[h] = tail.lse[h];
  }
}

void DecodeStep::run_task(uint32_t task, uint32_t worker) {
  Worker& w = workers_[worker];
  if (task >= tasks_.size()) {
    const uint32_t host_task = task - static_cast<uint32_t>(tasks_.size());
    if (!host_tasks_[host_task].taken.exchange(true, std::memory_order_relaxed)) {
      run_resident(host_task, w);
    }
    return;
  }
  const uint32_t kv_head = tasks_[task] / kSlots;
  const uint32_t i = tasks_[task] % kSlots;
  if (delivery_ == nullptr) return run_work(kv_head, i, w);
  try {
    run_work(kv_head, i, w);
  } catch (...) {
    left_[kv_head].failed.store(true, std::memory_order_relaxed);
    end_task(kv_head);
    throw;
  }
  end_task(kv_head);
}

void DecodeStep::run_work(uint32_t kv_head, uint32_t i, Worker& worker) {
  if (i >= kMaxParts) return run_chunk(kv_head, i - kMaxParts, worker);
  if (work_[kv_head].partitions != nullptr) return run_chosen(kv_head, i, worker);
  run_search(kv_head, i, worker);
}

void DecodeStep::end_task(uint32_t kv_head) {
  Left& left = left_[kv_head];
  // Release this task's slot; who ends last acquires those of all.
  if (left.tasks.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (left.failed.load(std::memory_order_relaxed)) return;  // finish() throws
  States states;
  StateView tail{};
  const size_t n = host_states(kv_head, states.data(), tail);
  cpu::merge_states({states.data(), n}, group_, dim_, delivery_->slot(kv_head));
  delivery_->deliver(kv_head);
}

void DecodeStep::run_chosen(uint32_t kv_head, uint32_t part, Worker& worker) {
  const HeadWork& work = work_[kv_head];
  const std::span<const uint32_t> chosen = delivery_->chosen(kv_head);
  const auto start = Clock::now();
  const uint32_t parts = parts_[kv_head].count;
  const size_t begin = chosen.size() * part / parts;
  const size_t end = chosen.size() * (part + 1) / parts;
  std::vector<uint32_t>& rows = worker.rows;
  rows.clear();
  for (size_t i = begin; i < end; ++i) {
    const auto of = work.partitions->rows_of(chosen[i]);
    rows.insert(rows.end(), of.begin(), of.end());
  }
  cpu::attend_ids(engine_->kernels(), work.kv, rows, queries_of(kv_head), group_,
                  engine_->model().logits, slot(kv_head, part));
  if (part == 0) worker.cost.keys_offered += uint64_t{group_} * work.partitions->count();
  worker.cost.keys_attended += uint64_t{group_} * rows.size();
  worker.cost.keys_opened += rows.size();
  worker.cost.bytes_read += rows.size() * (2 * work.kv.keys.stride + sizeof(uint32_t));
  worker.cost.offload_seconds += seconds_since(start);
}

void DecodeStep::run_resident(uint32_t host_task, Worker& worker) {
  const auto start = Clock::now();
  resident_->run_host_task(host_task);
  worker.cost.resident_seconds += seconds_since(start);
  host_tasks_[host_task].done.store(true, std::memory_order_release);
}

StateView DecodeStep::resident_state(uint32_t kv_head, Worker& worker) {
  if (resident_ == nullptr || resident_->host_tasks() == 0) return {};
  HostTask& task = host_tasks_[kv_head];
  if (!task.taken.exchange(true, std::memory_order_relaxed)) {
    run_resident(kv_head, worker);
  } else {
    // Somebody is at it, for some tens of microseconds at most.
    while (!task.done.load(std::memory_order_acquire)) std::this_thread::yield();
  }
  return resident_->host_state(kv_head);
}

void DecodeStep::run_search(uint32_t kv_head, uint32_t part, Worker& worker) {
  const HeadWork& work = work_[kv_head];
  const float* q = queries_of(kv_head);
  Parts& parts = parts_[kv_head];
  SearchParams params = work.search;
  params.part = part;
  params.parts = parts.count;
  const bool ends_search =
      parts.count == 1 || params.attend != KEYHOLE_ATTEND_TOPK;  // else the last part does
  StateView tail{};
  const auto begin_tail = [&] {
    if (params.tail.tree == nullptr) return;
    tail = slot(kv_head, kTailSlot);
    if (params.tail.goal.error > 0.0F || params.tail.goal.mass > 0.0F) {
      params.tail.other = resident_state(kv_head, worker);
    }
  };
  const auto add = [&](const Selection::Cost& cost) {
    worker.cost.keys_scored += cost.keys_scored;
    worker.cost.keys_attended += uint64_t{group_} * cost.keys_attended;
    worker.cost.bytes_read += cost.bytes_read;
    worker.cost.search_seconds += cost.search_seconds;
    worker.cost.offload_seconds += cost.attend_seconds;
    worker.cost.tail_seconds += cost.tail.seconds;
    worker.cost.keys_opened += cost.tail.keys_opened;
    worker.cost.targets_missed += cost.tail.missed ? 1 : 0;
  };
  const auto attended = [&](const Selection::Cost& cost) {
    add(cost);
    if (work.record == nullptr) return;
    work.record->attended.add(worker.selection.attended());
    if (params.tail.tree == nullptr) return;
    // The estimate is relative to what the search has led to and, where there is a target, resident tokens.
    const float* read = slot(kv_head, 0).lse;
    for (uint32_t h = 0; h < group_; ++h) {
      const double other = params.tail.other.lse == nullptr ? kMinusInf : params.tail.other.lse[h];
      const double largest = std::max<double>(other, read[h]);
      if (largest == kMinusInf) continue;
      const double seen =
          largest + std::log(std::exp(other - largest) + std::exp(read[h] - largest));
      const double missing = cost.tail.missing[h];
      work.record->unread_lse[h] = static_cast<float>(seen + std::log(missing / (1.0 - missing)));
    }
  };
  if (part == 0) worker.cost.keys_offered += uint64_t{group_} * work.index->count();
  if (ends_search) {
    begin_tail();
    return attended(worker.selection.search_and_attend(*work.index, engine_->kernels(), work.kv, q,
                                                       group_, params, engine_->model().logits,
                                                       slot(kv_head, part), tail));
  }
  const auto start = Clock::now();
  const index::Hits& found = worker.selection.search(*work.index, q, group_, params);
  const index::Hits& kept = parts.hits[part];
  std::copy_n(found.counts, group_, kept.counts);
  for (uint32_t h = 0; h < group_; ++h) {
    std::copy_n(found.ids + size_t{h} * params.k, found.counts[h], kept.ids + size_t{h} * params.k);
    std::copy_n(found.scores + size_t{h} * params.k, found.counts[h],
                kept.scores + size_t{h} * params.k);
  }
  Selection::Cost cost;
  cost.keys_scored = found.keys_scored;
  cost.bytes_read = found.bytes_read;
  cost.search_seconds = seconds_since(start);
  add(cost);
  // Release what this part has found; who ends last acquires what the others have.
  if (parts.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  begin_tail();
  attended(worker.selection.attend_parts({parts.hits.data(), parts.count}, engine_->kernels(),
                                         work.kv, q, group_, params, engine_->model().logits,
                                         slot(kv_head, 0), tail));
}

void DecodeStep::run_chunk(uint32_t kv_head, uint32_t chunk, Worker& worker) {
  const auto start = Clock::now();
  const HeadWork& work = work_[kv_head];
  const size_t begin = work.exact_begin + size_t{chunk} * chunk_rows_[kv_head];
  const size_t n = std::min<size_t>(chunk_rows_[kv_head], work.kv.keys.count - begin);
  cpu::attend_range(
      engine_->kernels(), {work.kv.keys.slice(begin, n), work.kv.values.slice(begin, n)},
      queries_of(kv_head), group_, engine_->model().logits, slot(kv_head, kMaxParts + chunk));
  worker.cost.keys_attended += uint64_t{group_} * n;
  worker.cost.bytes_read += 2 * n * work.kv.keys.stride;
  worker.cost.offload_seconds += seconds_since(start);
}

size_t DecodeStep::host_states(uint32_t kv_head, StateView* states, StateView& tail) {
  const HeadWork& work = work_[kv_head];
  size_t n = 0;
  // Parts of a search for the best k are merged before they are attended.
  const bool one = work.partitions == nullptr && work.search.attend == KEYHOLE_ATTEND_TOPK;
  const uint32_t searched = one ? std::min(parts_[kv_head].count, 1U) : parts_[kv_head].count;
  for (uint32_t p = 0; p < searched; ++p) states[n++] = slot(kv_head, p);
  for (uint32_t c = 0; c < chunks_[kv_head]; ++c) states[n++] = slot(kv_head, kMaxParts + c);
  const bool has_tail =
      searched != 0 && work.partitions == nullptr && work.search.tail.tree != nullptr;
  if (has_tail) states[n++] = tail = slot(kv_head, kTailSlot);
  return n;
}

void DecodeStep::merge_all() {
  resident_->attend_end({resident_o_.data(), resident_lse_.data()});
  States states;
  for (uint32_t h = 0; h < work_.size(); ++h) {
    const size_t q = size_t{h} * group_;
    StateView tail{};
    states[0] = {resident_o_.data() + q * dim_, resident_lse_.data() + q};
    const size_t n = 1 + host_states(h, states.data() + 1, tail);
    cpu::merge_states({states.data(), n}, group_, dim_, {o_.data() + q * dim_, lse_.data() + q});
    if (work_[h].record == nullptr) continue;
    end_record(h, {states.data(), tail.lse != nullptr ? n - 1 : n}, tail);
  }
}

StepCost DecodeStep::finish() {
  engine_->pool().finish(job_);
  if (delivery_ == nullptr) merge_all();

  StepCost sum;
  for (const Worker& w : workers_) {
    sum.keys_scored += w.cost.keys_scored;
    sum.keys_offered += w.cost.keys_offered;
    sum.keys_attended += w.cost.keys_attended;
    sum.bytes_read += w.cost.bytes_read;
    sum.search_seconds += w.cost.search_seconds;
    sum.offload_seconds += w.cost.offload_seconds;
    sum.resident_seconds += w.cost.resident_seconds;
    sum.tail_seconds += w.cost.tail_seconds;
    sum.keys_opened += w.cost.keys_opened;
    sum.targets_missed += w.cost.targets_missed;
  }
  return sum;
}

size_t DecodeStep::bytes() const {
  size_t bytes =
      (queries_.size() + 2 * o_.size() + 2 * lse_.size() + slot_o_.size() + slot_lse_.size()) *
      sizeof(float);
  for (const Worker& w : workers_) bytes += w.selection.bytes();
  for (size_t h = 0; h < work_.size(); ++h) {
    bytes += (parts_[h].ids.size() + parts_[h].scores.size()) * sizeof(uint32_t);
  }
  return bytes;
}

}  // namespace keyhole::runtime
