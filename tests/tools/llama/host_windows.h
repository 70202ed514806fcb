// Rings of sliding layers on the host, written plainly: what those on a GPU are compared with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "runtime/files/safetensors.h"
#include "tools/llama/config.h"
#include "tools/llama/team.h"
#include "tools/llama/window_span.h"

namespace keyhole::tools {

/// One ring for each sliding layer of a model: of a window of W tokens the last W + kSlack, so that the sequence can be
/// taken back by as many. Token i attends to j with i - j < W. Copies go on by themselves. One thread at a time.
class SlidingWindows {
 public:
  static constexpr uint32_t kSlack = WindowSpan::kSlack;

  /// K and V are stored as `type`: f32, f16 or bf16. `max_tokens`: the longest sequence; 0: not known.
  SlidingWindows(const LlamaConfig& model, ElementType type, uint32_t max_tokens);

  /// Appends k and v `[tokens, Hkv, d]` to a sliding layer. Throws std::runtime_error for more than max_tokens.
  void append(uint32_t layer, size_t tokens, const float* k, const float* v);
  /// The newest token's attention: q and out `[Hq, d]`. Spread over the team's threads where there is one.
  void attend(uint32_t layer, const float* q, float* out, Team* team);
  /// Forgets all tokens from `tokens` on. Throws std::runtime_error, and changes nothing, where a window would begin before
  /// what is kept; to 0 it can always go.
  void truncate(uint32_t tokens);

  [[nodiscard]] bool empty() const { return rings_.empty(); }
  [[nodiscard]] size_t bytes() const;

 private:
  /// Memory that is zero, and taken from the system where it is first used.
  class Bytes {
   public:
    explicit Bytes(size_t size);
    Bytes(const Bytes& other);
    Bytes(Bytes&&) = default;
    Bytes& operator=(Bytes&&) = default;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() = default;
    [[nodiscard]] std::byte* get() const { return data_.get(); }
    [[nodiscard]] size_t size() const { return size_; }

   private:
    struct Free {
      void operator()(std::byte* data) const { std::free(data); }
    };
    size_t size_;
    std::unique_ptr<std::byte[], Free> data_;
  };

  /// K and V `[Hkv, slots, d]`.
  struct Ring : WindowSpan {
    Bytes k, v;
  };
  void attend_head(const Ring& ring, uint32_t head, const float* q, float* out,
                   float* scores) const;
  /// body(typed rows of K, of V, first place among those attended to, number) for the one or two runs of slots.
  template <class Body>
  void for_runs(const Ring& ring, uint32_t kv_head, const Body& body) const;
  Ring& ring(uint32_t layer) { return rings_[places_[layer]]; }

  uint32_t q_heads_, kv_heads_, head_dim_;
  float scale_, softcap_;
  ElementType type_;
  uint32_t max_tokens_;
  std::vector<uint32_t> places_;  // layer -> ring
  std::vector<Ring> rings_;
  std::vector<float> scores_;  // [Hq, longest window]
};

}  // namespace keyhole::tools
