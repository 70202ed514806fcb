// Owners of streams and of events.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/cuda/common/check.h"

namespace keyhole::gpu {

/// A caller's stream (gpu::Stream).
[[nodiscard]] inline cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

/// A stream of the current device that waits for no other one.
class OwnStream {
 public:
  /// Priority of the stream. high: where multiprocessors come free, its thread blocks come before those of other
  /// streams.
  enum class Priority : uint8_t { usual, high };
  explicit OwnStream(Priority priority = Priority::usual) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities of streams");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                       priority == Priority::high ? greatest : least),
          "creating a stream");
  }
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  /// Waits for all that was enqueued. `what` names it in the error.
  void wait(const char* what = "waiting for the device") const {
    check(cudaStreamSynchronize(stream_), what);
  }
  /// Makes all that is enqueued from now on wait for `event`'s last record().
  void wait_for(cudaEvent_t event) const {
    check(cudaStreamWaitEvent(stream_, event), "ordering streams");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A mark in a stream. One that was never recorded counts as passed.
class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event"); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  [[nodiscard]] cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const {
    check(cudaEventRecord(event_, stream), "recording an event");
  }
  /// Waits on the calling thread. `what` names the work in the error.
  void wait(const char* what = "waiting for the device") const {
    check(cudaEventSynchronize(event_), what);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace keyhole::gpu
