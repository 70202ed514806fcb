// Attention of listed blocks on a device made of a thread: the host's attention of prompts, in the order of the
// stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/listed.h"
#include "runtime/prefill/host_prompt.h"

namespace keyhole::test {

class FakeListed final : public gpu::ListedAttention {
 public:
  FakeListed(const gpu::BlockedShape& shape, const cpu::Kernels& kernels,
             std::function<void(std::function<void()>)> push, std::function<void()> wait)
      : shape_(shape),
        kernels_(&kernels),
        push_(std::move(push)),
        wait_(std::move(wait)),
        pool_(cpu::PoolConfig{.threads = 1}),
        prompt_({shape.q_heads, shape.kv_heads, shape.head_dim}, kernels, pool_) {}

  std::function<void(bool memory)> on_call = [](bool) {};
  std::atomic<uint64_t>* calls = nullptr;
  std::atomic<uint64_t>* places = nullptr;  ///< of rows, all calls

  void attend(const gpu::ListedTurn& turn, std::span<const gpu::PromptPattern> patterns,
              gpu::Stream) override;
  bool saw_bad_queries(gpu::Stream) override;
  gpu::PromptBlocks blocks() const override;
  size_t bytes() const override { return bytes_; }
  void release() override;

 private:
  [[nodiscard]] std::vector<float> read(const TensorView& t) const;
  [[nodiscard]] float rounded(float x) const;

  gpu::BlockedShape shape_;
  const cpu::Kernels* kernels_;
  std::function<void(std::function<void()>)> push_;
  std::function<void()> wait_;
  cpu::Pool pool_;
  runtime::HostPrompt prompt_;
  size_t bytes_ = 0;
  bool saw_bad_ = false;
};

}  // namespace keyhole::test
