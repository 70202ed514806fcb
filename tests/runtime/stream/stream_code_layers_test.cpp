// Sessions of which some layers have codes on the device and the first ones do not, as there is no room for all.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/runtime/code_layers_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

TEST_F(CodeLayers, AreAsManyAsTheDeviceHasRoomFor) {
  for (uint32_t n = 0; n <= kLayers; n += unless_sanitized(1, 2)) {
    SCOPED_TRACE(n);
    log_.clear();
    StreamEngine device(engine_config_);
    keyhole_session_config c = mixed();
    c.device_memory_limit = gpu::cuda_resident_bytes(resident()) +
                            (n == 0 ? 0 : gpu::codes_bytes(codes(n, c.max_tokens)));
    if (n < kLayers) {
      const size_t one = gpu::codes_bytes(codes(1, c.max_tokens));
      c.device_memory_limit +=
          n == 0 ? one - 1 : gpu::codes_bytes(codes(2, c.max_tokens)) - one - 1;
    }
    const keyhole_memory_plan p = plan(c);
    EXPECT_EQ(p.code_layers, n);
    EXPECT_EQ(p.first_code_layer, n == 0 ? 0 : kLayers - n);
    EXPECT_EQ(p.fits, 1U);
    SessionPtr s = make_session(device.handle.get(), c);
    Model model(engine_config_);
    const keyhole_statistics st = statistics(s.get());
    EXPECT_EQ(st.device_bytes, p.device_bytes);
    EXPECT_EQ(st.code_bytes, p.code_bytes);
    EXPECT_EQ(st.code_layers, n);
    EXPECT_LE(st.device_bytes, c.device_memory_limit);
    const std::string host =
        n == 4 ? "layers 0:" : "layers 0 to " + std::to_string(kLayers - n - 1);
    EXPECT_EQ(logged("the host attends " + host), n == 0 || n == kLayers ? 0 : 1);
    EXPECT_EQ(logged("device_memory_limit"), n == kLayers ? 0 : 1);
    prefill(s.get(), model, 700);
    for (int i = 0; i < 100; ++i) step(s.get(), model, i % 2 == 0);
    EXPECT_EQ(layer_tokens(s.get(), 0).total - layer_tokens(s.get(), 0).window, 4U + 768);
    expect_layers(device, s.get(), n);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    EXPECT_EQ(logged("codes on the device"), 1) << "a build makes them anew";
    EXPECT_EQ(statistics(s.get()).code_layers, n);
  }
}

TEST_F(CodeLayers, AreAsManyAsMayBePinned) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = mixed();
  c.max_tokens = 20 + 4 * kCodeBlock + 200;
  const size_t exchange = gpu::cuda_pinned_bytes(resident());
  c.pinned_memory_limit = exchange + 3 * pinned_bytes(4 * kCodeBlock) + 5000;
  const keyhole_memory_plan p = plan(c);
  EXPECT_EQ(p.code_layers, 3U);
  EXPECT_EQ(p.first_code_layer, 2U);
  EXPECT_EQ(p.pinned_kv_bytes, 3 * pinned_bytes(4 * kCodeBlock));
  EXPECT_EQ(p.fits, 1U);
  SessionPtr s = make_session(device.handle.get(), c);
  EXPECT_EQ(logged("the host attends layers 0 to 1: "), 1);
  EXPECT_EQ(logged("pinned_memory_limit"), 1);
  Model model(engine_config_);
  prefill(s.get(), model, 500);
  prefill(s.get(), model, 560);
  while (model.tokens(0) < c.max_tokens) {
    step(s.get(), model, false);
    ASSERT_LE(statistics(s.get()).pinned_bytes, c.pinned_memory_limit);
  }
  expect_layers(device, s.get(), 3);
  EXPECT_EQ(statistics(s.get()).pinned_bytes, p.pinned_bytes + p.pinned_kv_bytes);
  EXPECT_EQ(statistics(s.get()).code_bytes, p.code_bytes);
  // Too little for one layer; too little for the exchange with the device; a session that insists.
  c.pinned_memory_limit = exchange;
  EXPECT_EQ(statistics(make_session(device.handle.get(), c).get()).code_layers, 0U);
  EXPECT_EQ(plan(c).code_layers, 0U);
  c.pinned_memory_limit = exchange - 1;
  keyhole_session* none = nullptr;
  EXPECT_EQ(KEYHOLE_OUT_OF_MEMORY, keyhole_session_create(device.handle.get(), &c, &none));
  EXPECT_EQ(plan(c).fits, 0U);
  c.pinned_memory_limit = exchange + 3 * pinned_bytes(4 * kCodeBlock);
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  EXPECT_EQ(KEYHOLE_OUT_OF_MEMORY, keyhole_session_create(device.handle.get(), &c, &none));
  expect_error_text("pinned_memory_limit");
  EXPECT_EQ(plan(c).fits, 0U);
}

