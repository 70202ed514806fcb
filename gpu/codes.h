// Codes of the offloaded keys and values on the device: every token is attended in every step, the heaviest rows of
// each KV head exactly, all others by 2 or 4 bits per element (cpu/code_layout.h says where every bit lies;
// index/scan/kv_codes.h is the reference of both encoding and attention).
//
// The device reads exact rows, and the rows that it encodes, from pinned host memory by itself (gpu/pinned_memory.h):
// no host
// thread is in a step's path. 16 rows of 8 KV heads take 5 us over PCIe 5; beyond 64 a head they fall off a cliff (512:
// 205 us). Where the memory of rows cannot be pinned (CodesShape::rows_by_host) a step asks the host for the rows that
// it has chosen, and a thread of the host puts them where the device reads them (serve_rows()): the same bits but in
// doubt, one exchange over the bus later.
//
// Where codes cannot tell which rows weigh, a step looks at the KV head's codes once more, reads what might weigh
// exactly, whatever its number, and sums up the rest again (docs/what-codes-hold.md, gpu/cuda/codes/settle.cuh): on
// the device alone, in the order of the stream. Not with rows_by_host, which counts such heads.
//
// 128k tokens at 2 bits and d = 128 are 70.5 bytes a row and KV head: 2.3 GB for 256 heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/code_layout.h"
#include "cpu/layer_shape.h"
#include "cpu/types.h"
#include "gpu/code_doubt.h"
#include "gpu/code_lists.h"
#include "gpu/coded_rows.h"
#include "gpu/kernel_limits.h"
#include "gpu/step.h"

namespace keyhole::gpu {

class CudaCodes;  // gpu/cuda/codes/cuda_codes.h

struct CodesShape {
  uint32_t layers = 0;  ///< of the model
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  CodeShape code;            ///< 2 or 4 bits, as many of values as of keys, see why_no_codes()
  DType dtype = DType::f16;  ///< of K and V as set_rows() has them: f16, bf16, f32, i8
  uint32_t blocks = 0;       ///< capacity of a layer, of kCodeBlock rows each
  uint32_t exact_rows =
      0;  ///< N, 0..kMostDeviceRows: the heaviest rows of a KV head, read exactly in every step
  LogitParams logits;
  uint32_t coded_layers = 0;  ///< most layers that have codes at a time; 0: all layers
  /// Rows need not lie in pinned memory: encode() copies them, steps wait for serve_rows().
  bool rows_by_host = false;
  std::vector<LogitParams> layer_logits{};  ///< `[layers]`; empty: `logits` of all
  /// As ResidentShape::shapes; code.dim is of no use then. sinks are `[q_heads]` of each layer, one behind the other,
  /// those without KV heads among them.
  std::vector<LayerShape> shapes{};
  std::vector<char>
      coded{};  ///< with shapes, `[layers]`: the layers that have codes, in place of coded_layers
  /// Learned sinks, `[layers, q_heads]` in host memory, copied: every step over these codes, of a stream or of
  /// Resident::attend_begin(), counts the state (0, sink) of each head. null: none.
  const float* sinks = nullptr;
  /// Steps read more rows than exact_rows where codes cannot tell which weigh. false: of tests, which know which rows
  /// are read.
  bool asks_doubt = true;
  /// There is memory for blocks after copy_layer() and complete() alone: codes of a copy take none for what they share.
  bool blocks_later = false;
  /// Rows of a list on average, where rows may be put in lists beside their blocks (gpu/code_lists.h); 0: there are
  /// none.
  uint32_t list_rows = 0;
  ListShare list_share = {};
  /// Rows of a layer that are in lists or will be (made_lists()) from which on its steps choose among the lists in use;
  /// with fewer they read all blocks.
  uint32_t lists_from = kListsFrom;
  uint32_t lists_from_more = 0;  ///< rows more for every further token of a step

  [[nodiscard]] const LogitParams& logits_of(uint32_t layer) const {
    return logits_of_layer(logits, layer_logits, layer);
  }
};

/// Calls of make_lists() whose work a device has ahead of it at most, some tens of launches each: launches wait for one
/// another where there are a thousand.
inline constexpr uint32_t kListingsAtOnce = 8;

/// Heads in doubt since the beginning: see DoubtBoard.
struct CodesDoubts {
  uint64_t doubted = 0, given_up = 0, rows = 0;

