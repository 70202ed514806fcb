// Host memory of a session, and its limit (host_memory_limit). What holds memory says how much; the sum is added up
// when somebody asks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/engine/sizes.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

class HostMemory {
 public:
  using Bytes = std::function<uint64_t()>;

  /// params: host_memory_limit. They outlive it.
  explicit HostMemory(const SessionParams& params) : params_(&params) {}

  /// Memory that is held. What the functions read outlives the last question.
  void count(Bytes held) { held_.push_back(std::move(held)); }
  /// Memory that something under way will hold, for which there must be room already.
  void promise(Bytes promised) { promised_.push_back(std::move(promised)); }

  [[nodiscard]] uint64_t held() const { return sum(held_); }
  /// Bytes held and promised: what the limit is about.
  [[nodiscard]] uint64_t accounted() const { return held() + sum(promised_); }
  [[nodiscard]] bool is_limited() const { return params_->host_memory_limit != 0; }
  /// Throws Error(out_of_memory) where so many bytes more would pass the limit; the text names `what` needs them.
  void check(uint64_t more_bytes, const char* what) const {
    if (!is_limited()) return;
    check_host_memory(params_->host_memory_limit, accounted(), more_bytes, what);
  }

  /// The bytes held now may be the most so far.
  void note_peak() { peak_ = std::max(peak_, held()); }
  [[nodiscard]] uint64_t peak() const { return peak_; }
  void take_peak(const HostMemory& from) { peak_ = std::max(from.peak_, from.held()); }

 private:
  [[nodiscard]] static uint64_t sum(const std::vector<Bytes>& parts) {
    uint64_t bytes = 0;
    for (const Bytes& part : parts) bytes += part();
    return bytes;
  }

  const SessionParams* params_;
  std::vector<Bytes> held_, promised_;
  uint64_t peak_ = 0;
};

}  // namespace keyhole::runtime
