// Rings on the GPU beside those on the host, which sliding_windows_test.cpp compares with double precision.
#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tests/tools/llama/host_windows.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/device_windows.h"

namespace keyhole::tools {
namespace {

using namespace testing;

/// Layers 0 and 2 slide, layer 1 does not.
LlamaConfig config_of(uint32_t head_dim, float softcap) {
  LlamaConfig config;
  config.layers = 3;
  config.q_heads = 6;
  config.kv_heads = 2;
  config.head_dim = head_dim;
  config.attention_scale = 0.2;
  config.attention_softcap = softcap;
  config.windows = {100, 0, 7};
  return config;
}

/// The same calls to both, and what they answer.
class Pair {
 public:
  Pair(const LlamaConfig& config, ElementType type, uint32_t max_tokens)
      : config_(config),
        type_(type),
        host_(config, type, max_tokens),
        device_(config, type, max_tokens) {}
  Pair(const Pair&) = default;

  void append_from_host(size_t tokens) {
    for (const uint32_t layer : {0U, 2U}) {
      const std::vector<float> k = rows(tokens), v = rows(tokens);
      host_.append(layer, tokens, k.data(), v.data());
      device_.append(layer, tokens, k.data(), v.data());
    }
    tokens_ += tokens;
  }

  /// In the rings' type, so that both hold the same numbers.
  void append_from_device(size_t tokens) {
    for (const uint32_t layer : {0U, 2U}) {
      const std::vector<float> k = rows(tokens), v = rows(tokens);
      host_.append(layer, tokens, k.data(), v.data());
      const cuda::OwnStream stream;
      const auto append = [&]<class Number>(Number) {
        const std::vector<Number> typed_k(k.begin(), k.end()), typed_v(v.begin(), v.end());
        const GpuArray<Number> device_k(typed_k), device_v(typed_v);
        device_.append({layer, tokens_, tokens, type_, nullptr, device_k.get(), device_v.get()},
                       stream.get());
      };
      if (type_ == ElementType::f32) append(float{});
      if (type_ == ElementType::f16) append(__half{});
      if (type_ == ElementType::bf16) append(__nv_bfloat16{});
    }
    tokens_ += tokens;
  }

  /// A token through host memory, or enqueued.
  void step(bool enqueued) {
    const GpuArray<uint32_t> position(std::vector<uint32_t>{static_cast<uint32_t>(tokens_)});
    if (enqueued) device_.will_hold(static_cast<uint32_t>(tokens_) + 1);
    for (const uint32_t layer : {0U, 2U}) {
      const std::vector<float> q = random_floats(q_size(), 1.0F, random_), k = rows(1), v = rows(1);
      std::vector<float> expected(q_size()), got(q_size());
      host_.append(layer, 1, k.data(), v.data());
      host_.attend(layer, q.data(), expected.data(), nullptr);
      if (enqueued) {
        const cuda::OwnStream stream;
        const GpuArray<float> device_q(q), device_k(k), device_v(v), out(q_size());
        device_.enqueue_attend(layer, device_q.get(), device_k.get(), device_v.get(), out.get(),
                               position.get(), stream.get());
        got = out.read();
      } else {
        device_.attend(layer, q.data(), k.data(), v.data(), got.data());
      }
      expect_near(got, expected);
      std::vector<float> again(q_size());
      device_.attend(layer, q.data(), nullptr, nullptr, again.data());
      EXPECT_TRUE(again == got);
    }
    ++tokens_;
  }

  void truncate(size_t tokens) {
    host_.truncate(static_cast<uint32_t>(tokens));
    device_.truncate(static_cast<uint32_t>(tokens));
    tokens_ = std::min(tokens_, tokens);
  }
  void expect_refused(size_t tokens) {
    EXPECT_THROW(host_.truncate(static_cast<uint32_t>(tokens)), std::runtime_error);
    EXPECT_THROW(device_.truncate(static_cast<uint32_t>(tokens)), std::runtime_error);
  }
  DeviceWindows& device() { return device_; }

 private:
  static void expect_near(const std::vector<float>& got, const std::vector<float>& expected) {
    EXPECT_LT(relative_error(got, {expected.begin(), expected.end()}), 1e-5);
  }
  [[nodiscard]] size_t q_size() const { return config_.q_width(); }
  /// Small whole numbers over 16: exact in every type.
  std::vector<float> rows(size_t tokens) {
    std::vector<float> values(tokens * config_.kv_width());
    for (float& value : values) value = (static_cast<float>(random_() % 129) - 64.0F) / 16.0F;
    return values;
  }

  LlamaConfig config_;
  ElementType type_;
  SlidingWindows host_;
  DeviceWindows device_;
  size_t tokens_ = 0;
  std::mt19937 random_{11};
};

TEST(GpuWindows, AreThoseOfTheHost) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t head_dim : {64, 80, 96, 128, 256}) {
    for (const ElementType type : {ElementType::f32, ElementType::f16, ElementType::bf16}) {
      for (const float softcap : {0.0F, 5.0F}) {
        SCOPED_TRACE(std::to_string(head_dim) + ", type " + std::to_string(static_cast<int>(type)));
        Pair pair(config_of(head_dim, softcap), type, 0);
        for (int i = 0; i < 12; ++i) pair.step(i % 2 == 0);  // fewer than the window
        pair.append_from_device(60);
        for (int i = 0; i < 40; ++i) pair.step(i % 3 != 0);  // past the window
        pair.append_from_host(5000);                         // past the ring, in one call
        for (int i = 0; i < 5; ++i) pair.step(true);
        pair.append_from_device(4190);  // around its end, in two runs
        for (int i = 0; i < 10; ++i) pair.step(i % 2 == 0);
        Pair copy = pair;
        copy.truncate(9000);
        copy.step(true);
        pair.step(true);  // unmoved by the copy
        copy.step(false);
        pair.expect_refused(4000);
        pair.truncate(0);
        for (int i = 0; i < 3; ++i) pair.step(true);
      }
    }
  }
}

TEST(GpuWindows, EndWithMaxTokens) {
  KEYHOLE_NEEDS_GPU();
  Pair pair(config_of(64, 0.0F), ElementType::f16, 50);
  pair.append_from_host(48);
  pair.step(true);
  pair.step(false);
  EXPECT_THROW(pair.device().will_hold(51), std::runtime_error);
  const std::vector<float> row(6 * 64);
  std::vector<float> out(6 * 64);
  EXPECT_THROW(pair.device().attend(0, row.data(), row.data(), row.data(), out.data()),
               std::runtime_error);
  EXPECT_THROW(pair.device().append(0, 1, row.data(), row.data()), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
