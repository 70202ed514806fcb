// Sliding layers with tensors in device memory: steps, halves, graphs, several tokens, drafts, copies, and calls with
// tensors in host memory between them, beside attention in double precision over exactly their newest tokens.
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <numeric>
#include <thread>

#include "keyhole/save.h"
#include "tests/runtime/new_tokens.h"
#include "tests/runtime/session/layer_fixture.h"

namespace keyhole::test {
namespace {

class StreamWindows : public LayerConfig {
 protected:
  void slide(uint32_t layer, uint32_t window, uint32_t slack = KEYHOLE_AUTO) {
    if (layers_.empty()) own_layers();
    layers_[layer].window = window;
    layers_[layer].window_slack = slack;
  }

  /// A step of a layer that is under way on the stream, or several tokens.
  struct Turn : NewTokens {
    uint32_t layer = 0;
  };
  Turn turn(uint32_t layer, uint32_t n) { return {new_tokens(shape(), n, numbers_), layer}; }
  keyhole_status extend_on_device(keyhole_session* s, Turn& t, const uint64_t* mask = nullptr) {
    return extend(s, shape(), t.layer, t, mask, KEYHOLE_DEVICE);
  }
  keyhole_status extend_on_host(keyhole_session* s, Turn& t, const uint64_t* mask = nullptr) {
    return extend(s, shape(), t.layer, t, mask);
  }
  keyhole_status step_on_device(keyhole_session* s, Turn& t, bool halves) {
    return attend(s, shape(), t.layer, t, KEYHOLE_DEVICE, halves);
  }
  /// Appends the turn's tokens to the model, whose answers must be the session's.
  void expect_turn(Model& model, const Turn& t, const uint64_t* mask = nullptr) {
    model.append(t.layer, t.k, t.v);
    expect_answers(model, shape(), t.layer, t, mask);
  }
  /// Each draft sees some of those before it.
  std::vector<uint64_t> random_tree(uint32_t n) {
    std::vector<uint64_t> mask;
    const uint32_t one_in = 1 + numbers_.below(4);
    for (uint32_t i = 0; i < n; ++i) {
      uint64_t seen = uint64_t{1} << i;
      for (uint32_t j = 0; j < i; ++j) {
        if (numbers_.below(one_in) == 0) seen |= uint64_t{1} << j;
      }
      mask.push_back(seen);
    }
    return mask;
  }
  /// A token of every layer on the stream, checked.
  void decode_on_device(keyhole_session* s, Model& model, bool halves = false) {
    std::vector<Turn> turns;
    for (uint32_t l = 0; l < engine_config_.layers; ++l) turns.push_back(turn(l, 1));
    for (Turn& t : turns) ASSERT_OK(step_on_device(s, t, halves));
    ASSERT_OK(keyhole_session_synchronize(s));
    for (const Turn& t : turns) expect_turn(model, t);
  }
  /// Attends without appending, on the stream.
  void expect_exact_on_device(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      Turn t = turn(l, 1);
      const auto q = on_device(t.q, {hq(), d()}), o = on_device(t.answer.o, {hq(), d()});
      ASSERT_OK(keyhole_session_attend(s, l, &q, nullptr, nullptr, &o, t.answer.lse.data()));
      ASSERT_OK(keyhole_session_synchronize(s));
      std::vector<double> lse;
      const auto truth = model.attend_all(l, t.q, lse);
      expect_near(t.answer, truth, lse);
    }
  }
  void prefill_from_device(keyhole_session* s, Model& model, uint32_t n) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const Turn t = turn(l, n);
      const auto k = on_device(t.k, {n, hkv(), d()}), v = on_device(t.v, {n, hkv(), d()});
      ASSERT_OK(keyhole_session_append(s, l, &k, &v, nullptr));
      model.append(l, t.k, t.v);
    }
  }
};

