#include "tests/tools/llama/host_windows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <stdexcept>
#include <string>

#include "runtime/files/element.h"
#include "tools/llama/vector_math.h"

namespace keyhole::tools {

SlidingWindows::Bytes::Bytes(size_t size)
    : size_(size), data_(static_cast<std::byte*>(std::calloc(std::max<size_t>(size, 1), 1))) {
  if (data_ == nullptr) throw std::bad_alloc();
}

SlidingWindows::Bytes::Bytes(const Bytes& other) : Bytes(other.size_) {
  std::memcpy(data_.get(), other.data_.get(), size_);
}

SlidingWindows::SlidingWindows(const LlamaConfig& model, ElementType type, uint32_t max_tokens)
    : q_heads_(model.q_heads),
      kv_heads_(model.kv_heads),
      head_dim_(model.head_dim),
      scale_(static_cast<float>(model.attention_scale)),
      softcap_(static_cast<float>(model.attention_softcap)),
      type_(type),
      max_tokens_(max_tokens),
      places_(model.layers) {
  size_t longest = 0;
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (!model.slides(layer)) continue;
    places_[layer] = static_cast<uint32_t>(rings_.size());
    const size_t window = model.windows[layer];
    const size_t slots = WindowSpan::slots_of(window, max_tokens);
    const size_t bytes = kv_heads_ * slots * head_dim_ * element_size(type_);
    rings_.push_back({{window, slots, 0, 0}, Bytes(bytes), Bytes(bytes)});
    longest = std::max(longest, std::min(window, slots));
  }
  scores_.resize(q_heads_ * longest);
}

size_t SlidingWindows::bytes() const {
  size_t total = 0;
  for (const Ring& ring : rings_) total += ring.k.size() + ring.v.size();
  return total;
}

void SlidingWindows::append(uint32_t layer, size_t tokens, const float* k, const float* v) {
  Ring& ring = this->ring(layer);
  WindowSpan::check_room(ring.count + tokens, max_tokens_);
  const size_t row = head_dim_ * element_size(type_);
  // Of a prompt that is longer than the ring only the end stays.
  const size_t skipped = tokens > ring.slots ? tokens - ring.slots : 0;
  for (size_t token = skipped; token < tokens; ++token) {
    const size_t slot = (ring.count + token) % ring.slots;
    for (uint32_t head = 0; head < kv_heads_; ++head) {
      const size_t from = (token * kv_heads_ + head) * head_dim_;
      const size_t to = (head * ring.slots + slot) * row;
      elements_from_f32(type_, {k + from, head_dim_}, {ring.k.get() + to, row});
      elements_from_f32(type_, {v + from, head_dim_}, {ring.v.get() + to, row});
    }
  }
  ring.add(tokens);
}

template <class Body>
void SlidingWindows::for_runs(const Ring& ring, uint32_t kv_head, const Body& body) const {
  const size_t first = ring.count - std::min(ring.count, ring.window);
  const size_t row = head_dim_ * element_size(type_);
  for (size_t token = first; token < ring.count;) {
    const size_t slot = token % ring.slots;
    const size_t run = std::min(ring.count - token, ring.slots - slot);
    const size_t at = (kv_head * ring.slots + slot) * row;
    const std::byte* const k = ring.k.get() + at;
    const std::byte* const v = ring.v.get() + at;
    const auto typed = [&]<class Number>(Number) {
      body(reinterpret_cast<const Number*>(k), reinterpret_cast<const Number*>(v), token - first,
           run);
    };
    switch (type_) {
      case ElementType::bf16: typed(BFloat16{}); break;
      case ElementType::f16: typed(Float16{}); break;
      default: typed(0.0F);
    }
    token += run;
  }
}

void SlidingWindows::attend_head(const Ring& ring, uint32_t head, const float* q, float* out,
                                 float* scores) const {
  const size_t tokens = std::min(ring.count, ring.window);
  const uint32_t kv_head = head / (q_heads_ / kv_heads_);
  for_runs(ring, kv_head, [&](const auto* k, const auto*, size_t place, size_t run) {
    matrix_vector(k, head_dim_, q, 0, run, scores + place);
  });
  scale(scale_, tokens, scores);
  if (softcap_ > 0.0F) soft_cap(softcap_, tokens, scores);
  constexpr float kLog2e = 1.44269504F;
  scale(kLog2e, tokens, scores);
  float largest = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;
  (void)online_softmax_row(scores, tokens, tokens, largest, sum);
  std::fill_n(out, head_dim_, 0.0F);
  for_runs(ring, kv_head, [&](const auto*, const auto* v, size_t place, size_t run) {
    add_rows(v, head_dim_, scores + place, run, out);
  });
  scale(1.0F / sum, head_dim_, out);
}

void SlidingWindows::attend(uint32_t layer, const float* q, float* out, Team* team) {
  const Ring& ring = this->ring(layer);
  if (ring.count == 0) throw std::runtime_error("a sliding layer has no token to attend to");
  const size_t stride = scores_.size() / q_heads_;
  const auto head = [&](size_t item, unsigned) {
    attend_head(ring, static_cast<uint32_t>(item), q + item * head_dim_, out + item * head_dim_,
                scores_.data() + item * stride);
  };
  if (team != nullptr) {
    team->for_each(q_heads_, head);
  } else {
    for (uint32_t item = 0; item < q_heads_; ++item) head(item, 0);
  }
}

void SlidingWindows::truncate(uint32_t tokens) {
  for (const Ring& ring : rings_) ring.check_truncation(tokens);
  for (Ring& ring : rings_) ring.truncate(tokens);
}

}  // namespace keyhole::tools
