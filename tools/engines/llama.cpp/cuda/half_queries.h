// Queries in 16 bits, which Keyhole's attention of prompts wants, and llama.cpp has in 32.
#pragma once

#include <ggml-backend-impl.h>
#include <ggml.h>

#include <cstddef>

#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

class HalfQueries {
 public:
  HalfQueries() = default;
  ~HalfQueries();
  HalfQueries(const HalfQueries&) = delete;
  HalfQueries& operator=(const HalfQueries&) = delete;

  /// Has the CUDA backend convert the queries of a FLASH_ATTN_EXT to `type`, in the order of its stream: all rows,
  /// those of one stream of the cache after those of another. They are there until the next call. Throws
  /// std::runtime_error where the card has no memory or the backend fails.
  [[nodiscard]] Rows convert(ggml_backend_t cuda, const ggml_tensor* attention, ggml_type type);

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  ggml_context* context_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
};

}  // namespace keyhole::llama_cpp
