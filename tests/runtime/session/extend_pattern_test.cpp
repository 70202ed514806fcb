// Many new tokens by patterns of prompts: exact where lists are full, over exactly the blocks that the same choice
// gives a prompt where they are not, wherever the tokens before lie.
#include <keyhole/batch.h>
#include <keyhole/prefill.h>
#include <keyhole/save.h>

#include "tests/runtime/session/extend_fixture.h"
#include "tests/sanitized.h"

namespace keyhole::test {
namespace {

struct Blocks {
  uint64_t attended = 0, seen = 0;
  bool operator==(const Blocks&) const = default;
};
Blocks blocks_of(const keyhole_session* session) {
  Blocks b;
  EXPECT_OK(keyhole_session_get_extend_blocks(session, &b.attended, &b.seen));
  return b;
}

constexpr const char* kFull[] = {"dense",
                                 "auto",
                                 "sampled:mass=1000,first=99999,from=0",
                                 "a-shape:first=99999",
                                 "pooled:mass=0,near=99999,from=0",
                                 "vertical-slash:columns=0,slashes=16384,first=99999,from=0"};

TEST(ExtendPattern, FullListsAreExact) {
  for (uint64_t seed = 1; seed <= unless_sanitized(12, 3); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Numbers numbers(seed);
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    auto ec = small_engine(1 + numbers.below(3));
    ec.layers = 1 + numbers.below(2);
    ec.head_dim = some_head_dim(numbers.below(1000));
    ec.values_in_keys = numbers.below(4) == 0 ? 1 : 0;
    ec.kv_heads = 1 + numbers.below(2);
    ec.q_heads = ec.kv_heads * (1 + numbers.below(5));
    ec.kv_dtype = kTypes[numbers.below(3)];
    ec.softcap = numbers.below(2) == 0 ? 0.0F : 10.0F;
    ec.scale = 0.05F;
    std::vector<float> sinks = numbers.many(size_t{ec.layers} * ec.q_heads);
    if (numbers.below(2) == 0) ec.sink_logits = sinks.data();
    auto sc = small_session();
    const bool is_int8 = numbers.below(3) == 0;
    if (is_int8) sc.kv_host = KEYHOLE_KV_HOST_INT8;
    sc.index = numbers.below(2) == 0 ? "flat" : "hnsw:M=6,ef=10,efc=20";
    sc.mode = numbers.below(2) == 0 ? KEYHOLE_MODE_INDEXED : KEYHOLE_MODE_EXACT;
    sc.sink = numbers.below(150);
    sc.window = 1 + numbers.below(100);
    sc.flush_block = is_int8 ? 256 : 1 + numbers.below(80);
    Pair p(ec, sc, seed);
    for (uint32_t i = 0; i < unless_sanitized(6, 3); ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      const char* const pattern = kFull[numbers.below(static_cast<uint32_t>(std::size(kFull)))];
      ASSERT_OK(keyhole_session_set_extend_pattern(p.session(), pattern, 1));
      if (numbers.below(2) == 0) p.prefill(1 + numbers.below(500));
      if (numbers.below(3) == 0) {
        ASSERT_OK(keyhole_session_build(p.session(), nullptr, nullptr));
      }
      if (numbers.below(3) == 0) {
        const uint32_t n = numbers.below(p.model().tokens(0) + 1);
        ASSERT_OK(keyhole_session_truncate(p.session(), n));
        p.model().truncate(n);
      }
      const uint32_t n = 1 + numbers.below(numbers.below(3) == 0 ? 10 : 300);
      p.extend_and_check(n, {}, is_int8 ? 0.2 : 1e-4, 1 + n / 5);
      if (HasFatalFailure()) return;
      const Blocks blocks = blocks_of(p.session());
      EXPECT_EQ(blocks.attended, blocks.seen);
    }
  }
}

/// What a prompt of all tokens of layer 0 gives the newest n, and which blocks it attends.
Answer of_prompt(Pair& p, const char* pattern, const NewTokens& t, uint32_t n, Blocks& blocks) {
  const Shape& s = p.shape();
  keyhole_prompt* prompt = nullptr;
  EXPECT_OK(keyhole_prompt_create(p.engine(), pattern, &prompt));
  const int64_t m = p.model().tokens(0);
  Answer a{std::vector<float>(s.o(n)), std::vector<float>(size_t{n} * static_cast<size_t>(s.hq))};
  const auto q = tensor(t.q, {n, s.hq, s.d}), k = tensor(p.model().keys(0), {m, s.hkv, s.d}),
             v = tensor(p.model().values(0), {m, s.hkv, s.d}), o = tensor(a.o, {n, s.hq, s.d});
  EXPECT_OK(keyhole_prompt_attend(prompt, 0, &q, &k, &v, &o, a.lse.data(), nullptr));
  EXPECT_OK(keyhole_prompt_get_blocks(prompt, &blocks.attended, &blocks.seen));
  keyhole_prompt_destroy(prompt);
  return a;
}

// Prompts are compared with double precision over the blocks of choices from their definitions:
// host_prompt_choice_test.cpp.
TEST(ExtendPattern, AttendsWhatAPromptOfAllTokensChooses) {
  for (const char* pattern :
       {"a-shape:first=64,near=128", "sampled:mass=500,lookups=1000,first=64,near=64,from=0",
        "pooled:blocks=2,first=64,near=64,from=0", "pooled:mass=400,first=64,near=64,from=0",
        "vertical-slash:columns=70,slashes=3,first=64,near=64,from=0"}) {
    SCOPED_TRACE(pattern);
    auto ec = small_engine();
    ec.kv_dtype = KEYHOLE_F32;
    ec.scale = 0.2F;
    auto sc = small_session();
    sc.sink = 37;
    sc.window = 111;
    Pair p(ec, sc, 21);
    p.prefill(unless_sanitized(1500, 900));
    ASSERT_OK(keyhole_session_build(p.session(), nullptr, nullptr));
    ASSERT_OK(keyhole_session_set_extend_pattern(p.session(), pattern, KEYHOLE_AUTO));
    Blocks all;
    for (const uint32_t n : {300U, 128U}) {
      NewTokens t = p.new_tokens(n);
      ASSERT_OK(p.extend(0, t));
      p.model().append(0, t.k, t.v);
      Blocks blocks;
      const Answer wanted = of_prompt(p, pattern, t, n, blocks);
      EXPECT_EQ(t.answer.o, wanted.o);
      EXPECT_EQ(t.answer.lse, wanted.lse);
      EXPECT_LT(blocks.attended, blocks.seen * 3 / 4);
      all = {all.attended + blocks.attended, all.seen + blocks.seen};
      EXPECT_EQ(blocks_of(p.session()), all);
    }
    // All were appended, and what comes next attends as ever.
    const auto q = p.numbers().many(p.shape().q(1));
    std::vector<double> lse;
    const auto o = p.model().attend_all(0, q, lse);
    expect_near(attend_only(p.session(), p.shape(), 0, q), o, lse);
    EXPECT_EQ(statistics(p.session()).attends, 428U + 1U);
  }
}

// Attention over the first tokens and the newest, from the definition, with K and V in int8 among them.
TEST(ExtendPattern, AttendsOffloadedTokensAsTheyLie) {
  auto sc = small_session();
  sc.kv_host = KEYHOLE_KV_HOST_INT8;
  sc.flush_block = 256;
  Pair p(small_engine(), sc, 22);
  p.prefill(900);
  ASSERT_OK(keyhole_session_set_extend_pattern(p.session(), "a-shape:first=128,near=192", 100));
  constexpr uint32_t kNew = 200;
  NewTokens t = p.new_tokens(kNew);
  ASSERT_OK(p.extend(0, t));
  const uint32_t before = p.model().tokens(0);
  p.model().append(0, t.k, t.v);
  for (uint32_t i = 0; i < kNew; i += 23) {
    const NewTokens one = part_of(t, p.shape(), i, i + 1);
    std::vector<double> lse;
    const uint32_t tile = before + i / 128 * 128;
    const auto o = p.model().attend(0, one.q, lse, [&](uint32_t token) {
      return token <= before + i && (token < 128 || token / 64 + 3 >= tile / 64);
    });
    expect_near(one.answer, o, lse, 0.2);
  }
}

TEST(ExtendPattern, IsOfManyNewTokensAlone) {
  const char* const pattern = "a-shape:first=0,near=0";
  const Blocks none;
  auto ec = small_engine();
  std::vector<keyhole_layer_config> layers(2);
  for (keyhole_layer_config& layer : layers) keyhole_layer_config_init(&layer, &ec);
  layers[1].window = 50;
  ec.layer_configs = layers.data();
  ec.layer_count = 2;
  Pair p(ec, small_session(), 23);
  p.prefill(300);
  keyhole_session* const s = p.session();
  ASSERT_OK(keyhole_session_set_extend_pattern(s, pattern, 20));
  p.extend_and_check(19, {}, 1e-4, 6);  // too few
  std::vector<uint64_t> causal;
  for (uint32_t i = 0; i < 20; ++i) causal.push_back((uint64_t{2} << i) - 1);
  p.extend_and_check(20, causal, 1e-4, 6);
  EXPECT_EQ(blocks_of(s), none);
  const auto extend = [&](keyhole_session* session) {
    NewTokens t = p.new_tokens(20);
    for (uint32_t l = 0; l < 2; ++l) EXPECT_OK(test::extend(session, p.shape(), l, t));
  };
  const SessionPtr held = fork_of(s);
  // Tokens 339..358 see 6 blocks and attend the one or two from that of the first of them on.
  extend(held.get());
  EXPECT_EQ(blocks_of(held.get()), (Blocks{4, 24}));
  EXPECT_EQ(blocks_of(s), none);
  ASSERT_OK(keyhole_session_set_mode(held.get(), KEYHOLE_MODE_RESIDENT, 0));
  extend(held.get());
  ASSERT_OK(keyhole_session_set_mode(held.get(), KEYHOLE_MODE_EXACT, 0));
  ASSERT_OK(keyhole_session_set_extend_pattern(held.get(), nullptr, 0));
  extend(held.get());
  EXPECT_EQ(blocks_of(held.get()), (Blocks{4, 24}));
  ASSERT_OK(keyhole_session_set_extend_pattern(s, "dense", 1));
  p.extend_and_check(150, {}, 1e-4, 31);
  EXPECT_EQ(blocks_of(s), none) << "nothing was chosen";
}

TEST(ExtendPattern, MembersOfABatchAttendByTheirOwn) {
  Pair plain(small_engine(), small_session(), 24);
  const SessionPtr other = make_session(plain.engine(), small_session());
  plain.prefill(400);
  ASSERT_OK(keyhole_session_set_extend_pattern(other.get(), "a-shape:first=64,near=0", 10));
  const uint32_t start[] = {0, 200, 230};
  const Shape& s = plain.shape();
  NewTokens t = plain.new_tokens(230);
  ASSERT_OK(extend_batch({other.get(), plain.session()}, s, 0, t, start));
  EXPECT_EQ(blocks_of(other.get()), (Blocks{4 * (2 + 3), 4 * (2 + 4)}));
  EXPECT_EQ(layer_tokens(other.get(), 0).total, 200U);
  EXPECT_EQ(layer_tokens(plain.session(), 0).total, 430U);
  Model model(small_engine());
  model.append(0, slice(t.k, 0, s.kv(200)), slice(t.v, 0, s.kv(200)));
  plain.model().append(0, slice(t.k, s.kv(200), s.kv(230)), slice(t.v, s.kv(200), s.kv(230)));
  for (const uint32_t i : {0U, 70U, 130U, 199U, 200U, 229U}) {
    SCOPED_TRACE("token " + std::to_string(i));
    const bool is_other = i < 200;
    const Model& m = is_other ? model : plain.model();
    const NewTokens one = part_of(t, s, i, i + 1);
    std::vector<double> lse;
    const auto o = m.attend(0, one.q, lse, [&](uint32_t token) {
      if (!is_other) return token <= i + 200;
      return token <= i && (token < 64 || token / 64 >= i / 128 * 2);
    });
    expect_near(one.answer, o, lse);
  }
}

TEST(ExtendPattern, RefusesWhatItCannotDo) {
  const auto says = [](const char* text) {
    return std::string(keyhole_last_error()).find(text) != std::string::npos;
  };
  const auto bad = KEYHOLE_INVALID_ARGUMENT;
  Pair p(small_engine(), small_session(), 26);
  keyhole_session* const s = p.session();
  ASSERT_OK(keyhole_session_set_extend_pattern(s, "sampled:mass=1000,first=9999,from=0", 5));
  EXPECT_EQ(keyhole_session_set_extend_pattern(s, "sparse", 1), bad);
  EXPECT_TRUE(says("sparse")) << keyhole_last_error();
  EXPECT_EQ(keyhole_session_set_extend_pattern(s, "dense", 2147483649U), bad);
  EXPECT_TRUE(says("2147483649 tokens or more, allowed: 1..2147483648")) << keyhole_last_error();
  EXPECT_EQ(keyhole_session_set_extend_pattern(s, "budgets:/no/such/file", 1), KEYHOLE_IO);
  EXPECT_EQ(keyhole_session_set_extend_pattern(nullptr, "dense", 1), bad);
  uint64_t blocks = 0;
  EXPECT_EQ(keyhole_session_get_extend_blocks(s, &blocks, nullptr), bad);
  EXPECT_EQ(keyhole_session_get_extend_blocks(nullptr, &blocks, &blocks), bad);
  p.extend_and_check(70, {}, 1e-4, 13);  // by what was set first
  EXPECT_EQ(blocks_of(s), (Blocks{2 * 4 * 2, 2 * 4 * 2}));
  NewTokens t = p.new_tokens(70);
  t.q.back() = NAN;
  EXPECT_EQ(p.extend(0, t), KEYHOLE_NOT_FINITE);
  EXPECT_EQ(layer_tokens(s, 0).total, 70U);
  auto narrow = small_engine();
  narrow.value_dim = 32;
  Pair other(narrow, small_session(), 27);
  EXPECT_EQ(keyhole_session_set_extend_pattern(other.session(), "dense", 1), KEYHOLE_UNSUPPORTED);
  EXPECT_TRUE(says("value_dim is 32, needed: head_dim, which is 64")) << keyhole_last_error();
}

TEST(ExtendPattern, ItsMemoryIsWithinTheLimitAndGoesWithTheNextStep) {
  auto sc = small_session();
  sc.host_memory_limit = 3U << 20U;
  Pair p(small_engine(), sc, 28);
  p.prefill(900);
  keyhole_session* const s = p.session();
  ASSERT_OK(keyhole_session_set_extend_pattern(s, "sampled:stride=1,mass=1000,from=0", 1));
  const uint64_t before = statistics(s).host_bytes;
  NewTokens t = p.new_tokens(100), many = p.new_tokens(1200);
  ASSERT_OK(p.extend(0, t));
  p.model().append(0, t.k, t.v);
  EXPECT_GT(statistics(s).host_bytes, before + 100 * 4 * 16 * sizeof(float));
  EXPECT_LE(statistics(s).host_bytes_peak, 3U << 20U);
  EXPECT_EQ(p.extend(0, many), KEYHOLE_OUT_OF_MEMORY);
  expect_error_text("the choice of blocks");
  EXPECT_EQ(layer_tokens(s, 0).total, 1000U);
  const uint64_t with = statistics(s).host_bytes;
  const auto q = p.numbers().many(p.shape().q(1));
  std::vector<double> lse;
  const auto o = p.model().attend_all(0, q, lse);
  expect_near(attend_only(s, p.shape(), 0, q), o, lse);
  EXPECT_LT(statistics(s).host_bytes, with);
}

}  // namespace
}  // namespace keyhole::test
