// Many new tokens with tensors in device memory by patterns of prompts: which of them attend so, where their rows lie,
// and what is counted; beside double precision, and beside sessions on the host. The device's own choice and attention:
// gpu_listed_test.
#include <keyhole/batch.h>
#include <keyhole/prefill.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/runtime/turns_fixture.h"

namespace keyhole::test {
namespace {

constexpr const char* kFull[] = {"sampled:mass=1000,first=999999,from=0", "a-shape:first=999999",
                                 "pooled:mass=0,near=999999,from=0",
                                 "vertical-slash:columns=0,slashes=9,first=999999,from=0"};

struct Blocks {
  uint64_t attended = 0, seen = 0;
  bool operator==(const Blocks&) const = default;
};
Blocks blocks_of(const keyhole_session* session) {
  Blocks b;
  EXPECT_OK(keyhole_session_get_extend_blocks(session, &b.attended, &b.seen));
  return b;
}

class StreamListed : public StreamTurns {
 protected:
  void set(keyhole_session* s, const char* pattern, uint32_t tokens) {
    ASSERT_OK(keyhole_session_set_extend_pattern(s, pattern, tokens));
  }
  /// A turn of layer 0 whose answers see, of the tokens up to their own, those that sees(tile's first position, token)
  /// says.
  template <class Sees>
  void expect_seen(keyhole_session* s, StoredModel& m, uint32_t n, const Sees& sees) {
    NewTokens t = turn(n);
    const uint32_t before = m.tokens(0);
    ASSERT_OK(enqueue_turn(s, 0, t, nullptr));
    ASSERT_OK(keyhole_session_synchronize(s));
    Model with = m;
    with.append(0, t.k, t.v);
    for (uint32_t i = 0; i < n; i += 1 + numbers_.below(40)) {
      SCOPED_TRACE("token " + std::to_string(i) + " of " + std::to_string(n));
      const NewTokens one = part_of(t, shape(), i, i + 1);
      std::vector<double> sums;
      const auto truth = with.attend(0, one.q, sums, [&](uint32_t token) {
        return token <= before + i && sees(before + i / 128 * 128, token);
      });
      expect_near(one.answer, truth, sums, 3e-4);
      if (HasFatalFailure()) return;
    }
    m.append(0, t.k, t.v);
    m.follow(s);
  }
};

// The first tokens and the newest of each tile: what lies in another place than its number says is attended wrongly.
TEST_P(StreamListed, RowsComeInTheOrderOfTheTokens) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = config();
  c.sink = 70;
  const SessionPtr s = make_session(device.handle.get(), c);
  StoredModel m = model();
  set(s.get(), "a-shape:first=128,near=192", 1);
  const auto sees = [](uint32_t first, uint32_t token) {
    return token < 128 || token / 64 + 3 >= first / 64;
  };
  uint64_t calls = 0;
  const auto extend = [&](uint32_t n) {
    expect_seen(s.get(), m, n, sees);
    EXPECT_EQ(device.listed_calls, ++calls);
  };
  extend(30);  // into the sink
  extend(300);
  prompt(s.get(), m, 400);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  m.follow(s.get());
  const uint64_t places = device.listed_places;
  extend(unless_sanitized(600U, 150U));
  // Sink, offloaded rows, window.
  EXPECT_GE(device.listed_places - places, 3U);
  extend(1);
  step(s.get(), m);
  ASSERT_OK(keyhole_session_truncate(s.get(), 500));
  m.truncate(500);
  m.follow(s.get());
  extend(129);
  EXPECT_EQ(device.blocked_calls, 0U);
}

TEST_P(StreamListed, FullListsAreExact) {
  StreamEngine device(engine_config_);
  for (uint64_t seed = 1; seed <= unless_sanitized(4U, 1U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    numbers_ = Numbers(seed);
    keyhole_session_config c = config();
    c.sink = numbers_.below(150);
    c.window = 1 + numbers_.below(100);
    const SessionPtr s = make_session(device.handle.get(), c);
    StoredModel m = model();
    if (seed % 2 == 0) prompt(s.get(), m, 1 + numbers_.below(900));
    for (int i = 0; i < 4; ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      set(s.get(), kFull[numbers_.below(std::size(kFull))], 1);
      ASSERT_OK(keyhole_session_synchronize(s.get()));
      m.follow(s.get());
      expect_seen(s.get(), m, 1 + numbers_.below(numbers_.below(3) == 0 ? 10 : 300),
                  [](uint32_t, uint32_t) { return true; });
      if (HasFatalFailure()) return;
      EXPECT_EQ(blocks_of(s.get()).attended, blocks_of(s.get()).seen);
      EXPECT_EQ(layer_tokens(s.get(), 0).total, m.tokens(0));
    }
  }
  EXPECT_EQ(device.listed_calls, unless_sanitized(16U, 4U));
}

// With the host's choice, which host_prompt_choice_test compares with choices from their definitions.
TEST_P(StreamListed, ChoosesAndCountsAsASessionOnTheHost) {
  if (GetParam().kept == KEYHOLE_KV_HOST_INT8) GTEST_SKIP() << "its rows round at other times";
  StreamEngine device(engine_config_);
  const EnginePtr host = make_engine(engine_config_);
  for (const char* pattern :
       {"sampled:mass=500,lookups=1000,first=64,near=64,from=0",
        "pooled:blocks=2,first=64,near=64,from=0", "pooled:mass=400,first=64,near=64,from=0",
        "vertical-slash:columns=70,slashes=3,first=64,near=64,from=0"}) {
    SCOPED_TRACE(pattern);
    const SessionPtr there = make_session(device.handle.get(), config()),
                     here = make_session(host.get(), small_session());
    StoredModel m = model(), same = model();
    const Numbers numbers = numbers_;
    prompt(there.get(), m, 900);
    numbers_ = numbers;
    prompt(here.get(), same, 900);
    Blocks of_device, of_host;
    for (keyhole_session* s : {there.get(), here.get()}) set(s, pattern, KEYHOLE_AUTO);
    for (const uint32_t n : {300U, 128U}) {
      NewTokens t = turn(n);
      ASSERT_OK(enqueue_turn(there.get(), 0, t, nullptr));
      ASSERT_OK(keyhole_session_synchronize(there.get()));
      NewTokens same_turn = t;
      ASSERT_OK(test::extend(here.get(), shape(), 0, same_turn));
      const Answer &a = t.answer, &b = same_turn.answer;
      for (size_t i = 0; i < a.o.size(); ++i) ASSERT_NEAR(a.o[i], b.o[i], 1e-5);
      for (size_t i = 0; i < a.lse.size(); ++i) ASSERT_NEAR(a.lse[i], b.lse[i], 1e-5);
    }
    of_device = blocks_of(there.get());
    of_host = blocks_of(here.get());
    EXPECT_EQ(of_device, of_host);
    EXPECT_GT(of_device.attended, 0U);
    EXPECT_LT(of_device.attended, of_device.seen);
    const keyhole_statistics st = statistics(there.get());
    EXPECT_EQ(st.attends, 428U);
    const auto rows = static_cast<uint64_t>(layer_tokens(there.get(), 0).total) * 428 * 4;
    EXPECT_GT(st.keys_attended, 0U);
    EXPECT_LT(st.keys_attended, rows);
    EXPECT_GT(st.device_bytes, statistics(here.get()).device_bytes);
  }
  EXPECT_EQ(device.listed_calls, 8U);
}

TEST_P(StreamListed, OtherCallsAttendAsEver) {
  if (GetParam().kept == KEYHOLE_KV_HOST_INT8) GTEST_SKIP() << "rows attend alike in any dtype";
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), config());
  StoredModel m = model();
  prompt(s.get(), m, unless_sanitized(400U, 100U));
  const char* const one_block = "a-shape:first=0,near=0";
  set(s.get(), one_block, KEYHOLE_AUTO);
  extend(s.get(), m, 127);  // too few
  set(s.get(), one_block, 20);
  extend(s.get(), m, 19);
  const auto mask = tree(30);
  extend(s.get(), m, 30, mask.data());
  // Dense, and dense so far: all rows at once, however few tokens, and not by codes.
  const uint64_t blocked = device.blocked_calls;
  for (const char* dense : {"dense", "auto", "sampled:mass=0,from=999999"}) {
    set(s.get(), dense, 2);
    extend(s.get(), m, 3);
  }
  EXPECT_EQ(device.blocked_calls, blocked + 3 * uint64_t{engine_config_.layers});
  set(s.get(), nullptr, 0);
  extend(s.get(), m, 128);
  // Where a step is captured it is one.
  set(s.get(), one_block, 1);
  NewTokens captured = turn(2);
  device.stream.begin_capture();
  for (uint32_t l = 0; l < engine_config_.layers; ++l)
    ASSERT_OK(enqueue_turn(s.get(), l, captured, nullptr));
  device.stream.end_capture();
  EXPECT_EQ(device.listed_calls, 0U);
  EXPECT_EQ(blocks_of(s.get()), Blocks{});
  // A copy has the pattern.
  const SessionPtr held = fork_of(s.get());
  NewTokens t = turn(20);
  ASSERT_OK(enqueue_turn(held.get(), 0, t, nullptr));
  EXPECT_EQ(device.listed_calls, 1U);
  EXPECT_LT(blocks_of(held.get()).attended, blocks_of(held.get()).seen);
  ASSERT_OK(keyhole_session_set_mode(held.get(), KEYHOLE_MODE_RESIDENT, 0));
  ASSERT_OK(enqueue_turn(held.get(), 0, t, nullptr));
  EXPECT_EQ(device.listed_calls, 1U);
}

