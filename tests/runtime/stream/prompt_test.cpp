// keyhole_prompt through the C API, on a device that computes attention from its definition: patterns, tensors, layers.
#include <keyhole/prefill.h>

#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/half.h"
#include "runtime/prefill/prefill_pattern.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

using runtime::parse_prefill_pattern;

/// Dense attention in double precision, of numbers in fp16; remembers the pattern.
class FakePrompt final : public gpu::PromptAttention {
 public:
  FakePrompt(const gpu::PromptShape& shape, std::vector<gpu::PromptPattern>& last)
      : shape_(shape), last_(&last) {}

  void attend(const gpu::PromptStretch& s, std::span<const gpu::PromptPattern> patterns,
              gpu::Stream) override {
    last_->assign(patterns.begin(), patterns.end());
    const uint32_t d = shape_.head_dim, group = shape_.q_heads / shape_.kv_heads;
    const auto at = [](const TensorView& t, size_t token, size_t head, size_t i) {
      return double{cpu::f16_to_f32(reinterpret_cast<const uint16_t*>(t.row(token, head))[i])};
    };
    for (uint32_t t = 0; t < s.n; ++t) {
      for (uint32_t h = 0; h < shape_.q_heads; ++h) {
        const uint32_t end = s.rows - s.n + t + 1;
        const uint32_t begin = s.window != 0 && end > s.window ? end - s.window : 0;
        double sum = s.sinks == nullptr ? 0.0 : std::exp(double{s.sinks[h]});
        std::vector<double> o(d);
        for (uint32_t i = begin; i < end; ++i) {
          double x = 0;
          for (uint32_t j = 0; j < d; ++j) x += at(s.q, t, h, j) * at(s.k, i, h / group, j);
          const double w = std::exp(x * double{s.logits.scale});
          sum += w;
          for (uint32_t j = 0; j < d; ++j) o[j] += w * at(s.v, i, h / group, j);
        }
        if (s.lse != nullptr)
          s.lse[size_t{t} * shape_.q_heads + h] = static_cast<float>(std::log(sum));
        for (uint32_t j = 0; j < d; ++j) {
          reinterpret_cast<float*>(s.out.row(t, h))[j] = static_cast<float>(o[j] / sum);
        }
      }
    }
    blocks_.attended += 1;
    blocks_.seen += 3;
  }
  [[nodiscard]] gpu::PromptBlocks blocks() const override { return blocks_; }
  [[nodiscard]] size_t bytes() const override { return 0; }

 private:
  gpu::PromptShape shape_;
  std::vector<gpu::PromptPattern>* last_;
  gpu::PromptBlocks blocks_;
};

/// A device of which prompts alone are asked.
class PromptDevice final : public gpu::Device {
 public:
  /// patterns: gets those of the last stretch; null: there is no attention of prompts.
  explicit PromptDevice(std::vector<gpu::PromptPattern>* patterns) : patterns_(patterns) {}
  const std::string& name() const override { return name_; }
  bool has(gpu::DevicePart part) const override {
    return part == gpu::DevicePart::prompts && patterns_ != nullptr;
  }
  std::unique_ptr<gpu::Resident> make_resident(
      const gpu::ResidentShape&, const std::shared_ptr<gpu::SessionOnDevice>&) const override {
    return nullptr;
  }
  std::unique_ptr<gpu::PromptAttention> make_prompt(const gpu::PromptShape& shape) const override {
    if (patterns_ == nullptr) return nullptr;
    return std::make_unique<FakePrompt>(shape, *patterns_);
  }

 private:
  std::vector<gpu::PromptPattern>* patterns_;
  std::string name_ = "test device";
};