TEST_F(StreamWindows, AttendExactlyTheirWindow) {
  const std::vector<float> sinks = {1, -3, 8, 0, 2, 15, -1, 4};
  for (const uint32_t window : {1U, 2U, 16U, 500U}) {
    for (const uint32_t slack : {0U, 1U, 40U}) {
      SCOPED_TRACE("window " + std::to_string(window) + ", slack " + std::to_string(slack));
      engine_config_.sink_logits = slack == 1 ? sinks.data() : nullptr;
      slide(1, window, slack);
      layers_[1].softcap = slack == 40 ? 5.0F : 0.0F;
      layers_[1].scale = 0.2F;
      StreamEngine device(engine_config_);
      const SessionPtr s = make_session(device.handle.get(), small_session());
      Model model(engine_config_);
      for (int i = 0; i < 3; ++i) decode_on_device(s.get(), model, i % 2 == 1);
      for (const uint32_t chunk : {1U, 30U, 200U}) {
        prefill_from_device(s.get(), model, chunk);
        expect_exact_on_device(s.get(), model);
        for (int i = 0; i < 5; ++i) decode_on_device(s.get(), model, i % 2 == 0);
        const keyhole_layer_tokens t = layer_tokens(s.get(), 1);
        EXPECT_EQ(t.total, model.tokens(1));
        EXPECT_EQ(t.window, std::min(window, model.tokens(1)));
        EXPECT_EQ(t.sink + t.indexed + t.pending, 0U);
      }
      for (int i = 0; i < 45; ++i) decode_on_device(s.get(), model);
      expect_all_exact(s.get(), model);
    }
  }
}

TEST_F(StreamWindows, TakeDeviceMemoryWhenTheyAreFirstThere) {
  slide(1, 20, 4);
  StreamEngine device(engine_config_);
  keyhole_session_config c = small_session();
  const SessionPtr s = make_session(device.handle.get(), c);
  Model model(engine_config_);
  prefill_model(s.get(), model, 50);
  const keyhole_statistics before = statistics(s.get());
  gpu::WindowsShape shape;
  shape.q_heads = 4, shape.kv_heads = 2, shape.head_dim = 64;
  shape.layers = {{1, 20, 24, {}}};
  device.windows_room = gpu::windows_bytes(shape) - 1;
  Turn t = turn(1, 1);
  EXPECT_EQ(KEYHOLE_OUT_OF_DEVICE_MEMORY, step_on_device(s.get(), t, false));
  EXPECT_EQ(layer_tokens(s.get(), 1).total, 50U);
  decode(s.get(), model);
  device.windows_room += 1;
  decode_on_device(s.get(), model);
  const keyhole_statistics after = statistics(s.get());
  EXPECT_EQ(after.device_bytes - before.device_bytes, gpu::windows_bytes(shape));
  EXPECT_EQ(after.stream_steps - before.stream_steps, 2U) << "of both layers";
  EXPECT_GE(after.attends - before.attends, 3U);
  ASSERT_OK(keyhole_session_reset_statistics(s.get()));
  EXPECT_EQ(statistics(s.get()).stream_steps, 0U);
  decode_on_device(s.get(), model);
  EXPECT_EQ(statistics(s.get()).stream_steps, 2U);
}

TEST_F(StreamWindows, AreInThePlanOfADevice) {
  engine_config_.layers = 3;
  slide(2, 20, 4);
  engine_config_.device = KEYHOLE_DEVICE_CUDA;
  keyhole_session_config c = small_session();
  const auto device_bytes = [&](uint64_t context) {
    keyhole_memory_plan plan;
    keyhole_memory_plan_init(&plan);
    EXPECT_OK(keyhole_plan(&engine_config_, &c, context, 0, 0, &plan));
    return plan.device_bytes;
  };
  gpu::WindowsShape shape{4, 2, 64, DType::f16, {{2, 20, 24, {}}}, {}};
  const uint64_t whole = gpu::windows_bytes(shape), with = device_bytes(1000);
  shape.layers[0].slots = 10;
  EXPECT_EQ(with - device_bytes(10), whole - gpu::windows_bytes(shape));
  // The last layers, where they slide, have no sink and window of the session.
  engine_config_.layers = engine_config_.layer_count = 2;
  EXPECT_EQ(with - device_bytes(1000), whole);
}

