// One decoding step of one layer in the order of a caller's stream: what a decoder on a GPU embeds.
//
//   stream   begin: take in k and v - publish q, k, v to the host - resident attention (state A)
//            end:   wait for the host's state B - merge A, B - write out
//   host     await(): q has arrived - search, gather, attend - deliver() one KV head after the other
//
// A step with a Codes waits for no state of the host: all offloaded tokens are attended on the device. The host still
// receives q, k, v, and acknowledges with deliver() for every KV head that it has taken them. A layer's next step
// overwrites them, and so waits for that first (beside its attention, so that only a host that is a whole step late
// holds it up). Threads that acknowledge wait for no work of the device: there may be no room for it meanwhile.
//
// The stream never waits for a thread that calls the API, and such a thread never waits for the stream.
// Sequence numbers are monotone and compared cyclically (>=), never reset: a flag that was raised stays raised.
// The device counts them itself (per layer), so that a captured graph can be launched again and again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cpu/tensor_view.h"
#include "cpu/types.h"
#include "gpu/step_group.h"

namespace keyhole::gpu {

/// A cudaStream_t, so that a file that includes this needs no CUDA.
using Stream = void*;

/// Query rows of one step over codes, at most: query heads of a KV head times tokens.
inline constexpr uint32_t kMostStepRows = 48;
/// Tokens of one step over codes, at most.
[[nodiscard]] constexpr uint32_t most_step_tokens(uint32_t group) {
  constexpr uint32_t kMost = 8;
  const uint32_t tokens = kMostStepRows / (group == 0 ? 1 : group);
  return tokens < 1 ? 1 : tokens > kMost ? kMost : tokens;
}

/// A step over codes attends all of its query rows in one pass; what follows takes them in parts of whole tokens, of up
/// to kMaxDeviceGroup query rows each. Every part has exact rows of its own.
struct StepParts {
  uint32_t count;
  uint32_t tokens;  ///< of every part but the last, which may have fewer
};
/// Those of parts of so many tokens.
[[nodiscard]] constexpr StepParts parts_of_tokens(uint32_t tokens, uint32_t each) {
  return {(tokens + each - 1) / each, each};
}
/// The fewest parts.
[[nodiscard]] constexpr StepParts step_parts(uint32_t group, uint32_t tokens) {
  if (group * tokens <= kMaxDeviceGroup) return {1, tokens};
  const uint32_t most = kMaxDeviceGroup / group < 1 ? 1 : kMaxDeviceGroup / group;
  const uint32_t parts = (tokens + most - 1) / most, each = (tokens + parts - 1) / parts;
  return parts_of_tokens(tokens, each);
}
inline constexpr uint32_t kMostStepParts = most_step_tokens(1);  ///< a token each
/// most_step_tokens() where the host reads the exact rows, which it does for one part.
[[nodiscard]] constexpr uint32_t most_hosted_tokens(uint32_t group) {
  uint32_t tokens = most_step_tokens(group);
  while (tokens > 1 && group * tokens > kMaxDeviceGroup) --tokens;
  return tokens;
}

/// Tokens that masks of drafts are about, at most.
inline constexpr uint32_t kMostDrafts = 64;

/// Several new tokens of a layer, in device memory: q and out `[tokens, q_heads, head_dim]`, k and v
/// `[tokens, kv_heads, head_dim]`, lse `[tokens, q_heads]` fp32 or null.
struct ManyTokens {
  TensorView q, k, v;  ///< 1..Codes::most_tokens(layer) tokens
  TensorOut out;
  float* lse = nullptr;
  /// Each attends to all tokens before the newest `drafts` (>= tokens, <= kMostDrafts; these are the newest), and of
  /// those to the ones that its word of `sees` has: bit j is the j-th.
  uint32_t drafts = 0;
  std::array<uint64_t, kMaxDeviceGroup> sees{};
  StepGroup* group = nullptr;  ///< see OnDevice
};

/// How a stream comes to know that the host's states are there.
enum class Signal : uint8_t {
  device_wait,  ///< the merge kernel polls the host's flags: lowest latency, can be captured
  host_launch  ///< the thread that calls end() waits for the host and then launches the merge: for machines
  ///< where kernels are launched one at a time (CUDA_LAUNCH_BLOCKING, WDDM); cannot be captured
};

/// See StreamSteps::capture_id().
inline constexpr uint64_t kLostCapture = UINT64_MAX;

/// What a step has sent to the host; valid until the layer's next step is awaited.
struct Published {
  const float* q = nullptr;  ///< `[tokens, q_heads, head_dim]`
  const std::byte* k =
      nullptr;  ///< `[tokens, kv_heads, head_dim]` of the session's dtype, after rounding to it
  const std::byte* v = nullptr;
};

class Codes;

/// What stands on the device for offloaded tokens: codes, or nothing (the host's state has all of them). And
/// whether the step leaves its answer for the host (StreamSteps::answer()); of sessions whose ResidentShape says so.
struct OnDevice {
  Codes* codes = nullptr;
  bool keeps_answer = false;
  /// A whole step over codes that can go with those of other sessions is added to this group (its count() grows), in
  /// place of being enqueued; null: it is enqueued.
  StepGroup* group = nullptr;
};

/// The stream's side of a Resident. begin() and end() come from one thread at a time; await() from any; deliver(),
/// answer() and host_copy() from the threads that serve the host's part, for layers that were begun, in their order.
class StreamSteps {
 public:
  virtual ~StreamSteps() = default;

