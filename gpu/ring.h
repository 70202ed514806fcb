// Where the resident tokens of a layer lie, and what a step does to them: one rule for the kernels, which read and
// advance the device's copy, and for the host's mirror, which repeats each step (update_host_copy()).
//
//   slot  0 .. sink-1                the sink
//         sink .. sink+capacity-1    the window, a ring that begins at slot sink + begin
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KEYHOLE_HOST_DEVICE __host__ __device__
#else
#define KEYHOLE_HOST_DEVICE
#endif

namespace keyhole::gpu {

/// Capacities of every layer's resident tokens.
struct RingShape {
  uint32_t sink = 0;      ///< S
  uint32_t capacity = 0;  ///< slots of the window
  uint32_t keep = 0;      ///< newest tokens that a full window keeps when a step appends: W - 1
};

/// Which tokens a layer has. 16 bytes: a kernel reads it with one load.
struct alignas(16) RingState {
  uint32_t sequence = 0;  ///< steps that were begun
  uint32_t sink = 0;      ///< tokens in the sink
  uint32_t begin = 0;     ///< slot of the oldest window token, counted from the first window slot
  uint32_t window = 0;    ///< tokens in the window

  [[nodiscard]] KEYHOLE_HOST_DEVICE uint32_t tokens() const { return sink + window; }
};

/// Slot of the window's token number i (0: the oldest).
[[nodiscard]] KEYHOLE_HOST_DEVICE inline uint32_t window_slot(const RingShape& shape,
                                                              const RingState& state, uint32_t i) {
  // begin < capacity and i < capacity: the sum wraps at most once, and may pass 2^32 only with more slots than that.
  uint32_t at = state.begin + i;
  if (at >= shape.capacity) at -= shape.capacity;
  return shape.sink + at;
}

/// Slot of the layer's resident token number i: sink first, oldest first.
[[nodiscard]] KEYHOLE_HOST_DEVICE inline uint32_t token_slot(const RingShape& shape,
                                                             const RingState& state, uint32_t i) {
  return i < state.sink ? i : window_slot(shape, state, i - state.sink);
}

/// Tokens that leave the window when a step appends one to `state`.
[[nodiscard]] KEYHOLE_HOST_DEVICE inline uint32_t leaving(const RingShape& shape,
                                                          const RingState& state) {
  if (state.sink < shape.sink || state.window < shape.capacity) return 0;
  return state.window - shape.keep;
}

/// The oldest n window tokens are gone.
[[nodiscard]] KEYHOLE_HOST_DEVICE inline RingState without_oldest(const RingShape& shape,
                                                                  RingState state, uint32_t n) {
  state.begin += n;
  if (state.begin >= shape.capacity) state.begin -= shape.capacity;
  state.window -= n;
  if (state.window == 0) state.begin = 0;
  return state;
}

/// State after a step; the new token, if there is one, is the last of the layer's tokens then.
[[nodiscard]] KEYHOLE_HOST_DEVICE inline RingState after_step(const RingShape& shape,
                                                              RingState state, bool appends) {
  ++state.sequence;
  if (!appends) return state;
  if (state.sink < shape.sink) {
    ++state.sink;
    return state;
  }
  state = without_oldest(shape, state, leaving(shape, state));
  ++state.window;
  return state;
}

/// State after a step that appends n tokens, for which the window has room.
[[nodiscard]] KEYHOLE_HOST_DEVICE inline RingState after_tokens(const RingShape& shape,
                                                                RingState state, uint32_t n) {
  ++state.sequence;
  const uint32_t free = shape.sink - state.sink;
  const uint32_t to_sink = n < free ? n : free;
  state.sink += to_sink;
  state.window += n - to_sink;
  return state;
}

/// The state of the newest `window` tokens alone, where there is no sink and there are more; window 0: all.
[[nodiscard]] KEYHOLE_HOST_DEVICE inline RingState attended(const RingShape& shape,
                                                            const RingState& state,
                                                            uint32_t window) {
  if (window == 0 || state.window <= window) return state;
  return without_oldest(shape, state, state.window - window);
}

/// The newest n tokens are gone; there are as many.
[[nodiscard]] KEYHOLE_HOST_DEVICE inline RingState without_newest(RingState state, uint32_t n) {
  const uint32_t of_window = n < state.window ? n : state.window;
  state.window -= of_window;
  state.sink -= n - of_window;
  if (state.window == 0) state.begin = 0;
  return state;
}

}  // namespace keyhole::gpu
