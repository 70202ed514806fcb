// Memory that prompts alone need. It is kept from one chunk of a prompt to the next, and given back by the next step or
// build.
#pragma once

#include <array>
#include <memory>

#include "cpu/layer_shape.h"
#include "runtime/prefill/host_prompt.h"
#include "runtime/stream/device_rows.h"

namespace keyhole::runtime {

struct PromptMemory {
  std::array<RowBuffer, 3> rows;  ///< k, v and q of a chunk that came from device memory
  std::unique_ptr<HostPrompt>
      attention{};     ///< of new tokens by a pattern, on the host; null: not used since
  LayerShape shape{};  ///< of the layers that `attention` is for

  void release() {
    for (RowBuffer& buffer : rows) buffer.release();
    attention.reset();
  }
  /// Bytes of host memory, of what counts against the limit: the buffers of rows do not.
  [[nodiscard]] uint64_t bytes() const { return attention == nullptr ? 0 : attention->bytes(); }
};

}  // namespace keyhole::runtime
