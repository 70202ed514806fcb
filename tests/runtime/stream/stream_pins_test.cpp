// Rows that are pinned beside a prompt and beside steps, and what becomes of layers whose rows cannot be.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/runtime/code_layers_fixture.h"
#include "tests/runtime/stored_model.h"

namespace keyhole::test {
namespace {

using CodePins = CodeLayers;

TEST_F(CodePins, ArePinnedAndEncodedBesideAPrompt) {
  StreamEngine device(engine_config_);
  std::vector<std::byte> blocks[2];
  for (const bool is_late : {false, true}) {
    numbers_ = Numbers(5);
    device.pin_pause_us = is_late ? kNever : 0;
    SessionPtr s = make_session(device.handle.get(), mixed());
    Model model(engine_config_);
    for (int chunk = 0; chunk < 3; ++chunk) {
      prefill(s.get(), model, 600);
      // What comes later must not change what the first rows teach.
      if (is_late) continue;
      ASSERT_OK(keyhole_session_synchronize(s.get()));
    }
    for (uint32_t l = 0; is_late && l < kLayers; ++l) EXPECT_EQ(device.codes->count(l), 0U);
    device.pin_pause_us = 0;
    step(s.get(), model, false);
    expect_layers(device, s.get(), kLayers);
    const CodeShape shape{64, 2, 2};
    for (uint32_t b = 0; b < 6; ++b) {
      blocks[is_late].resize((b + 1) * shape.block_bytes());
      device.codes->read(3, 1, b, blocks[is_late].data() + b * shape.block_bytes());
    }
  }
  EXPECT_EQ(blocks[0], blocks[1]);
}

TEST_F(CodePins, AreEncodedWhenOtherLayersGoOn) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), mixed());
  Model model(engine_config_);
  const Shape shape(engine_config_);
  prefill_both(s.get(), model, shape, 0, 1000, numbers_);
  // Layer 0 gets no more rows: the others' take what is pinned of it along.
  for (int i = 0; device.codes->count(0) == 0 && i < 100; ++i) {
    prefill_both(s.get(), model, shape, 1, 20, numbers_);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(device.codes->count(0), 3U);
}

/// Waits until so many bytes are pinned, or for five seconds.
bool are_pinned(const FakePinned& pinned, size_t bytes) {
  for (int i = 0; pinned.bytes() < bytes && i < 1000; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return pinned.bytes() >= bytes;
}

TEST_F(CodePins, OfALayerThatGoesOnArePinnedTogether) {
  constexpr uint32_t kTogether = 32768, kChunk = 8192;
  StreamEngine device(engine_config_);
  keyhole_session_config c = mixed();
  c.max_tokens = 2 * kTogether;
  SessionPtr s = make_session(device.handle.get(), c);
  const auto k = numbers_.many(size_t{kChunk} * 2 * 64), v = numbers_.many(k.size());
  const auto append = [&](uint32_t layer, uint32_t n) {
    const keyhole_tensor tk = tensor(k, {n, 2, 64}), tv = tensor(v, {n, 2, 64});
    ASSERT_OK(keyhole_session_append(s.get(), layer, &tk, &tv, nullptr));
  };
  const auto rows = [&](uint32_t layer) {
    const keyhole_layer_tokens t = layer_tokens(s.get(), layer);
    return t.indexed + t.pending;
  };
  append(0, 3000);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(device.pinned->bytes(), 0U);
  // What there is of a layer, when rows of another one come.
  append(1, kChunk);
  EXPECT_TRUE(are_pinned(*device.pinned, pinned_bytes(rows(0))));
  const size_t others = device.pinned->bytes();
  while (rows(1) < kTogether) append(1, kChunk);
  EXPECT_TRUE(are_pinned(*device.pinned, others + pinned_bytes(kTogether)));
}

TEST_F(CodePins, OfASessionThatEndsMeanwhileAreUnpinned) {
  StreamEngine device(engine_config_);
  for (const uint32_t pause : {0U, 500U, 2000U}) {
    device.pin_pause_us = pause;
    SessionPtr s = make_session(device.handle.get(), mixed());
    Model model(engine_config_);
    prefill(s.get(), model, 1500);
  }
}

TEST_F(CodePins, ThatMustBeOnTheDeviceFailUntilMemoryCanBePinned) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = mixed();
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  SessionPtr s = make_session(device.handle.get(), c);
  Model model(engine_config_);
  prefill(s.get(), model, 600);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  device.pinned_limit = 7 * pinned_bytes(kPinnedTogether);
  keyhole_status status = KEYHOLE_OK;
  const Shape shape(engine_config_);
  for (uint32_t l = 0; l < kLayers; ++l) {
    const auto k = numbers_.many(size_t{1000} * 2 * 64), v = numbers_.many(k.size());
    const keyhole_tensor tk = tensor(k, {1000, 2, 64}), tv = tensor(v, {1000, 2, 64});
    const keyhole_status own = keyhole_session_append(s.get(), l, &tk, &tv, nullptr);
    // It says so of layers before, and changes nothing then.
    EXPECT_EQ(layer_tokens(s.get(), l).total, own == KEYHOLE_OK ? 1600U : 600U);
    if (own == KEYHOLE_OK) model.append(l, k, v);
    if (own != KEYHOLE_OK) status = own;
  }
  if (status == KEYHOLE_OK) status = keyhole_session_synchronize(s.get());
  EXPECT_EQ(status, KEYHOLE_OUT_OF_MEMORY);
  EXPECT_NE(keyhole_session_synchronize(s.get()), KEYHOLE_OK);
  EXPECT_EQ(statistics(s.get()).code_layers, kLayers);
  device.pinned_limit = SIZE_MAX;
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  step(s.get(), model, false);
  expect_layers(device, s.get(), kLayers);
}