TEST_P(StreamListed, MembersOfABatchAttendByTheirOwn) {
  StreamEngine device(engine_config_);
  std::vector<SessionPtr> sessions;
  std::vector<StoredModel> models;
  for (int i = 0; i < 2; ++i) {
    sessions.push_back(make_session(device.handle.get(), config()));
    models.push_back(model());
    prompt(sessions[i].get(), models[i], 300);
  }
  set(sessions[1].get(), kFull[0], 2);
  const uint32_t start[] = {0, 2, 4};
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    NewTokens all = turn(4);
    const std::vector<keyhole_session*> handles = {sessions[0].get(), sessions[1].get()};
    ASSERT_OK(extend_batch(handles, shape(), l, all, start, nullptr, KEYHOLE_DEVICE));
    for (keyhole_session* s : handles) ASSERT_OK(keyhole_session_synchronize(s));
    for (uint32_t i = 0; i < 2; ++i) {
      const NewTokens own = part_of(all, shape(), start[i], start[i + 1]);
      models[i].append(l, own.k, own.v);
      if (GetParam().kept == KEYHOLE_KV_HOST_SAME) expect_turn(models[i], l, own, nullptr);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_EQ(device.listed_calls, uint64_t{engine_config_.layers});
  EXPECT_EQ(blocks_of(sessions[0].get()), Blocks{});
}

// The n-th request for memory, or command, is refused, until none is.
TEST_P(StreamListed, WhatIsRefusedIsAttendedOtherwiseOrChangesNothing) {
  for (const DeviceCall kind : {DeviceCall::memory, DeviceCall::command}) {
    for (int64_t n = 0;; ++n) {
      SCOPED_TRACE(std::string(kind == DeviceCall::memory ? "memory " : "command ") +
                   std::to_string(n));
      StreamEngine device(engine_config_);
      const SessionPtr s = make_session(device.handle.get(), config());
      StoredModel m = model();
      prompt(s.get(), m, 300);
      ASSERT_OK(keyhole_session_synchronize(s.get()));
      m.follow(s.get());
      set(s.get(), kFull[0], 1);
      std::atomic<int64_t> left = n;
      device.faults.on_call = [&](DeviceCall call) {
        if (call != kind || left.fetch_sub(1) != 0) return;
        throw Error(
            kind == DeviceCall::memory ? Status::out_of_device_memory : Status::device_error,
            "planted");
      };
      NewTokens t = turn(150);
      const keyhole_status status = enqueue_turn(s.get(), 0, t, nullptr);
      device.faults.on_call = [](DeviceCall) {};
      if (kind == DeviceCall::memory) {
        ASSERT_EQ(status, KEYHOLE_OK) << keyhole_last_error();
        EXPECT_EQ(device.blocked_calls, n == 0 ? 1U : 0U);
        StoredModel with = m;
        with.append(0, t.k, t.v);
        if (GetParam().kept == KEYHOLE_KV_HOST_SAME) expect_turn(with, 0, t, nullptr);
        if (HasFatalFailure()) return;
      } else if (status != KEYHOLE_OK) {
        EXPECT_EQ(status, KEYHOLE_DEVICE_ERROR);
        EXPECT_EQ(layer_tokens(s.get(), 0).total, 300U);
        EXPECT_EQ(blocks_of(s.get()), Blocks{});
      }
      if (left >= 0) break;
      ASSERT_LT(n, 100);
    }
  }
}

TEST_P(StreamListed, RefusedCallsChangeNothing) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = config();
  c.max_tokens = 1000;
  const SessionPtr s = make_session(device.handle.get(), c);
  StoredModel m = model();
  prompt(s.get(), m, 800);
  set(s.get(), kFull[0], 1);
  const auto refused = [&](NewTokens& t, keyhole_status status, const char* text) {
    EXPECT_EQ(enqueue_turn(s.get(), 0, t, nullptr), status);
    expect_error_text(text);
    EXPECT_EQ(layer_tokens(s.get(), 0).total, 800U);
    EXPECT_EQ(blocks_of(s.get()), Blocks{});
  };
  NewTokens many = turn(201);
  refused(many, KEYHOLE_INVALID_ARGUMENT, "max_tokens");
  for (const bool in_q : {true, false}) {
    NewTokens bad = turn(150);
    (in_q ? bad.q : bad.k)[3] = NAN;
    refused(bad, KEYHOLE_NOT_FINITE, in_q ? "tensor q" : "tensor k");
  }
  extend(s.get(), m, 150);
  step(s.get(), m);
}