class PromptTest : public testing::Test {
 protected:
  void SetUp() override {
    keyhole_engine_config_init(&config_);
    config_.layers = 2;
    config_.q_heads = 4;
    config_.kv_heads = 2;
    config_.head_dim = 64;
    config_.threads = 1;
    layers_.resize(2);
    for (keyhole_layer_config& layer : layers_) keyhole_layer_config_init(&layer, &config_);
    layers_[1].window = 5;
    config_.layer_configs = layers_.data();
    config_.layer_count = 2;
    sinks_ = {0.5F, -1.0F, 2.0F, 0.0F, 1.0F, 1.5F, -3.0F, 0.25F};
    config_.sink_logits = sinks_.data();
  }
  std::unique_ptr<keyhole_engine> engine(bool has_prompts = true) {
    auto made = std::make_unique<keyhole_engine>();
    made->engine = std::make_shared<const runtime::Engine>(
        config_, std::make_shared<const PromptDevice>(has_prompts ? &patterns_ : nullptr));
    return made;
  }
  struct Prompt {
    keyhole_prompt* p = nullptr;
    ~Prompt() { keyhole_prompt_destroy(p); }
  };
  static std::vector<uint16_t> halves(Numbers& numbers, size_t n) {
    std::vector<uint16_t> x;
    for (const float y : numbers.many(n)) x.push_back(cpu::f32_to_f16(y));
    return x;
  }
  template <class T>
  static keyhole_tensor tensor_of(std::vector<T>& x, keyhole_dtype dtype, int64_t n, int64_t heads,
                                  int64_t dim) {
    keyhole_tensor t{};
    t.data = x.data();
    t.dtype = dtype;
    t.memory = KEYHOLE_DEVICE;
    t.rank = 3;
    t.shape[0] = n, t.shape[1] = heads, t.shape[2] = dim;
    t.strides[0] = heads * dim, t.strides[1] = dim, t.strides[2] = 1;
    return t;
  }

  keyhole_engine_config config_{};
  std::vector<keyhole_layer_config> layers_;
  std::vector<float> sinks_;                  ///< `[layers, q_heads]`
  std::vector<gpu::PromptPattern> patterns_;  ///< of the last stretch
};

TEST_F(PromptTest, AttendsAsTheLayerSays) {
  const auto e = engine();
  Prompt prompt;
  ASSERT_EQ(keyhole_prompt_create(e.get(), "dense", &prompt.p), KEYHOLE_OK);
  constexpr uint32_t kTokens = 12, kQueries = 7;
  Numbers numbers(5);
  auto q = halves(numbers, size_t{kQueries} * 4 * 64),
       k = halves(numbers, size_t{kTokens} * 2 * 64), v = halves(numbers, size_t{kTokens} * 2 * 64);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    std::vector<float> out(q.size(), NAN), lse(size_t{kQueries} * 4, NAN);
    const keyhole_tensor tq = tensor_of(q, KEYHOLE_F16, kQueries, 4, 64),
                         tk = tensor_of(k, KEYHOLE_F16, kTokens, 2, 64),
                         tv = tensor_of(v, KEYHOLE_F16, kTokens, 2, 64),
                         to = tensor_of(out, KEYHOLE_F32, kQueries, 4, 64);
    ASSERT_EQ(keyhole_prompt_attend(prompt.p, layer, &tq, &tk, &tv, &to, lse.data(), nullptr),
              KEYHOLE_OK)
        << keyhole_last_error();
    // The first query of layer 1 sees five tokens of six.
    double sum = std::exp(double{sinks_[layer * 4 + 1]});
    std::vector<double> o(64);
    for (uint32_t i = layer == 1 ? 1 : 0; i <= kTokens - kQueries; ++i) {
      double x = 0;
      for (uint32_t j = 0; j < 64; ++j)
        x += double{cpu::f16_to_f32(q[64 + j])} * double{cpu::f16_to_f32(k[i * 128 + j])};
      const double w = std::exp(x / 8.0);
      sum += w;
      for (uint32_t j = 0; j < 64; ++j) o[j] += w * double{cpu::f16_to_f32(v[i * 128 + j])};
    }
    EXPECT_NEAR(lse[1], std::log(sum), 1e-5) << layer;
    for (uint32_t j = 0; j < 64; ++j) EXPECT_NEAR(out[64 + j], o[j] / sum, 1e-5) << layer;
  }
  uint64_t attended = 0, seen = 0;
  ASSERT_EQ(keyhole_prompt_get_blocks(prompt.p, &attended, &seen), KEYHOLE_OK);
  EXPECT_EQ(attended, 2U);
  EXPECT_EQ(seen, 6U);
}

