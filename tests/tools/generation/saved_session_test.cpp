// Sessions on disk: what comes back, and what is refused.
#include "tools/generation/saved_session.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <random>

#include "runtime/files/json.h"
#include "tests/normal.h"
#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

LlamaConfig small_shape() {
  LlamaConfig config;
  config.layers = 2;
  config.q_heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.vocab_size = 100;
  config.dtype = "float32";
  config.attention_scale = 0.125;
  config.windows.assign(config.layers, 0);
  return config;
}

KeyholeCacheOptions small_options() {
  KeyholeCacheOptions options;
  options.max_tokens = 200;
  options.sink = 4;
  options.window = 16;
  options.index = "flat";
  options.threads = 1;
  return options;
}

KeyholeCache filled_cache(size_t tokens, uint64_t seed) {
  const LlamaConfig config = small_shape();
  KeyholeCache cache(config, small_options());
  std::mt19937_64 random(seed);
  keyhole::test::Normal<float> normal;
  std::vector<float> rows(tokens * config.q_width());
  for (float& x : rows) x = normal(random);
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    cache.prefill({layer, 0, tokens, rows.data(), rows.data() + layer, rows.data() + 7});
  }
  cache.build(nullptr, nullptr);
  return cache;
}

SavedSession about(std::vector<uint32_t> tokens, uint32_t taken) {
  SavedSession session;
  session.model = "small";
  session.identity = {"0123456789abcdef", "none"};
  session.kv_dtype = "f32";
  session.tokens = std::move(tokens);
  session.taken = taken;
  return session;
}

mode_t mode_of(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 0777U;
}

std::vector<float> attend(KeyholeCache& cache) {
  std::vector<float> q(small_shape().q_width(), 0.5F);
  std::vector<float> out(q.size());
  cache.attend(1, q.data(), out.data());
  return out;
}

TEST(SavedSession, ComesBackAsItWas) {
  const TemporaryFolder folder;
  const fs::path path = folder / "talk.session";
  KeyholeCache cache = filled_cache(60, 1);
  std::vector<uint32_t> tokens(61, 7);
  tokens[3] = 99;
  save_session(path, cache, about(tokens, 60));
  const SavedSession read = read_session(path);
  EXPECT_EQ(read.model, "small");
  EXPECT_EQ(read.identity.weights, "0123456789abcdef");
  EXPECT_EQ(read.kv_dtype, "f32");
  EXPECT_EQ(read.tokens, tokens);
  EXPECT_EQ(read.taken, 60U);
  const KeyholeCache::Contents contents = contents_of(read);
  KeyholeCache loaded = KeyholeCache::load(small_shape(), small_options(), read.kv, &contents);
  EXPECT_EQ(loaded.layer_tokens(0).total, 60U);
  EXPECT_EQ(loaded.config().window, 16U);
  EXPECT_STREQ(loaded.config().index, "flat");
  EXPECT_EQ(attend(loaded), attend(cache));
}

TEST(SavedSession, MayHoldTokensThatAreAllToBeTakenYet) {
  const TemporaryFolder folder;
  const fs::path path = folder / "talk.session";
  KeyholeCache cache = filled_cache(60, 1);
  cache.truncate(0);  // as a prompt leaves it that was to be taken anew
  SavedSession session = about(std::vector<uint32_t>(61, 7), 0);
  session.rope_tokens = 300;
  save_session(path, cache, session);
  const SavedSession read = read_session(path);
  EXPECT_EQ(read.tokens, session.tokens);
  EXPECT_EQ(read.rope_tokens, session.rope_tokens);
  const KeyholeCache::Contents contents = contents_of(read);
  KeyholeCache loaded = KeyholeCache::load(small_shape(), small_options(), read.kv, &contents);
  EXPECT_EQ(loaded.layer_tokens(0).total, 0U);
}

TEST(SavedSession, TheSessionFileSaysWhatItHolds) {
  const TemporaryFolder folder;
  const fs::path path = folder / "talk.session";
  KeyholeCache cache = filled_cache(60, 1);
  save_session(path, cache, about(std::vector<uint32_t>(61, 7), 60));
  SavedSession other = read_session(path);
  const auto error = [&] {
    const KeyholeCache::Contents contents = contents_of(other);
    return error_of(
        [&] { (void)KeyholeCache::load(small_shape(), small_options(), other.kv, &contents); });
  };
  EXPECT_EQ(error(), "");
  other.tokens[59] = 8;
  EXPECT_NE(error().find("not the first of the 60"), std::string::npos) << error();
  other.tokens[59] = 7;
  other.identity.weights = "fedcba9876543210";
  EXPECT_NE(error().find("fedcba9876543210"), std::string::npos) << error();
}

