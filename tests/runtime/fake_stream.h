// A stream that needs no GPU: a thread runs one launch after the other. Launches can be captured and launched again.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/types.h"
#include "gpu/step.h"

namespace keyhole::test {

/// Runs launches in their order, on a thread.
class FakeStream {
 public:
  FakeStream() : thread_([this] { work(); }) {}
  ~FakeStream() {
    push({});
    thread_.join();
  }
  void push(std::function<void()> launch) {
    if (capture_ != 0 && launch) {
      graph_.push_back(std::move(launch));
      return;
    }
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(launch));
    changed_.notify_all();
  }
  /// Records what is pushed until end_capture(), in place of the graph before; it does not run.
  void begin_capture() {
    capture_ = ++captures_;
    graph_.clear();
  }
  void end_capture() { capture_ = 0; }
  /// The number of the capture under way; 0: none.
  uint64_t capture_id() const { return capture_; }
  using Graph = std::vector<std::function<void()>>;
  const Graph& graph() const { return graph_; }  ///< the one recorded last
  void launch_graph() { launch_graph(graph_); }
  void launch_graph(const Graph& graph) {
    for (const auto& f : graph) push(f);
  }
  /// Waits for the stream. During a capture it throws and ends the capture, as CUDA does.
  void synchronize() {
    if (capture_ != 0) {
      capture_ = gpu::kLostCapture;
      throw Error(Status::device_error, "a stream that is captured cannot be waited for");
    }
    wait();
  }
  /// Whether nothing is left to run.
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      auto launch = std::move(queue_.front());
      queue_.pop_front();
      if (!launch) return;
      busy_ = true;
      lock.unlock();
      launch();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  uint64_t capture_ = 0, captures_ = 0;
  Graph graph_;
  std::thread thread_;
};

}  // namespace keyhole::test