TEST_F(StreamWindows, RunInGraphs) {
  slide(0, 9, 6);
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 40);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  // Nothing of the window has been on the device yet. A token, and three more of the sliding layer.
  std::vector<Turn> turns = {turn(0, 1), turn(1, 1), turn(0, 3)};
  device.stream.begin_capture();
  ASSERT_OK(step_on_device(s.get(), turns[0], false));
  ASSERT_OK(step_on_device(s.get(), turns[1], true));
  ASSERT_OK(extend_on_device(s.get(), turns[2]));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_truncate(s.get(), 30));
  device.stream.end_capture();
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 40U) << "a captured step has not happened";
  EXPECT_EQ(statistics(s.get()).stream_steps, 0U);
  for (int launch = 0; launch < 12; ++launch) {
    for (Turn& t : turns) {
      refill(t, turn(t.layer, t.n));
    }
    ASSERT_OK(keyhole_session_announce(s.get()));
    device.stream.launch_graph();
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (const Turn& t : turns) expect_turn(model, t);
    EXPECT_EQ(layer_tokens(s.get(), 0).total, model.tokens(0));
    // The window goes to the host and comes back when the graph is announced.
    if (launch % 3 == 0) expect_all_exact(s.get(), model);
    if (launch % 4 == 1) {
      // Three of layer 0, and the newest of both are none of layer 1.
      const uint32_t n = model.tokens(0) - 3;
      ASSERT_OK(keyhole_session_truncate(s.get(), n));
      model.truncate(n);
    }
  }
  // A graph that would pass max_tokens.
  Turn many = turn(0, small_session().max_tokens - model.tokens(0) + 1);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, extend_on_device(s.get(), many));
  expect_error_text("max_tokens = 4096");
  expect_exact_on_device(s.get(), model);
}

TEST_F(StreamWindows, DraftsAreAcceptedWithoutWaiting) {
  slide(1, 12, 8);
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 60);
  decode_on_device(s.get(), model);
  for (const bool late : {false, true}) {
    std::vector<Turn> drafts = {turn(0, 5), turn(1, 5)}, more = {turn(0, 1), turn(1, 1)};
    std::atomic<bool> go_on{!late};
    device.stream.push([&] {
      while (!go_on) std::this_thread::yield();
    });
    const uint32_t path[] = {1, 4};
    // Where the stream stands still, layer 1 alone goes on: layer 0 has a host, which takes its tokens in.
    for (const uint32_t l : late ? std::vector<uint32_t>{1} : std::vector<uint32_t>{0, 1}) {
      ASSERT_OK(extend_on_device(s.get(), drafts[l]));
    }
    ASSERT_OK(keyhole_session_accept(s.get(), 2, path));
    for (const uint32_t l : late ? std::vector<uint32_t>{1} : std::vector<uint32_t>{0, 1}) {
      ASSERT_OK(step_on_device(s.get(), more[l], false));
    }
    go_on = true;
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (const uint32_t l : late ? std::vector<uint32_t>{1} : std::vector<uint32_t>{0, 1}) {
      expect_turn(model, drafts[l]);
      model.keep(l, 5, {1, 4});
      expect_turn(model, more[l]);
    }
  }
  // More than the slack.
  std::vector<Turn> drafts = {turn(1, 10)};
  ASSERT_OK(extend_on_device(s.get(), drafts[0]));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_accept(s.get(), 1, nullptr));
  expect_error_text("allowed: to drop up to its slack, 8");
  ASSERT_OK(keyhole_session_accept(s.get(), 2, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
}

// Windows that are longer than the tree, as long as a branch, and shorter; rings that have turned over and that have
// not.
TEST_F(StreamWindows, TreesOfDraftsSeeTheirBranches) {
  engine_config_.layers = 3;
  const std::vector<float> sinks = numbers_.many(12);
  engine_config_.sink_logits = sinks.data();
  slide(0, 40, 20);
  slide(1, 3, 20);
  slide(2, 1, 20);
  StreamEngine device(engine_config_);
  for (const uint32_t prompt : {1U, 10U, 90U}) {
    const SessionPtr s = make_session(device.handle.get(), small_session());
    Model model(engine_config_);
    prefill_model(s.get(), model, prompt);
    for (uint32_t round = 0; round < unless_sanitized(12, 3); ++round) {
      const uint32_t n = 1 + numbers_.below(20);
      const auto mask = random_tree(n);
      std::vector<Turn> turns = {turn(0, n), turn(1, n), turn(2, n)};
      for (Turn& t : turns) ASSERT_OK(extend_on_device(s.get(), t, mask.data()));
      std::vector<uint32_t> path;
      for (uint32_t i = 0; i < n; ++i) {
        if (numbers_.below(3) == 0) path.push_back(i);
      }
      path.reserve(1);
      ASSERT_OK(keyhole_session_accept(s.get(), static_cast<uint32_t>(path.size()), path.data()));
      ASSERT_OK(keyhole_session_synchronize(s.get()));
      for (const Turn& t : turns) {
        expect_turn(model, t, mask.data());
        model.keep(t.layer, t.n, path);
      }
      decode_on_device(s.get(), model);
      if (HasFatalFailure()) return;
    }
    expect_all_exact(s.get(), model);
  }
}

TEST_F(StreamWindows, TreesOfDraftsInGraphs) {
  engine_config_.layers = 1;
  slide(0, 9, 6);
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 30);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  const uint64_t mask[] = {1, 3, 5, 13, 19};
  Turn t = turn(0, 5);
  device.stream.begin_capture();
  ASSERT_OK(extend_on_device(s.get(), t, mask));
  device.stream.end_capture();
  for (uint32_t launch = 0; launch < 10; ++launch) {
    refill(t, turn(0, 5));
    ASSERT_OK(keyhole_session_announce(s.get()));
    device.stream.launch_graph();
    const std::vector<uint32_t> path = {0, 2, 3};
    ASSERT_OK(keyhole_session_accept(s.get(), 3, path.data()));
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    expect_turn(model, t, mask);
    model.keep(t.layer, t.n, path);
    EXPECT_EQ(layer_tokens(s.get(), 0).total, model.tokens(0));
  }
  expect_exact_on_device(s.get(), model);
}

