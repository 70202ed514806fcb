// Sessions whose device has codes of all offloaded rows, beside exact attention in double precision.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <tuple>

#include "tests/runtime/codes_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

/// Offloaded rows as they come, and in int8; read by the device, or by the host for it.
class StoredCodes
    : public StreamCodes,
      public testing::WithParamInterface<std::tuple<keyhole_kv_host, keyhole_rows_by>> {
 protected:
  static keyhole_kv_host kept() { return std::get<0>(GetParam()); }
  static bool by_host() { return std::get<1>(GetParam()) == KEYHOLE_ROWS_BY_HOST; }
  static keyhole_session_config coded() {
    keyhole_session_config c = StreamCodes::coded();
    c.kv_host = kept();
    c.exact_rows_by = std::get<1>(GetParam());
    return c;
  }
};

TEST_P(StoredCodes, AttendEveryTokenOnceWhileTokensCome) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), coded());
  StoredModel model(engine_config_, kept());
  prefill(s.get(), model, 1000);
  // (1000 - 4 - 16) / 256 whole blocks; the rest waits in the window.
  EXPECT_EQ(layer_tokens(s.get(), 0).indexed, 768U);
  EXPECT_EQ(layer_tokens(s.get(), 0).window, 1000U - 4 - 768);
  ASSERT_NE(device.codes, nullptr);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  EXPECT_EQ(device.codes->count(0), 3U);
  constexpr uint32_t kSteps = unless_sanitized(600, 320);
  for (uint32_t i = 0; i < kSteps; ++i) step(s.get(), model, i % 2 == 1);
  expect_same_codes(*device.codes, model, s.get());
  EXPECT_EQ(device.codes->count(0), (1000U - 4 - 16 + kSteps) / 256);
  const keyhole_statistics st = statistics(s.get());
  EXPECT_EQ(st.stream_steps, 2 * kSteps);
  EXPECT_EQ(st.index_bytes, 0U) << "the host indexes what the device has codes of";
  EXPECT_GE(st.device_bytes, device.codes->bytes());
  EXPECT_EQ(st.rows_by_host, by_host() ? 1U : 0U);
  if (by_host()) {
    EXPECT_EQ(device.pinned, nullptr) << "nothing is pinned";
    EXPECT_GE(device.codes->rows_served, kSteps * 2 * 2 * (FakeCodes::kAsked - 1));
  } else {
    EXPECT_GE(st.pinned_bytes, device.pinned->bytes());
    EXPECT_EQ(device.codes->requests, 0U);
  }
}

TEST_P(StoredCodes, HeadsInDoubtAreCounted) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), coded());
  StoredModel model(engine_config_, kept());
  prefill(s.get(), model, 700);
  step(s.get(), model, false);
  const auto expect = [&](uint64_t doubted, uint64_t given_up, uint64_t opened) {
    const keyhole_statistics st = statistics(s.get());
    EXPECT_EQ(st.codes_doubted, doubted);
    EXPECT_EQ(st.codes_given_up, given_up);
    EXPECT_EQ(st.keys_opened, opened);
  };
  expect(0, 0, 0);
  device.codes->seen_doubts = {5, 2, 300};
  expect(5, 2, 300);
  ASSERT_OK(keyhole_session_reset_statistics(s.get()));
  expect(0, 0, 0);
  device.codes->seen_doubts = {7, 2, 310};
  expect(2, 0, 10);
}

TEST_P(StoredCodes, BlocksAreThoseOfTheReference) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), coded());
  StoredModel model(engine_config_, kept());
  prefill(s.get(), model, 700);
  for (uint32_t i = 0; i < unless_sanitized(300, 100); ++i) step(s.get(), model, false);
  ASSERT_EQ(device.codes->count(1), 3U);
  const CodeShape shape{64, 2, 2};
  std::vector<std::byte> seen(shape.block_bytes()), again(shape.block_bytes());
  // The same block encoded twice, from rows that came in a prefill and in steps.
  for (uint32_t b = 0; b < 3; ++b) {
    device.codes->read(1, 1, b, seen.data());
    device.codes->encode(1, b, 3 - b, nullptr);
    device.codes->read(1, 1, b, again.data());
    EXPECT_EQ(seen, again) << b;
  }
}

TEST_P(StoredCodes, StepsWithTensorsOfTheHostAttendThemToo) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), coded());
  StoredModel model(engine_config_, kept());
  prefill(s.get(), model, 500);
  constexpr uint32_t kSteps = unless_sanitized(560, 300);
  for (uint32_t i = 0; i < kSteps; ++i) {
    if (i % 3 == 0) {
      step(s.get(), model, false);
    } else {
      host_step(s.get(), model);
    }
  }
  EXPECT_EQ(device.codes->count(0), (500U - 4 - 16 + kSteps) / 256);
}

