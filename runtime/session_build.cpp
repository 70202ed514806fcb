// Bringing all pending tokens into the indexes at once: the build after a prefill.
#include <algorithm>
#include <bit>
#include <exception>
#include <mutex>

#include "index/factory.h"
#include "runtime/session.h"

namespace keyhole::runtime {
namespace {

/// Sums the progress of heads that are built at once, and hands the caller's wish to stop to all of them.
class SharedProgress {
 public:
  SharedProgress(const std::function<bool(double, const char*)>& caller, double total_rows)
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
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::function<bool(double, const char*)>* caller_;
  double total_rows_;
  std::mutex mutex_;
  double done_ = 0.0;
  bool stop_ = false;
  std::exception_ptr error_;
};

}  // namespace

void Session::build(const std::function<bool(double, const char*)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  const AcceleratedBuild accelerated(*engine_);
  const ModelShape& m = engine_->model();
  struct Job {
    uint32_t layer, kv_head;
    double rows;  ///< its share of the progress
  };
  std::vector<Job> jobs;
  double rows = 0.0;
  uint64_t bytes = 0;
  std::vector<const Head*> built;
  for (uint32_t layer = 0; layer < m.layers; ++layer) cancel_append(layer);
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    for (uint32_t h = 0; h < m.kv_heads; ++h) {
      const Head& hd = head(layer, h);
      const bool partitions = hd.params.budget.needs_partitions() &&
                              (hd.tail == nullptr ? 0 : hd.tail->count()) < store_.rows(layer);
      if (is_dense(layer, h) || (store_.rows(layer) == hd.indexed() && !partitions)) continue;
      // Partitions alone are less work than an index, but then there is nothing else to report.
      const uint32_t unindexed = store_.rows(layer) - hd.indexed();
      jobs.push_back({layer, h, double{1} * (unindexed != 0 ? unindexed : store_.rows(layer))});
      rows += jobs.back().rows;
      if (partitions) {
        bytes += index::TailTree::estimate(store_.rows(layer) - (hd.tail ? hd.tail->count() : 0),
                                           m.head_dim, m.kv_dtype,
                                           {.keys_per_partition = params_.tail_partition});
      }
      if (unindexed == 0) continue;
      if (hd.index == nullptr) built.push_back(&hd);
      bytes += index::estimate_bytes(hd.params.index, store_.rows(layer), m.head_dim, m.kv_dtype);
      if (hd.index != nullptr) bytes -= std::min<uint64_t>(bytes, hd.index->bytes());
    }
  }
  check_memory(bytes, "building the indexes");
  if (stream_ != nullptr) stream_->front_refused = false;
  const auto finish = [&] {
    index_bytes_ = count_index_bytes();
    make_room(!built.empty());
    totals_.build_seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  if (!jobs.empty()) {
    SharedProgress shared(progress, rows);
    engine_->pool().run(static_cast<uint32_t>(jobs.size()), [&](uint32_t task, uint32_t) {
      if (shared.stopped()) return;
      const Job& job = jobs[task];
      try {
        build_head(job.layer, job.kv_head, shared.for_head(job.rows));
      } catch (...) {
        shared.fail(std::current_exception());
      }
    });
    finish();
    shared.rethrow();
    warn_of_poor_indexes(built);
  } else {
    finish();
  }
  if (progress) (void)progress(1.0, "indexes built");
}

void Session::build_head(uint32_t layer, uint32_t kv_head, const index::Progress& progress) {
  const ModelShape& m = engine_->model();
  Head& hd = head(layer, kv_head);
  const RowsView keys = store_.view(layer, kv_head).keys;
  // Partitions take a tenth of the time of an index, and come last.
  const auto build_tail = [&] {
    if (!hd.params.budget.needs_partitions()) return;
    const KvView kv = store_.view(layer, kv_head);
    if (hd.tail == nullptr) {
      auto tail = make_tail(layer, kv_head);
      tail->build(kv, {});
      hd.tail = std::move(tail);
    } else if (hd.tail->count() < kv.keys.count) {
      hd.tail->commit_append(*hd.tail->prepare_append(kv, {}));
    }
  };
  if (hd.index != nullptr) {
    if (hd.indexed() < keys.count) hd.index->append(keys, progress);
    build_tail();
    return;
  }
  auto built = index::make_index(hd.params.index, m.head_dim, m.kv_dtype,
                                 engine_->index_context(layer, kv_head));
  index::BuildInput input;
  input.keys = keys;
  input.queries = hd.queries.view();
  input.first_position = params_.sink;
  input.rope = &engine_->rope();
  built->build(input, progress);
  hd.index = std::move(built);
  build_tail();
}

std::unique_ptr<index::TailTree> Session::make_tail(uint32_t layer, uint32_t kv_head) const {
  const ModelShape& m = engine_->model();
  return std::make_unique<index::TailTree>(
      engine_->index_context(layer, kv_head), m.head_dim, m.kv_dtype,
      index::TailParams{.keys_per_partition = params_.tail_partition});
}

void Session::warn_of_poor_indexes(const std::vector<const Head*>& built) const {
  std::string first;
  size_t poor = 0;
  for (const Head* h : built) {
    if (h->index == nullptr) continue;
    std::string warning = h->index->info().warning;
    if (warning.empty()) continue;
    if (poor++ == 0) first = std::move(warning);
  }
  if (poor == 0) return;
  engine_->log()(KEYHOLE_LOG_WARNING, std::to_string(poor) + " of " + std::to_string(built.size()) +
                                          " indexes are poor, the first because " + first);
}

void Session::make_room(bool anew) {
  host_bytes_peak_ = std::max(host_bytes_peak_, host_bytes());
  if (stream_ != nullptr) stream_->front_stale = true;
  // Of each spec the largest index: another one's scratch is not always large enough for it.
  std::vector<Selection::Use> uses;
  std::vector<const std::string*> specs;
  uint32_t needed = 0;
  uint32_t k = 0;
  for (size_t i = 0; i < heads_.size(); ++i) {
    const Head& h = heads_[i];
    if (h.indexed() == 0) continue;
    const Budget& budget = h.params.budget;
    const uint32_t top_k = widened_top_k(i);
    needed = std::max(needed, std::min(top_k, h.indexed()));
    // Room for what the index will hold soon, so that a k which covers everything does not allocate at
    // every block.
    k = std::max(k, std::min(top_k, std::bit_ceil(h.indexed())));
    const auto same = std::find_if(specs.begin(), specs.end(), [&](const std::string* spec) {
      return *spec == h.params.index;
    });
    const auto at = static_cast<size_t>(same - specs.begin());
    if (same == specs.end()) {
      specs.push_back(&h.params.index);
      uses.push_back({h.index.get(), budget.attend, h.full_tail()});
      continue;
    }
    if (h.indexed() > uses[at].index->count()) uses[at].index = h.index.get();
    const index::TailTree* tail = h.full_tail();
    if (tail != nullptr && (uses[at].tail == nullptr || tail->count() > uses[at].tail->count())) {
      uses[at].tail = tail;
    }
    if (uses[at].attend == KEYHOLE_ATTEND_TOPK || uses[at].attend == KEYHOLE_ATTEND_NONE)
      uses[at].attend = budget.attend;
  }
  if (uses.empty()) return;
  const bool has_all = std::all_of(uses.begin(), uses.end(),
                                   [&](const Selection::Use& u) { return step_.fits(u); });
  if (!anew && has_all && step_.capacity_k() >= needed) return;
  step_.reserve(uses, k);
}

}  // namespace keyhole::runtime