TEST_F(CodeLayers, AreNeededOnADeviceThatIsToHaveThem) {
  StreamEngine device(engine_config_);
  const auto expect_refused = [](keyhole_status status) {
    EXPECT_EQ(status, KEYHOLE_INVALID_ARGUMENT);
    expect_error_text("no layer is attended by codes");
  };
  keyhole_session_config c = small_session();
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_SECOND;
  c.budget.min_keys = 100;
  keyhole_session* none = nullptr;
  expect_refused(keyhole_session_create(device.handle.get(), &c, &none));
  c = mixed();
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  SessionPtr s = make_session(device.handle.get(), c);
  Model model(engine_config_);
  prefill(s.get(), model, 900);
  expect_refused(keyhole_session_set_index(s.get(), "flat"));
  keyhole_budget budget;
  keyhole_budget_init(&budget);
  expect_refused(keyhole_session_set_budget(s.get(), KEYHOLE_ALL, KEYHOLE_ALL, &budget));
  for (int i = 0; i < 5; ++i) step(s.get(), model, false);
  expect_layers(device, s.get(), kLayers);
}

TEST_F(CodeLayers, OfADeviceThatDoesNotTellWhatIsFreeAreFound) {
  StreamEngine device(engine_config_);
  device.codes_room = gpu::codes_bytes(codes(3, 4096));
  SessionPtr s = make_session(device.handle.get(), mixed());
  // 5, 3: a quarter less each time, rounded up.
  EXPECT_EQ(statistics(s.get()).code_layers, 3U);
  EXPECT_EQ(logged("planted: no memory for codes"), 1);
  Model model(engine_config_);
  prefill(s.get(), model, 900);
  for (int i = 0; i < 20; ++i) step(s.get(), model, false);
  expect_layers(device, s.get(), 3);
  // A build looks for room for the others.
  device.codes_room = SIZE_MAX;
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  for (int i = 0; i < 20; ++i) step(s.get(), model, false);
  expect_layers(device, s.get(), kLayers);
}

TEST_F(CodeLayers, InAnyOrderOfCallsKeepEveryTokenOnce) {
  for (uint64_t seed = 0; seed < unless_sanitized(4, 2); ++seed) {
    StreamEngine device(engine_config_);
    numbers_ = Numbers(seed + 100);
    keyhole_session_config c = mixed();
    if (seed % 2 == 0) {
      c.device_memory_limit =
          gpu::cuda_resident_bytes(resident()) + gpu::codes_bytes(codes(3, c.max_tokens));
    }
    SessionPtr s = make_session(device.handle.get(), c);
    Model model(engine_config_);
    prefill(s.get(), model, 1 + numbers_.below(900));
    const TemporaryFolder folder;
    const std::string path = (folder / "session").string();
    for (int i = 0; i < 25; ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", call " + std::to_string(i));
      if (numbers_.below(4) == 0) {
        device.pinned_limit = pinned_bytes(kPinnedTogether) * (1 + numbers_.below(12));
      } else if (numbers_.below(4) == 0) {
        device.pinned_limit = SIZE_MAX;
        device.pin_pause_us = numbers_.below(3) * 200;
      }
      random_call(s, model, device.handle.get(), path);
      if (HasFatalFailure() || HasFailure()) return;
      expect_layers(device, s.get(), statistics(s.get()).code_layers);
    }
  }
}

TEST_F(CodeLayers, HaveAnIndexOnTheHostOrCodesOnTheDeviceNeverBoth) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = mixed();
  c.index = "codes:k=4,v=4";
  c.device_memory_limit =
      gpu::cuda_resident_bytes(resident()) + gpu::codes_bytes(codes(3, c.max_tokens, 4));
  const keyhole_memory_plan p = plan(c);
  SessionPtr s = make_session(device.handle.get(), c);
  Model model(engine_config_);
  prefill(s.get(), model, c.max_tokens - 300);
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  for (uint32_t l = 0; l < kLayers; ++l) {
    EXPECT_EQ(layer_tokens(s.get(), l).pending, 0U) << l;
    EXPECT_EQ(device.codes->count(l) != 0, l >= 2) << l;
  }
  const auto held = static_cast<double>(statistics(s.get()).index_bytes);
  EXPECT_NEAR(held, static_cast<double>(p.index_bytes), 0.15 * held) << "two layers' of five";
  // Copied or loaded where there is room for all, what the host had indexed goes.
  c.device_memory_limit = 0;
  device.codes_room = gpu::codes_bytes(codes(3, c.max_tokens, 4));
  s = make_session(device.handle.get(), c);
  Model other(engine_config_);
  prefill(s.get(), other, c.max_tokens - 300);
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  EXPECT_EQ(static_cast<double>(statistics(s.get()).index_bytes), held);
  device.codes_room = SIZE_MAX;
  const TemporaryFolder folder;
  const std::string path = (folder / "session").string();
  ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
  for (const bool loads : {false, true}) {
    keyhole_session* again = nullptr;
    ASSERT_OK(loads ? keyhole_session_load(device.handle.get(), path.c_str(), nullptr, &again)
                    : keyhole_session_fork(s.get(), &again));
    SessionPtr copy(again);
    EXPECT_EQ(statistics(copy.get()).code_layers, kLayers);
    EXPECT_EQ(statistics(copy.get()).index_bytes, 0U);
    Model same = other;
    for (int i = 0; i < 5; ++i) step(copy.get(), same, false);
    expect_layers(device, copy.get(), kLayers);
  }
}

