// Several new tokens with tensors in device memory: by steps over codes, one by one, or by blocks; drafts that are
// accepted on the stream, in graphs, too. Beside exact attention in double precision.
#include <gtest/gtest.h>

#include <string>

#include "keyhole/batch.h"
#include "tests/runtime/turns_fixture.h"

namespace keyhole::test {
namespace {

class StreamExtend : public StreamTurns {
 protected:
  /// Random calls with seeds 0.., every answer checked.
  void run_any_calls(uint64_t seeds);
};

// For tokens that come from the host, the host's copy of the device's sink and window is attended.
TEST_P(StreamExtend, FromTheHostByAPatternOfPrompts) {
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, 700);
  ASSERT_OK(
      keyhole_session_set_extend_pattern(s.get(), "sampled:mass=1000,first=999999,from=0", 1));
  for (const uint32_t n : {150U, 3U}) {
    extend(s.get(), m, 7);  // from the device, as ever
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      NewTokens t = turn(n);
      ASSERT_OK(test::extend(s.get(), shape(), l, t));
      m.append(l, t.k, t.v);
      expect_turn(m, l, t, nullptr);
      if (HasFatalFailure()) return;
    }
    m.follow(s.get());
  }
  uint64_t attended = 0, seen = 0;
  ASSERT_OK(keyhole_session_get_extend_blocks(s.get(), &attended, &seen));
  EXPECT_GT(attended, 0U);
  EXPECT_EQ(attended, seen);
}

void StreamExtend::run_any_calls(uint64_t seeds) {
  StreamEngine device(engine_config_);
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    numbers_ = Numbers(seed);
    SessionPtr s = make_session(device.handle.get(), config());
    StoredModel m = model();
    if (seed % 3 != 0) prompt(s.get(), m, 1 + numbers_.below(900));
    for (int i = 0; i < 14; ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", call " + std::to_string(i));
      switch (numbers_.below(7)) {
        case 0: extend(s.get(), m, 1 + numbers_.below(120)); break;
        case 1: {
          const uint32_t n = 1 + numbers_.below(16);
          extend(s.get(), m, n);
          const uint32_t kept = numbers_.below(n + 1);
          ASSERT_OK(keyhole_session_accept(s.get(), kept, nullptr));
          std::vector<uint32_t> path(kept);
          for (uint32_t j = 0; j < kept; ++j) path[j] = j;
          keep(m, n, path);
          break;
        }
        case 2: {
          // A mask needs codes on the device, or attention of blocks.
          if (!GetParam().coded && GetParam().dtype == KEYHOLE_F32) break;
          // More than the window holds need blocks.
          const bool many = GetParam().dtype != KEYHOLE_F32 && numbers_.below(2) != 0;
          const uint32_t n = 1 + numbers_.below(many ? 64 : 16);
          const auto mask = tree(n);
          extend(s.get(), m, n, mask.data());
          const auto path = path_of(n);
          ASSERT_OK(
              keyhole_session_accept(s.get(), static_cast<uint32_t>(path.size()), path.data()));
          keep(m, n, path);
          m.follow(s.get());
          break;
        }
        case 3: prompt(s.get(), m, 1 + numbers_.below(300)); break;
        case 4: {
          if (m.tokens(0) < 2) break;
          const uint32_t n = 1 + numbers_.below(m.tokens(0));
          ASSERT_OK(keyhole_session_truncate(s.get(), n));
          m.truncate(n);
          m.follow(s.get());
          break;
        }
        case 5: extend(s.get(), m, 1 + numbers_.below(8)); break;
        default: fork(s);
      }
      if (HasFatalFailure()) return;
      ASSERT_OK(keyhole_session_synchronize(s.get()));
      m.follow(s.get());
      for (uint32_t l = 0; l < engine_config_.layers; ++l) {
        ASSERT_EQ(layer_tokens(s.get(), l).total, m.tokens(l));
      }
      step(s.get(), m);
      if (HasFatalFailure()) return;
    }
  }
  if (seeds < 2) return;  // of one sequence it depends on the calls
  EXPECT_EQ(device.faults.steps_of_tokens != 0, GetParam().coded);
  EXPECT_EQ(device.blocked_calls != 0, GetParam().dtype != KEYHOLE_F32);
}