TEST_F(CodePins, AheadOfRowsMayFail) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = mixed();
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  SessionPtr s = make_session(device.handle.get(), c);
  Model model(engine_config_);
  device.pinned_limit = kLayers * pinned_bytes(kPinnedTogether);
  prefill(s.get(), model, 900);
  const auto rows = [&] {
    const keyhole_layer_tokens t = layer_tokens(s.get(), 0);
    return t.indexed + t.pending;
  };
  while (rows() < kPinnedTogether) prefill(s.get(), model, 32);
  ASSERT_EQ(rows(), kPinnedTogether);
  step(s.get(), model, false);  // begins to pin what may come
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int i = 0; i < 3; ++i) prefill(s.get(), model, 32);
  step(s.get(), model, false);
  expect_layers(device, s.get(), kLayers);
}

TEST_F(CodePins, WhatCannotBePinnedGoesToTheHostFirstLayersFirst) {
  StreamEngine device(engine_config_);
  device.pinned_limit = 7 * pinned_bytes(kPinnedTogether);
  SessionPtr s = make_session(device.handle.get(), mixed());
  Model model(engine_config_);
  prefill(s.get(), model, 1000);
  step(s.get(), model, false);
  expect_layers(device, s.get(), 5);
  for (int i = 0; i < 300; ++i) step(s.get(), model, i % 2 == 1);
  // In the middle of decoding all want a second piece: two layers go, and three have two.
  expect_layers(device, s.get(), 3);
  EXPECT_EQ(logged("the host attends layers 0: planted: too much is locked"), 1);
  EXPECT_EQ(logged("the host attends layers 0 to 1: planted: too much is locked"), 1);
  prefill(s.get(), model, 1100);
  step(s.get(), model, false);
  expect_layers(device, s.get(), 2);  // in the middle of a prefill
  ASSERT_OK(keyhole_session_truncate(s.get(), 600));
  model.truncate(600);
  step(s.get(), model, false);
  expect_layers(device, s.get(), 2);
  // A copy begins with all of them.
  fork(s);
  step(s.get(), model, false);
  expect_layers(device, s.get(), 5);
  device.pinned_limit = 0;
  prefill(s.get(), model, 1100);
  step(s.get(), model, true);
  EXPECT_EQ(statistics(s.get()).code_layers, 0U);
  EXPECT_EQ(logged("no codes on the device"), 1);
  device.pinned_limit = SIZE_MAX;
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  EXPECT_EQ(statistics(s.get()).code_layers, 0U) << "a build asks again for what was refused";
}

