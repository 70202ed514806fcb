// Loading Hugging Face folders: every dtype and layout gives the same weights; every fault is named.
#include "tools/llama/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/tools/llama/synthetic_model.h"
#include "tools/llama/read_ahead.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

/// Rows [first, first + tensor rows) of `matrix` are the tensor's.
void expect_rows(const Matrix& matrix, size_t first, const SyntheticTensor& tensor) {
  ASSERT_EQ(matrix.cols, tensor.shape[1]);
  ASSERT_LE(first + tensor.shape[0], matrix.rows);
  std::vector<float> rows(tensor.values.size());
  matrix.rows_to_f32(first, first + tensor.shape[0], rows.data());
  for (size_t i = 0; i < tensor.values.size(); ++i) {
    ASSERT_EQ(rows[i], static_cast<float>(tensor.values[i])) << i;
  }
}

std::string load_error(const std::filesystem::path& folder) {
  return error_of([&] { (void)load_llama(folder); });
}

class EveryDtype : public ::testing::TestWithParam<ElementType> {};

TEST_P(EveryDtype, GivesTheSameWeightsFromOneFileAndFromShards) {
  const SyntheticTensors tensors = random_weights(small_config(), GetParam(), 3);
  for (const size_t shards : {1, 3}) {
    const TemporaryFolder folder;
    write_model(folder.path(), small_config(), tensors, GetParam(), shards);
    const LlamaModel model = load_llama(folder.path());
    expect_rows(model.embedding, 0, tensors.at("model.embed_tokens.weight"));
    expect_rows(model.output_projection(), 0, tensors.at("lm_head.weight"));
    ASSERT_EQ(model.layers.size(), 3U);
    for (size_t layer = 0; layer < 3; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      const LayerWeights& weights = model.layers[layer];
      expect_rows(weights.qkv, 0, tensors.at(prefix + "self_attn.q_proj.weight"));
      expect_rows(weights.qkv, 6 * 64, tensors.at(prefix + "self_attn.k_proj.weight"));
      expect_rows(weights.qkv, 8 * 64, tensors.at(prefix + "self_attn.v_proj.weight"));
      expect_rows(weights.output, 0, tensors.at(prefix + "self_attn.o_proj.weight"));
      expect_rows(weights.gate_up, 0, tensors.at(prefix + "mlp.gate_proj.weight"));
      expect_rows(weights.gate_up, 40, tensors.at(prefix + "mlp.up_proj.weight"));
      expect_rows(weights.down, 0, tensors.at(prefix + "mlp.down_proj.weight"));
      EXPECT_EQ(weights.qkv.rows, 10U * 64U);
      EXPECT_EQ(weights.gate_up.rows, 80U);
    }
  }
}

TEST_P(EveryDtype, StaysAsTheFileHasIt) {
  const SyntheticTensors tensors = random_weights(small_config(), GetParam(), 3);
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, GetParam());
  const LlamaModel model = load_llama(folder.path());
  size_t matrices = 0;
  model.for_each_matrix([&](const Matrix& matrix) {
    ++matrices;
    EXPECT_EQ(matrix.bytes(), matrix.rows * matrix.cols * element_size(GetParam()));
    for (const MatrixPart& part : matrix.parts) EXPECT_EQ(part.type, GetParam());
  });
  EXPECT_EQ(matrices, 2U + 3 * 4);
  EXPECT_TRUE(model.aligned.empty());
}