TEST_P(StreamExtend, AnyOrderOfCallsKeepsEveryTokenOnce) {
  run_any_calls(unless_sanitized(4U, 2U));
}

TEST_P(StreamExtend, LayersHaveSinksAndLogitsOfTheirOwn) {
  if (kSanitized && GetParam().dtype != KEYHOLE_F16) GTEST_SKIP() << "takes long here";
  std::vector<float> sinks = numbers_.many(size_t{engine_config_.layers} * engine_config_.q_heads);
  sinks[1] = -INFINITY;
  sinks[2] = 20.0F;
  engine_config_.sink_logits = sinks.data();
  std::vector<keyhole_layer_config> layers(engine_config_.layers);
  for (keyhole_layer_config& layer : layers) keyhole_layer_config_init(&layer, &engine_config_);
  layers[1].scale = 0.07F;
  layers[1].softcap = 6.0F;
  engine_config_.layer_configs = layers.data();
  engine_config_.layer_count = engine_config_.layers;
  run_any_calls(unless_sanitized(3U, 1U));
}

TEST_P(StreamExtend, ManyTokensAreAttendedByBlocks) {
  if (GetParam().dtype == KEYHOLE_F32) GTEST_SKIP() << "there are none for f32";
  if (kSanitized && GetParam().kept != KEYHOLE_KV_HOST_SAME) GTEST_SKIP() << "takes long here";
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, 700);
  EXPECT_EQ(statistics(s.get()).device_bytes, statistics(s.get()).device_bytes_peak);
  extend(s.get(), m, 200);
  EXPECT_EQ(device.blocked_calls, uint64_t{engine_config_.layers});
  step(s.get(), m);
  extend(s.get(), m, unless_sanitized(600U, 150U));
  step(s.get(), m);
  EXPECT_GE(statistics(s.get()).attends,
            uint64_t{engine_config_.layers} * unless_sanitized(800U, 350U));
}

TEST_P(StreamExtend, ManyTokensAttendBlocksOfCodesByThePattern) {
  if (!GetParam().coded || GetParam().dtype != KEYHOLE_F16) GTEST_SKIP() << "codes of f16";
  if (kSanitized && GetParam().kept != KEYHOLE_KV_HOST_SAME) GTEST_SKIP() << "takes long here";
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, 600);
  // This device attends all codes whatever is to be chosen, and knows none of int8: then all rows are attended.
  const bool is_kept = GetParam().kept == KEYHOLE_KV_HOST_SAME;
  const uint64_t layers = is_kept ? engine_config_.layers : 0;
  ASSERT_OK(keyhole_session_set_extend_pattern(s.get(), "codes:blocks=5,from=0", 128));
  extend(s.get(), m, 127);
  EXPECT_EQ(device.chosen_blocks, 0U) << "the pattern is about more tokens";
  const uint64_t before = device.coded_calls;
  constexpr uint32_t kMany = unless_sanitized(1100U, 130U);
  extend(s.get(), m, kMany);
  EXPECT_EQ(device.coded_calls, before + layers * (kMany > 1024 ? 2 : 1)) << "1,024 at a time";
  EXPECT_EQ(device.chosen_blocks, is_kept ? 5U : 0U);
  step(s.get(), m);
  ASSERT_OK(keyhole_session_set_extend_pattern(s.get(), "codes:blocks=5,from=99999", 128));
  extend(s.get(), m, 130);
  EXPECT_EQ(device.chosen_blocks, is_kept ? 5U : 0U) << "of the turn before";
  EXPECT_EQ(device.coded_calls, before + layers * (kMany > 1024 ? 2 : 1));
  step(s.get(), m);
}

