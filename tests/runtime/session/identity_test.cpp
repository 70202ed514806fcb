// The identity of a saved session's model and text: set, saved, copied, forgotten; another one than is asked for is
// refused.
#include <cstddef>
#include <filesystem>
#include <numeric>

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace keyhole::test {
namespace {

class IdentityTest : public ::testing::Test {
 protected:
  IdentityTest() {
    std::iota(tokens_.begin(), tokens_.end(), 1000);
    prefill(60);
  }
  void prefill(uint32_t n) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      prefill_both(session_.get(), model_, shape_, l, n, numbers_);
    }
  }
  static keyhole_identity identity_of(const keyhole_session* s) {
    keyhole_identity identity;
    keyhole_identity_init(&identity);
    EXPECT_OK(keyhole_session_get_identity(s, &identity));
    return identity;
  }
  void set(const char* model, uint64_t count) {
    EXPECT_OK(keyhole_session_set_identity(session_.get(), model,
                                           count == 0 ? nullptr : tokens_.data(), count));
  }
  keyhole_status load(const char* model, const std::vector<int32_t>* tokens) {
    keyhole_session* loaded = nullptr;
    keyhole_load_options options;
    keyhole_load_options_init(&options);
    options.model = model;
    options.tokens = tokens == nullptr ? nullptr : tokens->data();
    options.token_count = tokens == nullptr ? 0 : tokens->size();
    const keyhole_status status =
        keyhole_session_load(engine_.get(), path_.c_str(), &options, &loaded);
    EXPECT_EQ(loaded != nullptr, status == KEYHOLE_OK);
    loaded_.reset(loaded);
    return status;
  }
  void expect_refused(keyhole_status status, const std::vector<const char*>& texts) {
    EXPECT_EQ(status, KEYHOLE_INVALID_ARGUMENT) << keyhole_last_error();
    for (const char* text : texts) {
      expect_error_text(text);
    }
  }
  void save() { ASSERT_OK(keyhole_session_save(session_.get(), path_.c_str())); }

  keyhole_engine_config ec_ = small_engine();
  EnginePtr engine_ = make_engine(ec_);
  SessionPtr session_ = make_session(engine_.get(), small_session());
  Numbers numbers_{5};
  Model model_{ec_};
  Shape shape_{ec_};
  std::vector<int32_t> tokens_ = std::vector<int32_t>(100);
  TemporaryFolder folder_;
  std::string path_ = (folder_ / "session").string();
  SessionPtr loaded_;
};

TEST_F(IdentityTest, IsWhatTheCallerHasSaid) {
  EXPECT_STREQ(identity_of(session_.get()).model, "");
  EXPECT_EQ(identity_of(session_.get()).token_count, 0U);
  set("some/model", 60);
  const keyhole_identity a = identity_of(session_.get());
  EXPECT_STREQ(a.model, "some/model");
  EXPECT_EQ(a.token_count, 60U);
  EXPECT_EQ(a.token_hash, XXH3_64bits(tokens_.data(), 240));
  set(nullptr, 59);
  const keyhole_identity b = identity_of(session_.get());
  EXPECT_STREQ(b.model, "some/model");
  EXPECT_EQ(b.token_count, 59U);
  EXPECT_NE(b.token_hash, a.token_hash);
  set("", 0);
  EXPECT_STREQ(identity_of(session_.get()).model, "");
  EXPECT_EQ(identity_of(session_.get()).token_hash, 0U);
}

TEST_F(IdentityTest, IsSavedAndCopied) {
  set(std::string(255, 'm').c_str(), 60);
  save();
  ASSERT_EQ(load(nullptr, nullptr), KEYHOLE_OK) << keyhole_last_error();
  const SessionPtr owner = fork_of(session_.get());
  for (keyhole_session* s : {loaded_.get(), owner.get()}) {
    EXPECT_EQ(std::string(identity_of(s).model), std::string(255, 'm'));
    EXPECT_EQ(identity_of(s).token_count, 60U);
    EXPECT_EQ(identity_of(s).token_hash, identity_of(session_.get()).token_hash);
  }
}

TEST_F(IdentityTest, ATruncationForgetsTheTokens) {
  set("model", 60);
  ASSERT_OK(keyhole_session_truncate(session_.get(), 60));
  EXPECT_EQ(identity_of(session_.get()).token_count, 60U);
  ASSERT_OK(keyhole_session_truncate(session_.get(), 59));
  EXPECT_EQ(identity_of(session_.get()).token_count, 0U);
  EXPECT_EQ(identity_of(session_.get()).token_hash, 0U);
  EXPECT_STREQ(identity_of(session_.get()).model, "model");
}

