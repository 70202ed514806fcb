// A prompt that comes in extends: its queries guide the index as those of appended tokens do, and nothing is indexed
// before it has ended.
#include <cmath>
#include <string>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kChunk = 96;

struct Chunk {
  std::vector<float> q, k, v;
};

class PromptChunk : public testing::Test {
 protected:
  static keyhole_session_config session_config() {
    auto c = small_session();
    c.index = "roargraph:M=8,ef=16,Nq=10,beam=12";
    c.budget.top_k = 4;
    c.training_queries = 64;
    c.append_mode = KEYHOLE_APPEND_IN_STEP;
    return c;
  }
  std::vector<Chunk> prompt(uint32_t chunks) {
    std::vector<Chunk> all;
    for (uint32_t i = 0; i < chunks; ++i) {
      all.push_back({numbers_.many(shape_.q(kChunk)), numbers_.many(shape_.kv(kChunk)),
                     numbers_.many(shape_.kv(kChunk))});
    }
    return all;
  }
  void append(keyhole_session* s, uint32_t layer, const Chunk& c, bool with_queries) {
    const auto k = tensor(c.k, {kChunk, shape_.hkv, shape_.d}),
               v = tensor(c.v, {kChunk, shape_.hkv, shape_.d}),
               q = tensor(c.q, {kChunk, shape_.hq, shape_.d});
    ASSERT_OK(keyhole_session_append(s, layer, &k, &v, with_queries ? &q : nullptr));
  }
  void extend(keyhole_session* s, uint32_t layer, const Chunk& c, bool on_device = false) {
    std::vector<float> o(shape_.o(kChunk));
    auto k = tensor(c.k, {kChunk, shape_.hkv, shape_.d}),
         v = tensor(c.v, {kChunk, shape_.hkv, shape_.d}),
         q = tensor(c.q, {kChunk, shape_.hq, shape_.d}),
         out = tensor(o, {kChunk, shape_.hq, shape_.d});
    if (on_device) k.memory = v.memory = q.memory = out.memory = KEYHOLE_DEVICE;
    ASSERT_OK(keyhole_session_extend(s, layer, &q, &k, &v, nullptr, &out, nullptr));
    ASSERT_OK(keyhole_session_synchronize(s));
  }
  std::vector<float> answer(keyhole_session* s, uint32_t layer, uint64_t seed) {
    Numbers numbers(seed);
    return attend_only(s, shape_, layer, numbers.many(shape_.q(1))).o;
  }

  keyhole_engine_config config_ = small_engine();
  EnginePtr engine_ = make_engine(config_);
  Shape shape_{config_};
  Numbers numbers_{31};
};

TEST_F(PromptChunk, GuidesTheIndexAsAppendedTokensDo) {
  const auto chunks = prompt(6);
  const auto appended = make_session(engine_.get(), session_config()),
             extended = make_session(engine_.get(), session_config()),
             unguided = make_session(engine_.get(), session_config());
  ASSERT_OK(keyhole_session_set_prompt_chunk(extended.get(), kChunk));
  for (const Chunk& c : chunks) {
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      append(appended.get(), layer, c, true);
      append(unguided.get(), layer, c, false);
      extend(extended.get(), layer, c);
      EXPECT_EQ(0U, layer_tokens(extended.get(), layer).indexed);
    }
  }
  for (keyhole_session* s : {appended.get(), extended.get(), unguided.get()}) {
    ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
  }
  bool differs = false;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      const auto guided = answer(appended.get(), layer, seed);
      EXPECT_EQ(guided, answer(extended.get(), layer, seed)) << "layer " << layer;
      differs = differs || guided != answer(unguided.get(), layer, seed);
    }
  }
  EXPECT_TRUE(differs) << "queries that guide nothing would show nothing here";
}

// The device copies those queries that the sample wants.
TEST_F(PromptChunk, GuidesItWithTensorsOnADevice) {
  auto config = config_;
  config.threads = 3;
  StreamEngine device(config);
  const auto chunks = prompt(6);
  const auto appended = make_session(device.handle.get(), session_config()),
             extended = make_session(device.handle.get(), session_config());
  ASSERT_OK(keyhole_session_set_prompt_chunk(extended.get(), kChunk));
  for (const Chunk& c : chunks) {
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      append(appended.get(), layer, c, true);
      extend(extended.get(), layer, c, true);
    }
  }
  ASSERT_NE(0U, device.blocked_calls) << "all tokens at once";
  for (keyhole_session* s : {appended.get(), extended.get()}) {
    ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
  }
  for (uint64_t seed = 0; seed < 10; ++seed) {
    EXPECT_EQ(answer(appended.get(), 1, seed), answer(extended.get(), 1, seed));
  }
}

TEST_F(PromptChunk, EndsWithTheFirstStep) {
  const auto chunks = prompt(6);
  const auto session = make_session(engine_.get(), session_config()),
             always = make_session(engine_.get(), session_config());
  ASSERT_OK(keyhole_session_set_prompt_chunk(session.get(), kChunk));
  for (const Chunk& c : chunks) {
    extend(session.get(), 0, c);
    extend(always.get(), 0, c);
  }
  EXPECT_EQ(0U, layer_tokens(session.get(), 0).indexed);
  EXPECT_NE(0U, layer_tokens(always.get(), 0).indexed);
  // A copy has it, too.
  keyhole_session* forked = nullptr;
  ASSERT_OK(keyhole_session_fork(session.get(), &forked));
  const SessionPtr copy(forked);
  extend(copy.get(), 0, chunks[0]);
  EXPECT_EQ(0U, layer_tokens(copy.get(), 0).indexed);
  for (uint32_t i = 0; i < 40; ++i) {
    const auto q = numbers_.many(shape_.q(1)), k = numbers_.many(shape_.kv(1)),
               v = numbers_.many(shape_.kv(1));
    std::vector<float> o(shape_.o(1));
    const auto tq = tensor(q, {shape_.hq, shape_.d}), tk = tensor(k, {shape_.hkv, shape_.d}),
               tv = tensor(v, {shape_.hkv, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
    // One token without its axis: an extend of one.
    ASSERT_OK(keyhole_session_extend(session.get(), 0, &tq, &tk, &tv, nullptr, &out, nullptr));
  }
  EXPECT_NE(0U, layer_tokens(session.get(), 0).indexed);
}

TEST_F(PromptChunk, RefusesWhatNoExtendCanHave) {
  const auto session = make_session(engine_.get(), session_config());
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_prompt_chunk(session.get(), UINT32_MAX));
  EXPECT_NE(std::string::npos, std::string(keyhole_last_error()).find("1..2147483648"))
      << keyhole_last_error();
}

}  // namespace
}  // namespace keyhole::test