TEST_F(CodePins, FollowRowsThatLeavePagesWhichACopyReads) {
  for (const keyhole_kv_host kv : {KEYHOLE_KV_HOST_SAME, KEYHOLE_KV_HOST_INT8}) {
    StreamEngine device(engine_config_);
    keyhole_session_config c = mixed();
    c.kv_host = kv;
    SessionPtr s = make_session(device.handle.get(), c);
    StoredModel model(engine_config_, kv);
    prefill(s.get(), model, 1900);
    step(s.get(), model, false);
    FakeCodes* const parents_codes = device.codes;
    FakePinned* const parents_pinned = device.pinned;
    const SessionPtr copy = fork_of(s.get());
    StoredModel copys = model;
    step(copy.get(), copys, false);
    expect_layers(device, copy.get(), kLayers);
    // Both write where they shared pages, first the one that was copied.
    ASSERT_OK(keyhole_session_truncate(s.get(), 800));
    model.truncate(800);
    follow(model, s.get());
    prefill(s.get(), model, 700);
    step(s.get(), model, true);
    EXPECT_FALSE(parents_codes->unpinned);
    EXPECT_TRUE(parents_pinned->sees_what_the_host_sees());
    EXPECT_TRUE(device.pinned->sees_what_the_host_sees());
    step(copy.get(), copys, true);
    for (const uint32_t kept : {1500U, 900U, 300U}) {
      const SessionPtr owner = fork_of(copy.get());
      FakePinned* const pinned = device.pinned;
      FakeCodes* const codes = device.codes;
      StoredModel others = copys;
      ASSERT_OK(keyhole_session_truncate(owner.get(), kept));
      others.truncate(kept);
      follow(others, owner.get());
      step(owner.get(), others, false);
      EXPECT_TRUE(pinned->sees_what_the_host_sees());
      prefill(owner.get(), others, 1000);
      step(owner.get(), others, false);
      EXPECT_TRUE(pinned->sees_what_the_host_sees()) << kept;
      EXPECT_FALSE(codes->unpinned);
      step(copy.get(), copys, false);
    }
  }
}

TEST_F(CodePins, ThatGoInTheMiddleOfAGraphSayThatItIsToBeCapturedAgain) {
  StreamEngine device(engine_config_);
  device.pinned_limit = 7 * pinned_bytes(kPinnedTogether);
  SessionPtr s = make_session(device.handle.get(), mixed());
  Model model(engine_config_);
  prefill(s.get(), model, 900);
  std::vector<Token> tokens(kLayers);
  std::vector<std::vector<float>> out(kLayers), lse(kLayers);
  const auto capture = [&] {
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    device.stream.begin_capture();
    for (uint32_t l = 0; l < kLayers; ++l) {
      tokens[l] = token();
      out[l].resize(tokens[l].q.size());
      lse[l].resize(engine_config_.q_heads);
      ASSERT_OK(enqueue(s.get(), l, tokens[l], out[l], lse[l].data()));
    }
    device.stream.end_capture();
  };
  capture();
  int captures = 1;
  for (int launch = 0; launch < 500; ++launch) {
    const keyhole_status status = keyhole_session_announce(s.get());
    if (status != KEYHOLE_OK) {
      ASSERT_EQ(status, KEYHOLE_INVALID_ARGUMENT);
      expect_error_text("capture it again");
      captures += 1;
      capture();
      ASSERT_OK(keyhole_session_announce(s.get()));
    }
    device.stream.launch_graph();
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (uint32_t l = 0; l < kLayers; ++l) {
      model.append(l, tokens[l].k, tokens[l].v);
      expect_truth(model, l, tokens[l].q, out[l], lse[l]);
    }
    if (HasFatalFailure() || HasFailure()) return;
  }
  EXPECT_EQ(captures, 2);
  expect_layers(device, s.get(), 3);
}

}  // namespace
}  // namespace keyhole::test