// What is counted is what was attended: chosen blocks, all of them where the device does not choose or has refused.
TEST_P(StreamExtend, NumbersSayWhichBlocksOfCodesWereAttended) {
  if (!GetParam().coded || GetParam().dtype != KEYHOLE_F16) GTEST_SKIP() << "codes of f16";
  if (GetParam().kept != KEYHOLE_KV_HOST_SAME) GTEST_SKIP() << "this device has no codes of int8";
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  constexpr uint32_t kChosen = 3, kMany = 130;
  prompt(s.get(), m, 1500);
  step(s.get(), m);
  ASSERT_OK(keyhole_session_set_extend_pattern(s.get(), "codes:blocks=3,from=0", 128));
  const auto layers = uint64_t{engine_config_.layers}, heads = uint64_t{engine_config_.q_heads};
  struct Counts {
    uint64_t keys, attended, seen;
  };
  uint32_t blocks = 0, total = 0;  // before the turn
  const auto turn_of_many = [&] {
    const keyhole_layer_tokens before = layer_tokens(s.get(), 0);
    total = before.total;
    blocks = (before.indexed + before.pending) / kCodeBlock;
    EXPECT_GT(blocks, kChosen + 1);
    Counts sums{};
    EXPECT_EQ(keyhole_session_get_extend_blocks(s.get(), &sums.attended, &sums.seen), KEYHOLE_OK);
    const uint64_t keys = statistics(s.get()).keys_attended;
    extend(s.get(), m, kMany);
    Counts now{statistics(s.get()).keys_attended - keys, 0, 0};
    EXPECT_EQ(keyhole_session_get_extend_blocks(s.get(), &now.attended, &now.seen), KEYHOLE_OK);
    return Counts{now.keys, now.attended - sums.attended, now.seen - sums.seen};
  };
  const auto in_blocks = [](uint64_t rows) { return (rows + 63) / 64; };
  const uint64_t queries = layers * heads * kMany;

  Counts counts = turn_of_many();
  EXPECT_EQ(counts.keys, queries * kChosen * kCodeBlock);
  // Two tiles of tokens, of 128 and of 2.
  uint64_t seen = layers * heads * (in_blocks(total + 128) + in_blocks(total + kMany));
  EXPECT_EQ(counts.seen, seen);
  EXPECT_EQ(counts.attended, seen - layers * heads * 2 * 4 * (blocks - kChosen));

  device.doubted =
      7;  // query heads of tokens of each layer, which have attended all in another pass
  counts = turn_of_many();
  EXPECT_EQ(counts.keys,
            (queries - 7 * layers) * kChosen * kCodeBlock + 7 * layers * blocks * kCodeBlock);
  device.doubted = 0;

  device.refuses_codes = true;
  counts = turn_of_many();
  EXPECT_EQ(counts.keys, queries * blocks * kCodeBlock);
  EXPECT_EQ(counts.seen, 0U) << "all of it was dense";
  device.refuses_codes = false;

  device.never_chooses = true;
  const uint64_t coded = device.coded_calls;
  counts = turn_of_many();
  EXPECT_EQ(counts.keys, queries * blocks * kCodeBlock);
  EXPECT_EQ(counts.seen, 0U);
  EXPECT_EQ(device.coded_calls, coded + layers) << "all of them, by code";
  EXPECT_EQ(device.chosen_blocks, 0U);
}

TEST_P(StreamExtend, ManyTokensAttendCodesAtOnce) {
  if (!GetParam().coded || GetParam().dtype != KEYHOLE_F16) GTEST_SKIP() << "codes of f16";
  if (kSanitized && GetParam().kept != KEYHOLE_KV_HOST_SAME) GTEST_SKIP() << "takes long here";
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, 900);
  const bool is_kept = GetParam().kept == KEYHOLE_KV_HOST_SAME;
  const uint64_t layers = is_kept ? engine_config_.layers : 0;  // int8 is attended in full here
  extend(s.get(), m, 40);
  EXPECT_EQ(device.coded_calls, layers);
  step(s.get(), m);
  device.refuses_codes = true;
  extend(s.get(), m, 40);
  EXPECT_EQ(device.coded_calls, 2 * layers);
  step(s.get(), m);
  device.refuses_codes = false;
  // Outputs of a first pass that was not enough do not stay.
  device.doubts_codes = true;
  extend(s.get(), m, 30);
  EXPECT_EQ(device.coded_calls, 3 * layers);
  device.doubts_codes = false;
  extend(s.get(), m, 4);
  EXPECT_EQ(device.coded_calls, 3 * layers) << "a step takes so few";
  // What cannot be attended is seen before the window gives tokens up for it, and drafts before can still be accepted.
  const keyhole_layer_tokens before = layer_tokens(s.get(), 0);
  NewTokens bad = turn(40);
  bad.q[3] = NAN;
  EXPECT_EQ(enqueue_turn(s.get(), 0, bad, nullptr), KEYHOLE_NOT_FINITE);
  expect_error_text("tensor q");
  EXPECT_EQ(device.coded_calls, 3 * layers + (is_kept ? 1 : 0));
  const keyhole_layer_tokens after = layer_tokens(s.get(), 0);
  EXPECT_EQ(after.total, before.total);
  EXPECT_EQ(after.window, before.window);
  ASSERT_OK(keyhole_session_accept(s.get(), 2, nullptr));
  keep(m, 4, {0, 1});
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  m.follow(s.get());
  step(s.get(), m);
}

