#include "tools/llama/device_windows.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/files/element.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/window_kernels.h"
#include "tools/llama/window_span.h"

namespace keyhole::tools {

class DeviceWindows::Rings {
 public:
  Rings(const LlamaConfig& model, ElementType type, uint32_t max_tokens)
      : q_heads_(model.q_heads),
        kv_heads_(model.kv_heads),
        head_dim_(model.head_dim),
        scale_(static_cast<float>(model.attention_scale)),
        softcap_(static_cast<float>(model.attention_softcap)),
        type_(type),
        max_tokens_(max_tokens),
        places_(model.layers),
        partial_(cuda::window_partial_floats(q_heads_, head_dim_)) {
    for (uint32_t layer = 0; layer < model.layers; ++layer) {
      if (!model.slides(layer)) continue;
      places_[layer] = rings_.size();
      const size_t slots = WindowSpan::slots_of(model.windows[layer], max_tokens);
      rings_.push_back({{model.windows[layer], slots, 0, 0}, bytes(slots), bytes(slots)});
    }
  }
  Rings(const Rings& other)
      : q_heads_(other.q_heads_),
        kv_heads_(other.kv_heads_),
        head_dim_(other.head_dim_),
        scale_(other.scale_),
        softcap_(other.softcap_),
        type_(other.type_),
        max_tokens_(other.max_tokens_),
        places_(other.places_),
        partial_(other.partial_.size()) {
    for (const Ring& ring : other.rings_) {
      rings_.push_back({ring.span, bytes(ring.span.slots), bytes(ring.span.slots)});
      cuda::copy_now(rings_.back().k.get(), ring.k.get(), ring.k.size());
      cuda::copy_now(rings_.back().v.get(), ring.v.get(), ring.v.size());
    }
  }
  Rings& operator=(const Rings&) = delete;
  ~Rings() = default;

  void append(uint32_t layer, size_t tokens, const float* k, const float* v) {
    const size_t width = size_t{kv_heads_} * head_dim_;
    const size_t row = width * element_size(type_);
    std::vector<std::byte> room(tokens * row);
    const auto copy = [&](const float* from, cuda::Buffer<std::byte> Ring::*to) {
      elements_from_f32(type_, {from, tokens * width}, room);
      for_runs(ring(layer), tokens, [&](size_t first, size_t slot, size_t count) {
        cuda::copy_now((ring(layer).*to).get() + slot * row, room.data() + first * row,
                       count * row);
      });
    };
    copy(k, &Ring::k);
    copy(v, &Ring::v);
    ring(layer).span.add(tokens);
  }

  void append(const DeviceLayerChunk& chunk, cudaStream_t stream) {
    if (chunk.type != type_) throw std::runtime_error("a window's K and V in another type");
    Ring& ring = this->ring(chunk.layer);
    const size_t row = size_t{kv_heads_} * head_dim_ * element_size(type_);
    for_runs(ring, chunk.tokens, [&](size_t first, size_t slot, size_t count) {
      const auto copy = [&](std::byte* to, const void* from) {
        cuda::check(
            cudaMemcpyAsync(to + slot * row, static_cast<const std::byte*>(from) + first * row,
                            count * row, cudaMemcpyDeviceToDevice, stream),
            "keys and values of a window");
      };
      copy(ring.k.get(), chunk.k);
      copy(ring.v.get(), chunk.v);
    });
    cuda::check(cudaStreamSynchronize(stream), "keys and values of a window");
    ring.span.add(chunk.tokens);
  }

  void attend(uint32_t layer, const float* q, const float* k, const float* v, float* out) {
    Ring& ring = this->ring(layer);
    if (k == nullptr && ring.span.count == 0) {
      throw std::runtime_error("a sliding layer has no token to attend to");
    }
    if (k != nullptr) check_room(ring, 1);
    const size_t q_size = size_t{q_heads_} * head_dim_;
    const size_t kv_size = size_t{kv_heads_} * head_dim_;
    const auto position = static_cast<uint32_t>(ring.span.count - (k == nullptr ? 1 : 0));
    const cuda::Buffer<uint32_t> at(1);
    const cuda::Buffer<float> queries(q_size), keys(kv_size), values(kv_size), result(q_size);
    cuda::copy_now(at.get(), &position, 1);
    cuda::copy_now(queries.get(), q, q_size);
    if (k != nullptr) {
      cuda::copy_now(keys.get(), k, kv_size);
      cuda::copy_now(values.get(), v, kv_size);
    }
    const cuda::OwnStream stream;
    cuda::window_attend(device_ring(ring),
                        step(queries.get(), k == nullptr ? nullptr : keys.get(), values.get(),
                             result.get(), at.get()),
                        stream.get());
    cuda::check(cudaStreamSynchronize(stream.get()), "a sliding window");
    cuda::copy_now(out, result.get(), q_size);
    if (k != nullptr) ring.span.add(1);
  }

