// Codes on the device whose exact rows the host reads: when that is, and how its steps end where it fails.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "runtime/stream/row_server.h"
#include "tests/runtime/code_layers_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class HostRows : public CodeLayers {
 protected:
  static keyhole_session_config with(keyhole_rows_by by) {
    keyhole_session_config c = mixed();
    c.exact_rows_by = by;
    return c;
  }
  /// All layers are the device's, and the host reads their rows.
  void expect_by_host(const StreamEngine& device, keyhole_session* s) {
    expect_layers(device, s, kLayers);
    const keyhole_statistics st = statistics(s);
    EXPECT_EQ(st.rows_by_host, 1U);
    EXPECT_LT(st.pinned_bytes, gpu::cuda_pinned_bytes(resident()) + (1U << 18U));
  }
  static keyhole_rows_by saved(const keyhole_session* s) {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    EXPECT_OK(keyhole_session_get_config(s, &c));
    return c.exact_rows_by;
  }
};

TEST_F(HostRows, InAnyOrderOfCallsKeepEveryTokenOnce) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    StreamEngine device(engine_config_);
    numbers_ = Numbers(seed + 300);
    SessionPtr s = make_session(device.handle.get(), with(KEYHOLE_ROWS_BY_HOST));
    Model model(engine_config_);
    prefill(s.get(), model, 1 + numbers_.below(900));
    const TemporaryFolder folder;
    const std::string path = (folder / "session").string();
    for (int i = 0; i < 20; ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", call " + std::to_string(i));
      random_call(s, model, device.handle.get(), path);
      if (HasFatalFailure() || HasFailure()) return;
      expect_by_host(device, s.get());
      EXPECT_EQ(saved(s.get()), KEYHOLE_ROWS_BY_HOST);
    }
    EXPECT_GT(device.codes->rows_served + device.codes->requests, 0U);
  }
}

TEST_F(HostRows, AreWhatAutoTakesWhereTheLimitIsTooLow) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = with(KEYHOLE_ROWS_BY_AUTO);
  const size_t exchange = gpu::cuda_pinned_bytes(resident());
  const size_t all = kLayers * pinned_bytes((c.max_tokens - 20) / kCodeBlock * kCodeBlock);
  for (const bool must : {false, true}) {
    c.offload_placement = must ? KEYHOLE_PLACE_DEVICE : KEYHOLE_PLACE_AUTO;
    c.pinned_memory_limit = exchange + all;
    EXPECT_EQ(plan(c).rows_by_host, 0U);
    EXPECT_EQ(plan(c).pinned_kv_bytes, all);
    EXPECT_EQ(statistics(make_session(device.handle.get(), c).get()).rows_by_host, 0U);
    log_.clear();
    c.pinned_memory_limit = exchange + all - 1;
    const keyhole_memory_plan p = plan(c);
    EXPECT_EQ(p.rows_by_host, 1U);
    EXPECT_EQ(p.code_layers, kLayers);
    EXPECT_EQ(p.pinned_kv_bytes, 0U);
    EXPECT_EQ(p.fits, 1U);
    SessionPtr s = make_session(device.handle.get(), c);
    EXPECT_EQ(logged("rows read by the host"), 1);
    EXPECT_EQ(logged("the host reads the tokens that the device attends exactly"), 1);
    EXPECT_EQ(logged("pinned_memory_limit is " + std::to_string(c.pinned_memory_limit)), 1);
    EXPECT_EQ(logged("the host attends"), 0);
    Model model(engine_config_);
    prefill(s.get(), model, 700);
    step(s.get(), model, false);
    expect_by_host(device, s.get());
    const keyhole_statistics st = statistics(s.get());
    EXPECT_EQ(st.pinned_bytes, p.pinned_bytes);
    EXPECT_EQ(st.code_bytes, p.code_bytes);
    EXPECT_LE(st.pinned_bytes, c.pinned_memory_limit);
  }
  // Not even their exchange may be pinned: the host attends.
  c.offload_placement = KEYHOLE_PLACE_AUTO;
  c.pinned_memory_limit = exchange;
  EXPECT_EQ(plan(c).code_layers, 0U);
  EXPECT_EQ(plan(c).rows_by_host, 0U);
  EXPECT_EQ(statistics(make_session(device.handle.get(), c).get()).code_layers, 0U);
}

TEST_F(HostRows, AreWhatAutoTakesWhereMemoryCannotBePinned) {
  for (const bool must : {false, true}) {
    StreamEngine device(engine_config_);
    log_.clear();
    keyhole_session_config c = with(KEYHOLE_ROWS_BY_AUTO);
    if (must) c.offload_placement = KEYHOLE_PLACE_DEVICE;
    SessionPtr s = make_session(device.handle.get(), c);
    Model model(engine_config_);
    prefill(s.get(), model, 600);
    step(s.get(), model, false);
    expect_layers(device, s.get(), kLayers);
    EXPECT_EQ(statistics(s.get()).rows_by_host, 0U);
    device.pinned_limit = 7 * pinned_bytes(kPinnedTogether);
    prefill(s.get(), model, 1000);
    for (int i = 0; i < 10; ++i) step(s.get(), model, i % 2 == 0);
    expect_by_host(device, s.get());
    EXPECT_EQ(logged("the host reads the tokens that the device attends exactly: planted"), 1);
    // A copy tries again.
    device.pinned_limit = SIZE_MAX;
    fork(s);
    for (int i = 0; i < 3; ++i) step(s.get(), model, false);
    expect_layers(device, s.get(), kLayers);
    EXPECT_EQ(statistics(s.get()).rows_by_host, 0U);
  }
}

