#include "tools/io/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "runtime/files/element.h"
#include "tests/normal.h"
#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

struct Recording {
  TraceInfo info;
  TraceWriter::Options options;
  // As a decoder holds them: K, V [n, Hkv, d], Q [m, Hq, d], one per layer.
  std::vector<std::vector<float>> k, v, q, training;
};

std::vector<float> normal(size_t count, std::mt19937& random) {
  keyhole::test::Normal<float> distribution;
  std::vector<float> out(count);
  for (float& x : out) x = distribution(random);
  return out;
}

Recording make_recording(std::mt19937& random) {
  Recording r;
  r.info.q_heads = 6;
  r.info.kv_heads = 2;
  r.info.head_dim = 16;
  r.info.scale = 0.3F;
  r.info.softcap = 50;
  r.info.rope = {500000, "llama3", 8, 1, 4, 8192};
  r.info.layers = {1, 4};
  r.info.tokens = 40;
  r.info.model = "some model";
  r.info.task = "kv";
  r.info.prompt = "\xc3\xa9t\xc3\xa9, \"quoted\"";
  r.info.seed = 0xfedcba9876543210ULL;
  r.options.query_positions = {35, 36, 37, 38, 39};
  r.options.training_positions = {0, 7, 7, 34};
  const size_t d = r.info.head_dim;
  for (size_t i = 0; i < r.info.layers.size(); ++i) {
    r.k.push_back(normal(size_t{r.info.tokens} * r.info.kv_heads * d, random));
    r.v.push_back(normal(size_t{r.info.tokens} * r.info.kv_heads * d, random));
    r.q.push_back(normal(r.options.query_positions.size() * r.info.q_heads * d, random));
    r.training.push_back(normal(r.options.training_positions.size() * r.info.q_heads * d, random));
  }
  return r;
}

void write(const std::filesystem::path& path, const Recording& r) {
  TraceWriter writer(path, r.info, r.options);
  const size_t d = r.info.head_dim;
  const size_t kv_width = r.info.kv_heads * d;
  const size_t q_width = r.info.q_heads * d;
  const size_t group_width = r.info.group() * d;
  for (size_t layer = 0; layer < r.info.layers.size(); ++layer) {
    for (uint32_t h = 0; h < r.info.kv_heads; ++h) {
      writer.write_head(
          {r.k[layer].data() + h * d, r.info.tokens, kv_width},
          {r.v[layer].data() + h * d, r.info.tokens, kv_width},
          {r.q[layer].data() + h * group_width, r.options.query_positions.size(), q_width},
          {r.training[layer].data() + h * group_width, r.options.training_positions.size(),
           q_width});
    }
  }
  writer.finish();
}

class TraceFile : public testing::Test {
 protected:
  TraceFile()
      : seed_(std::random_device{}()), random_(seed_), recording_(make_recording(random_)) {}

  // Every tensor of a good trace, to be changed and written again.
  struct Parts {
    std::map<std::string, std::string> metadata;
    std::vector<SafetensorsWriter::Declaration> layout;
    std::vector<std::vector<std::byte>> bytes;
  };

  Parts parts() {
    write(path_, recording_);
    const SafetensorsFile file(path_);
    Parts out;
    out.metadata = file.metadata();
    for (const auto& [name, view] : file.tensors()) {
      out.layout.push_back({name, view.type, view.shape});
      out.bytes.emplace_back(view.bytes.begin(), view.bytes.end());
    }
    return out;
  }

  std::string error_of_parts(const Parts& parts) {
    SafetensorsWriter writer(path_, parts.layout, parts.metadata);
    for (const auto& bytes : parts.bytes) writer.write(bytes);
    writer.finish();
    return error_of([&] { (void)Trace::open(path_); });
  }

  static size_t find(const Parts& parts, const std::string& name) {
    for (size_t i = 0; i < parts.layout.size(); ++i) {
      if (parts.layout[i].name == name) return i;
    }
    throw std::runtime_error("no tensor " + name);
  }

  unsigned seed_;
  std::mt19937 random_;
  Recording recording_;
  TemporaryFolder folder_;
  std::filesystem::path path_ = folder_ / "t.safetensors";
};

