// Where the host's part of a stream step goes.
#pragma once

#include "gpu/step.h"
#include "runtime/step/result_sink.h"
#include "runtime/stream/stream_server.h"

namespace keyhole::runtime {

class StreamDelivery final : public ResultSink {
 public:
  StreamDelivery(gpu::StreamSteps& steps, const StreamStep& step)
      : steps_(&steps), layer_(step.layer), sequence_(step.sequence) {}

  StateView slot(uint32_t kv_head) override { return steps_->host_slot(layer_, kv_head); }
  void deliver(uint32_t kv_head) override { steps_->deliver(layer_, kv_head, sequence_); }

 private:
  gpu::StreamSteps* steps_;
  uint32_t layer_, sequence_;
};

}  // namespace keyhole::runtime
