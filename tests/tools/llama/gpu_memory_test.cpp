// --gpu-memory from outside, and its plan for a model of 8 billion weights of which only the headers exist. Needs no
// GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "tests/tools/cli/run_command.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/commands/common/gpu_memory.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

/// A folder in the shape of Llama-3-8B in bf16, whose 15 GiB are a hole in a file.
class Folder8B {
 public:
  Folder8B() {
    const nlohmann::json config = {
        {"model_type", "llama"},    {"architectures", {"LlamaForCausalLM"}},
        {"hidden_act", "silu"},     {"vocab_size", 128256},
        {"hidden_size", 4096},      {"intermediate_size", 14336},
        {"num_hidden_layers", 32},  {"num_attention_heads", 32},
        {"num_key_value_heads", 8}, {"max_position_embeddings", 131072},
        {"rms_norm_eps", 1e-5},     {"rope_theta", 500000.0},
        {"torch_dtype", "bfloat16"}};
    write_file(folder_ / "config.json", config.dump());
    nlohmann::json header = nlohmann::json::object();
    uint64_t at = 0;
    const auto add = [&](const std::string& name, const std::vector<uint64_t>& shape) {
      uint64_t bytes = 2;
      for (const uint64_t side : shape) bytes *= side;
      header[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {at, at + bytes}}};
      at += bytes;
    };
    add("model.embed_tokens.weight", {128256, 4096});
    for (int layer = 0; layer < 32; ++layer) {
      const std::string name = "model.layers." + std::to_string(layer) + ".";
      add(name + "input_layernorm.weight", {4096});
      add(name + "self_attn.q_proj.weight", {4096, 4096});
      add(name + "self_attn.k_proj.weight", {1024, 4096});
      add(name + "self_attn.v_proj.weight", {1024, 4096});
      add(name + "self_attn.o_proj.weight", {4096, 4096});
      add(name + "post_attention_layernorm.weight", {4096});
      add(name + "mlp.gate_proj.weight", {14336, 4096});
      add(name + "mlp.up_proj.weight", {14336, 4096});
      add(name + "mlp.down_proj.weight", {4096, 14336});
    }
    add("model.norm.weight", {4096});
    add("lm_head.weight", {128256, 4096});
    weights_ = at;
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t size = text.size();
    const std::filesystem::path path = folder_ / "model.safetensors";
    {
      std::ofstream file(path, std::ios::binary);
      file.write(reinterpret_cast<const char*>(&size), sizeof size);
      file << text;
    }
    std::filesystem::resize_file(path, sizeof size + size + at);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return folder_.path(); }
  [[nodiscard]] uint64_t weights() const { return weights_; }

 private:
  TemporaryFolder folder_;
  uint64_t weights_ = 0;
};

GpuMemoryRequest request_of(const Folder8B& folder, uint64_t limit, uint64_t tokens,
                            const std::string& index = kAutoIndex) {
  GpuMemoryRequest request;
  request.folder = folder.path();
  request.model = load_llama_config(folder.path() / "config.json");
  request.limit = limit;
  request.option = std::to_string(limit);
  request.prompt = tokens;
  request.session = true;
  request.context = tokens + 256;
  request.cache.kv_dtype = "bf16";
  request.specs = {{index, ""}};
  request.budgets = {for_index(BudgetChoice{parse_attend("topk", 100), {}, {}}, index)};
  return request;
}

TEST(GpuMemory, An8BWith128kTokensFitsA24GBCard) {
  const Folder8B folder;
  const GpuMemoryPlan plan = plan_gpu_memory(request_of(folder, 24 * kGiB, 131072));
  EXPECT_GE(plan.weights, folder.weights());
  EXPECT_LT(plan.weights, folder.weights() + (64 << 20));
  EXPECT_EQ(plan.others() + plan.session_limit, 24 * kGiB);
  EXPECT_LE(plan.session, plan.session_limit);
  // Codes of 2 bits of all layers at least: 2.3 GiB, see README.md.
  EXPECT_GT(plan.session, 2 * kGiB);
}

