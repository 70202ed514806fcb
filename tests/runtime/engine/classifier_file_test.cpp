// Engines with a classifier file: sound files are used, all others refused with a status and a text.
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>

#include "keyhole/index.h"
#include "keyhole/save.h"
#include "runtime/files/element.h"
#include "runtime/files/safetensors.h"
#include "tests/normal.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

using Metadata = std::map<std::string, std::string>;

/// A file for small_engine() with two of its four heads, to be damaged before it is written.
struct Content {
  struct Part {
    ElementType type;
    std::vector<size_t> shape;
    std::vector<float> data;
  };
  Metadata metadata = {{"keyhole_classifiers", "1"}, {"q_heads", "4"},        {"kv_heads", "2"},
                       {"head_dim", "64"},           {"partitions", "6"},     {"hidden", "64"},
                       {"rope_theta", "0"},          {"rope_scaling", "none"}};
  std::map<std::string, Part> parts;

  Content() {
    std::mt19937 random(11);
    add_head(0, 1, random);
    add_head(1, 0, random);
  }
  void add_head(int layer, int kv_head, std::mt19937& random) {
    const std::string prefix =
        "layer." + std::to_string(layer) + ".kv." + std::to_string(kv_head) + ".";
    const auto add = [&](const char* name, ElementType type, std::vector<size_t> shape) {
      size_t n = 1;
      for (const size_t axis : shape) n *= axis;
      keyhole::test::Normal<float> normal(0.0F, 0.3F);
      std::vector<float> data(n);
      for (float& x : data) x = normal(random);
      parts[prefix + name] = {type, std::move(shape), std::move(data)};
    };
    add("centroids", ElementType::f32, {6, 64});
    add("offsets", ElementType::f32, {6});
    add("w1", ElementType::f16, {64, 64});
    add("b1", ElementType::f32, {64});
    add("w2", ElementType::f16, {6, 64});
    add("b2", ElementType::f32, {6});
    add("w3", ElementType::f16, {6, 64});
  }
  void write(const std::filesystem::path& path) const {
    std::vector<SafetensorsWriter::Declaration> layout;
    for (const auto& [name, part] : parts) layout.push_back({name, part.type, part.shape});
    SafetensorsWriter file(path, layout, metadata);
    for (const auto& [name, part] : parts) {
      std::vector<std::byte> bytes(part.data.size() * element_size(part.type));
      elements_from_f32(part.type, part.data, bytes);
      file.write(bytes);
    }
    file.finish();
  }
};

class ClassifierFile : public ::testing::Test {
 protected:
  /// The status of an engine made with this file.
  keyhole_status open(const std::string& path, keyhole_engine_config config = small_engine()) {
    config.classifiers = path.c_str();
    keyhole_engine* engine = nullptr;
    const keyhole_status status = keyhole_engine_create(&config, &engine);
    engine_.reset(engine);
    EXPECT_EQ(status == KEYHOLE_OK, engine != nullptr);
    return status;
  }
  keyhole_status open(const Content& content, keyhole_engine_config config = small_engine()) {
    content.write(path_);
    return open(path_.string(), config);
  }
  keyhole_status open_damaged(const std::function<void(Content&)>& damage) {
    Content content;
    damage(content);
    return open(content);
  }
  void write_bytes(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
  [[nodiscard]] std::string read_bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  TemporaryFolder folder_;
  std::filesystem::path path_ = folder_ / "classifiers.safetensors";
  EnginePtr engine_;
};

TEST_F(ClassifierFile, HeadsUseTheirOwn) {
  ASSERT_EQ(open(Content()), KEYHOLE_OK) << keyhole_last_error();
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  ASSERT_OK(keyhole_engine_get_config(engine_.get(), &config));
  EXPECT_EQ(config.classifiers, path_.string());
  std::filesystem::remove(path_);  // all of it has been read

  Numbers numbers(1);
  const auto keys = numbers.many(300 * 64);
  const keyhole_tensor k = tensor(keys, {300, 64});
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (uint32_t kv_head = 0; kv_head < 2; ++kv_head) {
      keyhole_index* index = nullptr;
      ASSERT_OK(keyhole_index_create(engine_.get(), "saap", layer, kv_head, &index));
      ASSERT_OK(keyhole_index_build(index, &k, nullptr, nullptr, nullptr, 4, nullptr, nullptr));
      keyhole_index_info info;
      keyhole_index_info_init(&info);
      ASSERT_OK(keyhole_index_get_info(index, &info));
      const bool trained =
          std::string(info.diagnostics).find("\"trained_partitions\": 1") != std::string::npos;
      EXPECT_EQ(trained, layer != kv_head) << info.diagnostics;
      keyhole_index_destroy(index);
    }
  }
}

