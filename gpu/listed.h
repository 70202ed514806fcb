// Attention of many new tokens of a session by the patterns of prompts (gpu/prompt.h): a turn behind a context, a chunk
// of a prompt, over the blocks of rows that their queries choose among all tokens. What a tile attends follows from its
// queries and all keys, so both must be on the device before: KV heads pass through it, not rows.
//
//     for some KV heads at a time   all their rows, wherever they lie, to one piece of device memory; choice and
//                                   attention there as of a prompt, while the rows of the next heads come
//
// That takes memory for two lots of heads, 64 MiB each or those of one head (of 128k rows of 128 components in 16 bits:
// 64 MiB), and gives every choice what it has where a whole prompt lies on the device.
//
// FLOOR. Offloaded rows cross the bus once, as they do for exact attention (gpu/blocked.h): 512 MiB a layer at 128k of
// 8 KV heads, 9.8 ms at 55 GB/s. Exact attention of 32 query heads over them takes 4.8 us of an H200 for each new token
// beside that: 512 tokens 12.6 ms, 1024 15.6, 2048 20.2, and 8192, for which rows cross twice, some 60. With a fifth of
// the blocks and one query in 16 to choose them it should be 1.3 us for each token: 512 tokens 10.5 ms, 2048 12.5, 8192
// 20, less where they hide behind the bus. So lists gain nothing to speak of below some 500 tokens, lose nothing there
// either, and halve the time from some 4,000 on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cpu/tensor_view.h"
#include "gpu/blocked.h"
#include "gpu/prompt.h"

namespace keyhole::gpu {

/// n new tokens behind those of `before`. All in device memory but for rows of the host.
struct ListedTurn {
  TensorView q;          ///< `[n, q_heads, head_dim]`, any dtype
  TensorView k, v;       ///< `[n, kv_heads, head_dim]`, any dtype, rounded to that of the shape
  TensorOut out;         ///< as q, any dtype, rows aligned to 8 bytes; may be q
  float* lse = nullptr;  ///< `[n, q_heads]`, natural log; null: not wanted
  uint32_t n = 0;
  BlockedLayer layer;
  /// In the order of the tokens, in as many places as they lie in, each as BlockedAttention::attend() has them; they
  /// stay until the stream has come past it.
  std::span<const KvView> before;
};

/// One at a time on a stream; calls enqueue, in order, and are not captured. All throw Error: invalid_argument,
/// out_of_device_memory, device_error.
class ListedAttention {
 public:
  virtual ~ListedAttention() = default;

  /// patterns: one, or one for each query head. Where memory is lacking nothing has been written. Rows of the host that
  /// are not pinned have been read when it returns.
  virtual void attend(const ListedTurn& turn, std::span<const PromptPattern> patterns,
                      Stream stream) = 0;
  /// Whether a query of the last turn was not finite; waits for the stream.
  [[nodiscard]] virtual bool saw_bad_queries(Stream stream) = 0;
  /// Of all turns so far that were not dense; waits for them.
  [[nodiscard]] virtual PromptBlocks blocks() const = 0;

  /// Device memory that it holds now; it grows with n and the rows, and counts against the Resident's limit.
  [[nodiscard]] virtual size_t bytes() const = 0;
  /// Gives that back; waits for what was enqueued.
  virtual void release() = 0;
};

/// Most tokens of a turn and those before it together, and places that these lie in.
inline constexpr uint32_t kMostListedRows = 65535 * 64, kMostListedPlaces = 8;

}  // namespace keyhole::gpu
