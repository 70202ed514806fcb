// Arithmetic of device memory against sums made by hand, and against the files that weights come from.
#include "tools/llama/gpu_sizes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/tools/llama/synthetic_model.h"

namespace keyhole::tools {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

LlamaConfig llama_8b() {
  LlamaConfig config;
  config.vocab_size = 128256;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.layers = 32;
  config.q_heads = 32;
  config.kv_heads = 8;
  config.head_dim = 128;
  config.rope.dims = 128;
  return config;
}

TEST(OnCard, RoundsAsTheDriverHandsOut) {
  EXPECT_EQ(on_card(0), 0U);
  EXPECT_EQ(on_card(1), 512U);
  EXPECT_EQ(on_card(512), 512U);
  EXPECT_EQ(on_card(kMiB), 2 * kMiB);
  EXPECT_EQ(on_card(2 * kMiB + 1), 4 * kMiB);
}

TEST(GpuPrefillSizes, AddUpToWhatAPromptTakes) {
  const size_t n = 131072;
  const GpuPrefillSizes sizes = gpu_prefill_sizes(llama_8b(), n, 4, "dense");
  // Bytes for all tokens: hidden states, RoPE's table, K and V of a layer in 16 bits, ids.
  const uint64_t all = n * (4096 * 4 + 64 * 8 + 2 * 1024 * 2 + 4);
  // Bytes for a chunk: the wider of qkv (6144) and gate with up (28672), q, three pairs of bf16, two exports.
  const uint64_t chunk =
      sizes.rows.chunk * (28672 * 4 + 4096 * 2 + 4 * (4096 + 4096 + 14336) + 2 * 6144 * 4);
  const uint64_t exact = all + chunk + 128256 * 4 + 32 * kMiB;  // and the products' workspace
  EXPECT_GE(sizes.device_bytes(), exact);
  EXPECT_LT(sizes.device_bytes(), exact + 16 * 2 * kMiB);
  EXPECT_EQ(sizes.rows.chunk % 128, 0U);
  EXPECT_LE(chunk, uint64_t{1} << 30);
  const GpuPrefillSizes alone = gpu_prefill_sizes(llama_8b(), n, 0, "dense");
  EXPECT_EQ(sizes.device_bytes() - alone.device_bytes(), 2 * on_card(sizes.rows.chunk * 6144 * 4));
  const GpuPrefillSizes halves = gpu_prefill_sizes(llama_8b(), n, 2, "dense");
  EXPECT_EQ(halves.rows.chunk, sizes.rows.chunk);
  EXPECT_EQ(halves.device_bytes() - alone.device_bytes(), 4 * on_card(sizes.rows.chunk * 6144 * 2))
      << "twice as many chunks of half the bytes";
}

/// Pinned memory of the host, through which K and V come: four chunks of them to a cache on the GPU.
TEST(GpuPrefillSizes, CountWhatIsPinned) {
  const GpuPrefillSizes sizes = gpu_prefill_sizes(llama_8b(), 131072, 2, "dense");
  EXPECT_EQ(sizes.pinned_bytes(true), 4 * 2 * sizes.rows.chunk * 1024 * 2);
  EXPECT_EQ(sizes.pinned_bytes(false), 4 * sizes.rows.chunk * 6144 * 2);
  EXPECT_EQ(gpu_prefill_sizes(llama_8b(), 131072, 0, "dense").pinned_bytes(false), 0U);
  KvShare quarter;
  quarter.first_head = 4;
  quarter.heads = 2;
  EXPECT_EQ(4 * gpu_prefill_sizes(llama_8b(), 131072, 2, "dense", 0, quarter).pinned_bytes(true),
            sizes.pinned_bytes(true));
}

TEST(KvShares, HaveEachTokenOnce) {
  for (const size_t block : {1U, 5U, 64U}) {
    for (const uint32_t ranks : {1U, 3U}) {
      std::vector<int> owners(200);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const KvShare share{0, 0, block, rank, ranks};
        for (size_t first = 0; first < owners.size(); first += 50) {
          share.for_each_run(first, 50, [&](size_t token, size_t n) {
            EXPECT_GE(token, first);
            EXPECT_LE(token + n, first + 50);
            for (size_t t = token; t < token + n; ++t) {
              EXPECT_EQ(t / block % ranks, rank);
              ++owners[t];
            }
          });
        }
      }
      EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), 200);
    }
  }
  size_t calls = 0;
  KvShare{}.for_each_run(7, 9, [&](size_t token, size_t n) { calls += token == 7 && n == 9; });
  EXPECT_EQ(calls, 1U);
}

