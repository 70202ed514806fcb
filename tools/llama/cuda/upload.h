// Copies numbers of a mapped file into device memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "tools/llama/cuda/memory.h"
#include "tools/llama/read_ahead.h"

namespace keyhole::tools::cuda {

/// Copies through two pinned buffers: while one is on its way to the device, several threads fill the other from the
/// mapping (one thread copies 8 GB/s out of the page cache, PCIe 5 takes 50).
class Upload {
 public:
  /// `total`: bytes that will come in all. Borrows `progress`.
  Upload(uint64_t total, const LoadProgress& progress)
      : total_(total), progress_(progress), buffers_{Buffer(kBytes), Buffer(kBytes)} {}
  ~Upload() { (void)cudaStreamSynchronize(stream_.get()); }  // the buffers are about to go
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  /// Enqueues the copy; `from` may be reused when this returns.
  void copy(void* to, const void* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kBytes, slot_ = 1 - slot_) {
      const size_t count = std::min(kBytes, bytes - at);
      sent_[slot_].wait();  // an event that was never recorded has passed
      std::byte* const pinned = buffers_[slot_].get();
      const std::byte* const source = static_cast<const std::byte*>(from) + at;
      team_.for_each((count + kPiece - 1) / kPiece, [&](size_t piece, unsigned) {
        const size_t begin = piece * kPiece;
        std::memcpy(pinned + begin, source + begin, std::min(kPiece, count - begin));
      });
      check(cudaMemcpyAsync(static_cast<std::byte*>(to) + at, pinned, count, cudaMemcpyHostToDevice,
                            stream_.get()),
            "weights to the GPU");
      sent_[slot_].record(stream_.get());
    }
  }
  /// Counts `bytes` of the total as copied.
  void count(size_t bytes) {
    done_ += bytes;
    if (progress_) progress_(std::min(done_, total_), total_);
  }
  /// Returns when everything has arrived.
  void wait() const { check(cudaStreamSynchronize(stream_.get()), "weights to the GPU"); }

  [[nodiscard]] Team& team() { return team_; }

 private:
  using Buffer = Pinned<std::byte>;
  static constexpr size_t kBytes = size_t{32} << 20;
  static constexpr size_t kPiece = size_t{1} << 20;

  uint64_t total_;
  uint64_t done_ = 0;
  const LoadProgress& progress_;
  Team team_{8};
  OwnStream stream_;
  std::array<Buffer, 2> buffers_;
  std::array<Event, 2> sent_;
  size_t slot_ = 0;
};

}  // namespace keyhole::tools::cuda