TEST_F(IdentityTest, AnAcceptForgetsTokensThatItDropsOrMoves) {
  const auto extend = [&] {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const auto k = numbers_.many(shape_.kv(4)), q = numbers_.many(shape_.q(4));
      std::vector<float> o(shape_.q(4));
      const auto tk = tensor(k, {4, shape_.hkv, shape_.d}),
                 tq = tensor(q, {4, shape_.hq, shape_.d}),
                 out = tensor(o, {4, shape_.hq, shape_.d});
      EXPECT_OK(keyhole_session_extend(session_.get(), l, &tq, &tk, &tk, nullptr, &out, nullptr));
    }
  };
  const auto named = [&] { return identity_of(session_.get()).token_count; };
  extend();
  set("model", 64);
  ASSERT_OK(keyhole_session_accept(session_.get(), 4, nullptr));
  EXPECT_EQ(named(), 64U) << "all of them stay";
  extend();
  set(nullptr, 66);
  ASSERT_OK(keyhole_session_accept(session_.get(), 2, nullptr));
  EXPECT_EQ(named(), 66U) << "what went was not named";
  extend();
  set(nullptr, 68);
  ASSERT_OK(keyhole_session_accept(session_.get(), 1, nullptr));
  EXPECT_EQ(named(), 0U);
  EXPECT_STREQ(identity_of(session_.get()).model, "model");
  extend();
  set(nullptr, 69);
  const uint32_t path[] = {0, 2, 3};
  ASSERT_OK(keyhole_session_accept(session_.get(), 3, path));
  EXPECT_EQ(named(), 0U) << "the second new token is another one now";
}

TEST_F(IdentityTest, NobodyNamesTokensThatAreNotThere) {
  expect_refused(keyhole_session_set_identity(session_.get(), "model", tokens_.data(), 61),
                 {"count is 61, allowed: up to the 60 tokens"});
  EXPECT_STREQ(identity_of(session_.get()).model, "") << "a refused call changes nothing";
  set("model", 60);
}

TEST_F(IdentityTest, AnotherModelIsRefused) {
  save();
  expect_refused(load("model", nullptr), {path_.c_str(), "does not say of which model", "'model'"});
  set("model", 0);
  save();
  EXPECT_EQ(load("model", nullptr), KEYHOLE_OK) << keyhole_last_error();
  EXPECT_EQ(load(nullptr, nullptr), KEYHOLE_OK) << keyhole_last_error();
  expect_refused(load("model2", nullptr), {"'model'", "'model2'"});
  expect_refused(load("mode", nullptr), {"'model'", "'mode'"});
  expect_refused(load("", nullptr), {"'model'", "''"});
}

TEST_F(IdentityTest, OtherTokensAreRefused) {
  save();
  expect_refused(load(nullptr, &tokens_), {"does not say which tokens"});
  set("model", 60);
  save();
  std::vector<int32_t> asked = tokens_;
  EXPECT_EQ(load("model", &asked), KEYHOLE_OK) << "the first 60 of 100: " << keyhole_last_error();
  asked.resize(60);
  EXPECT_EQ(load(nullptr, &asked), KEYHOLE_OK) << keyhole_last_error();
  asked.resize(59);
  expect_refused(load(nullptr, &asked), {"60 tokens", "the first of 59"});
  for (const size_t other : {size_t{0}, size_t{59}}) {
    asked = tokens_;
    ++asked[other];
    expect_refused(load(nullptr, &asked), {"60 tokens which are not the first of the 100"});
  }
  ++(asked = tokens_)[60];
  EXPECT_EQ(load(nullptr, &asked), KEYHOLE_OK) << "a token behind those of the file";
  prefill(1);
  save();
  expect_refused(load(nullptr, &tokens_), {"has 61 tokens and names 60"});
}

TEST_F(IdentityTest, OptionsOfALoadAreRead) {
  set("model", 60);
  save();
  const auto load_by = [&](const keyhole_load_options* options) {
    keyhole_session* loaded = nullptr;
    const keyhole_status status =
        keyhole_session_load(engine_.get(), path_.c_str(), options, &loaded);
    EXPECT_EQ(loaded != nullptr, status == KEYHOLE_OK);
    loaded_.reset(loaded);
    return status;
  };
  keyhole_load_options options;
  keyhole_load_options_init(&options);
  EXPECT_EQ(load_by(nullptr), KEYHOLE_OK) << "no options: any file of the shape";
  EXPECT_EQ(load_by(&options), KEYHOLE_OK) << "as the init function leaves them";
  options.token_count = 3;
  expect_refused(load_by(&options), {"tokens is NULL, count is 3"});
  // A program of an earlier header, which knows of no tokens.
  options.struct_size = offsetof(keyhole_load_options, tokens);
  EXPECT_EQ(load_by(&options), KEYHOLE_OK) << keyhole_last_error();
  options.model = "other";
  expect_refused(load_by(&options), {"'model'", "'other'"});
  options.struct_size = 0;
  expect_refused(load_by(&options), {"options.struct_size"});
}

TEST_F(IdentityTest, ArgumentsAreNamed) {
  const auto set_model = [&](const std::string& model) {
    return keyhole_session_set_identity(session_.get(), model.c_str(), nullptr, 0);
  };
  set("model", 60);
  expect_refused(set_model(std::string(256, 'm')), {"255 bytes"});
  expect_refused(keyhole_session_set_identity(session_.get(), "other", nullptr, 3),
                 {"tokens is NULL, count is 3"});
  expect_refused(keyhole_session_set_identity(session_.get(), "other", tokens_.data(), 0),
                 {"count is 0"});
  EXPECT_STREQ(identity_of(session_.get()).model, "model");
  EXPECT_EQ(identity_of(session_.get()).token_count, 60U);
  EXPECT_EQ(keyhole_session_set_identity(nullptr, "m", nullptr, 0), KEYHOLE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace keyhole::test