  void enqueue_attend(uint32_t layer, const float* q, const float* k, const float* v, float* out,
                      const uint32_t* position, cudaStream_t stream) {
    cuda::window_attend(device_ring(ring(layer)), step(q, k, v, out, position), stream);
  }

  void will_hold(uint32_t tokens) {
    WindowSpan::check_room(tokens, max_tokens_);
    for (Ring& ring : rings_) {
      if (ring.span.count < tokens) ring.span.add(tokens - ring.span.count);
    }
  }

  void truncate(uint32_t tokens) {
    for (const Ring& ring : rings_) ring.span.check_truncation(tokens);
    for (Ring& ring : rings_) ring.span.truncate(tokens);
  }

 private:
  struct Ring {
    WindowSpan span;
    cuda::Buffer<std::byte> k, v;  // [slots, Hkv, d]
  };

  [[nodiscard]] cuda::Buffer<std::byte> bytes(size_t slots) const {
    return cuda::Buffer<std::byte>(slots * kv_heads_ * head_dim_ * element_size(type_));
  }
  Ring& ring(uint32_t layer) { return rings_[places_[layer]]; }

  void check_room(const Ring& ring, size_t tokens) const {
    WindowSpan::check_room(ring.span.count + tokens, max_tokens_);
  }

  /// body(first of the new tokens, its slot, how many) for the runs of slots that `tokens` tokens take; of more than the ring
  /// holds only the end.
  template <class Body>
  void for_runs(const Ring& ring, size_t tokens, const Body& body) const {
    check_room(ring, tokens);
    const size_t slots = ring.span.slots;
    for (size_t token = tokens > slots ? tokens - slots : 0; token < tokens;) {
      const size_t slot = (ring.span.count + token) % slots;
      const size_t count = std::min(tokens - token, slots - slot);
      body(token, slot, count);
      token += count;
    }
  }

  [[nodiscard]] cuda::WindowRing device_ring(const Ring& ring) const {
    cuda::WindowRing device;
    device.k = ring.k.get();
    device.v = ring.v.get();
    device.numbers = cuda::numbers_of(type_);
    device.slots = static_cast<uint32_t>(ring.span.slots);
    device.window = static_cast<uint32_t>(ring.span.window);
    device.kv_heads = kv_heads_;
    device.head_dim = head_dim_;
    return device;
  }
  cuda::WindowStep step(const float* q, const float* k, const float* v, float* out,
                        const uint32_t* position) {
    return {q, k, v, out, position, q_heads_, scale_, softcap_, partial_.get()};
  }

  uint32_t q_heads_, kv_heads_, head_dim_;
  float scale_, softcap_;
  ElementType type_;
  uint32_t max_tokens_;
  std::vector<size_t> places_;  // layer -> ring
  std::vector<Ring> rings_;
  cuda::Buffer<float> partial_;  // of one layer at a time
};

DeviceWindows::DeviceWindows(const LlamaConfig& model, ElementType type, uint32_t max_tokens)
    : rings_(std::make_unique<Rings>(model, type, max_tokens)) {}
DeviceWindows::DeviceWindows(const DeviceWindows& other)
    : rings_(std::make_unique<Rings>(*other.rings_)) {}
DeviceWindows::~DeviceWindows() = default;

void DeviceWindows::append(uint32_t layer, size_t tokens, const float* k, const float* v) {
  rings_->append(layer, tokens, k, v);
}
void DeviceWindows::append(const DeviceLayerChunk& chunk, void* stream) {
  rings_->append(chunk, static_cast<cudaStream_t>(stream));
}
void DeviceWindows::attend(uint32_t layer, const float* q, const float* k, const float* v,
                           float* out) {
  rings_->attend(layer, q, k, v, out);
}
void DeviceWindows::enqueue_attend(uint32_t layer, const float* q, const float* k, const float* v,
                                   float* out, const uint32_t* position, void* stream) {
  rings_->enqueue_attend(layer, q, k, v, out, position, static_cast<cudaStream_t>(stream));
}
void DeviceWindows::will_hold(uint32_t tokens) { rings_->will_hold(tokens); }
void DeviceWindows::truncate(uint32_t tokens) { rings_->truncate(tokens); }

}  // namespace keyhole::tools
