// Sessions of five layers, of which the first ones may have no codes on the test's device. The host attends pending
// rows exactly, and indexes none unless a test builds, so that every layer answers as the model in double precision
// does.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/runtime/codes_fixture.h"

namespace keyhole::test {

inline constexpr uint32_t kLayers = 5;
/// Number of rows of a layer that are pinned at a time, where an array's rows fill no huge page.
inline constexpr size_t kPinnedTogether = 1024;

class CodeLayers : public StreamCodes {
 protected:
  CodeLayers() {
    engine_config_.layers = kLayers;
    engine_config_.log = [](void* user, int32_t, const char* text) {
      static_cast<std::vector<std::string>*>(user)->emplace_back(text);
    };
    engine_config_.log_user = &log_;
  }
  static keyhole_session_config mixed() {
    keyhole_session_config c = coded();
    c.offload_placement = KEYHOLE_PLACE_AUTO;
    c.append_block = 100000;
    c.exact_rows_by = KEYHOLE_ROWS_BY_DEVICE;
    return c;
  }
  static gpu::ResidentShape resident() {
    return {kLayers, 4, 2, 64, DType::f16, 4, 16 + kCodeBlock, 16, {}};
  }
  static gpu::CodesShape codes(uint32_t layers, uint32_t max_tokens, uint32_t bits = 2) {
    gpu::CodesShape s{kLayers, 4, 2, {64, bits, bits}, DType::f16, 0, 16, {}};
    s.blocks = (max_tokens - 4 - 16) / kCodeBlock;
    s.coded_layers = layers;
    return s;
  }
  /// Bytes of K and V of a layer with this many offloaded rows.
  static size_t pinned_bytes(size_t rows) { return rows * 2 * 2 * 64 * 2; }
  [[nodiscard]] keyhole_memory_plan plan(const keyhole_session_config& c) const {
    keyhole_engine_config e = engine_config_;
    e.device = KEYHOLE_DEVICE_CUDA;
    keyhole_memory_plan p;
    keyhole_memory_plan_init(&p);
    EXPECT_OK(keyhole_plan(&e, &c, c.max_tokens, c.device_memory_limit, 0, &p));
    return p;
  }
  [[nodiscard]] long logged(const std::string& part) const {
    return std::count_if(log_.begin(), log_.end(), [&](const std::string& line) {
      return line.find(part) != std::string::npos;
    });
  }
  /// More of the prompt, a truncation, a copy, a file, a step on the host, or up to 60 steps on the stream; then one
  /// more.
  void random_call(SessionPtr& s, Model& model, keyhole_engine* engine, const std::string& path) {
    switch (numbers_.below(7)) {
      case 0: prefill(s.get(), model, 1 + numbers_.below(300)); break;
      case 1: {
        const uint32_t n = 1 + numbers_.below(model.tokens(0));
        ASSERT_OK(keyhole_session_truncate(s.get(), n));
        model.truncate(n);
        break;
      }
      case 2: fork(s); break;
      case 3: reload(s, engine, path); break;
      case 4: host_step(s.get(), model); break;
      default:
        for (uint32_t n = numbers_.below(60); n > 0; --n) step(s.get(), model, n % 2 == 0);
    }
    step(s.get(), model, false);
  }
  /// Checks that the last `n` layers are the device's, with all their rows encoded.
  void expect_layers(const StreamEngine& device, keyhole_session* s, uint32_t n) {
    EXPECT_EQ(statistics(s).code_layers, n);
    for (uint32_t l = 0; l < kLayers; ++l) {
      const keyhole_layer_tokens t = layer_tokens(s, l);
      const uint32_t rows = t.indexed + t.pending;
      EXPECT_EQ(rows % kCodeBlock, 0U);
      if (l < kLayers - n) {
        EXPECT_EQ(t.indexed, 0U) << l;
      } else {
        EXPECT_EQ(t.pending, 0U) << l;
        EXPECT_EQ(size_t{device.codes->count(l)} * kCodeBlock, rows) << l;
        EXPECT_FALSE(device.codes->unpinned);
      }
    }
  }

  std::vector<std::string> log_;
};

}  // namespace keyhole::test
