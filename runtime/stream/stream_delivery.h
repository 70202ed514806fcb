// Where the host's part of a stream step goes, and where the device's choice comes from.
#pragma once

#include <atomic>
#include <span>
#include <string>

#include "gpu/step.h"
#include "runtime/step/decode_step.h"
#include "runtime/stream/stream_server.h"

namespace keyhole::runtime {

class StreamDelivery final : public Delivery {
 public:
  /// `stop` ends waits for the device's choice.
  StreamDelivery(gpu::StreamSteps& steps, const StreamStep& step, uint64_t timeout_us,
                 const std::atomic<bool>& stop)
      : steps_(&steps), step_(step), timeout_us_(timeout_us), stop_(&stop) {}

  StateView slot(uint32_t kv_head) override { return steps_->host_slot(step_.layer, kv_head); }
  void deliver(uint32_t kv_head) override { steps_->deliver(step_.layer, kv_head, step_.sequence); }
  std::span<const uint32_t> chosen(uint32_t kv_head) override {
    gpu::Chosen chosen;
    if (!steps_->chosen(step_.layer, kv_head, step_.sequence, timeout_us_, *stop_, chosen)) {
      throw Error(Status::timeout, "layer " + std::to_string(step_.layer) +
                                       ": the device has not chosen partitions within " +
                                       std::to_string(timeout_us_ / 1000) + " ms (timeout_ms)");
    }
    return {chosen.ids, chosen.count};
  }

 private:
  gpu::StreamSteps* steps_;
  StreamStep step_;
  uint64_t timeout_us_;
  const std::atomic<bool>* stop_;
};

}  // namespace keyhole::runtime