TEST_F(HostRows, AreNotTakenWhereTheDeviceIsToReadThem) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), with(KEYHOLE_ROWS_BY_DEVICE));
  Model model(engine_config_);
  device.pinned_limit = 7 * pinned_bytes(kPinnedTogether);
  prefill(s.get(), model, 1600);
  for (int i = 0; i < 3; ++i) step(s.get(), model, false);
  EXPECT_EQ(statistics(s.get()).rows_by_host, 0U);
  EXPECT_LT(statistics(s.get()).code_layers, kLayers);
  EXPECT_EQ(logged("the host reads"), 0);
}

TEST_F(HostRows, ASessionMayEndWhileTheDeviceWaits) {
  for (const uint32_t pause : {0U, 3000U, 30000U}) {
    std::atomic<uint32_t> late{0};
    StreamEngine device(engine_config_, 10000);
    SessionPtr s = make_session(device.handle.get(), with(KEYHOLE_ROWS_BY_HOST));
    Model model(engine_config_);
    prefill(s.get(), model, 700);
    step(s.get(), model, false);
    device.codes->answer_pause = pause;
    device.codes->on_failure = [&late](const std::string& text) {
      if (text.find("given up") == std::string::npos) late += 1;
    };
    std::vector<Token> tokens;
    std::vector<std::vector<float>> out(kLayers);
    for (uint32_t l = 0; l < kLayers; ++l) {
      tokens.push_back(token());
      out[l].resize(tokens[l].q.size());
    }
    for (uint32_t l = 0; l < kLayers; ++l) {
      ASSERT_OK(enqueue(s.get(), l, tokens[l], out[l], nullptr));
    }
    s.reset();
    device.stream.wait();
    EXPECT_EQ(late, 0U) << "a step has waited until it was too late";
  }
}

TEST_F(HostRows, ThatCannotBeReadEndTheSteps) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), with(KEYHOLE_ROWS_BY_HOST));
  Model model(engine_config_);
  prefill(s.get(), model, 700);
  step(s.get(), model, false);
  device.codes->wrong_request = true;
  const Token t = token();
  std::vector<float> out(t.q.size());
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  EXPECT_EQ(keyhole_session_synchronize(s.get()), KEYHOLE_CANCELLED);
  for (const float x : out) EXPECT_TRUE(std::isnan(x));
  EXPECT_EQ(enqueue(s.get(), 1, t, out, nullptr), KEYHOLE_CANCELLED);
  // What it holds can be saved.
  const TemporaryFolder folder;
  ASSERT_OK(keyhole_session_save(s.get(), (folder / "session").c_str()));
}

/// Requests that a test makes.
class AskedCodes final : public gpu::Codes {
 public:
  void set_balance(uint32_t, uint32_t, const float*, float) override {}
  void set_rows(uint32_t, const KvView&) override {}
  void encode(uint32_t, uint32_t, uint32_t, gpu::Stream) override {}
  void truncate(uint32_t, uint32_t, gpu::Stream) override {}
  uint32_t count(uint32_t) const override { return 0; }
  void copy_layer(uint32_t, gpu::Codes&) override {}
  void complete() override {}
  uint32_t serve_rows(uint32_t kv_head) override {
    looks += 1;
    return asked[kv_head];
  }
  void give_up_rows(uint32_t step) override { given_up = step; }
  uint32_t most_tokens(uint32_t) const override { return 1; }
  void read(uint32_t, uint32_t, uint32_t, std::byte*) const override {}
  size_t bytes() const override { return 0; }

  std::atomic<uint32_t> asked[2]{}, looks{0}, given_up{0};
};

template <class F>
bool becomes(F&& is_so) {
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!is_so() && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
  return is_so();
}

TEST(RowServerTest, LooksWhileStepsAreExpectedAndGivesTheRestUp) {
  AskedCodes codes;
  {
    runtime::RowServer server(codes, 2, {.spin_us = 0, .timeout_ms = 60000});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(codes.looks, 0U);
    server.expect();
    server.expect();
    EXPECT_TRUE(becomes([&] { return codes.looks > 10; }));
    codes.asked[0] = 2;
    codes.asked[1] = 1;
    EXPECT_TRUE(becomes([&] { return server.served() == 1; }));
    codes.asked[1] = 2;
    EXPECT_TRUE(becomes([&] { return server.served() == 2; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const uint32_t looks = codes.looks;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(codes.looks, looks) << "it sleeps";
    server.expect();
    EXPECT_TRUE(becomes([&] { return codes.looks > looks; }));
    EXPECT_EQ(codes.given_up, 0U);
  }
  EXPECT_GE(codes.given_up, 3U);
}

TEST(RowServerTest, SleepsAfterAStepThatDoesNotCome) {
  AskedCodes codes;
  runtime::RowServer server(codes, 1, {.spin_us = 0, .timeout_ms = 5});
  server.expect();
  uint32_t looks = 0;
  EXPECT_TRUE(becomes([&] {
    looks = codes.looks;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return looks > 0 && codes.looks == looks;
  }));
  server.expect();
  EXPECT_TRUE(becomes([&] { return codes.looks > looks; }));
}

}  // namespace
}  // namespace keyhole::test