TEST(GpuPrefillSizes, AShortPromptIsOneChunk) {
  EXPECT_EQ(gpu_prefill_sizes(llama_8b(), 5, 4, "dense").rows.chunk, 5U);
  const GpuPrefillSizes chunked = gpu_prefill_sizes(llama_8b(), 65536, 4, "dense", 2048);
  EXPECT_EQ(chunked.rows.chunk, 2048U);
  EXPECT_EQ(chunked.q, 2048 * llama_8b().q_width());
  EXPECT_EQ(gpu_prefill_sizes(llama_8b(), 5, 4, "dense", 2048).rows.chunk, 5U);
  EXPECT_LT(gpu_prefill_sizes(llama_8b(), 5, 4, "dense").device_bytes(), 40 * kMiB);
}

/// Two kinds of layers have a table of RoPE each.
TEST(GpuPrefillSizes, CountBothRopes) {
  LlamaConfig config = llama_8b();
  const uint64_t one = gpu_prefill_sizes(config, 65536, 0, "dense").device_bytes();
  config.windows.assign(config.layers, 0);
  config.windows[3] = 4096;
  config.sliding_rope.dims = 64;
  EXPECT_EQ(gpu_prefill_sizes(config, 65536, 0, "dense").device_bytes() - one, 65536U * 32 * 8);
}

TEST(GpuExtensionBytes, AreThoseOfAChunk) {
  // As above, of 512 tokens: hidden states, q, K and V and attention in fp32, RoPE, and the chunk's activations.
  const uint64_t n = 512;
  const uint64_t exact =
      n * (4096 * 4 + 64 * 8 + 6144 * 4 + 4096 * 4 + 4 + 28672 * 4 + 4 * (4096 + 4096 + 14336)) +
      128256 * 4 + 32 * kMiB;
  EXPECT_GE(gpu_extension_bytes(llama_8b()), exact);
  EXPECT_LT(gpu_extension_bytes(llama_8b()), exact + 16 * 2 * kMiB);
}

/// K, V and queries of 4,096 tokens, or of a model in fp32, are f32, of which the library has a copy.
TEST(GpuPrefillSizes, CountTheNumbersOfFineAttention) {
  LlamaConfig config = llama_8b();
  const GpuPrefillSizes rounded = gpu_prefill_sizes(config, 4097, 0, "dense");
  EXPECT_FALSE(rounded.fine);
  EXPECT_TRUE(gpu_prefill_sizes(config, 4096, 0, "dense").fine);
  config.dtype = "float32";
  const GpuPrefillSizes fine = gpu_prefill_sizes(config, 4097, 0, "dense");
  EXPECT_TRUE(fine.fine);
  const uint64_t kv = 4097 * 1024, q = fine.rows.chunk * 4096;
  EXPECT_EQ(fine.device_bytes() - rounded.device_bytes(), 2 * (on_card(4 * kv) - on_card(2 * kv)) +
                                                              on_card(4 * q) - on_card(2 * q) +
                                                              on_card(4 * (2 * kv + q)));
}

TEST(GpuStepBytes, AreAFewMegabytes) {
  // Hidden state, qkv, attention, the MLP's inside, logits, a product of gate and up, RoPE's turns and their
  // frequencies.
  const uint64_t floats = 4096 + 6144 + 4096 + 14336 + 128256 + 28672 + 4 * 64 + 2;
  EXPECT_GE(gpu_step_bytes(llama_8b()), 4 * floats);
  EXPECT_LT(gpu_step_bytes(llama_8b()), 4 * floats + 12 * 512);
}

TEST(GpuWeightBytes, FollowTheDtypeOfTheFiles) {
  using namespace testing;
  nlohmann::json fields = small_config();
  for (const bool tied : {false, true}) {
    fields["tie_word_embeddings"] = tied;
    for (const ElementType type : {ElementType::bf16, ElementType::f16, ElementType::f32}) {
      const TemporaryFolder folder;
      const SyntheticTensors tensors = random_weights(fields, type, 1);
      write_model(folder.path(), fields, tensors, type, 2);
      uint64_t expected = 0;
      for (const auto& [name, tensor] : tensors) {
        if (tied && name == "lm_head.weight") continue;
        const uint64_t halves = on_card(tensor.values.size() * 2);
        if (tensor.shape.size() == 1) {
          expected += on_card(tensor.values.size() * 4);
        } else {
          expected += type == ElementType::bf16 ? halves : 2 * halves;
        }
      }
      const LlamaConfig config = load_llama_config(folder / "config.json");
      EXPECT_EQ(gpu_weight_bytes(folder.path(), config), expected) << tied;
    }
  }
  const TemporaryFolder empty;
  EXPECT_THROW((void)gpu_weight_bytes(empty.path(), llama_8b()), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
