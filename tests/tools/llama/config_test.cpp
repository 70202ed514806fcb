// config.json: what is accepted, what its defaults are, and how each wrong field is named.
#include "tools/llama/config.h"

#include <gtest/gtest.h>

#include "tests/tools/llama/synthetic_model.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using testing::small_config;

LlamaConfig parse(const json& config) { return parse_llama_config(config.dump(), "config.json"); }

std::string parse_error(const std::string& text) {
  return error_of([&] { (void)parse_llama_config(text, "config.json"); });
}

TEST(LlamaConfig, ReadsEveryField) {
  const LlamaConfig config = parse(small_config());
  EXPECT_EQ(config.vocab_size, 37U);
  EXPECT_EQ(config.hidden_size, 24U);
  EXPECT_EQ(config.intermediate_size, 40U);
  EXPECT_EQ(config.layers, 3U);
  EXPECT_EQ(config.q_heads, 6U);
  EXPECT_EQ(config.kv_heads, 2U);
  EXPECT_EQ(config.head_dim, 64U);
  EXPECT_EQ(config.group(), 3U);
  EXPECT_EQ(config.max_context, 512U);
  EXPECT_DOUBLE_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_DOUBLE_EQ(config.rope_theta, 10000.0);
  EXPECT_EQ(config.rope_scaling.kind, RopeScaling::Kind::none);
  EXPECT_FALSE(config.tied_output);
  EXPECT_EQ(config.bos_token, 0U);
  EXPECT_EQ(config.eos_tokens, std::vector<uint32_t>{1});
}

TEST(LlamaConfig, FillsInWhatOlderFilesLeaveOut) {
  json config = small_config();
  for (const char* field : {"num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps",
                            "bos_token_id", "eos_token_id", "max_position_embeddings"}) {
    config.erase(field);
  }
  const LlamaConfig parsed = parse(config);
  EXPECT_EQ(parsed.kv_heads, 6U);  // multi-head attention
  EXPECT_EQ(parsed.head_dim, 4U);  // hidden_size / heads
  EXPECT_DOUBLE_EQ(parsed.rope_theta, 10000.0);
  EXPECT_FALSE(parsed.bos_token.has_value());
  EXPECT_TRUE(parsed.eos_tokens.empty());
}

TEST(LlamaConfig, KAndVAreStoredAsTheWeightsAre) {
  json config = small_config();
  EXPECT_EQ(kv_dtype_of(parse(config)), KEYHOLE_F16);  // not given
  for (const auto& [name, dtype] :
       {std::pair("bfloat16", KEYHOLE_BF16), {"float16", KEYHOLE_F16}, {"float32", KEYHOLE_F32}}) {
    config["torch_dtype"] = name;
    EXPECT_EQ(kv_dtype_of(parse(config)), dtype) << name;
    EXPECT_EQ(engine_config(parse(config)).kv_dtype, dtype) << name;
  }
  config["dtype"] = "bfloat16";  // newer files
  EXPECT_EQ(kv_dtype_of(parse(config)), KEYHOLE_BF16);
}

TEST(LlamaConfig, ReadsSeveralEndTokens) {
  json config = small_config();
  config["eos_token_id"] = {1, 5, 36};
  EXPECT_EQ(parse(config).eos_tokens, (std::vector<uint32_t>{1, 5, 36}));
}

TEST(LlamaConfig, ReadsRopeScalingInOldAndNewSpelling) {
  json config = small_config();
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(parse(config).rope_scaling.kind, RopeScaling::Kind::linear);
  EXPECT_DOUBLE_EQ(parse(config).rope_scaling.factor, 4.0);

  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  const RopeScaling scaling = parse(config).rope_scaling;
  EXPECT_EQ(scaling.kind, RopeScaling::Kind::llama3);
  EXPECT_DOUBLE_EQ(scaling.high_freq_factor, 4.0);
  EXPECT_EQ(scaling.original_context, 8192U);

  config.erase("rope_scaling");
  config.erase("rope_theta");
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500000.0}};
  EXPECT_DOUBLE_EQ(parse(config).rope_theta, 500000.0);
  EXPECT_EQ(parse(config).rope_scaling.kind, RopeScaling::Kind::none);
}