TEST_P(StoredCodes, AnyOrderOfCallsKeepsEveryTokenOnce) {
  StreamEngine device(engine_config_);
  const TemporaryFolder folder;
  for (uint64_t seed = 0; seed < unless_sanitized(3, 1); ++seed) {
    numbers_ = Numbers(seed);
    SessionPtr s = make_session(device.handle.get(), coded());
    StoredModel model(engine_config_, kept());
    prefill(s.get(), model, 1 + numbers_.below(900));
    const std::string path = (folder / "session").string();
    for (int i = 0; i < 25; ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", call " + std::to_string(i));
      switch (numbers_.below(8)) {
        case 0: prefill(s.get(), model, 1 + numbers_.below(600)); break;
        case 1: {
          const uint32_t n = 1 + numbers_.below(model.tokens(0));
          ASSERT_OK(keyhole_session_truncate(s.get(), n));
          model.truncate(n);
          model.follow(s.get());
          break;
        }
        case 2: fork(s); break;
        case 3: reload(s, device.handle.get(), path); break;
        case 4: ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr)); break;
        case 5: host_step(s.get(), model); break;
        case 6: {
          // Exact steps of the host, over the same rows.
          ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 0));
          for (uint32_t n = numbers_.below(300); n > 0; --n) step(s.get(), model, false);
          ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_INDEXED, 0));
          break;
        }
        default:
          for (uint32_t n = numbers_.below(60); n > 0; --n) step(s.get(), model, n % 2 == 0);
      }
      step(s.get(), model, false);
      if (HasFatalFailure()) return;
      expect_same_codes(*device.codes, model, s.get());
    }
  }
}

TEST_P(StoredCodes, GraphsStayValidWhileBlocksCome) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), coded());
  StoredModel model(engine_config_, kept());
  prefill(s.get(), model, 520);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  // Three tokens of every layer in a graph.
  std::vector<std::vector<Token>> tokens(3, std::vector<Token>(engine_config_.layers));
  std::vector<std::vector<std::vector<float>>> out(3), lse(3);
  device.stream.begin_capture();
  for (size_t i = 0; i < 3; ++i) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      tokens[i][l] = token();
      out[i].emplace_back(tokens[i][l].q.size());
      lse[i].emplace_back(engine_config_.q_heads);
      ASSERT_OK(enqueue(s.get(), l, tokens[i][l], out[i][l], lse[i][l].data()));
    }
  }
  device.stream.end_capture();
  for (uint32_t launch = 0; launch < unless_sanitized(200, 100); ++launch) {
    for (auto& of_layers : tokens) {
      for (Token& t : of_layers) {
        const Token next = token();
        std::copy(next.q.begin(), next.q.end(), t.q.begin());
        std::copy(next.k.begin(), next.k.end(), t.k.begin());
        std::copy(next.v.begin(), next.v.end(), t.v.begin());
      }
    }
    ASSERT_OK(keyhole_session_announce(s.get()));
    device.stream.launch_graph();
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    model.follow(s.get());  // what the window had no room for has left it with the announcement
    for (size_t i = 0; i < 3; ++i) {
      for (uint32_t l = 0; l < engine_config_.layers; ++l) {
        model.append(l, tokens[i][l].k, tokens[i][l].v);
        expect_truth(model, l, tokens[i][l].q, out[i][l], lse[i][l]);
      }
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GE(device.codes->count(0), 3U);
}

// On a host whose cores are all busy the session's thread does not get one: neither launches nor steps need it.
TEST_P(StoredCodes, NoCallWaitsForTheThreadOfTheSession) {
  const std::thread::id self = std::this_thread::get_id();
  std::atomic<bool> released{false};
  std::atomic<int> held{0};
  StreamEngine device(engine_config_, 60000);
  SessionPtr s = make_session(device.handle.get(), coded());
  StoredModel model(engine_config_, kept());
  prefill(s.get(), model, 520);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  std::vector<Token> tokens(engine_config_.layers);
  std::vector<std::vector<float>> out(engine_config_.layers), lse(engine_config_.layers);
  device.stream.begin_capture();
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    tokens[l] = token();
    out[l].resize(tokens[l].q.size());
    lse[l].resize(engine_config_.q_heads);
    ASSERT_OK(enqueue(s.get(), l, tokens[l], out[l], lse[l].data()));
  }
  device.stream.end_capture();

  device.faults.on_await = [&, self] {
    if (std::this_thread::get_id() == self || released) return;
    held += 1;
    released.wait(false);
  };
  // The launches bring a block of codes or two, and each is announced while the thread is still held up in the first.
  constexpr uint32_t kLaunches = unless_sanitized(300, 100);
  for (uint32_t launch = 0; launch < kLaunches; ++launch) {
    for (Token& t : tokens) {
      const Token next = token();
      std::copy(next.q.begin(), next.q.end(), t.q.begin());
      std::copy(next.k.begin(), next.k.end(), t.k.begin());
      std::copy(next.v.begin(), next.v.end(), t.v.begin());
    }
    ASSERT_OK(keyhole_session_announce(s.get()));
    device.stream.launch_graph();
    if (launch % 2 == 0) {
      ASSERT_OK(keyhole_session_synchronize(s.get()));
    } else {
      device.stream.wait();  // as a decoder that waits for its stream alone
    }
    model.follow(s.get());
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      model.append(l, tokens[l].k, tokens[l].v);
      expect_truth(model, l, tokens[l].q, out[l], lse[l]);
    }
    if (HasFatalFailure()) break;
  }
  for (int i = 0; i < 20; ++i) step(s.get(), model, i % 2 == 1);
  EXPECT_EQ(held, 1) << "the thread is in the wait in which it was held up";
  EXPECT_EQ(device.codes->count(0), (520U - 4 - 16 + kLaunches + 20) / 256);
  EXPECT_EQ(statistics(s.get()).stream_steps, (kLaunches + 20) * engine_config_.layers);
  released = true;
  released.notify_all();
  for (int i = 0; i < 20; ++i) step(s.get(), model, false);
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 520U + kLaunches + 40);
}