TEST_F(ClassifierFile, ASessionOfSaapIndexesIsExactWhereAllIsProbed) {
  ASSERT_EQ(open(Content()), KEYHOLE_OK) << keyhole_last_error();
  auto config = small_session();
  config.index = "saap:probe=1024";
  const keyhole_engine_config engine = small_engine();
  Model model(engine);
  const Shape shape(engine);
  Numbers numbers(2);
  const auto session = make_session(engine_.get(), config);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    prefill_both(session.get(), model, shape, layer, 400, numbers);
  }
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  const std::string saved = (folder_ / "session").string();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    expect_exact(session.get(), model, shape, layer, numbers);
    prefill_both(session.get(), model, shape, layer, 100, numbers);
    expect_exact(session.get(), model, shape, layer, numbers);
  }
  ASSERT_OK(keyhole_session_save(session.get(), saved.c_str()));
  const SessionPtr owner = load_of(engine_.get(), saved);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    expect_exact(owner.get(), model, shape, layer, numbers);
  }
  // An engine without the file cannot know what the saved lists mean.
  const EnginePtr without = make_engine(small_engine());
  keyhole_session* foreign = nullptr;
  EXPECT_EQ(keyhole_session_load(without.get(), saved.c_str(), nullptr, &foreign), KEYHOLE_CORRUPT);
  expect_error_text("classifier");
}

TEST_F(ClassifierFile, AnotherModelsIsRefused) {
  const auto changed = [](const std::function<void(keyhole_engine_config&)>& change) {
    keyhole_engine_config config = small_engine();
    change(config);
    return config;
  };
  for (const keyhole_engine_config& config :
       {changed([](auto& c) { c.head_dim = 128; }), changed([](auto& c) { c.q_heads = 8; }),
        changed([](auto& c) { c.kv_heads = 4; }), changed([](auto& c) { c.layers = 1; }),
        changed([](auto& c) { c.rope_theta = 10000.0F; })}) {
    EXPECT_EQ(open(Content(), config), KEYHOLE_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(keyhole_last_error()).find(path_.string()), 0U) << keyhole_last_error();
  }
}

