// The memory that a session takes, by kind. What it shares with its copies is counted by the first of them that still
// has it, so that the sum over sessions counts every page once.
#pragma once

#include <cstdint>

namespace keyhole::runtime {

struct MemoryFigures {
  // Host memory; the kinds do not overlap.
  uint64_t kv = 0;  ///< K and V of offloaded tokens, with the scales of int8, and of sliding layers
  uint64_t resident = 0;  ///< K and V of sink and window, or the host's copy of them
  uint64_t indexes = 0;   ///< indexes, partitions of tails, samples of queries
  uint64_t work = 0;      ///< buffers, what steps, searches and audits work in
  /// Of kv, what lies in pages of shared memory (cpu/shared_arrays.h).
  uint64_t shared_pages = 0;
  uint64_t pinned = 0;  ///< see keyhole_statistics
  // Device memory; 0 where there is no device.
  uint64_t device = 0;
  uint64_t codes = 0;  ///< of it

  [[nodiscard]] uint64_t host() const { return kv + resident + indexes + work; }

  void add(const MemoryFigures& other) {
    kv += other.kv;
    resident += other.resident;
    indexes += other.indexes;
    work += other.work;
    shared_pages += other.shared_pages;
    pinned += other.pinned;
    device += other.device;
    codes += other.codes;
  }
};

}  // namespace keyhole::runtime
