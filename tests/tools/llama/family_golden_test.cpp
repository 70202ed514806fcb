// Every family of models against what Hugging Face transformers computed: logits behind a long prompt, and the tokens
// that follow greedily, step by step through Keyhole's cache.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "runtime/files/json.h"
#include "tests/temporary_folder.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/llama/gpu_decoder.h"
#include "tools/llama/host_decoder.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

/// The source tree's, or for a program that was carried to a machine with a GPU, $KEYHOLE_GOLDEN.
const std::filesystem::path kGolden = std::getenv("KEYHOLE_GOLDEN") != nullptr
                                          ? std::getenv("KEYHOLE_GOLDEN")
                                          : KEYHOLE_GOLDEN_FOLDER;

/// splitmix64 of FNV-1a of a name plus a number, as golden/make.py has it.
class Hashes {
 public:
  explicit Hashes(const std::string& name) {
    for (const char byte : name) {
      state_ = (state_ ^ static_cast<unsigned char>(byte)) * 0x100000001B3ULL;
    }
  }
  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_ = 0xCBF29CE484222325ULL;
};

bool contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

std::vector<double> values(const std::string& name, size_t count, bool gemma) {
  const bool norm = name.ends_with("norm.weight");
  const bool head_norm = name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight");
  double step = 0x1p-10;
  if (norm) step = 0x1p-9;
  if (contains(name, "embed_tokens")) step = gemma ? 0x1p-11 : 0x1p-8;
  if (contains(name, "q_proj") || contains(name, "k_proj")) step = gemma ? 0x1p-8 : 0x1p-10;
  if (contains(name, "lm_head")) step = 0x1p-9;
  Hashes hashes(name);
  std::vector<double> out(count);
  for (double& value : out) {
    const uint64_t bits = hashes.next();
    if (norm && (!gemma || head_norm)) {
      value = (128.0 + static_cast<double>(bits >> 57)) / (gemma ? 64.0 : 128.0);
    } else {
      value = (2.0 * static_cast<double>(bits >> 56) - 255.0) * step;
    }
  }
  return out;
}

struct FamilyGolden {
  json config;
  SyntheticTensors tensors;
  std::vector<uint32_t> prompt, generated;
  std::vector<float> logits;
};

FamilyGolden load(const std::string& name) {
  const json file = json::parse(read_file(kGolden / (name + ".json")));
  FamilyGolden golden;
  golden.config = file.at("config");
  const bool gemma = name.starts_with("gemma");
  for (const auto& [tensor, shape] : file.at("tensors").items()) {
    const auto extents = shape.get<std::vector<size_t>>();
    size_t count = 1;
    for (const size_t extent : extents) count *= extent;
    golden.tensors[tensor] = {extents, values(tensor, count, gemma)};
  }
  Hashes tokens("prompt " + std::to_string(file.at("seed").get<int>()));
  for (size_t i = 0; i < file.at("prompt_tokens").get<size_t>(); ++i) {
    golden.prompt.push_back(static_cast<uint32_t>(tokens.next() % 256));
  }
  golden.generated = file.at("generated").get<std::vector<uint32_t>>();
  golden.logits = file.at("logits").get<std::vector<float>>();
  return golden;
}

void expect_golden_logits(std::span<const float> logits, const std::vector<float>& expected) {
  ASSERT_EQ(logits.size(), expected.size());
  for (size_t i = 0; i < logits.size(); ++i) EXPECT_NEAR(logits[i], expected[i], 1e-3) << i;
}

class FamilyTest : public ::testing::Test {
 protected:
  static LlamaModel loaded(const FamilyGolden& golden, ElementType type, size_t shards) {
    const TemporaryFolder folder;
    write_model(folder.path(), golden.config, golden.tensors, type, shards);
    return load_llama(folder.path());
  }
  static KeyholeCacheOptions exact_cache() {
    KeyholeCacheOptions options;
    options.max_tokens = 2100;
    options.sink = 16;
    options.window = 64;
    options.mode = KEYHOLE_MODE_EXACT;
    options.kv_dtype = KEYHOLE_F32;
    options.threads = 2;
    return options;
  }
  static std::vector<uint32_t> continued(Decoder& decoder, std::span<const float> logits,
                                         size_t count) {
    std::vector<uint32_t> tokens{greedy(logits)};
    while (tokens.size() < count) tokens.push_back(greedy(decoder.step(tokens.back())));
    return tokens;
  }
  Team team_{2};
};

class Family : public FamilyTest, public ::testing::WithParamInterface<std::string> {};

