// Blocked attention on a device made of a thread, computed by the definition in double precision, in the order of the
// stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/blocked.h"
#include "gpu/copy.h"

namespace keyhole::test {

class FakeBlocked final : public gpu::BlockedAttention {
 public:
  FakeBlocked(const gpu::BlockedShape& shape, std::function<void(std::function<void()>)> push,
              std::function<void()> wait)
      : shape_(shape), push_(std::move(push)), wait_(std::move(wait)) {}

  std::function<void(bool memory)> on_call = [](bool) {};
  std::atomic<uint64_t>* calls = nullptr;
  std::atomic<uint64_t>* coded_calls = nullptr;      ///< of attend_codes()
  std::atomic<uint32_t>* chosen_blocks = nullptr;    ///< of the last attend_codes()
  const std::atomic<bool>* refuses_codes = nullptr;  ///< says attend_codes()
  const std::atomic<bool>* never_chooses = nullptr;  ///< says chooses_codes()
  /// Of these query heads of tokens attend_codes() says that they were in doubt, where it has chosen.
  const std::atomic<uint32_t>* doubted = nullptr;
  /// Its first pass is not enough: only what comes after `meanwhile` attends the codes.
  const std::atomic<bool>* doubts_codes = nullptr;
  const std::atomic<double>* products_slowness = nullptr;  ///< says slowness()

  void begin(const TensorView& q, const gpu::BlockedLayer& layer, gpu::Stream) override;
  void attend(const KvView& rows, gpu::Stream) override;
  void attend_new(const TensorView& k, const TensorView& v, const uint64_t* mask,
                  gpu::Stream) override;
  bool attends_codes(const gpu::CodedRows& rows) const override;
  bool chooses_codes(const gpu::CodedRows& rows) const override;
  /// Attends the rows themselves, and all of them, so that one that is attended twice or never shows. Where it says
  /// that it chooses it says that it has chosen.
  gpu::CodedAttention attend_codes(const gpu::CodedRows& rows, gpu::Stream stream,
                                   const std::function<void()>& meanwhile) override;
  gpu::DeviceSlowness slowness() const override { return {.products = *products_slowness}; }
  void finish(const TensorOut& out, float* lse, gpu::Stream) override;
  bool saw_bad_queries(gpu::Stream) override;
  size_t bytes() const override;
  void release() override;

 private:
  struct State {
    LogitParams layer;
    std::vector<float> q, sinks;
    std::deque<std::vector<float>> rows;            ///< values of all rows so far, head by head
    std::vector<std::vector<double>> logits;        ///< `[n, q_heads]`
    std::vector<std::vector<const float*>> values;  ///< likewise, among `rows`
  };

  static float element(const void* data, DType dtype, size_t at);
  static void write(std::byte* row, DType dtype, size_t at, float x);
  [[nodiscard]] float rounded(float x) const;
  [[nodiscard]] std::vector<float> read(const TensorView& rows) const;
  [[nodiscard]] std::vector<float> row(const RowsView& rows, uint32_t head, uint32_t i) const;
  void take(State& state, uint32_t token, uint32_t kv_head, const std::vector<float>& k,
            const float* v) const;

  gpu::BlockedShape shape_;
  std::function<void(std::function<void()>)> push_;
  std::function<void()> wait_;
  std::shared_ptr<State> state_;
  uint32_t n_ = 0, capacity_ = 0;
};

/// Rows of a device whose memory is the host's.
class FakeCopies final : public gpu::HostCopies {
 public:
  explicit FakeCopies(std::function<void()> wait) : wait_(std::move(wait)) {}
  void read(const void* device, size_t, size_t pitch, size_t rows, gpu::Stream,
            const Take& take) override;
  gpu::Stream beside(gpu::Stream stream) override { return stream; }
  void write(const std::byte* data, size_t row_bytes, size_t rows, void* device, size_t pitch,
             gpu::Stream) override;

 private:
  std::function<void()> wait_;
};

}  // namespace keyhole::test
