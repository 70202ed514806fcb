// config.json: what is accepted, what its defaults are, and how each wrong field is named.
#include "tools/llama/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "tests/tools/llama/synthetic_model.h"
#include "tools/llama/engine_config.h"

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
  EXPECT_DOUBLE_EQ(config.rope.theta, 10000.0);
  EXPECT_EQ(config.rope.scaling.kind, RopeScaling::Kind::none);
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
  EXPECT_DOUBLE_EQ(parsed.rope.theta, 10000.0);
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
  EXPECT_EQ(parse(config).rope.scaling.kind, RopeScaling::Kind::linear);
  EXPECT_DOUBLE_EQ(parse(config).rope.scaling.factor, 4.0);

  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  const RopeScaling scaling = parse(config).rope.scaling;
  EXPECT_EQ(scaling.kind, RopeScaling::Kind::llama3);
  EXPECT_DOUBLE_EQ(scaling.high_freq_factor, 4.0);
  EXPECT_EQ(scaling.original_context, 8192U);

  config.erase("rope_scaling");
  config.erase("rope_theta");
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500000.0}};
  EXPECT_DOUBLE_EQ(parse(config).rope.theta, 500000.0);
  EXPECT_EQ(parse(config).rope.scaling.kind, RopeScaling::Kind::none);
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
  config["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 8192}};
  EXPECT_EQ(parse(config).longest_context(), 32768U);
}

struct Refusal {
  const char* field;
  json value;
  const char* allowed;  // part of the text
};

TEST(LlamaConfig, NamesFieldValueAndWhatIsAllowed) {
  const std::vector<Refusal> refusals = {
      {"model_type", "mixtral", "\"llama\", \"mistral\", \"qwen2\""},
      {"hidden_act", "gelu", "\"silu\""},
      {"use_bidirectional_attention", true, "false"},
      {"attn_logit_softcapping", 50.0, "null for model_type \"llama\""},
      {"layer_types", {"full_attention"}, "a list of 3 names"},
      {"layer_types", json::array({"full_attention", "full_attention", "chunked_attention"}),
       "\"full_attention\", \"sliding_attention\""},
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

TEST(LlamaConfig, NamesWhatOfARopeScalingIsNotRead) {
  json config = small_config();
  EXPECT_TRUE(parse(config).unread_rope.empty());
  config["rope_scaling"] = {{"type", "yarn"},      {"factor", 4.0},        {"finetuned", true},
                            {"attn_factor", 0.8},  {"beta_fast", 32.0},    {"mscale", 1.0},
                            {"mscale_all_dim", 1}, {"extra", nullptr},     {"truncate", false},
                            {"beta_slow", 1},      {"attention_factor", 1}};
  EXPECT_EQ(parse(config).unread_rope, std::vector<std::string>{"attn_factor"});
  // What another kind reads is as unread as what none does.
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}, {"beta_fast", 32.0}, {"alpha", 1}};
  EXPECT_EQ(parse(config).unread_rope, (std::vector<std::string>{"alpha", "beta_fast"}));
  config.erase("rope_scaling");
  config["rope_parameters"] = {{"rope_type", "default"}, {"mrope_section", {1, 2}}};
  EXPECT_EQ(parse(config).unread_rope, std::vector<std::string>{"mrope_section"});
}

