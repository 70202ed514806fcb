// What host and device write for each other while steps run: one line of memory for each flag, so that no two of them
// share a line of a cache. The kernels of steps and the host's end of the exchange (gpu/cuda/exchange/) read the same
// structs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/ring.h"

namespace keyhole::gpu {

inline constexpr size_t kLine = 128;

/// From device to host, one for each layer and KV head.
struct alignas(kLine) PublishedLine {
  uint32_t sequence;  ///< the newest step whose rows are here
};

/// From host to device, one for each layer and KV head. The device reads both words with one load.
struct alignas(kLine) DeliveredLine {
  uint32_t sequence;   ///< the newest step whose state is in the slot
  uint32_t abandoned;  ///< steps up to this one get none
};

/// How long kernels waited for the host: sums of one KV head over all layers and steps, in device memory.
struct WaitSums {
  uint64_t nanoseconds;
  uint64_t merges;
};

/// From device to host: 0, or what went wrong last (failure_word()).
struct alignas(kLine) FailureLine {
  uint64_t word;
};

/// `untaken`: of steps with codes, whose q, k and v the host did not take. `rows`: of steps that asked the host for
/// rows; the sequence is that of Codes::serve_rows(). `bad`: of steps of sliding layers, whose rows the host does not
/// see.
enum class FailureKind : uint32_t {
  none = 0,
  timed_out = 1,
  given_up = 2,
  untaken_in_time = 3,
  untaken = 4,
  rows_in_time = 5,
  rows_given_up = 6,
  bad_q = 7,
  bad_k = 8,
  bad_v = 9
};

/// What went wrong in one word, which is written at once: kind in 8 bits, layer in 12, KV head in 12, sequence in 32.
KEYHOLE_HOST_DEVICE constexpr uint64_t failure_word(FailureKind kind, uint32_t layer,
                                                    uint32_t kv_head, uint32_t sequence) {
  return (uint64_t{static_cast<uint32_t>(kind)} << 56U) | (uint64_t{layer & 0xfffU} << 44U) |
         (uint64_t{kv_head & 0xfffU} << 32U) | sequence;
}

/// How steps wait for rows that the host reads (Codes::serve_rows()), and where they say that they waited in vain.
struct RowWaits {
  FailureLine* failure = nullptr;  ///< pinned; null: nobody is told
  WaitSums* sums = nullptr;        ///< `[kv_heads]`; null: not added up
  uint64_t timeout_ns = 20'000'000'000;
};

}  // namespace keyhole::gpu
