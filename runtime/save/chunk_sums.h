// The checksum of a saved session: the XXH3 of the XXH3s of its bytes, 256 KiB at a time. So many threads can sum
// chunks, and damage is found as well as by one sum of all bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "index/serial.h"

namespace keyhole::runtime {

class ChunkSums {
 public:
  static constexpr size_t kChunk = size_t{256} << 10;

  /// Adds the next bytes.
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
  /// Number of bytes until the chunk under way is whole.
  [[nodiscard]] size_t left() const { return kChunk - filled_; }
  /// Adds the next kChunk bytes by their sum, where no chunk is under way.
  void add_chunk(uint64_t sum) { sums_.update(&sum, sizeof sum); }
  /// The sum of all bytes. Called once, at their end.
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