TEST_P(Family, ContinuesAsTransformersDoes) {
  const FamilyGolden golden = load(GetParam());
  const LlamaModel model = loaded(golden, ElementType::f32, 1);
  KeyholeCache cache(model.config, exact_cache());
  HostDecoder decoder(model, cache, team_);
  const std::span<const float> logits = decoder.prefill(golden.prompt);
  expect_golden_logits(logits, golden.logits);
  cache.build(nullptr, nullptr);
  EXPECT_EQ(continued(decoder, logits, golden.generated.size()), golden.generated);

  // Back to the prompt's end, where the same follows, in a copy too.
  const auto prompt = static_cast<uint32_t>(golden.prompt.size());
  decoder.truncate(prompt - 1);
  KeyholeCache copy = cache.fork();
  HostDecoder other(model, copy, team_, prompt - 1);
  expect_golden_logits(other.step(golden.prompt.back()), golden.logits);
  const std::span<const float> again = decoder.step(golden.prompt.back());
  expect_golden_logits(again, golden.logits);
  EXPECT_EQ(continued(decoder, again, 8),
            std::vector<uint32_t>(golden.generated.begin(), golden.generated.begin() + 8));
}

/// The same weights in 16 bits, in shards; most of the prompt in steps.
TEST_P(Family, AlsoFromFilesOf16Bits) {
  const FamilyGolden golden = load(GetParam());
  const size_t first = golden.prompt.size() - 40;
  for (const ElementType type : {ElementType::bf16, ElementType::f16}) {
    const LlamaModel model = loaded(golden, type, 2);
    KeyholeCache cache(model.config, exact_cache());
    HostDecoder decoder(model, cache, team_);
    (void)decoder.prefill(std::span(golden.prompt).first(first));
    cache.build(nullptr, nullptr);
    std::span<const float> logits;
    for (size_t i = first; i < golden.prompt.size(); ++i) logits = decoder.step(golden.prompt[i]);
    expect_golden_logits(logits, golden.logits);
    EXPECT_EQ(greedy(logits), golden.generated.front());
  }
}

/// A prompt of which the last 290 tokens come later, as turns of a chat do: 250 at once, some by steps, the rest at
/// once.
TEST_P(Family, TakesTheRestOfAPromptLater) {
  const FamilyGolden golden = load(GetParam());
  const auto prompt = std::span(golden.prompt);
  const size_t first = prompt.size() - 290;
  for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
    const LlamaModel model = loaded(golden, type, 1);
    KeyholeCache cache(model.config, exact_cache());
    HostDecoder decoder(model, cache, team_);
    (void)decoder.prefill(prompt.first(first));
    cache.build(nullptr, nullptr);
    ASSERT_GE(decoder.tokens_at_once(), 250U);
    (void)decoder.extend(prompt.subspan(first, 250));
    EXPECT_EQ(decoder.tokens(), first + 250);
    (void)decoder.extend(prompt.subspan(first + 250, 3));
    const std::span<const float> logits = decoder.extend(prompt.subspan(first + 253));
    expect_golden_logits(logits, golden.logits);
    EXPECT_EQ(continued(decoder, logits, golden.generated.size()), golden.generated);

    // What fails leaves the tokens as they were.
    const std::vector<uint32_t> more(decoder.tokens_at_once() + 1, prompt.front());
    EXPECT_THROW((void)decoder.extend(more), std::runtime_error);
    const auto fill = [&] {
      for (int i = 0; i < 20; ++i) (void)decoder.extend(std::span(more).first(150));
    };
    EXPECT_ANY_THROW(fill());
    EXPECT_EQ((decoder.tokens() - golden.generated.size() - prompt.size() + 1) % 150, 0U);
    decoder.truncate(static_cast<uint32_t>(prompt.size()) - 1);
    expect_golden_logits(decoder.step(prompt.back()), golden.logits);
  }
}

/// transformers has written the text model of Gemma 3 under two names.
TEST_F(FamilyTest, Gemma3UnderItsOtherNames) {
  const FamilyGolden golden = load("gemma3");
  FamilyGolden renamed = golden;
  renamed.tensors.clear();
  const std::string old_prefix = "language_model.model.";
  for (const auto& [name, tensor] : golden.tensors) {
    const bool text = name.starts_with(old_prefix);
    renamed.tensors[text ? "model.language_model." + name.substr(old_prefix.size())
                         : "model." + name] = tensor;
  }
  const auto tokens = std::span(golden.prompt).first(20);
  const LlamaModel model = loaded(golden, ElementType::bf16, 1);
  const LlamaModel other = loaded(renamed, ElementType::bf16, 1);
  EXPECT_EQ(prefill(model, team_, tokens, {}), prefill(other, team_, tokens, {}));
}

/// On the GPU a prompt's activations have 16 bits. With the same rounding the host's logits are off by 3e-5 to 3e-4 of
/// the largest (by 2.4e-3 of 18 for phi3_longrope), and the tokens are the same.
void expect_close_on_gpu(std::span<const float> logits, const std::vector<float>& expected) {
  ASSERT_EQ(logits.size(), expected.size());
  double largest = 0.0;
  for (const float x : expected) largest = std::max(largest, std::abs(double{x}));
  const double tolerance = std::max(1e-3, 3e-4 * largest);
  for (size_t i = 0; i < logits.size(); ++i) {
    EXPECT_NEAR(logits[i], expected[i], tolerance) << i;
  }
}

