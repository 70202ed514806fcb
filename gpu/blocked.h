// Exact attention of many new tokens at once: a turn behind a context, a chunk of a prompt. FlashAttention's scheme
// with a state that is carried from piece to piece, as the keys come from several places: the new tokens' own, the
// resident tokens on the device, and offloaded ones, which pass through the device in pieces while the piece before is
// attended.
//
//     begin(q) - attend(rows) for each place, in any order - attend_new(k, v) - finish(out)
//
// FLOOR. Offloaded rows cross the bus once for all queries: 512 MiB a layer at 128k of 8 KV heads, d = 128 and 16 bits,
// 9.8 ms at 55 GB/s, in which tensor cores attend some 1,000 tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cpu/tensor_view.h"
#include "cpu/types.h"
#include "gpu/coded_rows.h"
#include "gpu/device_slowness.h"
#include "gpu/step.h"

namespace keyhole::gpu {

struct BlockedShape {
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::f16;   ///< of resident and of new rows: f16 or bf16
  bool rows_in_int8 = false;  ///< rows of the host may be
};

/// What differs from layer to layer.
struct BlockedLayer {
  LogitParams logits;
  const float* sinks =
      nullptr;  ///< learned sinks `[q_heads]`, natural log, in host memory, copied; null: none
};

/// What has come of queries over codes.
struct CodedAttention {
  bool refused = false;  ///< too many rows weigh, or codes do not say enough about some
  uint32_t rows = 0;     ///< of all KV heads that were read exactly, once for all queries
  uint32_t passes = 0;   ///< over the codes: one, and others of queries in doubt
  uint32_t doubted = 0;  ///< query heads of tokens that were in doubt, or listed too many rows
  uint32_t heads = 0;    ///< KV heads with such
  /// Blocks of codes that each tile of query rows has attended, but for query rows of `doubted`, which have attended
  /// all of them where there was another pass; 0: all have.
  uint32_t chosen_blocks = 0;
};

/// One at a time on a stream; calls enqueue, in order, and are not captured. All throw Error: invalid_argument,
/// out_of_device_memory, device_error.
class BlockedAttention {
 public:
  virtual ~BlockedAttention() = default;

  /// Queries `[n, q_heads, head_dim]`. They are copied: q may change once the stream has come past this.
  virtual void begin(const TensorView& q, const BlockedLayer& layer, Stream stream) = 0;
  /// All queries attend all of these rows, which stay as they are until the stream has come past it. The rows of a KV
  /// head lie without gaps, and V as K does. Rows in host memory may be in i8: they begin with a block of scales, which
  /// lie `[blocks of 256, kv_heads, 2 (of K, of V), head_dim]`, in pinned memory where the rows do.
  virtual void attend(const KvView& rows, Stream stream) = 0;
  /// The new tokens' own rows `[n, kv_heads, head_dim]`, rounded to the shape's dtype: token i attends tokens 0..i, or,
  /// with a mask (`[n]` words in host memory, n <= 64), those whose bit word i has.
  virtual void attend_new(const TensorView& k, const TensorView& v, const uint64_t* mask,
                          Stream stream) = 0;
  /// Whether attend_codes() has kernels for these codes. CUDA devices have them, for 2 or 4 bits, as many of values as
  /// of keys.
  [[nodiscard]] virtual bool attends_codes(const CodedRows& /*rows*/) const { return false; }
  /// Whether it then attends rows.chosen_blocks of their blocks, which are fewer than there are; else it attends all of
  /// them.
  [[nodiscard]] virtual bool chooses_codes(const CodedRows& /*rows*/) const { return false; }
  /// How much longer than by the kernels of 9.0 on an H100 many tokens take, estimated.
  [[nodiscard]] virtual DeviceSlowness slowness() const { return {}; }
  /// All queries attend all of these rows, but for those that weigh by their codes, as single steps do
  /// (docs/what-codes-hold.md). Comes after all other rows, of which there are some: what they weigh says which of
  /// these do. Waits for the stream. Where it is refused the state is as before, and all rows are to be attended in
  /// place of their codes. meanwhile: called once, or never, while the device attends the codes and has attended all
  /// other rows, which may change; what it throws comes through when the stream has ended. It may call finish(), whose
  /// outputs hold where one pass was enough: they are there without another launch behind the wait.
  virtual CodedAttention attend_codes(const CodedRows& /*rows*/, Stream /*stream*/,
                                      const std::function<void()>& /*meanwhile*/) {
    return {.refused = true};
  }
  /// Writes out, and lse `[n, q_heads]` in natural log or null, with the layer's learned sinks.
  virtual void finish(const TensorOut& out, float* lse, Stream stream) = 0;
  /// Whether a query was not finite; waits for the stream. Within `meanwhile` of attend_codes() any stream will do.
  [[nodiscard]] virtual bool saw_bad_queries(Stream stream) = 0;

  /// Device memory that it holds now; it grows with n, and counts against the Resident's limit.
  [[nodiscard]] virtual size_t bytes() const = 0;
  /// Gives that back; waits for what was enqueued.
  virtual void release() = 0;
};

/// Most new tokens of one begin().
inline constexpr uint32_t kMostBlockedTokens = 4096;
/// Device memory for n tokens at once.
[[nodiscard]] size_t blocked_bytes(const BlockedShape& shape, uint32_t n);
/// Why no device has kernels for the shape; empty: they do.
[[nodiscard]] std::string why_no_blocked(const BlockedShape& shape);

}  // namespace keyhole::gpu
