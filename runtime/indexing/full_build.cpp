#include "runtime/indexing/full_build.h"

#include <algorithm>
#include <mutex>
#include <string>

namespace keyhole::runtime {
namespace {

/// Sums the progress of heads that are built at once, and hands the caller's wish to stop to all of
/// them.
class SharedProgress {
 public:
  SharedProgress(const BuildProgress& caller, double total_rows)
      : caller_(&caller), total_rows_(total_rows) {}

  /// Progress of one head with `rows` of the total.
  [[nodiscard]] index::Progress for_head(double rows) {
    return [this, rows, before = 0.0](double fraction) mutable {
      const std::lock_guard lock(mutex_);
      done_ += (fraction - before) * rows;
      before = fraction;
      if (!stop_ && *caller_ &&
          !(*caller_)(std::clamp(done_ / total_rows_, 0.0, 1.0), "building indexes")) {
        stop_ = true;
      }
      return !stop_;
    };
  }
  [[nodiscard]] bool stopped() {
    const std::lock_guard lock(mutex_);
    return stop_;
  }
  /// Keeps the first failure and stops the others: heads that are not begun stay pending.
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    stop_ = true;
  }
  [[nodiscard]] std::exception_ptr failure() const { return error_; }

 private:
  const BuildProgress* caller_;
  double total_rows_;
  std::mutex mutex_;
  double done_ = 0.0;
  bool stop_ = false;
  std::exception_ptr error_;
};

uint32_t tail_rows(const HeadIndex& hd) {
  return hd.tail ? static_cast<uint32_t>(hd.tail->count()) : 0;
}

}  // namespace

FullBuild::FullBuild(const Engine& engine, const Sequence& sequence, HeadIndexes& heads)
    : engine_(&engine), sequence_(&sequence), heads_(&heads) {
  for (uint32_t layer = 0; layer < heads.layers(); ++layer) {
    for (uint32_t h = 0; h < heads.kv_heads(layer); ++h) plan(layer, h);
  }
}

void FullBuild::plan(uint32_t layer, uint32_t kv_head) {
  const HeadIndex& hd = heads_->at(layer, kv_head);
  const uint32_t rows = sequence_->rows(layer);
  const bool partitions = hd.params.budget.needs_partitions() && tail_rows(hd) < rows;
  if (hd.index == nullptr && rows < hd.first_rows && !partitions) return;
  const uint32_t unindexed = rows - hd.indexed();
  if (!heads_->is_indexed_here(layer, kv_head) || (unindexed == 0 && !partitions)) return;
  // Partitions alone are less work than an index, but then there is nothing else to report.
  jobs_.push_back({layer, kv_head, double{1} * (unindexed != 0 ? unindexed : rows)});
  rows_ += jobs_.back().rows;
  if (partitions) bytes_ += heads_->estimate_tail(layer, rows - tail_rows(hd));
  if (unindexed == 0) return;
  if (hd.index == nullptr) first_.push_back(&hd);
  bytes_ += heads_->estimate_index(layer, kv_head, rows);
  if (hd.index != nullptr) bytes_ -= std::min<uint64_t>(bytes_, hd.index->bytes());
}

void FullBuild::run(const BuildProgress& progress) {
  if (jobs_.empty()) return;
  SharedProgress shared(progress, rows_);
  engine_->pool().run(static_cast<uint32_t>(jobs_.size()), [&](uint32_t task, uint32_t) {
    if (shared.stopped()) return;
    try {
      build_head(jobs_[task], shared.for_head(jobs_[task].rows));
    } catch (...) {
      shared.fail(std::current_exception());
    }
  });
  failure_ = shared.failure();
  heads_->count_bytes();
}

void FullBuild::build_head(const Job& job, const index::Progress& progress) {
  HeadIndex& hd = heads_->at(job.layer, job.kv_head);
  const KvView kv = sequence_->view(job.layer, job.kv_head);
  if (hd.index == nullptr) {
    hd.take(heads_->build(job.layer, job.kv_head, kv, hd.balance, false, progress));
  } else if (hd.indexed() < kv.keys.tokens) {
    hd.index->append_kv(kv, progress);
  }
  // Partitions take a tenth of the time of an index, come last and report no progress.
  if (!hd.params.budget.needs_partitions()) return;
  if (!hd.tail) {
    index::TailTree tail =
        heads_->make_tail(job.layer, job.kv_head, heads_->fix_balance(job.layer, job.kv_head, kv));
    tail.build(kv, {});
    hd.tail = cpu::Shared(std::move(tail));
  } else if (hd.tail->count() < kv.keys.tokens) {
    const auto segment = hd.tail->prepare_append(kv, {});
    hd.tail.own().commit_append(*segment);
  }
}

void FullBuild::finish(const BuildProgress& progress) const {
  if (failure_) std::rethrow_exception(failure_);
  warn_of_poor();
  if (progress) (void)progress(1.0, "indexes built");
}

void FullBuild::warn_of_poor() const {
  std::string first;
  size_t poor = 0;
  for (const HeadIndex* h : first_) {
    if (h->index == nullptr) continue;
    heads_->tell_unguided(*h);
    std::string warning = h->index->info().warning;
    if (warning.empty()) continue;
    if (poor++ == 0) first = std::move(warning);
  }
  if (poor == 0) return;
  engine_->log()(KEYHOLE_LOG_WARNING, std::to_string(poor) + " of " +
                                          std::to_string(first_.size()) +
                                          " indexes are poor, the first because " + first);
}

}  // namespace keyhole::runtime
