// Keyhole's own stream on a card, and its order beside the stream of llama.cpp's CUDA backend.
#pragma once

#include <ggml-backend-impl.h>

namespace keyhole::llama_cpp {

/// Nothing here waits on the host but wait(). Used by one thread at a time.
class CardStream {
 public:
  /// `cuda`: the CUDA backend's device, which is CUDA's number `ordinal`. Throws std::runtime_error where CUDA fails,
  /// or where that backend has no events.
  CardStream(int ordinal, ggml_backend_dev_t cuda);
  ~CardStream();
  CardStream(const CardStream&) = delete;
  CardStream& operator=(const CardStream&) = delete;

  [[nodiscard]] int ordinal() const { return ordinal_; }
  /// A cudaStream_t.
  [[nodiscard]] void* handle() const { return stream_; }

  /// What comes on this stream waits for all that the backend has enqueued so far.
  void follow(ggml_backend_t cuda);
  /// What the backend enqueues from now on waits for all that is on this stream.
  void lead(ggml_backend_t cuda);
  /// Waits on the host until the stream is done. Throws std::runtime_error where the device has failed.
  void wait();

 private:
  int ordinal_;
  void* stream_ = nullptr;
  ggml_backend_event_t before_ = nullptr;
  ggml_backend_event_t behind_ = nullptr;
};

}  // namespace keyhole::llama_cpp
