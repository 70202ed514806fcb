// Sliding layers on a device made of a thread, computed by the definition in double precision, in the order of the
// stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "gpu/windows.h"

namespace keyhole::test {

class FakeWindows final : public gpu::Windows {
 public:
  FakeWindows(const gpu::WindowsShape& shape, const cpu::Kernels& kernels,
              std::function<void(std::function<void()>)> push, std::function<void()> wait)
      : shape_(shape),
        kernels_(&kernels),
        push_(std::move(push)),
        wait_(std::move(wait)),
        layers_(shape.layers.size()) {}

  std::function<void()> on_call = [] {};
  const std::atomic<bool>* fails = nullptr;  ///< no step can be launched

  void fill(uint32_t layer, uint32_t first, uint32_t n, const std::byte* k,
            const std::byte* v) override;
  void keep(uint32_t layer, uint32_t first, uint32_t n) override;
  void read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k, std::byte* v) const override;

  void append(uint32_t layer, uint32_t first, uint32_t kept, const TensorView& k,
              const TensorView& v, gpu::Stream) override;
  bool are_finite(uint32_t /*layer*/, const TensorView& rows, DType as, gpu::Stream) override;

  void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
            const gpu::SeenDrafts& drafts, const TensorOut& out, float* lse,
            gpu::Stream stream) override;
  void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
             gpu::Stream) override;
  void begin_among(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                   const gpu::SeenDrafts& drafts);
  void end(uint32_t layer, const TensorOut& out, float* lse, gpu::Stream) override;
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   gpu::Stream) override;

  Status failure(std::string& text) override;
  size_t bytes() const override { return gpu::windows_bytes(shape_); }

 private:
  struct Row {
    std::vector<std::byte> k, v;  ///< `[kv_heads, head_dim]` of the shape's dtype
  };
  struct Layer {
    uint32_t first = 0;  ///< number of the oldest token
    std::deque<Row> tokens;
    std::vector<float> o, lse;  ///< of the step under way
  };

  [[nodiscard]] size_t token_bytes() const;
  void launch() const;
  static void check_holds(const Layer& l, uint32_t first, uint32_t n);
  /// The rows of a view's first token.
  [[nodiscard]] std::vector<float> read_rows(const TensorView& rows) const;
  std::vector<std::byte> stored(const TensorView& rows, const char* name);
  [[nodiscard]] std::vector<float> numbers(const std::vector<std::byte>& bytes) const;
  void check_finite(const std::vector<float>& x, const char* name);

  void run(uint32_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
           const gpu::SeenDrafts& drafts, bool appends);

  gpu::WindowsShape shape_;
  const cpu::Kernels* kernels_;
  std::function<void(std::function<void()>)> push_;
  std::function<void()> wait_;
  std::vector<Layer> layers_;
  std::mutex mutex_;
  std::string failure_text_;
};

}  // namespace keyhole::test
