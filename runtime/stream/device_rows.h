// Tensors in device memory, by way of host memory.
#pragma once

#include <cstddef>
#include <memory>

#include "cpu/pool.h"
#include "gpu/copy.h"
#include "runtime/engine/tensor.h"

namespace keyhole::runtime {

/// Memory that is taken once for the chunks of a prompt. Taken anew for each, and cleared by one thread, it cost chunks
/// of 8 MiB a third of their time.
class RowBuffer {
 public:
  /// Room for `bytes`, not initialised, until the next call.
  [[nodiscard]] std::byte* room(size_t bytes) {
    if (bytes > bytes_) {
      data_.reset();
      data_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      bytes_ = bytes;
    }
    return data_.get();
  }
  void release() {
    data_.reset();
    bytes_ = 0;
  }

 private:
  std::unique_ptr<std::byte[]> data_;
  size_t bytes_ = 0;
};

/// Copies tensors to host memory, and a token's rows back.
class DeviceRowsReader {
 public:
  DeviceRowsReader(std::unique_ptr<gpu::HostCopies> copies, cpu::Pool& pool)
      : copies_(std::move(copies)), pool_(&pool) {}

  /// `rows` as they lie in `buffer` afterwards, without gaps; a tensor in host memory as it is. Waits for all that was
  /// enqueued on the stream. Throws Error(invalid_argument) where neither all heads of a token nor all rows of the
  /// tensor are equally far apart, Error(device_error).
  [[nodiscard]] TensorView read(const TensorView& rows, const char* name, gpu::Stream stream,
                                RowBuffer& buffer);
  /// See HostCopies::beside().
  [[nodiscard]] gpu::Stream beside(gpu::Stream stream) { return copies_->beside(stream); }
  /// Copies rows that lie without gaps at `data` to those of one token in device memory; returns when they are there.
  /// Throws Error(device_error).
  void write(const std::byte* data, const TensorOut& to, gpu::Stream stream) {
    const size_t row = to.row_bytes();
    const size_t pitch = to.heads == 1 ? row : to.head_stride * dtype_size(to.dtype);
    copies_->write(data, row, to.heads, to.data, pitch, stream);
  }
  /// Copies numbers in fp32 that lie without gaps.
  void write(const float* data, size_t count, float* to, gpu::Stream stream) {
    const size_t bytes = count * sizeof(float);
    copies_->write(reinterpret_cast<const std::byte*>(data), bytes, 1, to, bytes, stream);
  }

 private:
  std::unique_ptr<gpu::HostCopies> copies_;
  cpu::Pool* pool_;
};

}  // namespace keyhole::runtime