INSTANTIATE_TEST_SUITE_P(Ways, StreamListed,
                         testing::Values(TurnWay{KEYHOLE_F16, KEYHOLE_KV_HOST_SAME, true},
                                         TurnWay{KEYHOLE_BF16, KEYHOLE_KV_HOST_SAME, false},
                                         TurnWay{KEYHOLE_F16, KEYHOLE_KV_HOST_INT8, true}),
                         name_of);

// The device has no kernels for it: by steps, as without a pattern.
TEST(StreamListedF32, IsAttendedAsEver) {
  keyhole_engine_config c = small_engine(2);
  c.kv_dtype = KEYHOLE_F32;
  StreamEngine device(c);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Numbers numbers(5);
  Model model(c);
  prefill_both(s.get(), model, Shape(c), 0, 300, numbers);
  ASSERT_OK(keyhole_session_set_extend_pattern(s.get(), "a-shape:first=0,near=0", 1));
  NewTokens t = new_tokens(Shape(c), 2, numbers);
  ASSERT_OK(test::extend(s.get(), Shape(c), 0, t, nullptr, KEYHOLE_DEVICE));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  EXPECT_EQ(device.listed_calls, 0U);
  model.append(0, t.k, t.v);
  expect_answers(model, Shape(c), 0, t, nullptr, 3e-4);
}

}  // namespace
}  // namespace keyhole::test