  CodesDoubts& operator+=(const CodesDoubts& other) {
    doubted += other.doubted;
    given_up += other.given_up;
    rows += other.rows;
    return *this;
  }
};

/// Codes of the offloaded tokens of all heads of a session, in device memory. One thread at a time; calls that do not
/// say that they enqueue come while no step of the session is under way. All throw Error: invalid_argument,
/// device_error.
///
/// There is memory for coded_layers layers: the first that are named to set_balance() or set_rows(). Other layers have
/// count() 0, and every other call refuses them.
class Codes {
 public:
  virtual ~Codes() = default;

  /// The balanced space of a head (index/scan/balance.h): key_scale `[head_dim]` in host memory, all finite and above
  /// 0, and the number that values are divided by. Before the head's first block; codes made with another one are void.
  virtual void set_balance(uint32_t layer, uint32_t kv_head, const float* key_scale,
                           float value_scale) = 0;
  /// Where K and V of the layer's offloaded rows lie: pinned host memory (PinnedMemory), or any with rows_by_host,
  /// aligned to 16 bytes. The rows of a KV head lie without gaps, and V as K does; how many the view has does not
  /// matter, as rows come behind them. Steps read any row below kCodeBlock * count(layer), encode() those of its
  /// blocks: they stay where they are, and as they are, until the stream has done so. Scales of rows of dtype i8 lie
  /// `[blocks, kv_heads, 2 (of K, of V), head_dim]`, pinned likewise; encode() alone reads them, and keeps a copy for
  /// the steps.
  virtual void set_rows(uint32_t layer, const KvView& rows) = 0;
  /// Enqueues: blocks [first, first + count) of the layer are encoded from their rows; the layer has first + count
  /// blocks after that, for steps that are enqueued later on the stream. first <= count(layer): also replaces. 128k
  /// rows of 8 KV heads take about as long as their bytes take over the bus; with rows_by_host, as copies of pageable
  /// memory take, which may wait for what was enqueued before.
  virtual void encode(uint32_t layer, uint32_t first, uint32_t count, Stream stream) = 0;
  /// Enqueues: the layer has `blocks` blocks, no more than now.
  virtual void truncate(uint32_t layer, uint32_t blocks, Stream stream) = 0;
  /// Blocks of the layer after all that was enqueued.
  [[nodiscard]] virtual uint32_t count(uint32_t layer) const = 0;

  /// Whether make_lists() may put rows of a layer in lists.
  [[nodiscard]] virtual bool takes_lists(uint32_t /*layer*/) const { return false; }
  /// Begins to put rows [begin, begin + rows) of all KV heads in lists (gpu/cuda/codes/make_lists.h), on a stream of
  /// its own behind what was enqueued so far: waits for nothing, and steps read these rows as blocks until use_lists().
  /// begin: made_lists(layer); rows: kListStretch at most, all with blocks; both are multiples of kCodeBlock. Rows stay
  /// where and as they are until use_lists() has taken their lists, or until truncate(), encode() or stop_lists() has
  /// taken them back. What then cuts through the rows of a call takes all of its lists.
  /// Returns false, and has begun nothing, while kListingsAtOnce earlier calls are under way, and where no lists can be
  /// used: without list_rows, with rows_by_host, on devices that have no kernels for them
  /// (chooses_among_lists()).
  virtual bool make_lists(uint32_t /*layer*/, uint32_t /*begin*/, uint32_t /*rows*/) {
    return false;
  }
  /// Enqueues: steps of up to most_listed_tokens() (gpu/codes_layout.h) that are enqueued later choose among all lists
  /// of the layer that have been made by now (CodesShape::lists_from), in the order of their rows. Waits for nothing.
  /// While the stream is captured nothing changes.
  virtual void use_lists(uint32_t /*layer*/, Stream /*stream*/) {}
  /// Waits until no rows of the layer are read for lists. Lists that steps do not use are forgotten.
  virtual void stop_lists(uint32_t /*layer*/) {}
  /// Rows of the layer that are in lists or will be, of those that make_lists() was told: the first ones.
  [[nodiscard]] virtual uint32_t made_lists(uint32_t layer) const { return listed(layer); }
  /// Rows of the layer among whose lists steps choose after all that was enqueued: the first ones.
  [[nodiscard]] virtual uint32_t listed(uint32_t /*layer*/) const { return 0; }