// As many new tokens as an H100 attends by code at once go by steps where products take long enough.
TEST_P(StreamExtend, SlowProductsLeaveNewTokensToSteps) {
  if (!GetParam().coded || GetParam().dtype != KEYHOLE_F16) GTEST_SKIP() << "codes of f16";
  if (GetParam().kept != KEYHOLE_KV_HOST_SAME) GTEST_SKIP() << "this device has no codes of int8";
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, 900);
  uint64_t by_code = 0;
  for (const double slowness : {1.0, 20.0, 1e6}) {
    device.products_slowness = slowness;
    extend(s.get(), m, 40);
    // Behind so few tokens there are few products: what makes them 20 times as long changes nothing.
    if (slowness < 1e6) by_code += engine_config_.layers;
    EXPECT_EQ(device.coded_calls, by_code) << slowness;
    EXPECT_EQ(device.blocked_calls, by_code) << slowness;
    step(s.get(), m);
  }
}

TEST_P(StreamExtend, WithoutMemoryForBlocksTokensComeAFewAtATime) {
  if (GetParam().dtype == KEYHOLE_F32) GTEST_SKIP() << "there are no blocks for f32";
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, 300);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  device.faults.on_call = [](DeviceCall call) {
    if (call == DeviceCall::memory) throw Error(Status::out_of_device_memory, "planted: no memory");
  };
  extend(s.get(), m, 150);
  EXPECT_EQ(device.blocked_calls, 0U);
  device.faults.on_call = [](DeviceCall) {};
  step(s.get(), m);
}

TEST_P(StreamExtend, RefusedCallsChangeNothing) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = config();
  c.max_tokens = 1000;
  SessionPtr s = make_session(device.handle.get(), c);
  StoredModel m = model();
  prompt(s.get(), m, 800);
  const auto refused = [&](NewTokens& t, const uint64_t* mask, keyhole_status status,
                           const char* text) {
    EXPECT_EQ(enqueue_turn(s.get(), 0, t, mask), status);
    expect_error_text(text);
    EXPECT_EQ(layer_tokens(s.get(), 0).total, 800U);
  };
  NewTokens many = turn(201);
  refused(many, nullptr, KEYHOLE_INVALID_ARGUMENT, "max_tokens");
  const uint64_t wrong[] = {1, 1};
  NewTokens two = turn(2);
  refused(two, wrong, KEYHOLE_INVALID_ARGUMENT, "mask");
  const keyhole_tensor q = on_device(two.q, {2, hq(), d()}), k = on_device(two.k, {2, hkv(), d()}),
                       v = tensor(two.v, {2, hkv(), d()}),
                       o = on_device(two.answer.o, {2, hq(), d()});
  EXPECT_EQ(keyhole_session_extend(s.get(), 0, &q, &k, &v, nullptr, &o, nullptr),
            KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(keyhole_session_accept(s.get(), 0, nullptr), KEYHOLE_INVALID_ARGUMENT);
  if (GetParam().dtype != KEYHOLE_F32) {
    for (const bool in_q : {true, false}) {
      NewTokens bad = turn(150);
      (in_q ? bad.q : bad.k)[3] = NAN;
      refused(bad, nullptr, KEYHOLE_NOT_FINITE, in_q ? "tensor q" : "tensor k");
    }
  }
  if (GetParam().dtype == KEYHOLE_F32) {
    NewTokens wide = turn(17);
    const auto mask = tree(17);
    refused(wide, mask.data(), KEYHOLE_UNSUPPORTED, "window of 16");
  }
  extend(s.get(), m, 3);
  step(s.get(), m);
}