class GpuFamily : public Family {
 protected:
  /// body(model, a cache) for files in 32 and 16 bits, and sessions on the host and on the GPU.
  template <class Body>
  void for_all_ways(const FamilyGolden& golden, const Body& body) {
    for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
      const LlamaModel model = loaded(golden, type, 1);
      if (const std::string refusal = gpu_refusal(model.config); !refusal.empty()) {
        GTEST_SKIP() << refusal;
      }
      const GpuModel gpu(model);
      for (const keyhole_device device : {KEYHOLE_DEVICE_HOST, KEYHOLE_DEVICE_AUTO}) {
        SCOPED_TRACE(std::string(type == ElementType::f32 ? "fp32" : "bf16") +
                     (device == KEYHOLE_DEVICE_HOST ? ", session on the host" : ""));
        KeyholeCacheOptions options = exact_cache();
        options.device = device;
        KeyholeCache cache(model.config, options);
        body(gpu, cache);
      }
    }
  }
};

TEST_P(GpuFamily, ContinuesAsTransformersDoes) {
  const FamilyGolden golden = load(GetParam());
  for_all_ways(golden, [&](const GpuModel& gpu, KeyholeCache& cache) {
    GpuDecoder decoder(gpu, cache);
    const std::span<const float> logits = decoder.prefill(golden.prompt);
    expect_close_on_gpu(logits, golden.logits);
    cache.build(nullptr, nullptr);
    EXPECT_EQ(continued(decoder, logits, golden.generated.size()), golden.generated);

    // Back to the prompt's end, where the same follows, in a copy too.
    const auto prompt = static_cast<uint32_t>(golden.prompt.size());
    decoder.truncate(prompt - 1);
    KeyholeCache copy = cache.fork();
    GpuDecoder other(gpu, copy, prompt - 1);
    expect_close_on_gpu(other.step(golden.prompt.back()), golden.logits);
    const std::span<const float> again = decoder.step(golden.prompt.back());
    expect_close_on_gpu(again, golden.logits);
    EXPECT_EQ(continued(decoder, again, 8),
              std::vector<uint32_t>(golden.generated.begin(), golden.generated.begin() + 8));
  });
}

/// A prompt of which the last 240 tokens come later: 200 at once, then by steps.
TEST_P(GpuFamily, TakesTheRestOfAPromptLater) {
  const FamilyGolden golden = load(GetParam());
  const size_t first = golden.prompt.size() - 240;
  for_all_ways(golden, [&](const GpuModel& gpu, KeyholeCache& cache) {
    GpuDecoder decoder(gpu, cache);
    (void)decoder.prefill(std::span(golden.prompt).first(first));
    cache.build(nullptr, nullptr);
    (void)decoder.extend(std::span(golden.prompt).subspan(first, 200));
    std::span<const float> logits;
    for (size_t i = first + 200; i < golden.prompt.size(); ++i) {
      logits = decoder.step(golden.prompt[i]);
    }
    expect_close_on_gpu(logits, golden.logits);
    EXPECT_EQ(greedy(logits), golden.generated.front());
  });
}

/// Sliding layers are in the file, wherever they lay.
TEST_P(GpuFamily, SavedSessionsGoOn) {
  const FamilyGolden golden = load(GetParam());
  const TemporaryFolder folder;
  for_all_ways(golden, [&](const GpuModel& gpu, KeyholeCache& cache) {
    const std::string path = (folder.path() / "talk.kv").string();
    KeyholeCacheOptions options = exact_cache();
    options.device = cache.on_device() ? KEYHOLE_DEVICE_CUDA : KEYHOLE_DEVICE_HOST;
    const auto prompt = std::span(golden.prompt);
    const auto before = static_cast<uint32_t>(prompt.size() - 3);
    {
      GpuDecoder decoder(gpu, cache);
      (void)decoder.prefill(prompt.first(before - 2));
      cache.build(nullptr, nullptr);
      for (uint32_t i = before - 2; i < before; ++i) (void)decoder.step(prompt[i]);
      cache.save(path);
    }
    KeyholeCache saved = KeyholeCache::load(gpu.host().config, options, path);
    GpuDecoder decoder(gpu, saved, before);
    std::span<const float> logits;
    for (uint32_t i = before; i < prompt.size(); ++i) logits = decoder.step(prompt[i]);
    expect_close_on_gpu(logits, golden.logits);
    EXPECT_EQ(continued(decoder, logits, 8),
              std::vector<uint32_t>(golden.generated.begin(), golden.generated.begin() + 8));
  });
}

const auto kModels =
    ::testing::Values("llama", "llama_biases", "mistral", "mistral_sliding", "qwen2", "qwen3",
                      "gemma2", "gemma3_text", "gemma3", "phi3", "phi3_longrope", "phi3_sliding");
INSTANTIATE_TEST_SUITE_P(Models, Family, kModels, [](const auto& name) { return name.param; });
INSTANTIATE_TEST_SUITE_P(Models, GpuFamily, kModels, [](const auto& name) { return name.param; });

}  // namespace
}  // namespace keyhole::tools