TEST_F(StreamWindows, TreesOfDraftsNeedSlack) {
  slide(1, 12, 8);
  StreamEngine device(engine_config_);
  auto c = small_session();
  const SessionPtr s = make_session(device.handle.get(), c);
  Model model(engine_config_);
  prefill_model(s.get(), model, 60);
  // The last draft sees itself alone: of the tokens before it 11, and 9 drafts lie behind these.
  const std::vector<uint64_t> mask = {1, 3, 5, 9, 17, 33, 65, 129, 257, 512};
  Turn t = turn(1, 9);
  ASSERT_OK(extend_on_device(s.get(), t, mask.data()));
  ASSERT_OK(keyhole_session_accept(s.get(), 1, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  expect_turn(model, t, mask.data());
  model.keep(t.layer, t.n, {0});
  Turn many = turn(1, 10);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, extend_on_device(s.get(), many, mask.data()));
  expect_error_text("layer 1 has a sliding window of 12 and keeps 20 tokens");
  expect_error_text("token 9 of this mask needs a window_slack of 9");
  EXPECT_EQ(layer_tokens(s.get(), 1).total, model.tokens(1));
  // In host memory there is no such bound.
  ASSERT_OK(extend_on_host(s.get(), many, mask.data()));
  expect_turn(model, many, mask.data());
  expect_exact_on_device(s.get(), model);
  // Nor where the layer keeps all tokens that can come.
  c.max_tokens = 20;
  const SessionPtr all = make_session(device.handle.get(), c);
  Model few(engine_config_);
  prefill_model(all.get(), few, 10);
  many = turn(1, 10);
  ASSERT_OK(extend_on_device(all.get(), many, mask.data()));
  ASSERT_OK(keyhole_session_synchronize(all.get()));
  expect_turn(few, many, mask.data());
}

TEST_F(StreamWindows, RefuseWhatIsNotFinite) {
  slide(1, 9);
  for (const char* name : {"q", "k", "v"}) {
    StreamEngine device(engine_config_);
    SessionPtr s = make_session(device.handle.get(), small_session());
    Model model(engine_config_);
    prefill_model(s.get(), model, 20);
    Turn t = turn(1, 1);
    (*name == 'q' ? t.q : *name == 'k' ? t.k : t.v)[70] = NAN;
    ASSERT_OK(step_on_device(s.get(), t, false));
    EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_synchronize(s.get()));
    expect_error_text(std::string("tensor ") + name);
    EXPECT_EQ(KEYHOLE_NOT_FINITE, step_on_device(s.get(), t, false)) << "there are no more steps";
    EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_truncate(s.get(), 20));
    // A copy has the tokens before.
    s = fork_of(s.get());
    EXPECT_EQ(layer_tokens(s.get(), 1).total, *name == 'q' ? 21U : 20U);
    ASSERT_OK(keyhole_session_truncate(s.get(), 20));
    expect_all_exact(s.get(), model);
    decode_on_device(s.get(), model);
  }
  // More steps than the slack before anybody looks.
  layers_[1].window_slack = 2;
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 20);
  std::atomic<bool> go_on{false};
  device.stream.push([&] {
    while (!go_on) std::this_thread::yield();
  });
  Turn t = turn(1, 4);
  t.k[70] = NAN;
  ASSERT_OK(extend_on_device(s.get(), t));
  go_on = true;
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_synchronize(s.get()));
  keyhole_session* fork = nullptr;
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_fork(s.get(), &fork));
  expect_error_text("4 tokens ago");
}

