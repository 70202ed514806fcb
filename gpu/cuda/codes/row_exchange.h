// The host's end of steps whose exact rows the host reads (gpu/cuda/codes/host_rows.h): requests in, rows and answers
// out.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/tensor_view.h"
#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/host_rows.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/waiting.h"

namespace keyhole::gpu {

class RowExchange {
 public:
  /// Memory for a shape with rows_by_host. steps: device memory, `[kv_heads]`, zero, which lives as long as the
  /// exchange is used.
  RowExchange(const CodesShape& shape, uint32_t* steps)
      : layout_(shape),
        exact_rows_(shape.exact_rows),
        kv_heads_(shape.kv_heads),
        steps_(steps),
        memory_(layout_.bytes),
        served_(shape.kv_heads) {}

  /// The parameters of a step of the layer.
  [[nodiscard]] HostRows params(uint32_t layer, const RowWaits& waits) const {
    HostRows p;
    p.requests = memory_.device<uint64_t>(layout_.requests);
    p.answers = memory_.device<DeliveredLine>(layout_.answers);
    p.rows = memory_.device(layout_.rows);
    p.steps = steps_;
    p.request_words = layout_.request_words;
    p.row_bytes = static_cast<uint32_t>(layout_.row_bytes);
    p.waits = waits;
    p.layer = layer;
    return p;
  }

  /// Does Codes::serve_rows(). source(layer) gives the layer's rows in host memory, without gaps in each head.
  template <class F>
  uint32_t serve(uint32_t kv_head, F&& source) {
    const uint64_t* words =
        memory_.as<uint64_t>(layout_.requests) + size_t{kv_head} * layout_.request_words;
    const uint64_t first = load(words);
    const auto step = static_cast<uint32_t>(first >> 32U);
    uint32_t& served = served_[kv_head].step;
    if (step == served) return served;
    uint32_t rows[kMostDeviceRows];
    for (uint32_t i = 0; i < exact_rows_; ++i) {
      const uint64_t word = load(words + 1 + i);
      if (static_cast<uint32_t>(word >> 32U) != step) return served;  // it has not come yet
      rows[i] = static_cast<uint32_t>(word);
    }
    gather(kv_head, rows, source(static_cast<uint32_t>(first)));
    store_release(line(kv_head)->sequence, step);
    return served = step;
  }
  /// Does Codes::give_up_rows().
  void give_up(uint32_t step) {
    for (uint32_t head = 0; head < kv_heads_; ++head) store_release(line(head)->abandoned, step);
  }

 private:
  struct alignas(64) Served {
    uint32_t step = 0;
  };
  static uint64_t load(const uint64_t* word) {
    return std::atomic_ref(const_cast<uint64_t&>(*word)).load(std::memory_order_acquire);
  }
  [[nodiscard]] DeliveredLine* line(uint32_t kv_head) const {
    return memory_.as<DeliveredLine>(layout_.answers) + kv_head;
  }
  /// Copies the rows. They lie anywhere in memory, so all of them are prefetched before the first is copied.
  void gather(uint32_t kv_head, const uint32_t* rows, const KvView& from) {
    constexpr size_t kCacheLine = 64;
    const size_t bytes = layout_.row_bytes;
    const std::byte* const arrays[2] = {from.keys.row(0, kv_head), from.values.row(0, kv_head)};
    for (uint32_t i = 0; i < exact_rows_; ++i) {
      if (rows[i] >= from.keys.tokens) continue;
      for (const std::byte* array : arrays) {
        for (size_t at = 0; at < bytes; at += kCacheLine) {
          __builtin_prefetch(array + rows[i] * bytes + at);
        }
      }
    }
    std::byte* to = memory_.data() + layout_.rows + size_t{kv_head} * exact_rows_ * 2 * bytes;
    for (uint32_t i = 0; i < exact_rows_; ++i) {
      for (const std::byte* array : arrays) {
        if (rows[i] < from.keys.tokens) std::memcpy(to, array + rows[i] * bytes, bytes);
        to += bytes;
      }
    }
  }

  RowExchangeLayout layout_;
  uint32_t exact_rows_, kv_heads_;
  uint32_t* steps_;
  PinnedBuffer memory_;
  std::vector<Served> served_;
};

}  // namespace keyhole::gpu
