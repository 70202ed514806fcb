#include "gpu/cuda/common/host_copies.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <string>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"

namespace keyhole::gpu {
namespace {

// A piece of 8 MiB takes 150 us at 55 GB/s: enough to hide what starting it costs, and as much pinned memory as two
// of them need is there on any machine.
constexpr size_t kPiece = size_t{8} << 20;

class PinnedCopies final : public HostCopies {
 public:
  explicit PinnedCopies(int ordinal) : ordinal_(ordinal) {
    const DeviceScope device(ordinal);
    const BesideCapture beside;
    for (Buffer& b : buffers_) {
      b.memory = PinnedBuffer(kPiece);
      b.arrived.emplace();
    }
    own_.emplace();
    enqueued_.emplace();
  }

  void read(const void* device, size_t row_bytes, size_t pitch, size_t rows, Stream stream,
            const Take& take) override {
    const size_t at_once = std::max<size_t>(1, kPiece / std::max<size_t>(row_bytes, 1));
    if (row_bytes > kPiece) {
      throw Error(Status::unsupported, "a row of " + std::to_string(row_bytes) +
                                           " bytes, allowed: " + std::to_string(kPiece));
    }
    auto* s = static_cast<cudaStream_t>(stream);
    const size_t pieces = (rows + at_once - 1) / at_once;
    const auto count = [&](size_t piece) { return std::min(at_once, rows - piece * at_once); };
    const auto start = [&](size_t piece) {
      Buffer& b = buffers_[piece % 2];
      const auto* from = static_cast<const char*>(device) + piece * at_once * pitch;
      check(cudaMemcpy2DAsync(b.memory.data(), row_bytes, from, pitch, row_bytes, count(piece),
                              cudaMemcpyDeviceToHost, s),
            "copying rows from the device");
      b.arrived->record(s);
    };
    try {
      if (pieces != 0) start(0);
      for (size_t piece = 0; piece < pieces; ++piece) {
        if (piece + 1 < pieces) start(piece + 1);
        buffers_[piece % 2].arrived->wait("copying rows from the device");
        take(piece * at_once, count(piece), buffers_[piece % 2].memory.data());
      }
    } catch (...) {
      (void)cudaStreamSynchronize(s);  // nothing may write to the buffers afterwards
      (void)cudaGetLastError();
      throw;
    }
  }

  Stream beside(Stream stream) override {
    const DeviceScope device(ordinal_);
    enqueued_->record(static_cast<cudaStream_t>(stream));
    own_->wait_for(enqueued_->get());
    return own_->get();
  }

  void write(const std::byte* data, size_t row_bytes, size_t rows, void* device, size_t pitch,
             Stream stream) override {
    auto* s = static_cast<cudaStream_t>(stream);
    check(cudaMemcpy2DAsync(device, pitch, data, row_bytes, row_bytes, rows, cudaMemcpyHostToDevice,
                            s),
          "copying rows to the device");
    check(cudaStreamSynchronize(s), "copying rows to the device");
  }

 private:
  struct Buffer {
    PinnedBuffer memory;
    std::optional<Event> arrived;
  };
  Buffer buffers_[2];
  int ordinal_;
  std::optional<OwnStream> own_;
  std::optional<Event> enqueued_;
};

}  // namespace

std::unique_ptr<HostCopies> make_host_copies(int ordinal) {
  return std::make_unique<PinnedCopies>(ordinal);
}

}  // namespace keyhole::gpu
