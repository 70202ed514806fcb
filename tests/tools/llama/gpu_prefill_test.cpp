// The hand-over of a prompt to a sink on the GPU: what one on the host gets, rounded. And how its products are formed.
#include <cmath>
#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/llama/gpu_model.h"

namespace keyhole::tools {
namespace {

using namespace testing;

/// One layer's rows, in fp32.
struct Rows {
  std::vector<float> q, k, v;
};

template <class Number>
float as_float(Number x) {
  return static_cast<float>(x);
}

template <class Number>
void append(std::vector<float>& to, const void* device, size_t count) {
  std::vector<Number> numbers(count);
  cuda::copy_now(numbers.data(), static_cast<const Number*>(device), count);
  for (const Number x : numbers) to.push_back(as_float(x));
}

template <class Number>
std::vector<float> rounded_rows(const std::vector<float>& x) {
  std::vector<float> out;
  out.reserve(x.size());
  for (const float number : x) out.push_back(as_float(static_cast<Number>(number)));
  return out;
}

template <class Kv, class Query>
void expect_device_rows(const GpuModel& gpu, const std::vector<uint32_t>& tokens, ElementType type,
                        const std::vector<float>& logits, const std::vector<Rows>& expected) {
  const LlamaConfig& config = gpu.host().config;
  std::vector<Rows> layers(config.layers);
  DeviceSink sink;
  sink.type = type;
  sink.take = [&](const DeviceLayerChunk& chunk) {
    Rows& rows = layers[chunk.layer];
    EXPECT_EQ(chunk.first_token * config.kv_width(), rows.k.size());
    EXPECT_EQ(chunk.type, type);
    EXPECT_EQ(chunk.kv_on_host, !config.slides(chunk.layer));
    append<Query>(rows.q, chunk.q, chunk.tokens * config.q_width());
    append<Kv>(rows.k, chunk.k, chunk.tokens * config.kv_width());
    append<Kv>(rows.v, chunk.v, chunk.tokens * config.kv_width());
  };
  EXPECT_EQ(gpu_prefill_to_device(gpu, tokens, sink), logits);
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    SCOPED_TRACE(layer);
    EXPECT_TRUE(layers[layer].q == rounded_rows<Query>(expected[layer].q));
    EXPECT_TRUE(layers[layer].k == rounded_rows<Kv>(expected[layer].k));
    EXPECT_TRUE(layers[layer].v == rounded_rows<Kv>(expected[layer].v));
  }
}

/// One chunk, and several, whose last is a part of one.
TEST(GpuPrefillToDevice, IsThatToTheHostRounded) {
  KEYHOLE_NEEDS_GPU();
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), random_weights(small_config(), ElementType::bf16, 2),
              ElementType::bf16);
  const LlamaModel model = load_llama(folder.path());
  if (const std::string refusal = gpu_refusal(model.config); !refusal.empty()) {
    GTEST_SKIP() << refusal;
  }
  const GpuModel gpu(model);
  std::mt19937 random(8);
  for (const size_t length : {100, 2 * 8192 + 77}) {
    SCOPED_TRACE(length);
    std::vector<uint32_t> tokens(length);
    for (uint32_t& token : tokens) token = random() % 37;
    std::vector<Rows> expected(model.config.layers);
    const std::vector<float> logits = gpu_prefill(gpu, tokens, [&](const LayerChunk& chunk) {
      Rows& rows = expected[chunk.layer];
      rows.q.insert(rows.q.end(), chunk.q, chunk.q + chunk.tokens * model.config.q_width());
      rows.k.insert(rows.k.end(), chunk.k, chunk.k + chunk.tokens * model.config.kv_width());
      rows.v.insert(rows.v.end(), chunk.v, chunk.v + chunk.tokens * model.config.kv_width());
    });
    expect_device_rows<float, float>(gpu, tokens, ElementType::f32, logits, expected);
    expect_device_rows<__half, __half>(gpu, tokens, ElementType::f16, logits, expected);
    expect_device_rows<__nv_bfloat16, __half>(gpu, tokens, ElementType::bf16, logits, expected);
  }
}