  /// The layer, which has no blocks, has those of `from`, codes of the same shape, and their balance, as they are after
  /// all that was enqueued there. Device memory that holds nothing else is shared, until encode() of either writes
  /// there, which takes new memory then (Error(out_of_device_memory), and nothing was enqueued). Rows are not `from`'s:
  /// set_rows() comes before. No step of either session is under way; waits for the device. Batches of such sessions
  /// read what is shared once.
  virtual void copy_layer(uint32_t layer, Codes& from) = 0;
  /// These codes as steps of a CUDA device read them; null: they lie on no such device.
  [[nodiscard]] virtual CudaCodes* on_cuda() { return nullptr; }
  /// The codes that have this layer, where a session has codes for each shape of its layers (gpu/mixed_parts.h), null
  /// where layers of its shape have none; else these themselves.
  [[nodiscard]] virtual Codes* of_layer(uint32_t /*layer*/) { return this; }
  /// The codes of a layer and where its rows lie, for BlockedAttention::attend_codes(), after all that was enqueued
  /// here; CodedRows::blocks_at is null where there are none, where the host reads rows, and where no row is read
  /// exactly.
  [[nodiscard]] virtual CodedRows coded_rows(uint32_t /*layer*/) const { return {}; }
  /// Takes all memory for blocks that blocks_later has left out and no copy_layer() has brought. Throws
  /// Error(out_of_device_memory).
  virtual void complete() = 0;

  /// Of a shape with rows_by_host, else 0. The device counts the steps over these codes, of all layers together, from 1
  /// in the order of the stream, and each asks for the rows of every KV head. Puts the rows that the newest step of a
  /// KV head has asked for where it reads them, and lets it go on; returns the number of the head's newest step that
  /// was served (cyclic; the same as before where none has asked). Any thread, one at a time for a KV head; beside all
  /// other calls. Does not wait, and must be called again and again while a step is under way, by a thread that waits
  /// for no work of the device.
  virtual uint32_t serve_rows(uint32_t kv_head) = 0;
  /// Steps up to this number wait for no rows any more: what they write is NaN, and StreamSteps::failure() says why.
  /// Any thread.
  virtual void give_up_rows(uint32_t step) = 0;

  /// Tokens that a step of the layer may have (StreamSteps::step_tokens()): most_step_tokens(), or fewer where the
  /// device lacks the shared memory. The exact rows of each of its parts (StepParts) are chosen together, exact_rows
  /// for each token, kMostDeviceRows at most (with rows_by_host exact_rows).
  [[nodiscard]] virtual uint32_t most_tokens(uint32_t layer) const = 0;

  /// A block as it lies in device memory, to out (code.block_bytes()), after all that was enqueued here: waits for the
  /// device. For tests and audits.
  virtual void read(uint32_t layer, uint32_t kv_head, uint32_t block, std::byte* out) const = 0;
  /// Of device memory: what is shared counts for the codes that took it.
  [[nodiscard]] virtual size_t bytes() const = 0;
  /// Of the steps that the device has done by now, which it does not wait for. Copied from the device: some 10 us a
  /// call. With rows_by_host these heads are counted, and no more rows are read.
  [[nodiscard]] virtual CodesDoubts doubts() const { return {}; }
};

/// Device memory that a Codes of this shape takes, all of it from the start. Throws Error(invalid_argument) for a shape
/// that no session has, or whose size exceeds 2^64 - 1.
[[nodiscard]] size_t codes_bytes(const CodesShape& shape);
/// Pinned host memory that it takes: 0 but with rows_by_host, when K and V need none. Throws likewise.
[[nodiscard]] size_t codes_pinned_bytes(const CodesShape& shape);
/// Why no device has kernels for the shape; empty: they do. Says what is supported. Throws as codes_bytes().
[[nodiscard]] std::string why_no_codes(const CodesShape& shape);
[[nodiscard]] inline bool codes_supported(const CodesShape& shape) {
  return why_no_codes(shape).empty();
}
/// Whether steps of a layer of this shape at least choose among lists of codes (gpu/code_lists.h) on a device with such
/// limits, where list_rows asks for lists: kernels want the shared memory of a thread block, and where there are no
/// clusters of thread blocks 8 multiprocessors for a KV head. Asks no device; throws nothing.
[[nodiscard]] bool chooses_among_lists(const CodesShape& shape, const KernelLimits& limits);

}  // namespace keyhole::gpu