TEST_P(StreamExtend, GraphsStayValidWhileDraftsAreAccepted) {
  if (!GetParam().coded) GTEST_SKIP() << "codes alone";
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, 520);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  constexpr uint32_t kDrafts = 11;
  const auto mask = tree(kDrafts);
  std::vector<NewTokens> turns;
  for (uint32_t l = 0; l < engine_config_.layers; ++l) turns.push_back(turn(kDrafts));
  device.stream.begin_capture();
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    ASSERT_OK(enqueue_turn(s.get(), l, turns[l], mask.data()));
  }
  EXPECT_EQ(keyhole_session_accept(s.get(), 1, nullptr), KEYHOLE_BUSY);
  device.stream.end_capture();
  for (uint32_t round = 0; round < unless_sanitized(70U, 50U); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    for (NewTokens& t : turns) refill(t, turn(kDrafts));
    ASSERT_OK(keyhole_session_announce(s.get()));
    device.stream.launch_graph();
    const auto path = path_of(kDrafts);
    ASSERT_OK(keyhole_session_accept(s.get(), static_cast<uint32_t>(path.size()), path.data()));
    device.stream.wait();
    m.follow(s.get());  // what the announcement has offloaded
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      m.append(l, turns[l].k, turns[l].v);
      expect_turn(m, l, turns[l], mask.data());
      if (HasFatalFailure()) return;
    }
    keep(m, kDrafts, path);
    EXPECT_EQ(layer_tokens(s.get(), 0).total, m.tokens(0));
  }
  step(s.get(), m);
}

TEST_P(StreamExtend, BatchesGoOnWhereOneFails) {
  StreamEngine device(engine_config_);
  std::vector<SessionPtr> sessions;
  std::vector<StoredModel> models;
  std::vector<keyhole_session*> handles;
  const uint32_t counts[] = {5, 1, 40, 3};
  std::vector<uint32_t> start{0};
  for (const uint32_t n : counts) {
    keyhole_session_config c = config();
    if (n == 1) c.max_tokens = 300;
    sessions.push_back(make_session(device.handle.get(), c));
    handles.push_back(sessions.back().get());
    models.push_back(model());
    prompt(handles.back(), models.back(), 300);
    start.push_back(start.back() + n);
  }
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    NewTokens all = turn(start.back());
    keyhole_status statuses[4];
    EXPECT_EQ(extend_batch(handles, shape(), l, all, start.data(), statuses, KEYHOLE_DEVICE),
              KEYHOLE_INVALID_ARGUMENT);
    for (uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(statuses[i], i == 1 ? KEYHOLE_INVALID_ARGUMENT : KEYHOLE_OK);
      ASSERT_OK(keyhole_session_synchronize(handles[i]));
      if (i == 1) continue;
      const NewTokens own = part_of(all, shape(), start[i], start[i + 1]);
      models[i].append(l, own.k, own.v);
      if (GetParam().kept == KEYHOLE_KV_HOST_SAME) expect_turn(models[i], l, own, nullptr);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, StreamExtend,
                         testing::ValuesIn(unless_thread_sanitized(
                             std::vector<TurnWay>{{KEYHOLE_F32, KEYHOLE_KV_HOST_SAME, true},
                                                  {KEYHOLE_F16, KEYHOLE_KV_HOST_SAME, true},
                                                  {KEYHOLE_BF16, KEYHOLE_KV_HOST_SAME, false},
                                                  {KEYHOLE_F32, KEYHOLE_KV_HOST_SAME, false},
                                                  {KEYHOLE_F16, KEYHOLE_KV_HOST_INT8, true}},
                             2)),
                         name_of);

}  // namespace
}  // namespace keyhole::test
