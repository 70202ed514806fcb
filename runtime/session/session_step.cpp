// Steps with tensors in host memory: append the token, find out what every KV head does, let the
// step run, take its result.
#include <algorithm>
#include <array>
#include <exception>
#include <string>

#include "runtime/session/session.h"
#include "runtime/step/recording.h"

namespace keyhole::runtime {
namespace {

/// Rows that a step over codes attends exactly for `tokens` tokens together.
uint32_t rows_of_codes(const Budget& budget, uint32_t tokens) {
  if (tokens == 1) return budget.top_k;
  return static_cast<uint32_t>(
      std::min<uint64_t>(uint64_t{budget.top_k} * tokens, index::kMostExactRows));
}

}  // namespace

void Session::attend_begin(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v) {
  const auto began = std::chrono::steady_clock::now();
  const LayerShape m = engine_->model().of(layer);
  release_prompt();
  if (k != nullptr) check_append(layer, *k, *v);
  check_finite(engine_->kernels(), q, "q", 0, 1, DType::f32);
  if (k == nullptr && tokens(layer) == 0) {
    throw Error(
        Status::invalid_argument,
        "layer " + std::to_string(layer) + " holds no token to attend to: append one with k and v");
  }
  advance_append(layer);
  if (k != nullptr) {
    sequence_.append(layer, *k, *v);
    forget_extended(layer);
  }
  try {
    if (codes_of_step(layer) != nullptr) stream_->finish_codes(layer);
    step_append_seconds_ =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    for (uint32_t h = 0; h < m.q_heads; ++h) {
      engine_->kernels().to_f32[static_cast<int>(q.dtype)](
          q.row(0, h), step_.queries() + size_t{h} * m.head_dim, m.head_dim);
    }
    prepare_work(layer, tokens(layer) - 1);
    if (audits_.on()) begin_audits(layer);
    step_layer_ = layer;
    step_appended_ = k != nullptr;
    step_began_ = began;
    if (codes_of_step(layer) != nullptr) codes_->expect_step();
    step_.start(layer, sequence_.resident_of(layer), codes_of_step(layer));
  } catch (...) {
    // The caller will bring the token again.
    audits_.discard();
    if (k != nullptr) sequence_.drop_newest(layer);
    throw;
  }
  in_step_ = true;
}

void Session::prepare_work(DecodeStep& step, uint32_t layer, uint32_t position, uint32_t tokens) {
  for (uint32_t h = 0; h < engine_->model().of(layer).kv_heads; ++h) {
    const HeadIndex& hd = keeper_.head(layer, h);
    HeadWork& work = step.work(h);
    work.kv = sequence_.view(layer, h);
    work.index = nullptr;
    work.exact_begin = 0;
    work.record = nullptr;
    work.common = {};
    if (params_.mode == KEYHOLE_MODE_EXACT || keeper_.is_dense(layer, h)) continue;
    work.exact_begin = sequence_.rows(layer);
    if (params_.mode == KEYHOLE_MODE_RESIDENT || codes_of_step(layer) != nullptr) continue;
    const Budget& budget = hd.params.budget;
    if (budget.reads_codes()) {
      prepare_codes(step, work, hd, position, tokens);
      continue;
    }
    const index::TailTree* tail = budget.needs_partitions() ? hd.full_tail() : nullptr;
    // Capacity can only be missing where there was no memory for it.
    const bool searches = hd.indexed() != 0 &&
                          (tail != nullptr || budget.attend != KEYHOLE_ATTEND_NONE) &&
                          step.fits({hd.index.get(), budget.attend, tail});
    work.exact_begin = searches ? hd.indexed() : 0;
    if (!searches) continue;
    work.index = hd.index.get();
    work.search = {.k = budget.top_k, .attend = budget.attend, .min_weight = budget.min_weight};
    work.position = position;
    if (tail != nullptr) work.search.tail = tail_work(budget, *tail);
  }
}

void Session::prepare_codes(DecodeStep& step, HeadWork& work, const HeadIndex& head,
                            uint32_t position, uint32_t tokens) {
  const Budget& budget = head.params.budget;
  const index::CodedRows codes =
      head.index == nullptr ? index::CodedRows() : index::CodedRows::of(*head.index);
  // Rows of the last block that are indexed and have no code yet are attended like pending ones.
  const bool reads =
      codes && codes.count() != 0 && step.fits({head.index.get(), budget.attend, nullptr, codes});
  work.exact_begin = reads ? static_cast<uint32_t>(codes.count()) : 0;
  if (!reads) return;
  work.index = head.index.get();
  // Each token of the step may have heavy rows of its own.
  work.search = {.k = rows_of_codes(budget, tokens), .attend = budget.attend, .codes = codes};
  work.position = position;
}

void Session::begin_audits(uint32_t layer) {
  const uint32_t kv_heads = engine_->model().of(layer).kv_heads;
  const auto budget = [&](uint32_t h) -> const Budget& {
    return keeper_.head(layer, h).params.budget;
  };
  audits_.begin_step(layer);
  bool wider = false;
  for (uint32_t h = 0; h < kv_heads; ++h) wider = audits_.act(layer, h, budget(h)) || wider;
  if (wider) {
    try {
      reserve_searches(false);
    } catch (const std::exception& e) {
      engine_->log()(KEYHOLE_LOG_WARNING,
                     "layer " + std::to_string(layer) +
                         ": there is no memory for a wider search: " + e.what());
    }
  }
  for (uint32_t h = 0; h < kv_heads; ++h) audits_.record(layer, h, budget(h), step_.work(h));
}

void Session::end_coded_audits() {
  const LayerShape m = engine_->model().of(step_layer_);
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    HeadRecord* record = step_.work(h).record;
    if (record == nullptr) continue;
    // The state that the step took for the resident one is that of all tokens.
    record->knows_rows = false;
    const StateView resident = resident_truth_->state(step_layer_, h, record->queries.data());
    const StateView fresh = step_.fresh_state(h);
    if (fresh.o != nullptr) {
      const std::array<StateView, 2> both{resident, fresh};
      cpu::merge_states(both, m.group(), m.head_dim, resident);
    }
    record->set_resident(resident);
    add_sinks(*record, engine_->model().sinks_of(step_layer_, h));
    std::copy_n(step_.lse() + size_t{h} * m.group(), m.group(), record->read_lse.data());
  }
}

