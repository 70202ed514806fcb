// Sliding layers on a device: each keeps its newest tokens in a ring, and a step attends to exactly the newest W of
// them. Nothing of a step goes to the host, and none waits for it: the host knows how many tokens there are by
// counting, and has no copy of them. Token t of a layer lies in slot t % slots, so that both find it.
//
// One kernel does all of a step: the resident attention (gpu/step.h) over the ring's newest tokens, without an
// exchange.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/layer_shape.h"
#include "cpu/types.h"
#include "gpu/step.h"

namespace keyhole::gpu {

struct WindowsShape {
  struct Layer {
    uint32_t number = 0;  ///< of the model's, for texts of errors
    uint32_t window = 0;  ///< W: a step attends to the newest W tokens, its own among them
    uint32_t slots =
        0;  ///< tokens that are kept: more than W, or as many as the longest sequence has
    LogitParams logits;
  };
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::f16;  ///< of K and V: f32, f16 or bf16
  std::vector<Layer> layers;
  std::vector<float> sinks;  ///< learned, natural log, `[layers, q_heads]`; empty: none
  /// Heads of each layer where they differ, in place of those above, `[layers]`; sinks are then those of one layer
  /// behind those of the layer before. Such a session has one Windows for each shape (gpu/mixed_parts.h).
  std::vector<LayerShape> shapes{};
};

/// In a tree of drafts: which of the newest tokens a step attends to, its own among them.
struct SeenDrafts {
  uint32_t drafts =
      0;  ///< so many are the drafts, up to kMostDrafts, the step's own the last; 0: it sees all of them
  uint64_t sees = 0;  ///< bit j: the j-th of them; that of its own is set

  /// Those that a step with a window attends to: the newest `window` of what it sees.
  [[nodiscard]] uint64_t seen_within(uint32_t window) const {
    uint64_t seen = sees;
    while (static_cast<uint32_t>(std::popcount(seen)) > window) seen &= seen - 1;
    return seen;
  }
  /// The newest tokens among which all lie that a step with a window attends to: the drafts, and those before them that
  /// the window has room for.
  [[nodiscard]] uint32_t reach(uint32_t window) const {
    if (drafts == 0) return window;
    return window - std::min(window, static_cast<uint32_t>(std::popcount(sees))) + drafts;
  }
};

/// Of one sequence. One thread at a time. Layers are those of the shape, 0, 1, ...
class Windows {
 public:
  virtual ~Windows() = default;

  // These wait for their own copies, never for a caller's stream, and may come during a capture. No step of the layer
  // is under way. Throw Error(device_error).
  /// The layer's tokens become first, first + 1, ... first + n - 1: K and V `[n, kv_heads, head_dim]` of the shape's
  /// dtype in host memory, n <= slots.
  virtual void fill(uint32_t layer, uint32_t first, uint32_t n, const std::byte* k,
                    const std::byte* v) = 0;
  /// Of the layer's tokens those that are first, ... first + n - 1 remain; all of these are there.
  virtual void keep(uint32_t layer, uint32_t first, uint32_t n) = 0;
  /// Copies tokens first, ... first + n - 1, which are there, to k and v in host memory, as fill() has them.
  virtual void read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k,
                    std::byte* v) const = 0;

  /// Tokens of a prompt come, first, first + 1, ...: those of k and v, n <= slots of them, after which the layer's
  /// tokens are the newest `kept` (n <= kept <= slots), those before the new ones being there. Waits for the stream;
  /// not during a capture. Throws Error(invalid_argument | device_error).
  virtual void append(uint32_t layer, uint32_t first, uint32_t kept, const TensorView& k,
                      const TensorView& v, Stream stream) = 0;
  /// Whether rows of head_dim elements, of a layer's q, k or v, are finite once they are rounded to a dtype. Likewise.
  [[nodiscard]] virtual bool are_finite(uint32_t layer, const TensorView& rows, DType as,
                                        Stream stream) = 0;

  /// Enqueues a step: k and v (both null: none) are appended, in a full ring in place of the oldest token, then q
  /// attends; out `[q_heads, head_dim]`, lse `[q_heads]` fp32 in device memory or null. May be captured. The layer has
  /// a token then. Of drafts: drafts.reach() <= slots, or the layer has had no more tokens than slots.
  /// Throws Error(invalid_argument | device_error); nothing is enqueued then.
  virtual void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                    const SeenDrafts& drafts, const TensorOut& out, float* lse, Stream stream) = 0;
  /// The same in halves, of a step that sees all; one step at a time is between them.
  virtual void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                     Stream stream) = 0;
  virtual void end(uint32_t layer, const TensorOut& out, float* lse, Stream stream) = 0;
  /// Enqueues: of the newest `of` (<= kMostDrafts) tokens of these layers, which are there, those remain that `kept`
  /// names, rising numbers below `of`.
  virtual void keep_newest(std::span<const uint32_t> layers, uint32_t of,
                           std::span<const uint32_t> kept, Stream stream) = 0;

  /// What steps have found since the last call: q, k or v with a NaN or an infinity, or k or v beyond the dtype
  /// (not_finite; the step's output is NaN or of no use, and what it appended as well). Does not wait.
  [[nodiscard]] virtual Status failure(std::string& text) = 0;
  /// Device memory.
  [[nodiscard]] virtual size_t bytes() const = 0;
};

/// Device memory that Windows of this shape take.
[[nodiscard]] size_t windows_bytes(const WindowsShape& shape);

}  // namespace keyhole::gpu