TEST_P(EveryDtype, MultipliesAcrossTheBordersOfParts) {
  const SyntheticTensors tensors = random_weights(small_config(), GetParam(), 3);
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, GetParam());
  const LlamaModel model = load_llama(folder.path());
  const Matrix& qkv = model.layers[1].qkv;
  std::vector<float> weights(qkv.rows * qkv.cols), x(qkv.cols), y(qkv.rows);
  qkv.rows_to_f32(0, qkv.rows, weights.data());
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.25F * static_cast<float>(i) - 2.0F;
  Team team(2);
  multiply(qkv, x.data(), team, y.data());
  for (size_t row = 0; row < qkv.rows; ++row) {
    double expected = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
      expected += static_cast<double>(weights[row * qkv.cols + i]) * x[i];
    }
    ASSERT_NEAR(y[row], expected, 1e-4) << row;
  }
  // Any range of rows, also one that begins in one part and ends in another.
  std::vector<float> some(3 * qkv.cols);
  qkv.rows_to_f32(6 * 64 - 1, 6 * 64 + 2, some.data());
  EXPECT_TRUE(std::equal(some.begin(), some.end(), weights.begin() + (6 * 64 - 1) * qkv.cols));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, EveryDtype,
                         ::testing::Values(ElementType::f32, ElementType::f16, ElementType::bf16),
                         [](const auto& dtype) { return element_name(dtype.param); });

TEST(LoadLlama, ReadsTensorsThatAreNotAligned) {
  const SyntheticTensors tensors = random_weights(small_config(), ElementType::f32, 3);
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, ElementType::f32);
  // One blank more in the header moves every tensor by a byte.
  const std::filesystem::path path = folder.path() / "model.safetensors";
  std::string bytes = read_file(path);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  bytes.insert(8 + length, " ");
  ++length;
  std::memcpy(bytes.data(), &length, sizeof length);
  write_file(path, bytes);
  const LlamaModel model = load_llama(folder.path());
  EXPECT_FALSE(model.aligned.empty());
  expect_rows(model.embedding, 0, tensors.at("model.embed_tokens.weight"));
  expect_rows(model.layers[2].down, 0, tensors.at("model.layers.2.mlp.down_proj.weight"));
}

TEST(ReadAhead, TellsHowFarItIs) {
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), random_weights(small_config(), ElementType::bf16, 3),
              ElementType::bf16, 2);
  const LlamaModel model = load_llama(folder.path());
  uint64_t expected = 0;
  model.for_each_matrix([&](const Matrix& matrix) { expected += matrix.bytes(); });
  Team team(2);
  uint64_t last = 0;
  read_ahead(model, team, [&](uint64_t done, uint64_t total) {
    EXPECT_EQ(total, expected);
    EXPECT_GE(done, last);
    last = done;
  });
  EXPECT_EQ(last, expected);
}

TEST(LoadLlama, TiedOutputIsTheEmbedding) {
  json config = small_config();
  config["tie_word_embeddings"] = true;
  SyntheticTensors tensors = random_weights(config, ElementType::f32, 1);
  const TemporaryFolder folder;
  write_model(folder.path(), config, tensors, ElementType::f32);
  const LlamaModel model = load_llama(folder.path());
  EXPECT_EQ(&model.output_projection(), &model.embedding);

  // Some exporters store the tied matrix once more.
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"];
  write_model(folder.path(), config, tensors, ElementType::f32);
  EXPECT_EQ(load_error(folder.path()), "");
}

TEST(LoadLlama, NamesAMissingTensor) {
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
                           "model.layers.2.mlp.up_proj.weight"}) {
    SyntheticTensors tensors = random_weights(small_config(), ElementType::f32, 1);
    tensors.erase(name);
    const TemporaryFolder folder;
    write_model(folder.path(), small_config(), tensors, ElementType::f32);
    const std::string error = load_error(folder.path());
    EXPECT_NE(error.find(name), std::string::npos) << error;
    EXPECT_NE(error.find("missing"), std::string::npos) << error;
  }
}

TEST(LoadLlama, NamesAWrongShapeAndTheShapeNeeded) {
  SyntheticTensors tensors = random_weights(small_config(), ElementType::f32, 1);
  std::swap(tensors["model.layers.1.self_attn.o_proj.weight"].shape[0],
            tensors["model.layers.1.self_attn.o_proj.weight"].shape[1]);
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, ElementType::f32);
  const std::string error = load_error(folder.path());
  EXPECT_NE(error.find("model.layers.1.self_attn.o_proj.weight"), std::string::npos) << error;
  EXPECT_NE(error.find("[384, 24]"), std::string::npos) << error;
  EXPECT_NE(error.find("[24, 384]"), std::string::npos) << error;
}