TEST_F(PromptTest, LayersAndHeadsHavePatternsOfTheirOwn) {
  const auto e = engine();
  Prompt prompt;
  ASSERT_EQ(keyhole_prompt_create(e.get(), "dense", &prompt.p), KEYHOLE_OK);
  ASSERT_EQ(keyhole_prompt_set_pattern(prompt.p, 0, KEYHOLE_ALL, "a-shape:first=128,near=640"),
            KEYHOLE_OK);
  Numbers numbers(7);
  auto q = halves(numbers, 4 * 4 * 64), k = halves(numbers, 4 * 2 * 64);
  std::vector<float> out(q.size());
  const keyhole_tensor tq = tensor_of(q, KEYHOLE_F16, 4, 4, 64),
                       tk = tensor_of(k, KEYHOLE_F16, 4, 2, 64),
                       to = tensor_of(out, KEYHOLE_F32, 4, 4, 64);
  for (const uint32_t layer : {0U, 1U}) {
    ASSERT_EQ(keyhole_prompt_attend(prompt.p, layer, &tq, &tk, &tk, &to, nullptr, nullptr),
              KEYHOLE_OK);
    ASSERT_EQ(patterns_.size(), 1U);
    EXPECT_EQ(patterns_[0].dense, layer == 1);
    EXPECT_EQ(patterns_[0].near_rows, layer == 1 ? 0U : 640U);
  }
  ASSERT_EQ(keyhole_prompt_set_pattern(prompt.p, 0, 1, "pooled:blocks=3"), KEYHOLE_OK);
  ASSERT_EQ(keyhole_prompt_attend(prompt.p, 0, &tq, &tk, &tk, &to, nullptr, nullptr), KEYHOLE_OK);
  ASSERT_EQ(patterns_.size(), 4U);
  EXPECT_EQ(patterns_[1].blocks, 3U);
  for (const size_t h : {0, 2, 3}) EXPECT_EQ(patterns_[h].near_rows, 640U) << h;
}

TEST_F(PromptTest, RefusesOtherTensors) {
  const auto e = engine();
  Prompt prompt;
  ASSERT_EQ(keyhole_prompt_create(e.get(), nullptr, &prompt.p), KEYHOLE_OK);
  Numbers numbers(6);
  auto q = halves(numbers, 4 * 4 * 64), k = halves(numbers, 4 * 2 * 64);
  std::vector<float> out(q.size());
  const keyhole_tensor tq = tensor_of(q, KEYHOLE_F16, 4, 4, 64),
                       tk = tensor_of(k, KEYHOLE_F16, 4, 2, 64),
                       to = tensor_of(out, KEYHOLE_F32, 4, 4, 64);
  const auto attend = [&](uint32_t layer, const keyhole_tensor& a, const keyhole_tensor& b,
                          const keyhole_tensor& c, const keyhole_tensor& o) {
    return keyhole_prompt_attend(prompt.p, layer, &a, &b, &c, &o, nullptr, nullptr);
  };
  const auto says = [](const char* text) {
    return std::string(keyhole_last_error()).find(text) != std::string::npos;
  };
  EXPECT_EQ(attend(0, tq, tk, tk, to), KEYHOLE_OK);
  EXPECT_EQ(attend(2, tq, tk, tk, to), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_TRUE(says("layer is 2, allowed: 0..1")) << keyhole_last_error();
  keyhole_tensor other = tq;
  other.memory = KEYHOLE_HOST;
  EXPECT_EQ(attend(0, other, tk, tk, to), KEYHOLE_UNSUPPORTED);
  EXPECT_TRUE(says("tensor q lies in host memory")) << keyhole_last_error();
  EXPECT_EQ(attend(0, tk, tk, tk, to), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_TRUE(says("tensor q has shape [4, 2, 64], needed: [n, 4, 64]")) << keyhole_last_error();
  keyhole_tensor fewer = tk;
  fewer.shape[0] = 3;
  EXPECT_EQ(attend(0, tq, tk, fewer, to), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_TRUE(says("tensor v has 3 tokens, needed: as many as k, 4")) << keyhole_last_error();
  keyhole_tensor narrow = to;
  narrow.strides[0] = 64;
  EXPECT_EQ(attend(0, tq, tk, tk, narrow), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_TRUE(says("overlap")) << keyhole_last_error();
  EXPECT_EQ(keyhole_prompt_attend(nullptr, 0, &tq, &tk, &tk, &to, nullptr, nullptr),
            KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(keyhole_prompt_attend(prompt.p, 0, nullptr, &tk, &tk, &to, nullptr, nullptr),
            KEYHOLE_INVALID_ARGUMENT);
}

TEST_F(PromptTest, IsMadeOfAnEngineOnADeviceAndAPattern) {
  Prompt prompt;
  const auto host = engine(false);
  EXPECT_EQ(keyhole_prompt_create(host.get(), "dense", &prompt.p), KEYHOLE_UNSUPPORTED);
  EXPECT_EQ(prompt.p, nullptr);
  const auto e = engine();
  for (const char* bad :
       {"sparse", "sampled:mass=1001", "sampled:stride=0", "a-shape:far=3", "dense:x=1", "",
        "dense:skip=65", "pooled:mass=-1", "vertical-slash:queries=65",
        "vertical-slash:columns=16385", "auto:skip=3"}) {
    EXPECT_EQ(keyhole_prompt_create(e.get(), bad, &prompt.p), KEYHOLE_INVALID_ARGUMENT) << bad;
    EXPECT_EQ(prompt.p, nullptr);
  }
  EXPECT_EQ(keyhole_prompt_create(nullptr, "dense", &prompt.p), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(keyhole_prompt_create(e.get(), "dense", nullptr), KEYHOLE_INVALID_ARGUMENT);
  keyhole_prompt_destroy(nullptr);
}

TEST(PrefillPattern, SaysWhatIsAttended) {
  EXPECT_TRUE(parse_prefill_pattern("dense").dense);
  const gpu::PromptPattern a = parse_prefill_pattern("a-shape:first=128,near=640");
  EXPECT_FALSE(a.dense);
  EXPECT_EQ(a.first_rows, 128U);
  EXPECT_EQ(a.near_rows, 640U);
  EXPECT_EQ(a.stride, 0U);
  const gpu::PromptPattern s =
      parse_prefill_pattern("sampled:mass=875,stride=8,lookups=125,first=0,near=64,from=4096");
  EXPECT_FLOAT_EQ(s.mass, 0.875F);
  EXPECT_EQ(s.stride, 8U);
  EXPECT_FLOAT_EQ(s.lookups, 0.125F);
  EXPECT_EQ(s.first_rows, 0U);
  EXPECT_EQ(s.near_rows, 64U);
  EXPECT_EQ(s.dense_rows, 4096U);
  EXPECT_EQ(s.choice, gpu::PromptChoice::sampled);
  EXPECT_EQ(s.skip, 0.0F);
  EXPECT_EQ(parse_prefill_pattern("dense:skip=12").skip, 12.0F);
  EXPECT_TRUE(parse_prefill_pattern("dense:skip=12").dense);
  const gpu::PromptPattern lines = parse_prefill_pattern(
      "vertical-slash:columns=30,slashes=2048,queries=32,first=128,near=0,from=99,skip=10");
  EXPECT_FALSE(lines.dense);
  EXPECT_EQ(lines.choice, gpu::PromptChoice::vertical_slash);
  EXPECT_EQ(lines.columns, 30U);
  EXPECT_EQ(lines.slashes, 2048U);
  EXPECT_EQ(lines.queries, 32U);
  EXPECT_EQ(lines.first_rows, 128U);
  EXPECT_EQ(lines.near_rows, 0U);
  EXPECT_EQ(lines.dense_rows, 99U);
  EXPECT_EQ(lines.skip, 10.0F);
  const gpu::PromptPattern means = parse_prefill_pattern("pooled:blocks=100,mass=500");
  EXPECT_EQ(means.choice, gpu::PromptChoice::pooled);
  EXPECT_EQ(means.blocks, 100U);
  EXPECT_FLOAT_EQ(means.mass, 0.5F);
  EXPECT_EQ(parse_prefill_pattern("pooled").blocks, 0U);
  const gpu::PromptPattern coded = parse_prefill_pattern("codes:blocks=7,from=300");
  EXPECT_TRUE(coded.dense) << "where there are no codes";
  EXPECT_EQ(coded.coded_blocks, 7U);
  EXPECT_EQ(coded.dense_rows, 300U);
  EXPECT_EQ(parse_prefill_pattern("dense").coded_blocks, 0U);
  EXPECT_THROW((void)parse_prefill_pattern("codes:blocks=2"), Error);
  const gpu::PromptPattern automatic = parse_prefill_pattern("auto"),
                           defaults = parse_prefill_pattern("sampled");
  EXPECT_EQ(automatic.mass, defaults.mass);
  EXPECT_EQ(automatic.stride, defaults.stride);
  EXPECT_EQ(automatic.dense_rows, defaults.dense_rows);
  const std::string help = keyhole_prompt_help();
  for (const char* name : {"dense:", "a-shape:", "sampled:", "auto:", "stride=16",
                           "vertical-slash:", "pooled:", "codes:", "skip=0"}) {
    EXPECT_NE(help.find(name), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace keyhole::test
