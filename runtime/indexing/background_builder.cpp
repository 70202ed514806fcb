#include "runtime/indexing/background_builder.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

namespace keyhole::runtime {

using Part = AppendJob::Part;
using State = AppendJob::Part::State;

BackgroundBuilder::~BackgroundBuilder() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    for (AppendJob* job : queue_) job->cancelled.store(true, std::memory_order_relaxed);
  }
  work_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void BackgroundBuilder::submit(AppendJob& job) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    queue_.push_back(&job);
  }
  work_.notify_one();
}

bool BackgroundBuilder::finish(AppendJob& job) {
  {
    const std::lock_guard lock(mutex_);
    drop(job);
    if (job.undone == 0) return false;
  }
  pool_->run(static_cast<uint32_t>(job.parts.size()), [&](uint32_t i, uint32_t) {
    Part& part = job.parts[i];
    {
      const std::lock_guard lock(mutex_);
      if (part.state != State::waiting) return;
      part.state = State::taken;
    }
    prepare(job, part, false);
  });
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return job.undone == 0; });
  return true;
}

void BackgroundBuilder::cancel(AppendJob& job) noexcept {
  job.cancelled.store(true, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  drop(job);
  for (Part& part : job.parts) {
    if (part.state != State::waiting) continue;
    part.state = State::done;
    --job.undone;
  }
  progress_.wait(lock, [&] { return job.undone == 0; });
}

void BackgroundBuilder::retire(std::unique_ptr<AppendJob> job) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) return;
    retired_.push_back(std::move(job));
  } catch (const std::bad_alloc&) {
    return;  // then it is destroyed here
  }
  work_.notify_one();
}

void BackgroundBuilder::drop(AppendJob& job) { std::erase(queue_, &job); }

Part* BackgroundBuilder::next_part(AppendJob*& job) {
  for (AppendJob* candidate : queue_) {
    for (Part& part : candidate->parts) {
      if (part.state != State::waiting) continue;
      job = candidate;
      return &part;
    }
  }
  return nullptr;
}

void BackgroundBuilder::prepare(AppendJob& job, Part& part, bool in_background) {
  const auto start = std::chrono::steady_clock::now();
  std::exception_ptr error;
  BuiltHead first;
  std::unique_ptr<index::Addition> addition;
  std::unique_ptr<index::TailSegment> segment;
  try {
    const index::Progress progress = [&job](double) {
      return !job.cancelled.load(std::memory_order_relaxed);
    };
    if (part.build) {
      first = part.build(part.kv, progress);
    } else {
      addition = part.index->prepare_append_kv(part.kv, progress);
    }
    if (part.tail != nullptr) segment = part.tail->prepare_append(part.kv, progress);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  part.first = std::move(first);
  part.addition = std::move(addition);
  part.segment = std::move(segment);
  part.error = std::move(error);
  part.state = State::done;
  --job.undone;
  if (in_background) {
    job.background_seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  progress_.notify_one();
}

void BackgroundBuilder::work() {
  // On this thread alone. A parallel part would be taken up by workers that steps need: a step's
  // tasks last tens of microseconds, an append's many milliseconds, and no worker leaves a task
  // half-done.
  const cpu::Pool::Inline inline_runs(*pool_);
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (!retired_.empty()) {
      auto retired = std::exchange(retired_, {});
      lock.unlock();
      retired.clear();
      lock.lock();
      continue;
    }
    AppendJob* job = nullptr;
    Part* part = next_part(job);
    if (part == nullptr) {
      work_.wait(lock);
      continue;
    }
    part->state = State::taken;
    lock.unlock();
    prepare(*job, *part, true);  // the job may be gone after it
    lock.lock();
  }
}

}  // namespace keyhole::runtime
