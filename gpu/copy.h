// Rows from device memory to pageable host memory through two pinned buffers: the copy of one piece overlaps what
// the host does with the piece before. And a few rows back.
#pragma once

#include <functional>
#include <memory>

#include "gpu/step.h"

namespace keyhole::gpu {

class HostCopies {
 public:
  virtual ~HostCopies() = default;

  /// Hands `rows` rows of row_bytes each, `pitch` bytes apart on the device, to `take(first row, count, data)` in
  /// pieces (rows one after the other, no gaps), in order, after all that was enqueued on the stream before. Returns
  /// when all are taken. Throws Error(device_error), or what `take` throws.
  using Take = std::function<void(size_t first, size_t count, const std::byte* data)>;
  virtual void read(const void* device, size_t row_bytes, size_t pitch, size_t rows, Stream stream,
                    const Take& take) = 0;

  /// A stream whose work comes after all that was enqueued on `stream` so far, and beside what is enqueued there later;
  /// the same one in every call. Throws Error(device_error).
  [[nodiscard]] virtual Stream beside(Stream stream) = 0;

  /// Copies `rows` rows of row_bytes each, which lie without gaps in host memory, to where they lie `pitch` bytes apart
  /// on the device, after all that was enqueued on the stream before. Returns when they are there. Throws
  /// Error(device_error).
  virtual void write(const std::byte* data, size_t row_bytes, size_t rows, void* device,
                     size_t pitch, Stream stream) = 0;
};

}  // namespace keyhole::gpu