TEST_F(StreamWindows, PromptsThatAreNotFiniteChangeNothing) {
  slide(1, 9, 3);
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_from_device(s.get(), model, 30);
  decode_on_device(s.get(), model);
  for (const char* name : {"k", "v", "q"}) {
    Turn t = turn(1, 20);
    // Also of a token that would not stay.
    auto& rows = *name == 'q' ? t.q : *name == 'k' ? t.k : t.v;
    rows[(*name == 'q' ? shape().q(2) : shape().kv(2)) + 64] = *name == 'k' ? 70000.0F : NAN;
    const auto k = on_device(t.k, {20, hkv(), d()}), v = on_device(t.v, {20, hkv(), d()}),
               q = on_device(t.q, {20, hq(), d()});
    EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_append(s.get(), 1, &k, &v, &q));
    expect_error_text(std::string("tensor ") + name);
    expect_error_text("at token 2, head 1");
  }
  expect_exact_on_device(s.get(), model);
  Turn t = turn(1, 4);
  const auto k = on_device(t.k, {4, hkv(), d()}), v = on_device(t.v, {3, hkv(), d()});
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_append(s.get(), 1, &k, &v, nullptr));
  expect_exact_on_device(s.get(), model);
  decode_on_device(s.get(), model);
}

TEST_F(StreamWindows, FailuresOfTheDeviceEndTheSession) {
  slide(1, 9);
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 20);
  decode_on_device(s.get(), model);
  Turn t = turn(1, 1);
  device.faults.fails = true;
  EXPECT_EQ(KEYHOLE_DEVICE_ERROR, step_on_device(s.get(), t, false));
  device.faults.fails = false;
  EXPECT_EQ(KEYHOLE_DEVICE_ERROR, step_on_device(s.get(), t, false));
  expect_error_text("planted");
}

TEST_F(StreamWindows, FailuresWhileTheyMoveLeaveThemWhereTheyAre) {
  slide(1, 9);
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 20);
  bool fails = true;
  device.faults.on_call = [&](DeviceCall call) {
    if (fails && call != DeviceCall::command) {
      throw Error(Status::out_of_device_memory, "planted: no memory");
    }
  };
  Turn t = turn(1, 1);
  EXPECT_EQ(KEYHOLE_OUT_OF_DEVICE_MEMORY, step_on_device(s.get(), t, true));
  fails = false;
  expect_all_exact(s.get(), model);
  decode_on_device(s.get(), model);
  decode(s.get(), model);
}

