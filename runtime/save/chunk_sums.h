// The checksum of a saved session: XXH3 of the XXH3s of its bytes, 256 KiB at a time. Chunks can be summed by many threads,
// and damage is found as by one sum of all bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "index/serial.h"

namespace keyhole::runtime {

class ChunkSums {
 public:
  static constexpr size_t kChunk = size_t{256} << 10;

  /// The next bytes.
  void update(const std::byte* data, size_t n) {
    while (n != 0) {
      const size_t part = std::min(n, left());
      chunk_.update(data, part);
      filled_ += part;
      data += part;
      n -= part;
      if (filled_ == kChunk) end_chunk();
    }
  }
  /// Bytes until the chunk under way is whole.
  [[nodiscard]] size_t left() const { return kChunk - filled_; }
  /// The next kChunk bytes, where no chunk is under way, by their sum.
  void add_chunk(uint64_t sum) { sums_.update(&sum, sizeof sum); }
  /// Of all bytes; once, at their end.
  [[nodiscard]] uint64_t finish() {
    if (filled_ != 0) end_chunk();
    return sums_.value();
  }

 private:
  void end_chunk() {
    add_chunk(chunk_.value());
    chunk_ = index::Checksum();
    filled_ = 0;
  }
  index::Checksum chunk_, sums_;
  size_t filled_ = 0;
};

}  // namespace keyhole::runtime