TEST_F(ClassifierFile, OfAnotherLayoutOfRopeIsRefused) {
  keyhole_engine_config config = small_engine();
  config.rope_theta = 10000.0F;
  Content content;
  content.metadata["rope_theta"] = "10000";
  EXPECT_EQ(open(content, config), KEYHOLE_OK);
  config.rope_interleaved = 1;
  EXPECT_EQ(open(content, config), KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("rope_interleaved");
}

TEST_F(ClassifierFile, WhatCannotBeReadIsAnIoError) {
  EXPECT_EQ(open((folder_ / "nothing").string()), KEYHOLE_IO);
  EXPECT_EQ(open(folder_.path().string()), KEYHOLE_IO);
}

TEST_F(ClassifierFile, AnotherVersionIsRefused) {
  EXPECT_EQ(open_damaged([](Content& c) { c.metadata["keyhole_classifiers"] = "2"; }),
            KEYHOLE_VERSION_MISMATCH);
}

TEST_F(ClassifierFile, ContradictionsAreCorrupt) {
  const std::function<void(Content&)> damages[] = {
      [](Content& c) { c.metadata.erase("keyhole_classifiers"); },
      [](Content& c) { c.metadata["keyhole_classifiers"] = "one"; },
      [](Content& c) { c.metadata.erase("partitions"); },
      [](Content& c) { c.metadata["partitions"] = "7"; },
      [](Content& c) { c.metadata["partitions"] = "18446744073709551616"; },
      [](Content& c) { c.metadata["hidden"] = "128"; },
      [](Content& c) { c.metadata["hidden"] = "-64"; },
      [](Content& c) { c.metadata["head_dim"] = ""; },
      [](Content& c) { c.metadata.erase("rope_theta"); },
      [](Content& c) { c.parts.erase("layer.0.kv.1.w2"); },
      [](Content& c) { c.parts["layer.0.kv.1.w1"].type = ElementType::bf16; },
      [](Content& c) { c.parts["layer.0.kv.1.b1"].type = ElementType::f16; },
      [](Content& c) {
        c.parts["layer.1.kv.0.w3"].shape = {64, 6};
      },
      [](Content& c) { c.parts["layer.1.kv.0.w1"].data[100] = NAN; },
      [](Content& c) { c.parts["layer.1.kv.0.w2"].data[100] = 1e6F; },
      [](Content& c) { c.parts["layer.1.kv.0.b2"].data[3] = INFINITY; },
      [](Content& c) { c.parts["layer.1.kv.0.centroids"].data[7] = NAN; },
  };
  for (size_t i = 0; i < std::size(damages); ++i) {
    EXPECT_EQ(open_damaged(damages[i]), KEYHOLE_CORRUPT) << "damage " << i;
    EXPECT_EQ(std::string(keyhole_last_error()).find(path_.string()), 0U) << keyhole_last_error();
  }
}

TEST_F(ClassifierFile, TensorsThatNoHeadHasAreRefused) {
  EXPECT_EQ(
      open_damaged([](Content& c) { c.parts["layer.9.kv.0.w1"] = c.parts["layer.0.kv.1.w1"]; }),
      KEYHOLE_INVALID_ARGUMENT);
}

TEST_F(ClassifierFile, EveryTruncationIsCorrupt) {
  Content().write(path_);
  const std::string bytes = read_bytes();
  for (size_t size = 0; size < bytes.size(); size += size < 64 ? 1 : bytes.size() / 150) {
    write_bytes(bytes.substr(0, size));
    ASSERT_EQ(open(path_.string()), KEYHOLE_CORRUPT) << size << " bytes";
  }
}

TEST_F(ClassifierFile, AbsurdHeaderLengthsCostNoMemory) {
  Content().write(path_);
  std::string bytes = read_bytes();
  for (const uint64_t length : {~uint64_t{0}, uint64_t{1} << 62, uint64_t{1} << 40, uint64_t{1}}) {
    std::memcpy(bytes.data(), &length, sizeof length);
    write_bytes(bytes);
    EXPECT_EQ(open(path_.string()), KEYHOLE_CORRUPT);
  }
}

TEST_F(ClassifierFile, MutationsAreRefusedOrHarmless) {
  Content().write(path_);
  const std::string sound = read_bytes();
  uint64_t header = 0;
  std::memcpy(&header, sound.data(), sizeof header);
  Numbers numbers(3);
  const auto keys = numbers.many(200 * 64);
  const keyhole_tensor k = tensor(keys, {200, 64});
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::string bytes = sound;
    for (uint32_t i = 0; i <= random() % 3; ++i) {
      const size_t end = random() % 2 == 0 ? 8 + header : bytes.size();
      bytes[random() % end] = static_cast<char>(random());
    }
    write_bytes(bytes);
    const keyhole_status status = open(path_.string());
    if (status != KEYHOLE_OK) {
      EXPECT_TRUE(status == KEYHOLE_CORRUPT || status == KEYHOLE_INVALID_ARGUMENT ||
                  status == KEYHOLE_VERSION_MISMATCH)
          << "seed " << seed << ": " << status;
      EXPECT_STRNE(keyhole_last_error(), "");
      continue;
    }
    keyhole_index* index = nullptr;
    ASSERT_OK(keyhole_index_create(engine_.get(), "saap:probe=2", 0, 1, &index));
    ASSERT_OK(keyhole_index_build(index, &k, nullptr, nullptr, nullptr, 0, nullptr, nullptr));
    std::vector<uint32_t> ids(2 * 100);
    std::vector<uint32_t> counts(2);
    const auto q = numbers.many(2 * 64);
    const keyhole_tensor queries = tensor(q, {2, 64});
    ASSERT_OK(keyhole_index_search(index, &queries, nullptr, ids.data(), nullptr, counts.data(),
                                   nullptr));
    keyhole_index_destroy(index);
  }
}

}  // namespace
}  // namespace keyhole::test
