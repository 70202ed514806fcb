// Keyhole's parallel work on the threads that llama.cpp computes with. Threads of OpenMP spin for some time when a
// graph is done: a pool beside them, of as many threads, would wait for the cores that they hold.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "tools/engines/llama.cpp/cpu_backend.h"

namespace keyhole::llama_cpp {

class ParallelFor {
 public:
  using Task = void (*)(void* context, uint32_t index);

  ParallelFor() = default;
  ~ParallelFor();
  ParallelFor(const ParallelFor&) = delete;
  ParallelFor& operator=(const ParallelFor&) = delete;

  /// Whether llama.cpp's CPU backend keeps its threads from graph to graph, as it does where it is built with OpenMP.
  /// Without it threads would be started for each call of run().
  [[nodiscard]] static bool keeps_threads();

  /// How many threads llama.cpp computes with now; between calls of run(). Another number than that of its graphs would
  /// make OpenMP end threads and start them again.
  void set_threads(int threads) { cpu_.set_threads(threads); }
  /// Calls task(context, i) once for each i of [0, count), as keyhole_run_fn. Of several calls at once one has the
  /// threads, and the others' work is done by those who called.
  void run(Task task, void* context, uint32_t count) noexcept;

 private:
  /// Makes the graph, of one node that takes part in run() on all threads.
  void open();
  /// Does what nobody has begun.
  void help();

  std::mutex mutex_;  // of all below
  CpuBackend cpu_;
  ggml_context* memory_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  // Of the call under way:
  Task task_ = nullptr;
  void* context_ = nullptr;
  uint32_t count_ = 0;
  std::atomic<uint32_t> next_{0};
};

}  // namespace keyhole::llama_cpp
