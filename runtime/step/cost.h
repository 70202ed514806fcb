// The cost of the host's part of a step. Costs of its pieces add up to the step's.
#pragma once

#include <chrono>
#include <cstdint>

namespace keyhole::runtime {

struct StepCost {
  uint64_t keys_scored = 0;     ///< once for each query head
  uint64_t keys_offered = 0;    ///< keys that the searched indexes hold, once for each query head
  uint64_t keys_attended = 0;   ///< once for each query head
  uint64_t keys_opened = 0;     ///< distinct keys that were read for a target, or in doubt
  uint64_t targets_missed = 0;  ///< KV heads that stopped with a target unmet, by the estimate
  uint64_t codes_doubted = 0;   ///< KV heads whose codes could not tell which rows weigh
  uint64_t codes_given_up = 0;  ///< of these, those all of whose rows were read exactly
  uint64_t bytes_read = 0;      ///< by searches and estimates; of attended rows K and V, or V alone
                                ///< where scores were at hand
  uint64_t tail_bytes_read = 0;  ///< of bytes_read: means and row numbers of partitions
  double search_seconds = 0.0;   ///< time until it was known what to attend
  double offload_seconds = 0.0;  ///< time of attending offloaded rows
  double resident_seconds = 0.0;
  double tail_seconds = 0.0;  ///< of search_seconds: estimates

  StepCost& operator+=(const StepCost& other) {
    keys_scored += other.keys_scored;
    keys_offered += other.keys_offered;
    keys_attended += other.keys_attended;
    keys_opened += other.keys_opened;
    targets_missed += other.targets_missed;
    codes_doubted += other.codes_doubted;
    codes_given_up += other.codes_given_up;
    bytes_read += other.bytes_read;
    tail_bytes_read += other.tail_bytes_read;
    search_seconds += other.search_seconds;
    offload_seconds += other.offload_seconds;
    resident_seconds += other.resident_seconds;
    tail_seconds += other.tail_seconds;
    return *this;
  }
};

/// Measures the seconds since it was made.
class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace keyhole::runtime
