// Tasks of a step over codes: the choice among lists, and the pass over blocks or chosen lists.
#include <thread>

#include "runtime/step/decode_step.h"

namespace keyhole::runtime {

void DecodeStep::begin_choice(uint32_t kv_head) {
  const GroupQuery query = query_of(kv_head);
  choices_[kv_head].begin(*work_[kv_head].search.codes.lists, *query.kernels, query.queries, group_,
                          query.logits);
}

void DecodeStep::run_ranks(uint32_t kv_head, uint32_t part, Worker& worker) {
  Progress& progress = progress_[kv_head];
  const Stopwatch watch;
  index::ListChoice& choice = choices_[kv_head];
  choice.rank(part);
  worker.cost.search_seconds += watch.seconds();
  if (progress.ranks.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const Stopwatch choosing;
  choice.choose(work_[kv_head].search.codes.goal);
  worker.cost.search_seconds += choosing.seconds();
  progress.has_chosen.store(true, std::memory_order_release);
}

void DecodeStep::run_codes(uint32_t kv_head, uint32_t part, Worker& worker) {
  const HeadWork& work = work_[kv_head];
  const GroupQuery query = query_of(kv_head);
  Selection& selection = worker.selection;
  index::CodeParts& parts = code_parts_[kv_head];
  index::ListChoice* choice = nullptr;
  if (work.search.codes.blocks == nullptr) {
    choice = &choices_[kv_head];
    // Others rank the last lists, within some tens of microseconds; see StepPlan::make().
    while (!progress_[kv_head].has_chosen.load(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
    if (progress_[kv_head].failed.load(std::memory_order_relaxed)) return;
  }
  if (part >= work.common.codes) {
    worker.cost += selection.scan_codes(query, work.search, part, choice, parts);
  }
  // Only the task that ends last goes on, as in keep_hits().
  if (progress_[kv_head].parts.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  worker.cost.keys_offered += uint64_t{group_} * work.search.codes.count();
  worker.cost += selection.attend_codes(query, work.search, choice, parts,
                                        {slots_.part(kv_head, 0), slots_.tail(kv_head)});
  if (work.record == nullptr) return;
  if (selection.attended_all()) {
    work.record->exact_begin = 0;
  } else {
    work.record->attended.add(selection.attended());
  }
}

}  // namespace keyhole::runtime