TEST_P(StoredCodes, WhatDoesNotFitStaysWithTheHost) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = coded();
  const gpu::ResidentShape shape{2, 4, 2, 64, DType::f16, 4, 16 + kCodeBlock, 16, {}};
  c.device_memory_limit = gpu::cuda_resident_bytes(shape) + 1000;
  keyhole_session* none = nullptr;
  EXPECT_EQ(KEYHOLE_OUT_OF_DEVICE_MEMORY, keyhole_session_create(device.handle.get(), &c, &none));
  expect_error_text("device_memory_limit");
  EXPECT_EQ(none, nullptr);
  c.offload_placement = KEYHOLE_PLACE_AUTO;
  SessionPtr s = make_session(device.handle.get(), c);
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 0U);
}

TEST_P(StoredCodes, MemoryThatCannotBePinnedLosesNoToken) {
  StreamEngine device(engine_config_);
  device.pinned_limit = size_t{4} * 2 * 2 * kCodeBlock * 64 * 2;  // of all layers 2 blocks
  keyhole_session_config c = coded();
  c.offload_placement = KEYHOLE_PLACE_AUTO;
  SessionPtr s = make_session(device.handle.get(), c);
  StoredModel model(engine_config_, kept());
  prefill(s.get(), model, 300);
  prefill(s.get(), model, 1000);
  for (int i = 0; i < 5; ++i) step(s.get(), model, false);
  const keyhole_statistics st = statistics(s.get());
  const uint64_t exchange =
      gpu::cuda_pinned_bytes({2, 4, 2, 64, DType::f16, 4, 16 + kCodeBlock, 16, {}});
  EXPECT_EQ(st.code_layers, by_host() ? 2U : 0U);
  EXPECT_GE(st.pinned_bytes, exchange);
  EXPECT_LE(st.pinned_bytes, exchange + (by_host() ? 65536U : 0U));
}

/// All four; under a sanitizer two in which each value is once, so that the two sanitizers have all between them.
std::vector<std::tuple<keyhole_kv_host, keyhole_rows_by>> ways() {
  const std::tuple<keyhole_kv_host, keyhole_rows_by> same_device{KEYHOLE_KV_HOST_SAME,
                                                                 KEYHOLE_ROWS_BY_DEVICE},
      same_host{KEYHOLE_KV_HOST_SAME, KEYHOLE_ROWS_BY_HOST},
      int8_device{KEYHOLE_KV_HOST_INT8, KEYHOLE_ROWS_BY_DEVICE},
      int8_host{KEYHOLE_KV_HOST_INT8, KEYHOLE_ROWS_BY_HOST};
  if (kThreadSanitized) return {same_host, int8_device};
  if (kSanitized) return {same_device, int8_host};
  return {same_device, same_host, int8_device, int8_host};
}

INSTANTIATE_TEST_SUITE_P(KvHost, StoredCodes, testing::ValuesIn(ways()), [](const auto& p) {
  return std::string(std::get<0>(p.param) == KEYHOLE_KV_HOST_SAME ? "Same" : "Int8") +
         (std::get<1>(p.param) == KEYHOLE_ROWS_BY_HOST ? "ByHost" : "ByDevice");
});

}  // namespace
}  // namespace keyhole::test
