// Codes on the device of tests/runtime/stream_device.h, encoded by the reference, in the order of the stream, from
// rows that were pinned. Attention reads the rows themselves, so that a step is exact and every row that is attended
// twice or never shows. With rows_by_host some rows are asked for, as the device does, and what the host has handed
// over is attended in their place.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cpu/attention_state.h"
#include "gpu/codes.h"
#include "gpu/pinned_memory.h"
#include "index/scan/kv_codes.h"

namespace keyhole::test {

/// A pause that lasts until another is set.
inline constexpr uint32_t kNever = UINT32_MAX;

/// Remembers what is pinned. Faults can be planted, and it takes its time.
class FakePinned final : public gpu::PinnedMemory {
 public:
  explicit FakePinned(const std::atomic<size_t>* limit, const std::atomic<uint32_t>* pause_us)
      : limit_(limit), pause_us_(pause_us) {}
  void add(const std::byte* data, size_t bytes) override;
  void drop(const std::byte* from, const std::byte* to) noexcept override;
  ~FakePinned() override { drop(nullptr, nullptr); }
  [[nodiscard]] size_t bytes() const override;
  std::function<void()> on_call = [] {};  ///< before memory is pinned, on any thread: may throw

  [[nodiscard]] bool is_pinned(const std::byte* data, size_t bytes) const;
  /// Whether the device would read what the host reads, that is, whether no pages were exchanged under it.
  [[nodiscard]] bool sees_what_the_host_sees() const;

 private:
  struct Range {
    size_t bytes = 0;
    std::vector<std::byte*> pages;
  };
  [[nodiscard]] bool holds(const std::byte* data, size_t bytes) const;

  const std::atomic<size_t>* limit_;
  const std::atomic<uint32_t>* pause_us_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, Range> ranges_;
  size_t bytes_ = 0;
};

class FakeCodes final : public gpu::Codes {
 public:
  /// push: enqueues on the stream. wait: waits until the stream is empty.
  FakeCodes(const gpu::CodesShape& shape, const cpu::Kernels& kernels,
            std::function<void(std::function<void()>)> push, std::function<void()> wait,
            const FakePinned* pinned);
  ~FakeCodes() override { wait_(); }

  /// How many rows of a KV head a step asks for.
  static constexpr uint32_t kAsked = 16;
  std::atomic<uint32_t> requests{0};       ///< of heads, so far
  std::atomic<uint32_t> rows_served{0};    ///< of all requests
  std::atomic<uint32_t> answer_pause{0};   ///< microseconds, before a request is answered
  std::atomic<bool> wrong_request{false};  ///< names a layer that there is not
  uint32_t timeout_ms = 10000;             ///< of waits for rows
  gpu::CodesDoubts seen_doubts;            ///< it has none of its own, as it reads all rows
  std::function<void(const std::string&)> on_failure = [](const std::string&) {};

  uint32_t serve_rows(uint32_t kv_head) override;
  uint32_t most_tokens(uint32_t) const override;
  void give_up_rows(uint32_t step) override { abandoned_.store(step, std::memory_order_release); }

  void set_balance(uint32_t layer, uint32_t kv_head, const float* key_scale,
                   float value_scale) override;
  void set_rows(uint32_t layer, const KvView& rows) override;
  void copy_layer(uint32_t layer, gpu::Codes& from) override;
  /// Of host memory, as all that this device has. None where the host reads rows.
  gpu::CodedRows coded_rows(uint32_t layer) const override;
  void complete() override;
  /// Number of blocks of a KV head that copy_layer() has copied, over all layers.
  [[nodiscard]] uint32_t copied() const { return copied_; }
  void encode(uint32_t layer, uint32_t first, uint32_t count, gpu::Stream) override;
  void truncate(uint32_t layer, uint32_t blocks, gpu::Stream) override;
  uint32_t count(uint32_t layer) const override { return layers_[layer].wanted; }
  void read(uint32_t layer, uint32_t kv_head, uint32_t block, std::byte* out) const override;
  size_t bytes() const override { return gpu::codes_bytes(shape_); }
  gpu::CodesDoubts doubts() const override { return seen_doubts; }
  /// The balance with which the blocks of a head have been encoded.
  [[nodiscard]] const index::Balance& balance(uint32_t layer, uint32_t kv_head) const;

  /// From now on it attends nothing, for tests that look at the codes alone.
  void rest() { rests_ = true; }

  std::function<void()> on_call = [] {};  ///< before a copy or a launch: may throw
  std::atomic<bool> unpinned{false};      ///< rows were encoded that were not pinned

  /// Attends, now and exactly, the rows that have codes. From the stream's thread. asks: it asks the host for rows,
  /// where the host reads them.
  void run(uint32_t layer, uint32_t kv_head, const float* q, uint32_t group, StateView out,
           bool asks = true);

 private:
  /// The request of one KV head.
  struct Request {
    uint32_t layer = 0;
    std::vector<size_t> rows;
    std::vector<std::byte> bytes;  // `[rows, 2, row_bytes]`
    uint32_t served = 0;           // the host's
    std::atomic<uint32_t> asked{0}, answered{0};
  };
  /// Lets a step of the layer ask for rows among its first n, and waits for them. False: they will not come.
  bool ask(uint32_t layer, uint32_t kv_head, size_t n, std::map<size_t, size_t>& asked);
  struct Layer {
    uint32_t wanted = 0;  // after all that was enqueued
    uint32_t count = 0;   // the stream's
    bool is_named = false;
    KvView rows;
  };
  void check_pinned(uint32_t layer, uint32_t first, uint32_t count);
  void name(uint32_t layer);
  struct Head {
    index::Balance balance;
    std::vector<std::byte> blocks;
  };
  Head& head(uint32_t layer, uint32_t kv_head);
  KvView rows(uint32_t layer, uint32_t kv_head, size_t n) const;
  std::vector<float> sinks_;  // [layers, q_heads]; empty: none
  gpu::CodesShape shape_;
  const cpu::Kernels* kernels_;
  std::function<void(std::function<void()>)> push_;
  std::function<void()> wait_;
  const FakePinned* pinned_;
  std::vector<Layer> layers_;
  uint32_t named_ = 0, copied_ = 0;
  std::vector<Head> heads_;
  std::vector<std::unique_ptr<Request>> requests_;  // [kv_head]
  std::atomic<uint32_t> abandoned_{0};
  bool rests_ = false;
};

}  // namespace keyhole::test