TEST(LoadLlama, RefusesADtypeThatIsNoWeight) {
  const SyntheticTensors tensors = random_weights(small_config(), ElementType::f32, 1);
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, ElementType::i8);
  const std::string error = load_error(folder.path());
  EXPECT_NE(error.find("I8"), std::string::npos) << error;
  EXPECT_NE(error.find("F32, F16, BF16"), std::string::npos) << error;
}

TEST(LoadLlama, RefusesWeightsThatItWouldIgnore) {
  SyntheticTensors tensors = random_weights(small_config(), ElementType::f32, 1);
  tensors["model.layers.0.self_attn.q_proj.bias"] = {{384}, std::vector<double>(384, 0.5)};
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, ElementType::f32);
  const std::string error = load_error(folder.path());
  EXPECT_NE(error.find("q_proj.bias"), std::string::npos) << error;

  // A buffer of old exporters, computed from config.json.
  tensors.erase("model.layers.0.self_attn.q_proj.bias");
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{32}, std::vector<double>(32, 0.5)};
  write_model(folder.path(), small_config(), tensors, ElementType::f32);
  EXPECT_EQ(load_error(folder.path()), "");
}

TEST(LoadLlama, NamesFoldersAndFilesThatAreNotThere) {
  EXPECT_NE(load_error("/nonexistent").find("/nonexistent: not a folder"), std::string::npos);
  const TemporaryFolder folder;
  EXPECT_NE(load_error(folder.path()).find("config.json"), std::string::npos);
  write_file(folder.path() / "config.json", small_config().dump());
  EXPECT_NE(load_error(folder.path()).find("model.safetensors.index.json"), std::string::npos);
}

TEST(LoadLlama, ChecksTheIndexOfShards) {
  const SyntheticTensors tensors = random_weights(small_config(), ElementType::f32, 1);
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, ElementType::f32, 2);
  const std::filesystem::path index = folder.path() / "model.safetensors.index.json";

  const json good = json::parse(read_file(index));
  json wrong = good;
  wrong["weight_map"]["model.norm.weight"] =
      good["weight_map"]["model.norm.weight"] == "model-0.safetensors" ? "model-1.safetensors"
                                                                       : "model-0.safetensors";
  write_file(index, wrong.dump());
  std::string error = load_error(folder.path());
  EXPECT_NE(error.find("model.norm.weight"), std::string::npos) << error;
  EXPECT_NE(error.find("does not hold it"), std::string::npos) << error;

  wrong = good;
  wrong["weight_map"].erase("model.norm.weight");
  write_file(index, wrong.dump());
  error = load_error(folder.path());
  EXPECT_NE(error.find("does not name tensor model.norm.weight"), std::string::npos) << error;

  write_file(index, good.dump());
  EXPECT_EQ(load_error(folder.path()), "");
  std::filesystem::remove(folder.path() / "model-1.safetensors");
  error = load_error(folder.path());
  EXPECT_NE(error.find("model-1.safetensors: this shard is missing"), std::string::npos) << error;

  write_file(index, "{}");
  EXPECT_NE(load_error(folder.path()).find("weight_map"), std::string::npos);
  write_file(index, "not json");
  EXPECT_NE(load_error(folder.path()).find("weight_map"), std::string::npos);
  for (const json& file : {json("../model-0.safetensors"), json(7), json("")}) {
    write_file(index, json{{"weight_map", {{"model.norm.weight", file}}}}.dump());
    EXPECT_NE(load_error(folder.path()).find("same folder"), std::string::npos) << file;
  }
}

TEST(LoadLlama, RefusesACutFile) {
  const SyntheticTensors tensors = random_weights(small_config(), ElementType::f32, 1);
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), tensors, ElementType::f32);
  const std::filesystem::path file = folder.path() / "model.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  EXPECT_NE(load_error(folder.path()).find("model.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools
