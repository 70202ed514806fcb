// Sessions whose new tokens come by keyhole_session_extend, beside their models.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/runtime/fixture.h"

namespace keyhole::test {

struct New {
  std::vector<float> k, v, q;
};

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
  [[nodiscard]] New new_tokens(uint32_t n) {
    New t{numbers_.many(shape_.kv(n)), {}, {}};
    t.v = shape_.values_of(t.k, numbers_);
    t.q = numbers_.many(shape_.q(n));
    return t;
  }
  [[nodiscard]] keyhole_status extend(uint32_t layer, const New& t, const uint64_t* mask,
                                      Answer& a) {
    const auto n = static_cast<int64_t>(t.k.size() / shape_.kv(1));
    a = {std::vector<float>(shape_.o(static_cast<uint32_t>(n))),
         std::vector<float>(static_cast<size_t>(n * shape_.hq))};
    const auto tk = tensor(t.k, {n, shape_.hkv, shape_.d}),
               tv = tensor(t.v, {n, shape_.hkv, shape_.dv}),
               tq = tensor(t.q, {n, shape_.hq, shape_.d}),
               out = tensor(a.o, {n, shape_.hq, shape_.dv});
    return keyhole_session_extend(session(), layer, &tq, &tk, shape_.given(tv), mask, &out,
                                  a.lse.data());
  }
  /// Extends every layer; compares each `step`-th answer and the last with the truth.
  void extend_and_check(uint32_t n, const std::vector<uint64_t>& mask, double tolerance,
                        uint32_t step = 1) {
    const uint32_t before = model_.tokens(0);
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const New t = new_tokens(n);
      Answer a;
      ASSERT_OK(extend(l, t, mask.empty() ? nullptr : mask.data(), a));
      model_.append(l, t.k, t.v);
      for (uint32_t i = 0; i < n; i = i + 1 == n ? n : std::min(n - 1, i + step)) {
        SCOPED_TRACE("layer " + std::to_string(l) + ", token " + std::to_string(i) + " of " +
                     std::to_string(n) + " after " + std::to_string(before));
        check_one(l, t, a, i, before, mask, tolerance);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
  void check_one(uint32_t l, const New& t, const Answer& a, uint32_t i, uint32_t before,
                 const std::vector<uint64_t>& mask, double tolerance) {
    const size_t width = shape_.q(1), o_width = shape_.o(1);
    const auto heads = static_cast<size_t>(shape_.hq);
    const std::vector<float> q(t.q.begin() + static_cast<std::ptrdiff_t>(i * width),
                               t.q.begin() + static_cast<std::ptrdiff_t>((i + 1) * width));
    std::vector<double> lse;
    const auto o = model_.attend(l, q, lse, [&](uint32_t token) {
      if (token < before) return true;
      const uint32_t j = token - before;
      return mask.empty() ? j <= i : (mask[i] >> j & 1) != 0;
    });
    const Answer seen{{a.o.begin() + static_cast<std::ptrdiff_t>(i * o_width),
                       a.o.begin() + static_cast<std::ptrdiff_t>((i + 1) * o_width)},
                      {a.lse.begin() + static_cast<std::ptrdiff_t>(i * heads),
                       a.lse.begin() + static_cast<std::ptrdiff_t>((i + 1) * heads)}};
    expect_near(seen, o, lse, tolerance);
  }
  /// Keeps, of the newest n tokens of the model, those at `path`.
  void keep(uint32_t n, const std::vector<uint32_t>& path) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const uint32_t before = model_.tokens(l) - n;
      for (std::vector<float>* rows : {&model_.keys(l), &model_.values(l)}) {
        const size_t token = rows == &model_.keys(l) ? shape_.kv(1) : shape_.v(1);
        for (size_t i = 0; i < path.size(); ++i) {
          std::copy_n(rows->begin() + static_cast<std::ptrdiff_t>((before + path[i]) * token),
                      token, rows->begin() + static_cast<std::ptrdiff_t>((before + i) * token));
        }
        rows->resize((before + path.size()) * token);
      }
    }
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