  /// Enqueues the first half. Without k and v nothing is appended. A token goes to the sink until that is full,
  /// then to the window; a full window (window_capacity) first falls back to its W - 1 newest tokens.
  /// Codes of this layer are all attended; q stays as it is until end()'s work has ended. With Signal::host_launch and
  /// codes it first waits, on the calling thread, until the host has delivered all heads of the layer's step before;
  /// throws Error(timeout). Throws Error(device_error) if a launch fails; nothing is enqueued then.
  virtual void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                     const OnDevice& tokens, Stream stream) = 0;
  /// Enqueues the second half: out `[q_heads, head_dim]`, lse `[q_heads]` fp32 in device memory or null.
  /// With Signal::host_launch, without codes, it first waits, on the calling thread, until the host has delivered all
  /// heads; throws Error(timeout).
  virtual void end(uint32_t layer, const TensorOut& out, float* lse, Stream stream) = 0;
  /// Both at once; one kernel does all of it with nothing on the device and with Signal::device_wait.
  virtual void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                    const OnDevice& tokens, const TensorOut& out, float* lse, Stream stream) = 0;

  /// A step of several tokens over codes of this layer; the window has room for them.
  virtual void step_tokens(uint32_t layer, const ManyTokens& tokens, Codes& codes,
                           Stream stream) = 0;
  /// A group for up to `most` steps of sessions of this device, in one go or several.
  [[nodiscard]] virtual std::unique_ptr<StepGroup> make_group(uint32_t most) = 0;
  /// Enqueues: of the newest `of` resident tokens of these layers those remain that `kept` names, rising numbers below
  /// `of`.
  virtual void keep_newest(std::span<const uint32_t> layers, uint32_t of,
                           std::span<const uint32_t> kept, Stream stream) = 0;

  [[nodiscard]] virtual Signal signal() const = 0;
  /// The number of the capture, never used twice, while the stream records a graph (then a step counts when the graph
  /// is launched, not now); 0: none, or the device has failed. kLostCapture: nothing can be enqueued before the end of
  /// a capture that has failed, or of another stream's where this is the default stream. Throws nothing.
  [[nodiscard]] virtual uint64_t capture_id(Stream stream) const = 0;
  [[nodiscard]] bool is_capturing(Stream stream) const { return capture_id(stream) != 0; }

  /// Waits until q, k and v of the layer's step number `sequence` (1, 2, ... per layer; cyclic) are here: spins for
  /// spin_us, then in naps. False if `stop` was set or timeout_us passed first.
  [[nodiscard]] virtual bool await(uint32_t layer, uint32_t sequence, uint32_t spin_us,
                                   uint64_t timeout_us, const std::atomic<bool>& stop,
                                   Published& out) = 0;
  /// Where the host's state of a KV head's group goes: o `[group, head_dim]`, lse `[group]` (pinned memory: write it
  /// once, front to back). Of a step with codes nobody reads it.
  [[nodiscard]] virtual StateView host_slot(uint32_t layer, uint32_t kv_head) = 0;
  /// Hands the slot over: release order.
  virtual void deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) = 0;
  /// Ends waits of the device for this layer's step without a result: their outputs are NaN (not those of steps with
  /// codes, which need no result), failure() says why.
  virtual void give_up(uint32_t layer, uint32_t sequence) = 0;
  /// The same of all steps of all layers, now and later: the session ends, and memory that is freed waits for kernels.
  virtual void give_up_all() {}

  /// What a step wrote, or would have written without rounding to the dtype of out: o `[group, head_dim]`, lse
  /// `[group]`. False: it is not here, which is so until a later step of the stream, of any layer, was awaited, or the
  /// stream was waited for. It stays until the host has delivered the layer's next step.
  [[nodiscard]] virtual bool answer(uint32_t layer, uint32_t kv_head, uint32_t sequence,
                                    StateView& out) = 0;
  /// The host's copy of the resident tokens of all KV heads, sink first, oldest first, until the layer has others.
  [[nodiscard]] virtual KvPieces host_copy(uint32_t layer) = 0;

  /// Brings the host's copy of the layer's resident tokens up to a step that was awaited and appended: as begin()
  /// says. The tokens that left the window are copied to k and v (`[n, kv_heads, head_dim]`); returns n.
  virtual uint32_t update_host_copy(uint32_t layer, const Published& published, std::byte* k,
                                    std::byte* v) = 0;

  /// Does to the host's copy of a layer what keep_newest() does.
  virtual void keep_newest_of_copy(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) = 0;

  /// The same on the device, without gaps in each head, while no step of the session is under way.
  [[nodiscard]] virtual KvPieces device_rows(uint32_t layer) = 0;

  /// Waits for all that was enqueued on the stream.
  virtual void synchronize(Stream stream) = 0;
  /// What went wrong on the device since the last call: a wait that timed out (Status::timeout) or was given up
  /// (cancelled), a CUDA error (device_error). Does not wait.
  [[nodiscard]] virtual Status failure(std::string& text) = 0;

  /// Sums since the beginning: time that merges on the device (with codes: publishing) waited for the host, and how
  /// often they looked; of the KV head with most of them, as heads wait at the same time. Copied from the device: some
  /// 10 us a call.
  [[nodiscard]] virtual uint64_t wait_nanoseconds() const = 0;
  [[nodiscard]] virtual uint64_t merges() const = 0;
};

}  // namespace keyhole::gpu