TEST(LlamaConfig, RefusesRopeScalingThatItCannotCompute) {
  const std::vector<std::pair<json, std::string>> refusals = {
      {{{"rope_type", "dynamic"}, {"factor", 4.0}}, "rope_type is \"dynamic\""},
      {{{"rope_type", "longrope"}, {"factor", 4.0}}, "short_factor is missing"},
      {{{"rope_type", "yarn"}, {"factor", 4.0}, {"beta_fast", 1.0}}, "more than beta_slow"},
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

json config_of(const char* model_type) {
  json config = small_config();
  config["model_type"] = model_type;
  return config;
}

TEST(Families, AreWhatTheirConfigsSay) {
  LlamaConfig config = parse(config_of("qwen2"));
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.output_bias);

  config = parse(config_of("qwen3"));
  EXPECT_TRUE(config.head_norms);
  EXPECT_FALSE(config.qkv_bias);

  json gemma = config_of("gemma2");
  config = parse(gemma);
  EXPECT_TRUE(config.norm_adds_one);
  EXPECT_TRUE(config.output_norms);
  EXPECT_TRUE(config.tied_output);
  EXPECT_EQ(config.activation, Activation::gelu_tanh);
  EXPECT_DOUBLE_EQ(config.embedding_scale, std::sqrt(24.0));
  EXPECT_DOUBLE_EQ(config.attention_scale, 1.0 / 16);  // query_pre_attn_scalar 256
  EXPECT_DOUBLE_EQ(config.attention_softcap, 50.0);
  EXPECT_DOUBLE_EQ(config.final_softcap, 30.0);
  const keyhole_engine_config engine = engine_config(config);
  EXPECT_FLOAT_EQ(engine.scale, 1.0F / 16);
  EXPECT_FLOAT_EQ(engine.softcap, 50.0F);
  gemma["attn_logit_softcapping"] = nullptr;
  gemma["final_logit_softcapping"] = nullptr;
  EXPECT_EQ(parse(gemma).attention_softcap, 0.0);
  EXPECT_EQ(parse(gemma).final_softcap, 0.0);

  json phi = config_of("phi3");
  EXPECT_TRUE(parse(phi).fused_tensors);
  phi["partial_rotary_factor"] = 0.75;
  EXPECT_EQ(parse(phi).rope.dims, 48U);
  EXPECT_EQ(engine_config(parse(phi)).rope_theta, 10000.0F);
  EXPECT_EQ(engine_config(parse(phi)).rope_dim, 48U);
  phi["max_position_embeddings"] = 131072;
  for (const char* name : {"su", "yarn", "longrope"}) {  // all the same in this family
    json& scaling = phi["rope_scaling"];
    scaling = {{"type", name}, {"short_factor", std::vector<double>(24, 1.5)}};
    EXPECT_NE(parse_error(phi.dump()).find("long_factor is missing"), std::string::npos) << name;
    scaling["long_factor"] = std::vector<double>(23, 3.0);
    EXPECT_NE(parse_error(phi.dump()).find("a list of 24 numbers"), std::string::npos) << name;
    scaling["long_factor"] = std::vector<double>(24, 3.0);
    const RopeScaling parsed = parse(phi).rope.scaling;
    EXPECT_EQ(parsed.kind, RopeScaling::Kind::longrope) << name;
    EXPECT_EQ(parsed.original_context, 4096U);
    EXPECT_DOUBLE_EQ(parsed.attention_factor, std::sqrt(1.0 + std::log(32.0) / std::log(4096.0)));
    scaling["long_mscale"] = 1.2;
    EXPECT_NE(parse_error(phi.dump()).find("long_mscale"), std::string::npos) << name;
  }
}

TEST(Families, WindowsOfLayers) {
  using Windows = std::vector<uint32_t>;
  json mistral = config_of("mistral");
  EXPECT_EQ(parse(mistral).windows, (Windows{0, 0, 0}));  // 4096 hold the longest context, 512
  mistral["sliding_window"] = 100;
  EXPECT_EQ(parse(mistral).windows, (Windows{100, 100, 100}));
  EXPECT_EQ(parse(mistral).full_layers(), 0U);
  EXPECT_EQ(engine_config(parse(mistral)).layers, 1U);
  mistral["sliding_window"] = nullptr;
  EXPECT_EQ(parse(mistral).windows, (Windows{0, 0, 0}));
  mistral["sliding_window"] = 0;
  EXPECT_NE(parse_error(mistral.dump()).find("sliding_window is 0"), std::string::npos);

  json qwen = config_of("qwen2");
  qwen["sliding_window"] = 100;
  qwen["max_window_layers"] = 1;
  EXPECT_EQ(parse(qwen).windows, (Windows{0, 0, 0}));
  qwen["use_sliding_window"] = true;
  EXPECT_EQ(parse(qwen).windows, (Windows{0, 100, 100}));
  qwen["layer_types"] = {"sliding_attention", "full_attention", "full_attention"};
  const LlamaConfig config = parse(qwen);
  EXPECT_EQ(config.windows, (Windows{100, 0, 0}));
  EXPECT_EQ(config.full_layers(), 2U);
  EXPECT_EQ(engine_config(config).layers, 2U);
  EXPECT_EQ(config.places_among_full(), (std::vector<std::optional<uint32_t>>{{}, 0U, 1U}));

  json gemma = config_of("gemma2");
  gemma["sliding_window"] = 100;
  EXPECT_EQ(parse(gemma).windows, (Windows{100, 0, 100}));

  // Mistral's layers are all alike.
  mistral["sliding_window"] = 100;
  mistral["layer_types"] = {"sliding_attention", "full_attention", "full_attention"};
  EXPECT_NE(parse_error(mistral.dump()).find("the same type for every layer"), std::string::npos);
}

TEST(Families, Gemma3HasTwoRopes) {
  json text = config_of("gemma3_text");
  text["num_hidden_layers"] = 7;
  text["sliding_window"] = 100;
  text["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  text.erase("rope_theta");
  LlamaConfig config = parse(text);
  EXPECT_EQ(config.windows, (std::vector<uint32_t>{100, 100, 100, 100, 100, 0, 100}));
  EXPECT_DOUBLE_EQ(config.rope.theta, 1e6);
  EXPECT_EQ(config.rope.scaling.kind, RopeScaling::Kind::linear);
  EXPECT_DOUBLE_EQ(config.sliding_rope.theta, 1e4);
  EXPECT_EQ(config.sliding_rope.scaling.kind, RopeScaling::Kind::none);
  EXPECT_EQ(config.rope_of(5).theta, 1e6);
  EXPECT_EQ(config.rope_of(6).theta, 1e4);
  EXPECT_EQ(config.longest_context(), 512U);  // its files count the scaling

  // With pictures: the text model lies inside, and most of it may be left out.
  const json outer = {{"model_type", "gemma3"},
                      {"eos_token_id", {1, 106}},
                      {"torch_dtype", "bfloat16"},
                      {"text_config",
                       {{"model_type", "gemma3_text"},
                        {"hidden_size", 2560},
                        {"intermediate_size", 10240},
                        {"num_hidden_layers", 34},
                        {"sliding_window", 1024}}},
                      {"vision_config", {{"hidden_size", 1152}}}};
  config = parse(outer);
  EXPECT_TRUE(config.has_pictures);
  EXPECT_EQ(config.vocab_size, 262208U);
  EXPECT_EQ(config.q_heads, 8U);
  EXPECT_EQ(config.kv_heads, 4U);
  EXPECT_EQ(config.head_dim, 256U);
  EXPECT_EQ(config.eos_tokens, (std::vector<uint32_t>{1, 106}));
  EXPECT_EQ(config.dtype, "bfloat16");
  EXPECT_EQ(config.full_layers(), 5U);
  EXPECT_NE(parse_error(R"({"model_type": "gemma3"})").find("text_config is missing"),
            std::string::npos);
  // Which transformers would ignore.
  json capped = outer;
  capped["text_config"]["final_logit_softcapping"] = 30.0;
  EXPECT_NE(parse_error(capped.dump()).find("text_config: final_logit_softcapping is 30"),
            std::string::npos);
}

TEST(Families, RefuseWhatTheyWouldIgnore) {
  for (const char* type : {"mistral", "qwen2", "phi3"}) {
    json config = config_of(type);
    config["attention_bias"] = true;
    EXPECT_NE(parse_error(config.dump()).find("attention_bias is true"), std::string::npos) << type;
    config = config_of(type);
    config["mlp_bias"] = true;
    EXPECT_NE(parse_error(config.dump()).find("mlp_bias is true"), std::string::npos) << type;
  }
  json gemma = config_of("gemma2");
  gemma["hidden_activation"] = "gelu";
  EXPECT_NE(parse_error(gemma.dump()).find("hidden_activation is \"gelu\""), std::string::npos);
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