/// A rank's host gets the bytes that it stores, and no others.
TEST(GpuPrefillToDevice, BringsWhatARankStores) {
  KEYHOLE_NEEDS_GPU();
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), random_weights(small_config(), ElementType::bf16, 2),
              ElementType::bf16);
  const LlamaModel model = load_llama(folder.path());
  const LlamaConfig& config = model.config;
  if (const std::string refusal = gpu_refusal(config); !refusal.empty()) GTEST_SKIP() << refusal;
  ASSERT_GE(config.kv_heads, 2U);
  const GpuModel gpu(model);
  std::vector<uint32_t> tokens(8192 + 777);
  std::mt19937 random(8);
  for (uint32_t& token : tokens) token = random() % 37;
  struct Brought {
    std::vector<float> k, v;
    uint64_t bytes = 0;
  };
  const auto bring = [&](const KvShare& share) {
    Brought all;
    DeviceSink sink{ElementType::f16, {}, share, &all.bytes};
    sink.take = [&](const DeviceLayerChunk& chunk) {
      if (!chunk.kv_on_host) return;
      const size_t numbers = chunk.tokens * share.heads_of(config.kv_heads) * config.head_dim;
      append<__half>(all.k, chunk.k, numbers);
      append<__half>(all.v, chunk.v, numbers);
    };
    (void)gpu_prefill_to_device(gpu, tokens, sink);
    return all;
  };
  const Brought all = bring({});
  const size_t row = config.kv_width(), d = config.head_dim;
  EXPECT_EQ(all.bytes, 2 * (all.k.size() + all.v.size()));
  EXPECT_EQ(all.k.size() % (tokens.size() * row), 0U);

  KvShare second;
  second.first_head = second.heads = 1;
  const Brought head = bring(second);
  EXPECT_EQ(head.bytes * config.kv_heads, all.bytes);
  ASSERT_EQ(head.k.size() * config.kv_heads, all.k.size());
  for (size_t i = 0; i < head.k.size(); ++i) {
    ASSERT_EQ(head.k[i], all.k[i / d * row + d + i % d]) << i;
    ASSERT_EQ(head.v[i], all.v[i / d * row + d + i % d]) << i;
  }

  const KvShare last{0, 0, 512, 2, 3};
  const Brought blocks = bring(last);
  uint64_t own = 0;
  ASSERT_EQ(blocks.k.size(), all.k.size());
  for (size_t i = 0; i < all.k.size(); ++i) {
    ASSERT_TRUE(std::isfinite(blocks.k[i]) && std::isfinite(blocks.v[i])) << i;
    if (i / row % tokens.size() / 512 % 3 != 2) continue;
    ++own;
    ASSERT_EQ(blocks.k[i], all.k[i]) << i;
    ASSERT_EQ(blocks.v[i], all.v[i]) << i;
  }
  EXPECT_EQ(blocks.bytes, 4 * own);
  EXPECT_LT(blocks.bytes, all.bytes * 2 / 5);
}

/// |a - b| / |b|
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  return test::relative_error(a.data(), b);
}

/// The logits behind the first `length` of some tokens.
std::vector<float> logits_by(GpuModel& gpu, PromptProducts products, size_t length) {
  std::mt19937 random(8);
  std::vector<uint32_t> tokens(length);
  for (uint32_t& token : tokens) token = random() % 37;
  gpu.set_products(products);
  return gpu_prefill(gpu, tokens, {});
}

/// Activations of long prompts are rounded where the weights are bf16 anyway, which moves logits by some 2^-9.
TEST(GpuPrefillProducts, AreOfRoundedNumbersInLongPromptsOfBf16Models) {
  KEYHOLE_NEEDS_GPU();
  constexpr size_t kLong = 4097;
  constexpr double kRounding = 1.0 / 512;
  for (const ElementType type : {ElementType::bf16, ElementType::f16}) {
    SCOPED_TRACE(type == ElementType::bf16 ? "bf16" : "f16");
    const TemporaryFolder folder;
    write_model(folder.path(), small_config(), random_weights(small_config(), type, 2), type);
    const LlamaModel model = load_llama(folder.path());
    if (const std::string refusal = gpu_refusal(model.config); !refusal.empty()) {
      GTEST_SKIP() << refusal;
    }
    GpuModel gpu(model);
    for (const size_t length : {kLong - 1, kLong}) {
      SCOPED_TRACE(length);
      const auto by = [&](PromptProducts products) { return logits_by(gpu, products, length); };
      const std::vector<float> exact = by(PromptProducts::exact),
                               rounded = by(PromptProducts::bf16);
      EXPECT_GT(difference(rounded, exact), kRounding / 64);
      EXPECT_LT(difference(rounded, exact), kRounding * 16);
      const bool rounds = type == ElementType::bf16 && length == kLong;
      EXPECT_EQ(by(PromptProducts::automatic), rounds ? rounded : exact);
    }
  }
}

}  // namespace
}  // namespace keyhole::tools
