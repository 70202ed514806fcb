// Stream steps through the C API on the device of tests/runtime/stream_device.h, beside steps in host memory.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/api/api_objects.h"
#include "tests/runtime/fake_blocked.h"
#include "tests/runtime/fake_listed.h"
#include "tests/runtime/fake_rank_states.h"
#include "tests/runtime/fake_windows.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/stream_device.h"

namespace keyhole::test {

/// An engine whose device has streams. slides: it also takes steps of sliding layers.
struct StreamEngine {
  explicit StreamEngine(keyhole_engine_config c,
                        uint32_t timeout_ms = unless_sanitized(2000, 20000), bool slides = true);
  FakeStream stream;
  FakeFaults faults;
  std::atomic<size_t> pinned_limit = SIZE_MAX;
  std::atomic<uint32_t> pin_pause_us = 0;  ///< of each range
  size_t codes_room = SIZE_MAX;            ///< of the device, which does not tell
  size_t windows_room = SIZE_MAX;          ///< likewise
  bool codes_rest = false;                 ///< see FakeCodes::rest(); of sessions made from then on
  FakeCodes* codes = nullptr;              ///< of the session made last
  FakePinned* pinned = nullptr;            ///< likewise
  std::atomic<uint64_t> blocked_calls = 0;      ///< of BlockedAttention::begin(), all sessions
  std::atomic<uint64_t> coded_calls = 0;        ///< of BlockedAttention::attend_codes(), likewise
  std::atomic<uint32_t> chosen_blocks = 0;      ///< CodedRows::chosen_blocks of the last of them
  std::atomic<bool> refuses_codes = false;      ///< says each of these
  std::atomic<bool> doubts_codes = false;       ///< see FakeBlocked
  std::atomic<bool> never_chooses = false;      ///< likewise
  std::atomic<uint32_t> doubted = 0;            ///< likewise
  std::atomic<double> products_slowness = 1.0;  ///< likewise
  std::atomic<uint64_t> listed_calls = 0;       ///< of ListedAttention::attend(), likewise
  std::atomic<uint64_t> listed_places = 0;      ///< where their rows lay
  std::unique_ptr<keyhole_engine> handle;
};

inline keyhole_tensor on_device(const std::vector<float>& v, std::initializer_list<int64_t> shape) {
  keyhole_tensor t = tensor(v, shape);
  t.memory = KEYHOLE_DEVICE;
  return t;
}

struct Token {
  std::vector<float> q, k, v;
};

class StreamTest : public testing::Test {
 protected:
  Token token();
  [[nodiscard]] int64_t hq() const { return engine_config_.q_heads; }
  [[nodiscard]] int64_t hkv() const { return engine_config_.kv_heads; }
  [[nodiscard]] int64_t d() const { return engine_config_.head_dim; }

  void prefill(keyhole_session* s, uint32_t n, uint64_t seed);
  std::vector<float> attend_host(keyhole_session* s, uint32_t layer, const Token& t, float* lse);
  keyhole_status enqueue(keyhole_session* s, uint32_t layer, const Token& t,
                         std::vector<float>& out, float* lse, bool halves = false);

  /// Decodes the same tokens in both sessions; the outputs must agree.
  void compare(keyhole_session* host, keyhole_session* stream, uint32_t tokens, double tolerance);

  keyhole_engine_config engine_config_ = small_engine(3);
  Numbers numbers_{17};
};

}  // namespace keyhole::test