TEST_F(TraceFile, KeepsEveryElementAndWord) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  for (const ElementType kv_type : {ElementType::f32, ElementType::f16, ElementType::bf16}) {
    recording_.options.kv_type = kv_type;
    write(path_, recording_);
    const Trace trace = Trace::open(path_);

    const TraceInfo& info = trace.info();
    EXPECT_EQ(info.q_heads, 6U);
    EXPECT_EQ(info.kv_heads, 2U);
    EXPECT_EQ(info.head_dim, 16U);
    EXPECT_EQ(info.scale, 0.3F);
    EXPECT_EQ(info.softcap, 50);
    EXPECT_EQ(info.rope.theta, 500000);
    EXPECT_EQ(info.rope.scaling, "llama3");
    EXPECT_EQ(info.rope.factor, 8);
    EXPECT_EQ(info.rope.low_freq_factor, 1);
    EXPECT_EQ(info.rope.high_freq_factor, 4);
    EXPECT_EQ(info.rope.original_context, 8192U);
    EXPECT_EQ(info.layers, recording_.info.layers);
    EXPECT_EQ(info.tokens, 40U);
    EXPECT_EQ(info.model, "some model");
    EXPECT_EQ(info.task, "kv");
    EXPECT_EQ(info.prompt, recording_.info.prompt);
    EXPECT_EQ(info.seed, recording_.info.seed);
    EXPECT_TRUE(std::ranges::equal(trace.query_positions(), recording_.options.query_positions));
    EXPECT_TRUE(
        std::ranges::equal(trace.training_positions(), recording_.options.training_positions));

    ASSERT_EQ(trace.heads().size(), 4U);
    const double relative = kv_type == ElementType::f32   ? 0
                            : kv_type == ElementType::f16 ? 0x1p-11
                                                          : 0x1p-8;
    for (size_t at = 0; at < 4; ++at) {
      const TraceHead& head = trace.heads()[at];
      const size_t layer = at / 2;
      const size_t h = at % 2;
      EXPECT_EQ(head.layer, recording_.info.layers[layer]);
      EXPECT_EQ(head.kv_head, h);
      const std::vector<float> keys = head.keys.to_f32();
      const std::vector<float> values = head.values->to_f32();
      for (size_t i = 0; i < 40; ++i) {
        for (size_t j = 0; j < 16; ++j) {
          const float k = recording_.k[layer][(i * 2 + h) * 16 + j];
          const float v = recording_.v[layer][(i * 2 + h) * 16 + j];
          ASSERT_NEAR(keys[i * 16 + j], k, std::abs(k) * relative + 1e-7 * (relative != 0));
          ASSERT_NEAR(values[i * 16 + j], v, std::abs(v) * relative + 1e-7 * (relative != 0));
        }
      }
      // Query [i, j] of KV head h is query head h * g + j.
      const std::vector<float> queries = head.queries.to_f32();
      const std::vector<float> training = head.training_queries->to_f32();
      for (size_t j = 0; j < 3; ++j) {
        for (size_t x = 0; x < 16; ++x) {
          for (size_t i = 0; i < 5; ++i) {
            ASSERT_EQ(queries[(i * 3 + j) * 16 + x],
                      recording_.q[layer][(i * 6 + h * 3 + j) * 16 + x]);
          }
          for (size_t i = 0; i < 4; ++i) {
            ASSERT_EQ(training[(i * 3 + j) * 16 + x],
                      recording_.training[layer][(i * 6 + h * 3 + j) * 16 + x]);
          }
        }
      }
    }
  }
}

TEST_F(TraceFile, MayLackTrainingQueries) {
  recording_.options.training_positions.clear();
  for (auto& training : recording_.training) training.clear();
  write(path_, recording_);
  const Trace trace = Trace::open(path_);
  EXPECT_TRUE(trace.training_positions().empty());
  EXPECT_FALSE(trace.heads().front().training_queries.has_value());
}

