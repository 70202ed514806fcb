#include "tools/engines/llama.cpp/cuda/card_stream.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace keyhole::llama_cpp {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

/// ggml's events of CUDA devices hold a cudaEvent_t.
cudaEvent_t event(ggml_backend_event_t e) { return static_cast<cudaEvent_t>(e->context); }

}  // namespace

CardStream::CardStream(int ordinal, ggml_backend_dev_t cuda) : ordinal_(ordinal) {
  check(cudaSetDevice(ordinal), "choosing the card");
  before_ = ggml_backend_event_new(cuda);
  behind_ = ggml_backend_event_new(cuda);
  if (before_ == nullptr || behind_ == nullptr) {
    throw std::runtime_error("llama.cpp's CUDA backend was built without events");
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  stream_ = stream;
}

CardStream::~CardStream() {
  (void)cudaSetDevice(ordinal_);
  if (stream_ != nullptr) (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
  ggml_backend_event_free(before_);
  ggml_backend_event_free(behind_);
}

void CardStream::follow(ggml_backend_t cuda) {
  ggml_backend_event_record(before_, cuda);
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream_), event(before_), 0),
        "waiting for llama.cpp's stream");
}

void CardStream::lead(ggml_backend_t cuda) {
  check(cudaEventRecord(event(behind_), static_cast<cudaStream_t>(stream_)), "recording an event");
  ggml_backend_event_wait(cuda, behind_);
}

void CardStream::wait() {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream_)), "waiting for the card");
}

}  // namespace keyhole::llama_cpp