TEST(SavedSession, HoldsSlidingWindows) {
  const TemporaryFolder folder;
  const fs::path path = folder / "talk.session";
  LlamaConfig config = small_shape();
  config.layers = 3;
  config.windows = {9, 0, 30};
  KeyholeCache cache(config, small_options());
  std::mt19937_64 random(4);
  keyhole::test::Normal<float> normal;
  std::vector<float> rows(60 * config.q_width());
  for (float& x : rows) x = normal(random);
  for (uint32_t layer = 0; layer < 3; ++layer) {
    cache.prefill({layer, 0, 60, rows.data(), rows.data() + layer, rows.data() + 7});
  }
  cache.build(nullptr, nullptr);
  save_session(path, cache, about(std::vector<uint32_t>(60, 7), 60));
  KeyholeCache loaded = KeyholeCache::load(config, small_options(), read_session(path).kv);
  KeyholeCache fork = cache.fork();
  EXPECT_EQ(loaded.layer_tokens(0).window, 9U);
  EXPECT_EQ(loaded.layer_tokens(2).total, 60U);
  for (int step = 0; step < 40; ++step) {
    if (step == 20) {
      for (KeyholeCache* each : {&cache, &loaded, &fork}) each->truncate(65);
    }
    for (uint32_t layer = 0; layer < 3; ++layer) {
      const float* at = rows.data() + 64 * (step + layer);
      std::vector<float> out[3];
      size_t i = 0;
      for (KeyholeCache* each : {&cache, &loaded, &fork}) {
        out[i].resize(config.q_width());
        each->attend(layer, at, at + 256, at + 512, out[i++].data());
      }
      EXPECT_EQ(out[0], out[1]) << "layer " << layer << ", step " << step;
      EXPECT_EQ(out[0], out[2]) << "layer " << layer << ", step " << step;
    }
  }
}

TEST(SavedSession, IsForItsOwnerAlone) {
  const TemporaryFolder folder;
  const fs::path path = folder / "talk.session";
  // Left over from a save that was killed, for all to read.
  write_file(path.string() + ".tmp", std::string("old"));
  write_file(path.string() + ".kv0.tmp", std::string("old"));
  const mode_t before = umask(0);
  KeyholeCache cache = filled_cache(60, 1);
  save_session(path, cache, about(std::vector<uint32_t>(60, 7), 60));
  EXPECT_EQ(umask(before), 0U);  // as it was
  EXPECT_EQ(mode_of(path), 0600U);
  EXPECT_EQ(mode_of(read_session(path).kv), 0600U);
}

TEST(SavedSession, ASecondSaveReplacesTheFirstWhole) {
  const TemporaryFolder folder;
  const fs::path path = folder / "talk.session";
  KeyholeCache first = filled_cache(60, 1);
  KeyholeCache second = filled_cache(80, 2);
  save_session(path, first, about(std::vector<uint32_t>(60, 7), 60));
  const fs::path first_kv = read_session(path).kv;
  for (int again = 0; again < 2; ++again) {
    save_session(path, second, about(std::vector<uint32_t>(80, 8), 80));
    EXPECT_EQ(read_session(path).tokens.size(), 80U);
    EXPECT_EQ(fs::exists(path.string() + ".kv0"), again == 1);
    EXPECT_EQ(fs::exists(path.string() + ".kv1"), again == 0);
  }
  // A save that cannot write leaves what is there: a folder stands where the new file should go.
  fs::create_directory(path.string() + ".kv1");
  write_file(fs::path(path.string() + ".kv1") / "in the way", std::string("x"));
  EXPECT_NE(error_of([&] { save_session(path, first, about({7}, 1)); }), "");
  EXPECT_EQ(read_session(path).tokens.size(), 80U);
}

TEST(SavedSession, LiesBesideWhatALinkLeadsTo) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "far");
  const fs::path link = folder / "link";
  fs::create_symlink("far/talk", link);
  KeyholeCache cache = filled_cache(60, 1);
  for (int again = 0; again < 2; ++again) {
    save_session(link, cache, about(std::vector<uint32_t>(60, 7), 60));
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_EQ(files_in(folder.path()), 2U);
    EXPECT_EQ(files_in(folder / "far"), 2U);
    EXPECT_EQ(read_session(link).taken, 60U);
    EXPECT_EQ(read_session(folder / "far" / "talk").taken, 60U);
  }
}

TEST(SavedSession, IsRefusedBeforeTheWorkWhereItCannotLie) {
  const TemporaryFolder folder;
  const auto refusal = [](const fs::path& path) {
    return error_of([&] { check_session_path(path); });
  };
  EXPECT_EQ(refusal(folder / "new"), "");
  EXPECT_EQ(files_in(folder.path()), 0U) << "asking leaves nothing";
  EXPECT_NE(refusal(folder.path()).find(folder.path().string()), std::string::npos);
  EXPECT_NE(refusal(folder / "none" / "new").find("none/new"), std::string::npos);
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_NE(refusal(folder / "fifo").find("no regular file"), std::string::npos);
}

/// The error of reading `path` after `change` to its JSON.
template <class Change>
std::string error_after(const fs::path& path, const Change& change) {
  const std::string text = read_file(path);
  nlohmann::json root = nlohmann::json::parse(text);
  change(root);
  write_file(path, root.dump());
  std::string error = error_of([&] { (void)read_session(path); });
  write_file(path, text);
  return error;
}