void Session::attend_end(const RowsOut& out, float* lse) {
  in_step_ = false;
  const LayerShape m = engine_->model().of(step_layer_);
  StepCost cost;
  try {
    cost = step_.finish();
    const size_t values = size_t{m.q_heads} * m.head_dim;
    check_answer(engine_->kernels(), reinterpret_cast<const std::byte*>(step_.o()), DType::f32,
                 values);
  } catch (...) {
    audits_.discard();
    if (step_appended_) sequence_.drop_newest(step_layer_);
    count_step_bytes();
    throw;
  }
  if (audits_.on() && codes_of_step(step_layer_) != nullptr) end_coded_audits();
  audits_.submit();
  for (uint32_t h = 0; h < m.q_heads; ++h) {
    engine_->kernels().from_f32[static_cast<int>(out.dtype)](
        step_.o() + size_t{h} * m.head_dim, out.data + h * out.head_stride, m.value_dim);
  }
  if (lse != nullptr) std::copy_n(step_.lse(), m.q_heads, lse);

  add_cost(cost);
  totals_.append_seconds += step_append_seconds_;
  totals_.attend_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - step_began_).count();
}

void Session::add_cost(const StepCost& cost, uint32_t tokens) {
  totals_.attends += tokens;
  totals_.keys_scored += cost.keys_scored;
  totals_.keys_offered += cost.keys_offered;
  totals_.keys_attended += cost.keys_attended;
  totals_.bytes_read += cost.bytes_read;
  totals_.search_seconds += cost.search_seconds;
  totals_.offload_seconds += cost.offload_seconds;
  totals_.resident_seconds += cost.resident_seconds;
  totals_.tail_seconds += cost.tail_seconds;
  totals_.keys_opened += cost.keys_opened;
  totals_.targets_missed += cost.targets_missed;
  totals_.codes_doubted += cost.codes_doubted;
  totals_.codes_given_up += cost.codes_given_up;
  count_step_bytes();
}

void Session::abandon_step() noexcept {
  in_step_ = false;
  try {
    (void)step_.finish();
  } catch (...) {  // NOLINT: the session is about to go, and has no caller to tell
  }
}

}  // namespace keyhole::runtime
