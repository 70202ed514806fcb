// Tensors in device memory: as the device reads them in a step, and by way of host memory.
#pragma once

#include <cstddef>
#include <memory>

#include "cpu/pool.h"
#include "gpu/copy.h"
#include "gpu/step.h"
#include "runtime/engine/tensor.h"

namespace keyhole::runtime {

/// One token's rows for a step. A negative stride keeps its sign, in two's complement: the device computes addresses
/// modulo 2^64, as the host does.
[[nodiscard]] gpu::DeviceRows device_rows(const RowsIn& rows);
[[nodiscard]] gpu::DeviceRows device_rows(const RowsOut& rows);

/// The same of all tokens.
[[nodiscard]] gpu::DeviceTokens device_tokens(const RowsIn& rows);
[[nodiscard]] gpu::DeviceTokens device_tokens(const RowsOut& rows);

/// Memory that is taken once for the chunks of a prompt. Taken anew for each, and cleared by one thread, it cost chunks of
/// 8 MiB a third of their time.
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
  [[nodiscard]] RowsIn read(const RowsIn& rows, const char* name, gpu::Stream stream,
                            RowBuffer& buffer);
  /// `heads` rows of a tensor's width, without gaps at `data`, to one token's rows in device memory; returns when they are
  /// there. Throws Error(device_error).
  void write(const std::byte* data, size_t row_bytes, uint32_t heads, const RowsOut& to,
             gpu::Stream stream) {
    copies_->write(data, row_bytes, heads, to.data, heads == 1 ? row_bytes : to.head_stride,
                   stream);
  }

 private:
  std::unique_ptr<gpu::HostCopies> copies_;
  cpu::Pool* pool_;
};

}  // namespace keyhole::runtime