TEST(LlamaConfig, ItsContextGrowsWithRopeScaling) {
  json config = small_config();
  EXPECT_EQ(parse(config).longest_context(), 512U);
  // Linear scaling: the field is that of the model before it was stretched.
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(parse(config).longest_context(), 2048U);
  // Llama 3.1 counts the stretched context, 131072, although 8 times the original are 65536.
  config["max_position_embeddings"] = 131072;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  EXPECT_EQ(parse(config).longest_context(), 131072U);
  config["max_position_embeddings"] = 8192;
  EXPECT_EQ(parse(config).longest_context(), 65536U);
}

struct Refusal {
  const char* field;
  json value;
  const char* allowed;  // part of the text
};

TEST(LlamaConfig, NamesFieldValueAndWhatIsAllowed) {
  const std::vector<Refusal> refusals = {
      {"model_type", "mistral", "\"llama\""},
      {"hidden_act", "gelu", "\"silu\""},
      {"attention_bias", true, "false"},
      {"mlp_bias", true, "false"},
      {"quantization_config", {{"bits", 4}}, "none"},
      {"vocab_size", 0, "1 to 16777216"},
      {"vocab_size", -5, "1 to 16777216"},
      {"vocab_size", 37.5, "1 to 16777216"},
      {"vocab_size", "37", "1 to 16777216"},
      {"hidden_size", nullptr, "1 to 1048576"},
      {"num_hidden_layers", 4000000000U, "1 to 1024"},
      {"num_attention_heads", 7, "divisor of num_attention_heads = 7"},
      {"num_key_value_heads", 4, "divisor of num_attention_heads = 6"},
      {"head_dim", 63, "even"},
      {"rms_norm_eps", -1.0, "0 to 1"},
      {"rope_theta", 0.5, "1 to"},
      {"partial_rotary_factor", 0.5, "1"},
      {"tie_word_embeddings", 1, "true or false"},
      {"bos_token_id", 37, "vocab_size = 37"},
      {"eos_token_id", json::array({1, 99}), "vocab_size = 37"},
      {"rope_scaling", "llama3", "object"},
  };
  for (const Refusal& refusal : refusals) {
    json config = small_config();
    config[refusal.field] = refusal.value;
    const std::string error = parse_error(config.dump());
    EXPECT_NE(error.find("config.json: "), std::string::npos) << refusal.field << ": " << error;
    EXPECT_NE(error.find(refusal.allowed), std::string::npos) << refusal.field << ": " << error;
    if (std::string(refusal.field) != "num_attention_heads") {
      EXPECT_NE(error.find(refusal.field), std::string::npos) << error;
    }
  }
}

TEST(LlamaConfig, RefusesRopeScalingThatItCannotCompute) {
  const std::vector<std::pair<json, std::string>> refusals = {
      {{{"rope_type", "yarn"}, {"factor", 4.0}}, "rope_type is \"yarn\""},
      {{{"rope_type", "linear"}}, "factor is missing"},
      {{{"rope_type", "linear"}, {"factor", 0.0}}, "factor is 0"},
      {{{"rope_type", "llama3"},
        {"factor", 8.0},
        {"low_freq_factor", 1.0},
        {"high_freq_factor", 4.0}},
       "original_max_position_embeddings is missing"},
      {{{"rope_type", "llama3"},
        {"factor", 8.0},
        {"low_freq_factor", 4.0},
        {"high_freq_factor", 4.0},
        {"original_max_position_embeddings", 8192}},
       "more than low_freq_factor"},
  };
  for (const auto& [scaling, text] : refusals) {
    json config = small_config();
    config["rope_scaling"] = scaling;
    const std::string error = parse_error(config.dump());
    EXPECT_NE(error.find(text), std::string::npos) << error;
    EXPECT_NE(error.find("rope_scaling"), std::string::npos) << error;
  }
}

TEST(LlamaConfig, RefusesWhatIsNotJson) {
  EXPECT_NE(parse_error("{\"vocab_size\": ").find("not valid JSON"), std::string::npos);
  EXPECT_NE(parse_error("[]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(parse_error("").find("not valid JSON"), std::string::npos);
  const std::string text = small_config().dump();
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_NE(parse_error(text.substr(0, length)), "") << length;
  }
}

TEST(LlamaConfig, SaysThatAFileCannotBeOpened) {
  EXPECT_THROW((void)load_llama_config("/nonexistent/config.json"), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
