// Sessions with codes on the test's device, beside a model in double precision. The device attends exactly the rows
// that its codes cover, so that a token that is attended twice, or never, shows in every answer.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/stored_model.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {

class StreamCodes : public StreamTest {
 protected:
  static keyhole_session_config coded() {
    keyhole_session_config c = small_session();
    c.index = "codes:k=2,v=2";
    c.budget.top_k = 16;
    c.budget.tail = KEYHOLE_TAIL_CODES;
    c.flush_block = kCodeBlock;
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    return c;
  }
  /// Checks that every block of the device equals the reference's for the rows that the caller gave.
  void expect_same_codes(const FakeCodes& codes, const Model& model, keyhole_session* s) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const keyhole_layer_tokens t = layer_tokens(s, l);
      EXPECT_EQ(t.total, model.tokens(l));
      EXPECT_EQ(t.pending, 0U);
      EXPECT_EQ(t.indexed % kCodeBlock, 0U);
      EXPECT_LT(t.window, 16U + 2 * kCodeBlock);
      EXPECT_LE(size_t{codes.count(l)} * kCodeBlock, t.indexed);
    }
    EXPECT_FALSE(codes.unpinned);
  }
  static void follow(const Model&, const keyhole_session*) {}
  static void follow(StoredModel& model, const keyhole_session* s) { model.follow(s); }

  // M: Model, or StoredModel where rows are kept in another dtype.
  template <class M>
  void step(keyhole_session* s, M& model, bool halves) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const Token t = token();
      std::vector<float> out(t.q.size(), NAN), lse(engine_config_.q_heads, NAN);
      ASSERT_OK(enqueue(s, l, t, out, lse.data(), halves));
      ASSERT_OK(keyhole_session_synchronize(s));
      model.append(l, t.k, t.v);
      follow(model, s);
      expect_truth(model, l, t.q, out, lse);
    }
  }
  template <class M>
  void host_step(keyhole_session* s, M& model) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const Token t = token();
      std::vector<float> lse(engine_config_.q_heads, NAN);
      const std::vector<float> out = attend_host(s, l, t, lse.data());
      model.append(l, t.k, t.v);
      follow(model, s);
      expect_truth(model, l, t.q, out, lse);
    }
  }
  /// Goes on with a copy of the session, or with one that was saved and loaded.
  static void fork(SessionPtr& s) { s = fork_of(s.get()); }
  static void reload(SessionPtr& s, keyhole_engine* engine, const std::string& path) {
    ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
    s = load_of(engine, path);
  }
  void expect_truth(const Model& model, uint32_t layer, const std::vector<float>& q,
                    const std::vector<float>& out, const std::vector<float>& lse) {
    std::vector<double> sums;
    const auto truth = model.attend_all(layer, q, sums);
    expect_near({out, lse}, truth, sums, 2e-4);
  }
  template <class M>
  void prefill(keyhole_session* s, M& model, uint32_t n) {
    const Shape shape(engine_config_);
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      prefill_both(s, model, shape, l, n, numbers_);
      follow(model, s);
    }
  }
};

}  // namespace keyhole::test
