// Sessions whose new tokens come by keyhole_session_extend, beside their models.
#pragma once

#include <vector>

#include "tests/runtime/new_tokens.h"

namespace keyhole::test {

/// A session beside its model.
class Pair {
 public:
  Pair(const keyhole_engine_config& ec, const keyhole_session_config& sc, uint64_t seed)
      : ec_(ec), shape_(ec), model_(ec), numbers_(seed), engine_(make_engine(ec)) {
    session_ = make_session(engine_.get(), sc);
  }

  [[nodiscard]] keyhole_session* session() { return session_.get(); }
  [[nodiscard]] Model& model() { return model_; }
  [[nodiscard]] Numbers& numbers() { return numbers_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] keyhole_engine* engine() { return engine_.get(); }
  [[nodiscard]] uint32_t layers() const { return ec_.layers; }

  void prefill(uint32_t n) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      prefill_both(session(), model_, shape_, l, n, numbers_);
    }
  }
  [[nodiscard]] NewTokens new_tokens(uint32_t n) { return test::new_tokens(shape_, n, numbers_); }
  [[nodiscard]] keyhole_status extend(uint32_t layer, NewTokens& t,
                                      const uint64_t* mask = nullptr) {
    return test::extend(session(), shape_, layer, t, mask);
  }
  /// Extends every layer; compares each `step`-th answer and the last with the truth.
  void extend_and_check(uint32_t n, const std::vector<uint64_t>& mask, double tolerance,
                        uint32_t step = 1) {
    const uint64_t* const given = mask.empty() ? nullptr : mask.data();
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      NewTokens t = new_tokens(n);
      ASSERT_OK(extend(l, t, given));
      model_.append(l, t.k, t.v);
      expect_answers(model_, shape_, l, t, given, tolerance, step);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  /// Keeps, of the newest n tokens of the model, those at `path`.
  void keep(uint32_t n, const std::vector<uint32_t>& path) {
    for (uint32_t l = 0; l < ec_.layers; ++l) model_.keep(l, n, path);
  }
  void expect_all_exact(double tolerance) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const keyhole_layer_tokens t = layer_tokens(session(), l);
      ASSERT_EQ(t.total, model_.tokens(l));
      ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
      if (t.total == 0) continue;
      const auto q = numbers_.many(shape_.q(1));
      std::vector<double> lse;
      const auto o = model_.attend_all(l, q, lse);
      expect_near(attend_only(session(), shape_, l, q), o, lse, tolerance);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  keyhole_engine_config ec_;
  Shape shape_;
  Model model_;
  Numbers numbers_;
  EnginePtr engine_;
  SessionPtr session_;
};

}  // namespace keyhole::test