TEST(SavedSession, RefusesWhatNobodySaved) {
  const TemporaryFolder folder;
  const fs::path path = folder / "talk.session";
  EXPECT_NE(error_of([&] { (void)read_session(path); }).find("cannot be opened"),
            std::string::npos);
  write_file(path, std::string("no json"));
  EXPECT_NE(error_of([&] { (void)read_session(path); }).find("no saved session"),
            std::string::npos);
  KeyholeCache cache = filled_cache(60, 1);
  save_session(path, cache, about(std::vector<uint32_t>(60, 7), 60));
  for (const char* field : {"model", "weights", "vocabulary", "kv_dtype", "kv", "kv_bytes",
                            "kv_end", "taken", "tokens"}) {
    const std::string error = error_after(path, [&](auto& root) { root.erase(field); });
    EXPECT_NE(error.find(field), std::string::npos) << field << ": " << error;
  }
  const auto refused = [&](const char* field, const nlohmann::json& value) {
    return error_after(path, [&](auto& root) { root[field] = value; });
  };
  EXPECT_NE(refused("keyhole_session", 2).find("format 2"), std::string::npos);
  EXPECT_NE(refused("kv_dtype", "f8"), "");
  EXPECT_NE(refused("taken", 61), "");
  EXPECT_NE(refused("tokens", nlohmann::json::array()), "");
  EXPECT_NE(refused("tokens", {1, -2, 3}).find("token 1 is -2"), std::string::npos);
  EXPECT_NE(refused("tokens", {1.5}).find("token 0 is 1.5"), std::string::npos);
  const auto sampler = [&](const nlohmann::json& value) { return refused("sampler", value); };
  EXPECT_EQ(sampler({{"seed", 7}, {"draws", 12}}), "");
  EXPECT_NE(sampler({{"seed", 7}}).find("\"draws\", which is null"), std::string::npos);
  EXPECT_NE(sampler({{"seed", -7}, {"draws", 12}}).find("\"seed\", which is -7"),
            std::string::npos);
  EXPECT_NE(sampler({{"seed", 7}, {"draws", 1ULL << 40U}}).find("up to 2^32"), std::string::npos);
  EXPECT_EQ(refused("rope_tokens", 70), "");
  EXPECT_NE(refused("rope_tokens", -1).find("rope_tokens"), std::string::npos);
  EXPECT_NE(refused("kv", "../other").find("same folder"), std::string::npos);
  EXPECT_NE(refused("kv", "absent").find("cannot be read"), std::string::npos);
  EXPECT_NE(refused("kv_bytes", 1).find("not the file"), std::string::npos);
  EXPECT_NE(refused("kv_end", "0011223344556677").find("not the file"), std::string::npos);
}

TEST(SavedSession, IsOfOneModelAndVocabulary) {
  const SavedSession session = about({5, 99, 7}, 3);
  const auto error = [&](const ModelIdentity& identity, uint32_t vocab) {
    return error_of([&] { check_session(session, "talk.session", "other", identity, vocab); });
  };
  EXPECT_EQ(error({"0123456789abcdef", "none"}, 100), "");
  EXPECT_NE(error({"0000000000000000", "none"}, 100).find("the model small"), std::string::npos);
  EXPECT_NE(error({"0123456789abcdef", "1"}, 100).find("another vocabulary"), std::string::npos);
  EXPECT_NE(error({"0123456789abcdef", "none"}, 99).find("token 99"), std::string::npos);
}

TEST(ModelIdentity, ChangesWithWhatMattersAlone) {
  const TemporaryFolder folder;
  write_file(folder / "config.json", std::string("{}"));
  std::string weights(300000, 'w');
  write_file(folder / "model.safetensors", weights);
  const ModelIdentity first = identify_model(folder.path());
  EXPECT_EQ(first.weights.size(), 16U);
  EXPECT_EQ(first.vocabulary, "none");
  write_file(folder / "README.md", std::string("text"));
  EXPECT_EQ(identify_model(folder.path()).weights, first.weights);

  write_file(folder / "tokenizer.json", std::string("{\"a\": 1}"));
  const ModelIdentity with = identify_model(folder.path());
  EXPECT_EQ(with.weights, first.weights);
  EXPECT_NE(with.vocabulary, "none");
  write_file(folder / "tokenizer.json", std::string("{\"a\": 2}"));
  EXPECT_NE(identify_model(folder.path()).vocabulary, with.vocabulary);

  weights[200000] = 'x';
  write_file(folder / "model.safetensors", weights);
  EXPECT_NE(identify_model(folder.path()).weights, first.weights);
  weights[200000] = 'w';
  write_file(folder / "model.safetensors", weights + "w");
  EXPECT_NE(identify_model(folder.path()).weights, first.weights);
  write_file(folder / "model.safetensors", weights);
  EXPECT_EQ(identify_model(folder.path()).weights, first.weights);
  write_file(folder / "config.json", std::string("{ }"));
  EXPECT_NE(identify_model(folder.path()).weights, first.weights);
  fs::remove(folder / "config.json");
  EXPECT_NE(error_of([&] { (void)identify_model(folder.path()); }).find("config.json"),
            std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools
