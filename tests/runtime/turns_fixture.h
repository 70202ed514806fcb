// Turns of several new tokens with tensors in device memory, in sessions on the test's device.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/runtime/codes_fixture.h"
#include "tests/runtime/new_tokens.h"

namespace keyhole::test {

struct TurnWay {
  keyhole_dtype dtype;  ///< f32 has no attention of blocks
  keyhole_kv_host kept;
  bool coded;  ///< the index is codes, on the device
};

/// Sessions that get several tokens at once with tensors in device memory, beside the model of their tokens.
class StreamTurns : public StreamCodes, public testing::WithParamInterface<TurnWay> {
 protected:
  StreamTurns() { engine_config_.kv_dtype = GetParam().dtype; }

  keyhole_session_config config() {
    keyhole_session_config c = coded();
    c.kv_host = GetParam().kept;
    if (!GetParam().coded) {
      c.index = "flat";
      c.offload_placement = KEYHOLE_PLACE_AUTO;
      c.budget = {};
      keyhole_budget_init(&c.budget);
      c.mode = KEYHOLE_MODE_EXACT;
    }
    return c;
  }
  StoredModel model() { return StoredModel(engine_config_, GetParam().kept); }
  /// The numbers x as they are stored.
  std::vector<float> stored(std::vector<float> x) const {
    for (float& e : x) e = rounded_to(e, GetParam().dtype);
    return x;
  }

  [[nodiscard]] Shape shape() const { return Shape(engine_config_); }
  NewTokens turn(uint32_t n) {
    NewTokens t = new_tokens(shape(), n, numbers_);
    t.k = stored(t.k);
    t.v = stored(t.v);
    return t;
  }
  keyhole_status enqueue_turn(keyhole_session* s, uint32_t layer, NewTokens& t,
                              const uint64_t* mask) {
    return test::extend(s, shape(), layer, t, mask, KEYHOLE_DEVICE);
  }
  /// Checks the turn, when the model has its tokens as its newest.
  void expect_turn(const Model& model, uint32_t layer, const NewTokens& t, const uint64_t* mask) {
    expect_answers(model, shape(), layer, t, mask, 3e-4);
  }
  void extend(keyhole_session* s, StoredModel& m, uint32_t n, const uint64_t* mask = nullptr) {
    std::vector<NewTokens> turns;
    for (uint32_t l = 0; l < engine_config_.layers; ++l) turns.push_back(turn(n));
    for (uint32_t l = 0; l < engine_config_.layers; ++l)
      ASSERT_OK(enqueue_turn(s, l, turns[l], mask));
    ASSERT_OK(keyhole_session_synchronize(s));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      // Answers are about the tokens as they were when the answers were made: rows that leave the window meanwhile
      // become int8 later.
      StoredModel before = m;
      before.append(l, turns[l].k, turns[l].v);
      if (GetParam().kept == KEYHOLE_KV_HOST_SAME) expect_turn(before, l, turns[l], mask);
      m.append(l, turns[l].k, turns[l].v);
      if (HasFatalFailure()) return;
    }
    m.follow(s);
  }
  /// Keeps, of the newest n tokens, those at `path`.
  void keep(StoredModel& m, uint32_t n, const std::vector<uint32_t>& path) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) m.keep(l, n, path);
  }
  void step(keyhole_session* s, StoredModel& m) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      Token t = token();
      t.k = stored(t.k);
      t.v = stored(t.v);
      std::vector<float> out(t.q.size(), NAN), lse(engine_config_.q_heads, NAN);
      ASSERT_OK(enqueue(s, l, t, out, lse.data(), false));
      ASSERT_OK(keyhole_session_synchronize(s));
      m.append(l, t.k, t.v);
      m.follow(s);
      expect_truth(m, l, t.q, out, lse);
    }
  }
  void prompt(keyhole_session* s, StoredModel& m, uint32_t n) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const auto k = stored(numbers_.many(static_cast<size_t>(n * hkv() * d())));
      const auto v = stored(numbers_.many(k.size()));
      const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
      ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, nullptr));
      m.append(l, k, v);
      m.follow(s);
    }
  }
  std::vector<uint64_t> tree(uint32_t n) {
    std::vector<uint64_t> mask(n);
    for (uint32_t i = 0; i < n; ++i) {
      mask[i] = uint64_t{1} << i;
      if (i != 0 && numbers_.below(4) != 0) mask[i] |= mask[numbers_.below(i)];
    }
    return mask;
  }
  std::vector<uint32_t> path_of(uint32_t n) {
    std::vector<uint32_t> path;
    for (uint32_t i = 0; i < n; ++i) {
      if (numbers_.below(2) != 0) path.push_back(i);
    }
    return path;
  }
};

inline std::string name_of(const testing::TestParamInfo<TurnWay>& info) {
  const TurnWay& w = info.param;
  return std::string(w.dtype == KEYHOLE_F32   ? "f32"
                     : w.dtype == KEYHOLE_F16 ? "f16"
                                              : "bf16") +
         (w.kept == KEYHOLE_KV_HOST_INT8 ? "int8" : "") + (w.coded ? "codes" : "exact");
}

}  // namespace keyhole::test
