// What the rest of this folder wants from a sequence's K and V. store.h has the one that Keyhole keeps; tests have
// others.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace keyhole::llama_cpp {

enum class Number { kF32, kF16, kBf16 };

/// Heads of some tokens: `[tokens, heads, components]`, the components side by side. Borrowed.
struct Rows {
  const void* data = nullptr;
  Number number = Number::kF32;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t components = 0;
  /// Bytes from a token to the next, and from a head to the next.
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  /// They lie in the memory of the session's device: then the work is done in the order of its stream.
  bool on_device = false;
};

/// One sequence: its K and V in all layers, of which each may have another number of tokens while a batch is computed.
/// All calls throw std::runtime_error with the library's text; the session is of no use after that. One thread at a
/// time.
class Session {
 public:
  virtual ~Session() = default;

  /// Tokens that a layer holds.
  [[nodiscard]] virtual uint32_t tokens(uint32_t layer) const = 0;
  /// Attends with the new tokens, causally, to all that the layer holds and to one another, and appends them.
  virtual void attend(uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
                      const Rows& out) = 0;
  /// Appends without attending.
  virtual void append(uint32_t layer, const Rows& k, const Rows& v) = 0;
  /// Drops the tokens from number `tokens` on, in every layer.
  virtual void truncate(uint32_t tokens) = 0;
  /// Copies keys and values of a layer's tokens from number `first` on into the memory of k and v, which are the host's
  /// and as many; one of them may have no memory, and is not copied. Waits for what is enqueued on the session's
  /// device.
  virtual void read(uint32_t layer, uint32_t first, const Rows& k, const Rows& v) = 0;
  /// Indexes what has come and is not indexed. All layers hold the same number of tokens.
  virtual void build() = 0;
  /// Waits for what is enqueued on the session's device.
  virtual void settle() {}
  /// The number of the CUDA graph in which calls of attend() were captured last; 0: there is none.
  [[nodiscard]] virtual uint64_t graph() const { return 0; }
  /// To be called just before each launch of that graph. False: it is not valid any more, and nothing was announced.
  [[nodiscard]] virtual bool announce(uint64_t /*graph*/) { return false; }
  [[nodiscard]] virtual std::unique_ptr<Session> fork() = 0;
  /// One line: tokens, index, memory, time.
  [[nodiscard]] virtual std::string describe() const = 0;
};

/// What is to become of a session whose first `first` tokens stay as they are.
struct Rewriting {
  uint32_t first = 0;
  /// Numbers of the tokens that follow the first ones then, rising.
  std::vector<uint32_t> kept;
  /// By how many positions the key of each of them is turned.
  std::vector<int32_t> turns;
};

/// Rewrites sessions whose tokens are nowhere else.
class Rewriter {
 public:
  virtual ~Rewriter() = default;
  /// Throws std::runtime_error; the session is of no use after that.
  virtual void rewrite(Session& session, const Rewriting& change) = 0;
  /// Turns keys of a layer, which lie side by side in 16 bits in memory that is ours to change, by a number of
  /// positions each.
  virtual void turn(uint32_t layer, const Rows& keys, std::span<const int32_t> by) = 0;
};

/// Makes empty sessions.
class SessionSource {
 public:
  virtual ~SessionSource() = default;
  [[nodiscard]] virtual std::unique_ptr<Session> make() = 0;
};

}  // namespace keyhole::llama_cpp