TEST_F(TraceFile, NamesATensorOfAnotherShape) {
  Parts p = parts();
  const size_t at = find(p, "layer.4.kv.1.values");
  p.layout[at].shape = {20, 32};
  const std::string error = error_of_parts(p);
  EXPECT_NE(error.find("t.safetensors"), std::string::npos) << error;
  EXPECT_NE(error.find("layer.4.kv.1.values"), std::string::npos) << error;
  EXPECT_NE(error.find("[20, 32]"), std::string::npos) << error;
  EXPECT_NE(error.find("[40, 16]"), std::string::npos) << error;
}

TEST_F(TraceFile, NamesATensorThatIsMissing) {
  Parts p = parts();
  p.layout[find(p, "layer.1.kv.0.keys")].name = "layer.1.kv.9.keys";
  EXPECT_NE(error_of_parts(p).find("\"layer.1.kv.0.keys\""), std::string::npos);
}

TEST_F(TraceFile, NamesATensorOfIntegers) {
  Parts p = parts();
  p.layout[find(p, "layer.1.kv.0.queries")].type = ElementType::i32;
  EXPECT_NE(error_of_parts(p).find("I32"), std::string::npos);
}

TEST_F(TraceFile, NamesMetadataThatAreMissingOrWrong) {
  const Parts good = parts();
  const std::pair<const char*, const char*> wrong[] = {
      {"keyhole_trace", "2"},   {"q_heads", "0"},       {"q_heads", "6x"}, {"kv_heads", "4"},
      {"kv_heads", "-2"},       {"head_dim", ""},       {"scale", "0"},    {"scale", "nan"},
      {"softcap", "-1"},        {"rope_theta", "base"}, {"layers", "4,1"}, {"layers", ""},
      {"layers", "1,,4"},       {"tokens", "0"},        {"seed", "1e9"},   {"rope_scaling", "yarn"},
      {"tokens", "4294967296"}, {"head_dim", "16.0"}};
  for (const auto& [key, value] : wrong) {
    Parts p = good;
    p.metadata[key] = value;
    EXPECT_FALSE(error_of_parts(p).empty()) << key << " = " << value;
  }
  for (const auto& [key, value] : good.metadata) {
    Parts p = good;
    p.metadata.erase(key);
    EXPECT_NE(error_of_parts(p).find(key), std::string::npos) << key;
  }
}

TEST_F(TraceFile, RefusesPositionsThatCannotBe) {
  const auto refused = [&](std::vector<uint32_t> queries, std::vector<uint32_t> training) {
    recording_.options.query_positions = std::move(queries);
    recording_.options.training_positions = std::move(training);
    return error_of([&] { TraceWriter(path_, recording_.info, recording_.options); });
  };
  EXPECT_NE(refused({}, {}).find("queries is 0"), std::string::npos);
  EXPECT_NE(refused({5, 40}, {}).find("40"), std::string::npos);
  EXPECT_NE(refused({6, 5}, {}).find("6 before 5"), std::string::npos);
  EXPECT_NE(refused({5}, {5}).find("training"), std::string::npos);
  EXPECT_EQ(refused({5}, {4}), "");
}

TEST_F(TraceFile, RefusesToWriteWhatIsNotFiniteInItsType) {
  const auto refused = [&](float value) {
    recording_.v[1][17] = value;
    return error_of([&] { write(path_, recording_); });
  };
  for (const float value : {NAN, INFINITY, -INFINITY, 65520.0F}) {
    const std::string error = refused(value);
    EXPECT_NE(error.find("layer.4.kv.1.values"), std::string::npos) << value << ": " << error;
  }
  EXPECT_EQ(refused(65504.0F), "");
  recording_.options.kv_type = ElementType::f32;
  EXPECT_EQ(refused(65520.0F), "");
}

TEST_F(TraceFile, RefusesHeadsThatDoNotFitTheDeclaration) {
  TraceWriter writer(path_, recording_.info, recording_.options);
  const std::string error = error_of([&] {
    writer.write_head({recording_.k[0].data(), 39, 32}, {}, {}, {});
  });
  EXPECT_NE(error.find("39"), std::string::npos) << error;
  EXPECT_NE(error.find("40"), std::string::npos) << error;
  EXPECT_FALSE(error_of([&] { writer.finish(); }).empty());
  EXPECT_FALSE(std::filesystem::exists(path_));
}

}  // namespace
}  // namespace keyhole::tools
