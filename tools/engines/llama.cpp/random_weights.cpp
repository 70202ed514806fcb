#include "tools/engines/llama.cpp/random_weights.h"

#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

// Blocks of 256 weights, as ggml has them.
struct Q4K {
  ggml_fp16_t d, dmin;
  uint8_t scales[12];
  uint8_t q[128];
};
static_assert(sizeof(Q4K) == 144);
struct Q6K {
  uint8_t low[128];
  uint8_t high[64];
  int8_t scales[16];
  ggml_fp16_t d;
};
static_assert(sizeof(Q6K) == 210);

/// Numbers that are random enough for weights, 8 bytes at a time.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 1) {}
  uint64_t next() {
    state_ ^= state_ << 13U;
    state_ ^= state_ >> 7U;
    state_ ^= state_ << 17U;
    return state_;
  }
  void fill(void* to, size_t bytes) {
    auto* out = static_cast<uint8_t*>(to);
    for (size_t i = 0; i < bytes; i += 8) {
      const uint64_t word = next();
      std::memcpy(out + i, &word, std::min<size_t>(8, bytes - i));
    }
  }

 private:
  uint64_t state_;
};

/// Normal numbers in f16, of which weights are drawn.
class Normal {
 public:
  Normal() : values_(1U << 14U) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (float& value : values_) value = normal(random);
  }
  [[nodiscard]] float at(uint64_t bits) const { return values_[bits % values_.size()]; }

 private:
  std::vector<float> values_;
};

}  // namespace

void fill_random(std::span<uint8_t> out, ggml_type type, float deviation, uint64_t seed) {
  static const Normal normal;
  Random random(seed);
  if (type == GGML_TYPE_Q4_K) {
    // Each weight is d * 32 * q - dmin * 60, q even over 0 to 15; the scales 32 and the minima 60 are packed in 6 bits.
    Q4K block{};
    block.d = ggml_fp32_to_fp16(deviation / (32.0F * 4.61F));
    block.dmin = ggml_fp32_to_fp16(deviation / (32.0F * 4.61F) * 4.0F);
    std::memset(block.scales, 160, 4);
    std::memset(block.scales + 4, 252, 4);
    std::memset(block.scales + 8, 192, 4);
    for (size_t at = 0; at < out.size(); at += sizeof block) {
      random.fill(block.q, sizeof block.q);
      std::memcpy(out.data() + at, &block, sizeof block);
    }
  } else if (type == GGML_TYPE_Q6_K) {
    Q6K block{};
    block.d = ggml_fp32_to_fp16(deviation / (32.0F * 18.5F));
    std::memset(block.scales, 32, sizeof block.scales);
    for (size_t at = 0; at < out.size(); at += sizeof block) {
      random.fill(block.low, sizeof block.low + sizeof block.high);
      std::memcpy(out.data() + at, &block, sizeof block);
    }
  } else if (type == GGML_TYPE_F16) {
    auto* halves = reinterpret_cast<ggml_fp16_t*>(out.data());
    for (size_t i = 0; i < out.size() / 2; ++i) {
      halves[i] = ggml_fp32_to_fp16(deviation * normal.at(random.next() >> 20U));
    }
  } else {
    auto* numbers = reinterpret_cast<float*>(out.data());
    std::fill_n(numbers, out.size() / sizeof(float), deviation);
  }
}

}  // namespace keyhole::llama_cpp
