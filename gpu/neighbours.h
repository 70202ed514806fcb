// Exact nearest keys by inner product on a CUDA device: for many queries the keys of largest score, where
//
//   score(i, j) = queries[i] . keys[j] + query_extra[i] * key_extra[j]
//
// (the extra coordinate lifts keys onto a sphere, or is left out). Tensor cores form tiles of scores, which are
// compared with the query's threshold where they lie, in registers: the score matrix, 4 GB for 8192 queries of
// 128k keys, is never written. Thresholds begin as an estimate from every 16th key and are checked against what
// has passed them: a query whose estimate was too high is searched again without one, so the answer is exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/tensor_view.h"

namespace keyhole::gpu {

/// The keys of one KV head and the queries that seek among them. Host memory is copied through pinned memory, piece by
/// piece.
struct NeighbourTask {
  TensorView keys;  ///< f16, bf16 or f32; head dimension 64, 80, 96, 128 or 256
  const float* key_extra =
      nullptr;  ///< `[keys.tokens]` where keys lie, or null: no extra coordinate
  /// Same dimension. Queries of another dtype than 16-bit keys are rounded to that of the keys, each scaled by a
  /// power of two beforehand so that none overflows; scores are scaled back.
  TensorView queries;
  /// `[queries.tokens]` where queries lie; null exactly where key_extra is.
  const float* query_extra = nullptr;
  /// `[queries.tokens]` where queries lie, or null: query i sees keys [0, limits[i]) alone. Rising limits make the
  /// least work.
  const uint32_t* limits = nullptr;
  uint32_t most = 0;  ///< N: so many keys per query, 1..kMostNeighbours
  /// Not 0: queries are the keys themselves, query i key i, and at most this many are returned, the edges of a relative
  /// neighbourhood graph: of the `most` best, best first, those that no better one which is returned occludes (to
  /// which they are nearer than to the query; key i itself neither counts nor occludes). All keys are on the device
  /// then. Keys in f32 are not compared with each other: the best ones are returned, key i too. Without scores.
  uint32_t thin = 0;
};

inline constexpr uint32_t kMostNeighbours = 128;

/// The answer; arrays are the caller's. Entries past a query's count are undefined.
struct NeighbourLists {
  uint32_t* ids = nullptr;  ///< `[queries, most]` best first; of equal scores the smaller key first
  float* scores = nullptr;  ///< `[queries, most]`, or null
  uint32_t* counts = nullptr;  ///< `[queries]`: min(most, keys that the query sees)
  Memory in = Memory::host;
};

/// What one search made of its threshold estimates.
struct NeighbourFigures {
  uint64_t passed = 0;    ///< scores that were kept for the final selection, of all queries
  uint64_t repeated = 0;  ///< queries that were searched a second time
  uint32_t blocks = 0;    ///< of keys
};

struct NeighbourConfig {
  size_t memory_limit = 0;  ///< bytes of device memory for workspaces; 0: 2 GiB
  size_t block_keys = 0;    ///< keys on the device at a time, a multiple of 1024; 0: 131072
};

/// A stream of its own and the workspace for searches, which grows with them and is kept. One thread at a time;
/// several objects work at once.
class NeighbourSearch {
 public:
  virtual ~NeighbourSearch() = default;
  /// Returns when the answer is written. The same input gives the same bits on the same device. Scores are sums
  /// in fp32, in another order than on the host: equal to its scores up to rounding, and lists differ from the
  /// host's only where scores are that close. Not-a-number counts as minus infinity. Throws Error:
  /// invalid_argument, out_of_device_memory (what was allocated before stays), device_error.
  virtual void run(const NeighbourTask& task, const NeighbourLists& lists) = 0;
  [[nodiscard]] virtual NeighbourFigures figures() const = 0;  ///< of the last run
  [[nodiscard]] virtual size_t bytes() const = 0;              ///< of device memory that it holds
};

}  // namespace keyhole::gpu
