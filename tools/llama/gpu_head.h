// Attention of one query head of a prompt on a GPU, by any pattern. No CUDA in this header; in a build without CUDA
// the constructor throws.
#pragma once

#include <keyhole/prefill.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace keyhole::tools {

/// The rows of one query head of a prompt on the host, in fp32, after RoPE: `[tokens, head_dim]`, widths in elements
/// between tokens.
struct HeadRows {
  const float* q = nullptr;
  const float* k = nullptr;
  const float* v = nullptr;
  size_t q_width = 0, kv_width = 0;
  size_t tokens = 0;
};

/// Attends one head after the other, in fp16. Throws std::runtime_error with CUDA's text.
class GpuHead {
 public:
  explicit GpuHead(uint32_t dim);
  ~GpuHead();
  GpuHead(const GpuHead&) = delete;
  GpuHead& operator=(const GpuHead&) = delete;

  /// Copies the head's rows to the GPU, and waits for all other work there.
  void take(const HeadRows& head);
  /// Attends by `prompt`, which is of an engine of one such head on the GPU; out `[tokens, dim]`, lse `[tokens]` in
  /// host memory. Returns the GPU's seconds. Throws LibraryError.
  double attend(keyhole_prompt* prompt, float* out, float* lse);

 private:
  struct Memory;
  uint32_t dim_;
  size_t tokens_ = 0;
  std::unique_ptr<Memory> memory_;
};

}  // namespace keyhole::tools