TEST_F(StreamWindows, RandomCalls) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("keyhole_device_windows_" + std::to_string(getpid()));
  for (uint64_t seed = 0; seed < unless_sanitized(25, 6); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Numbers random(seed);
    numbers_ = Numbers(seed + 1000);
    layers_.clear();
    engine_config_ = small_engine(1 + random.below(3));
    engine_config_.layers = 3;
    engine_config_.layer_configs = nullptr;
    engine_config_.kv_dtype = random.below(2) == 0 ? KEYHOLE_F16 : KEYHOLE_F32;
    const std::vector<float> sinks = numbers_.many(12);
    engine_config_.sink_logits = random.below(2) == 0 ? sinks.data() : nullptr;
    const uint32_t slack = 1 + random.below(30);
    slide(1, 1 + random.below(50), slack);
    if (random.below(2) == 0) slide(2, 1 + random.below(10), slack);
    layers_[1].softcap = random.below(2) == 0 ? 3.0F : 0.0F;
    StreamEngine device(engine_config_);
    keyhole_session_config c = small_session();
    c.max_tokens = random.below(2) * 400 + 60;
    SessionPtr s = make_session(device.handle.get(), c);
    Model model(engine_config_);
    for (int call = 0; call < 40; ++call) {
      const uint32_t tokens = model.tokens(0), room = c.max_tokens - tokens;
      switch (random.below(9)) {
        case 0:
          if (room != 0) prefill_model(s.get(), model, 1 + random.below(std::min(room, 90U)));
          break;
        case 1:
          if (room != 0) prefill_from_device(s.get(), model, 1 + random.below(std::min(room, 90U)));
          break;
        case 2: {
          if (tokens == 0) break;
          const uint32_t n = tokens - random.below(std::min(slack, tokens) + 1);
          if (keyhole_session_truncate(s.get(), n) != KEYHOLE_OK) {
            // Only tokens that an earlier truncation took the slack of.
            expect_error_text("sliding window");
            break;
          }
          model.truncate(n);
          break;
        }
        case 3: {
          s = fork_of(s.get());
          break;
        }
        case 4: {
          keyhole_session* loaded = nullptr;
          ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
          if (random.below(2) == 0) break;  // and it goes on itself
          ASSERT_OK(keyhole_session_load(device.handle.get(), path.c_str(), nullptr, &loaded));
          s.reset(loaded);
          break;
        }
        case 5: {
          // Drafts, of which some are dropped where the slack allows.
          const uint32_t n = 1 + random.below(10);
          if (n > room) break;
          const bool on_host = random.below(3) == 0;
          std::vector<Turn> turns;
          for (uint32_t l = 0; l < 3; ++l) turns.push_back(turn(l, n));
          // A tree now and then. On the device the slack must do for it, and layer 0 has no codes: K and V in f16 then.
          const bool is_tree = random.below(2) == 0 &&
                               (on_host || (n <= slack && engine_config_.kv_dtype == KEYHOLE_F16));
          const auto tree = random_tree(n);
          const uint64_t* const mask = is_tree ? tree.data() : nullptr;
          for (Turn& t : turns) {
            ASSERT_OK(on_host ? extend_on_host(s.get(), t, mask)
                              : extend_on_device(s.get(), t, mask));
          }
          std::vector<uint32_t> ids;
          for (uint32_t i = 0; i < n; ++i) {
            if (random.below(3) != 0) ids.push_back(i);
          }
          const auto m = static_cast<uint32_t>(ids.size());
          const bool by_path = m != 0 && random.below(2) == 0;
          if (!by_path) std::iota(ids.begin(), ids.end(), 0U);
          const bool accepted =
              keyhole_session_accept(s.get(), m, by_path ? ids.data() : nullptr) == KEYHOLE_OK;
          if (!accepted) expect_error_text("sliding window");
          ASSERT_OK(keyhole_session_synchronize(s.get()));
          for (const Turn& t : turns) expect_turn(model, t, mask);
          if (!accepted) break;
          for (const Turn& t : turns) model.keep(t.layer, n, ids);
          break;
        }
        case 6:
          for (uint32_t i = random.below(20); i != 0 && model.tokens(0) < c.max_tokens; --i) {
            decode(s.get(), model);
          }
          break;
        default:
          for (uint32_t i = random.below(20); i != 0 && model.tokens(0) < c.max_tokens; --i) {
            decode_on_device(s.get(), model, random.below(2) == 0);
          }
      }
      if (model.tokens(0) == 0) continue;
      for (uint32_t l = 0; l < 3; ++l) {
        ASSERT_EQ(layer_tokens(s.get(), l).total, model.tokens(l)) << "call " << call;
      }
      if (random.below(4) == 0) {
        expect_all_exact(s.get(), model);
      } else {
        expect_exact_on_device(s.get(), model);
      }
    }
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace keyhole::test