TEST_F(CodeLayers, OfBitsThatNoDeviceHasAreTheHosts) {
  for (const char* spec : {"codes:k=1,v=1", "codes:k=1,v=4", "codes:k=2,v=4", "codes:k=4,v=2",
                           "codes:k=2,v=0", "codes:k=4,v=1"}) {
    SCOPED_TRACE(spec);
    log_.clear();
    StreamEngine device(engine_config_);
    keyhole_session_config c = mixed();
    c.index = spec;
    EXPECT_EQ(plan(c).code_layers, 0U);
    EXPECT_EQ(plan(c).code_bytes, 0U);
    SessionPtr s = make_session(device.handle.get(), c);
    EXPECT_EQ(logged("the host attends what is offloaded: no device has kernels for codes with "
                     "key_bits " +
                     std::string(1, spec[8]) + " and value_bits " + spec[12]),
              1);
    Model model(engine_config_);
    prefill(s.get(), model, 700);
    for (int i = 0; i < 30; ++i) step(s.get(), model, i % 2 == 0);
    expect_layers(device, s.get(), 0);
    EXPECT_EQ(device.codes, nullptr) << "the device was asked for codes";
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    for (uint32_t l = 0; l < kLayers; ++l) EXPECT_NE(layer_tokens(s.get(), l).indexed, 0U) << l;
    // A session that has codes on the device gives them up for such bits, and has others there later.
    c.index = "codes:k=2,v=2";
    s = make_session(device.handle.get(), c);
    EXPECT_EQ(statistics(s.get()).code_layers, kLayers);
    ASSERT_OK(keyhole_session_set_index(s.get(), spec));
    EXPECT_EQ(statistics(s.get()).code_layers, 0U);
    ASSERT_OK(keyhole_session_set_index(s.get(), "codes:k=4,v=4"));
    EXPECT_EQ(statistics(s.get()).code_layers, kLayers);
    // Where codes must be on the device, they are refused.
    c.index = spec;
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    keyhole_session* none = nullptr;
    EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_create(device.handle.get(), &c, &none));
    EXPECT_EQ(none, nullptr);
    expect_error_text("allowed are 2 of both or 4 of both");
  }
}

TEST_F(CodeLayers, AreWhatAutoChoosesTwoBitsFor) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = mixed();
  c.index = "auto";
  keyhole_budget_init(&c.budget);
  c.device_memory_limit =
      gpu::cuda_resident_bytes(resident()) + gpu::codes_bytes(codes(4, c.max_tokens));
  const keyhole_memory_plan p = plan(c);
  EXPECT_STREQ(p.index, "codes:k=2,v=2");
  EXPECT_EQ(p.code_layers, 4U);
  SessionPtr s = make_session(device.handle.get(), c);
  EXPECT_EQ(statistics(s.get()).code_layers, 4U);
  // Where pinned memory is what lacks, fewer bits would bring no layer to the device.
  c.device_memory_limit = 0;
  c.pinned_memory_limit =
      gpu::cuda_pinned_bytes(resident()) + 2 * pinned_bytes((c.max_tokens - 20) / 256 * 256);
  EXPECT_STREQ(plan(c).index, "codes:k=4,v=4");
  EXPECT_EQ(plan(c).code_layers, 2U);
  EXPECT_EQ(plan(c).first_code_layer, 3U);
  s = make_session(device.handle.get(), c);
  EXPECT_EQ(statistics(s.get()).code_layers, 2U);
  // A dense layer is none of them.
  const uint32_t dense[] = {4};
  c.dense_layers = dense;
  c.dense_layer_count = 1;
  EXPECT_EQ(plan(c).first_code_layer, 2U);
  EXPECT_EQ(statistics(make_session(device.handle.get(), c).get()).code_layers, 2U);
}

}  // namespace
}  // namespace keyhole::test