TEST(GpuMemory, RefusesWithTheContextThatWouldFit) {
  const Folder8B folder;
  std::string error;
  try {
    (void)plan_gpu_memory(request_of(folder, 17 * kGiB, 131072));
  } catch (const UsageError& e) {
    error = e.what();
  }
  const std::string before = "allowed: a context of at most ";
  const size_t at = error.find(before);
  ASSERT_NE(at, std::string::npos) << error;
  std::string digits;
  for (const char c : error.substr(at + before.size())) {
    if (c >= '0' && c <= '9') digits += c;
    if (c == ' ') break;
  }
  const uint64_t longest = std::stoull(digits);
  EXPECT_GT(longest, 1024U);
  EXPECT_LT(longest, 131072U);
  // It does fit, and twice as much does not.
  GpuMemoryRequest fitting = request_of(folder, 17 * kGiB, longest);
  fitting.context = longest;
  EXPECT_NO_THROW((void)plan_gpu_memory(fitting));
  EXPECT_THROW((void)plan_gpu_memory(request_of(folder, 17 * kGiB, 2 * longest)), UsageError);
}

TEST(GpuMemory, SaysWithWhichBitsAllLayersWouldFit) {
  const Folder8B folder;
  // 4 bits of 128k tokens take 4.3 GiB, of which half a GiB is missing.
  GpuMemoryRequest request = request_of(folder, 22 * kGiB, 131072, "codes:k=4,v=4");
  const GpuMemoryPlan others = plan_gpu_memory(request);
  request.limit = others.others() + 4 * kGiB;
  ::testing::internal::CaptureStderr();
  (void)plan_gpu_memory(request);
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find(" of 32 layers fit"), std::string::npos) << warning;
  EXPECT_NE(warning.find("--index codes:k=2,v=2, or with a context of "), std::string::npos)
      << warning;
}

// Layers with a window take their rings, 8192 tokens or all of a shorter context, in place of codes and of sink and
// window.
TEST(GpuMemory, SlidingLayersTakeTheirRings) {
  const Folder8B folder;
  const auto session = [&](uint32_t window, uint32_t sliding, uint64_t tokens) {
    GpuMemoryRequest request = request_of(folder, 40 * kGiB, tokens, "flat");
    request.model.windows.assign(32, 0);
    std::fill_n(request.model.windows.begin(), sliding, window);
    return plan_gpu_memory(request).session;
  };
  const uint64_t token = 2 * 1024 * 2;  // of one layer, K and V
  const double more = static_cast<double>(session(8192, 16, 60000) - session(4096, 16, 60000));
  EXPECT_NEAR(more, 16.0 * 4096 * static_cast<double>(token), 1e5);
  EXPECT_EQ(session(4096, 16, 2000), session(8192, 16, 2000)) << "no more than the context";
  EXPECT_GT(session(4096, 32, 60000), 32U * 8192 * token) << "where all layers slide, too";
}

TEST(GpuMemory, RecordingTakesNoSession) {
  const Folder8B folder;
  GpuMemoryRequest request = request_of(folder, 24 * kGiB, 131072);
  request.session = false;
  const GpuMemoryPlan plan = plan_gpu_memory(request);
  EXPECT_EQ(plan.session, 0U);
  EXPECT_EQ(plan.steps, 0U);
}

TEST(GpuMemory, IsRefusedBeforeAnythingIsLoaded) {
  const Folder8B folder;
  write_file(folder.path() / "ids.txt", std::string("1 2 3"));
  const std::string ids = folder.path() / "ids.txt";
  const auto refused = [&](const std::vector<std::string>& args, const std::string& text) {
    expect_failure(run_keyhole(args), 2, text);
  };
  const std::string model = folder.path();
  refused({"decode", "--model", model, "--tokens", ids, "--gpu-memory", "15GiB"}, "of weights");
  refused({"record", "--model", model, "--tokens", ids, "--queries", "1", "--out",
           folder.path() / "trace", "--gpu-memory", "15GiB"},
          "of weights");
  // Text needs a vocabulary, which the bundled model has.
  refused({"eval", "--task", "kv", "--length", "8k", "--gpu-memory", "1MiB"}, "of weights");
  refused({"decode", "--tokens", ids, "--device", "host", "--gpu-memory", "15GiB"},
          "--device host");
  refused({"decode", "--tokens", ids, "--gpu-memory", "much"}, "much");
}

}  // namespace
}  // namespace keyhole::tools
