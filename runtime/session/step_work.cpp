#include "runtime/session/step_work.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

/// Rows that a step over codes attends exactly for `tokens` tokens together.
uint32_t rows_of_codes(const Budget& budget, uint32_t tokens) {
  if (tokens == 1) return budget.top_k;
  return static_cast<uint32_t>(
      std::min<uint64_t>(uint64_t{budget.top_k} * tokens, index::kMostExactRows));
}

}  // namespace

void StepWork::prepare(DecodeStep& step, uint32_t layer, uint32_t position, uint32_t tokens) const {
  for (uint32_t h = 0; h < engine_->model().of(layer).kv_heads; ++h) {
    const HeadIndex& hd = keeper_->head(layer, h);
    HeadWork& work = step.work(h);
    work.kv = sequence_->view(layer, h);
    work.index = nullptr;
    work.exact_begin = 0;
    work.record = nullptr;
    work.common = {};
    if (params_->mode == KEYHOLE_MODE_EXACT || keeper_->is_dense(layer, h)) continue;
    work.exact_begin = sequence_->rows(layer);
    if (params_->mode == KEYHOLE_MODE_RESIDENT || codes_->of_step(layer) != nullptr) continue;
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

void StepWork::prepare_codes(DecodeStep& step, HeadWork& work, const HeadIndex& head,
                             uint32_t position, uint32_t tokens) const {
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

size_t StepWork::exact_from(uint32_t layer, uint32_t kv_head) const {
  if (params_->mode == KEYHOLE_MODE_EXACT || keeper_->is_dense(layer, kv_head)) return 0;
  return params_->mode == KEYHOLE_MODE_RESIDENT ? sequence_->rows(layer)
                                                : keeper_->head(layer, kv_head).indexed();
}

}  // namespace keyhole::runtime
