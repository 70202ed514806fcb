// Several sessions that get the same calls must give the same answers.
#pragma once

#include "tests/runtime/fixture.h"

namespace keyhole::test {

/// Several sessions that get the same calls.
class Chorus {
 public:
  Chorus(const keyhole_engine_config& ec, uint64_t seed)
      : ec_(ec), shape_(ec), model_(ec), numbers_(seed) {}

  void add(keyhole_engine* engine, const keyhole_session_config& sc) {
    sessions_.push_back(make_session(engine, sc));
  }
  void adopt(keyhole_session* session) { sessions_.emplace_back(session); }
  [[nodiscard]] keyhole_session* operator[](size_t i) const { return sessions_[i].get(); }
  [[nodiscard]] size_t size() const { return sessions_.size(); }
  [[nodiscard]] Numbers& numbers() { return numbers_; }
  [[nodiscard]] uint32_t tokens() const { return model_.tokens(0); }
  void remove_last() { sessions_.pop_back(); }

  void prefill(uint32_t n) {
    const auto k = numbers_.many(shape_.kv(n));
    const auto v = numbers_.many(shape_.kv(n));
    const auto q = numbers_.many(shape_.q(n));
    const auto tk = tensor(k, {n, shape_.hkv, shape_.d});
    const auto tv = tensor(v, {n, shape_.hkv, shape_.d});
    const auto tq = tensor(q, {n, shape_.hq, shape_.d});
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      for (const auto& s : sessions_) ASSERT_OK(keyhole_session_append(s.get(), l, &tk, &tv, &tq));
      model_.append(l, k, v);
    }
  }
  void build() {
    for (const auto& s : sessions_) ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  }
  void set_index(const char* spec) {
    for (const auto& s : sessions_) ASSERT_OK(keyhole_session_set_index(s.get(), spec));
  }
  void set_budget(uint32_t layer, uint32_t kv_head, const keyhole_budget& budget) {
    for (const auto& s : sessions_) {
      ASSERT_OK(keyhole_session_set_budget(s.get(), layer, kv_head, &budget));
    }
  }
  void truncate(uint32_t n) {
    for (const auto& s : sessions_) ASSERT_OK(keyhole_session_truncate(s.get(), n));
    model_.truncate(n);
  }

  /// Makes one token pass every layer; all sessions must answer with the bits of the first.
  void step() {
    const auto k = numbers_.many(shape_.kv(1));
    const auto v = numbers_.many(shape_.kv(1));
    const auto q = numbers_.many(shape_.q(1));
    const auto tk = tensor(k, {shape_.hkv, shape_.d});
    const auto tv = tensor(v, {shape_.hkv, shape_.d});
    const auto tq = tensor(q, {shape_.hq, shape_.d});
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      Answer first;
      for (size_t i = 0; i < sessions_.size(); ++i) {
        Answer a{std::vector<float>(shape_.q(1)), std::vector<float>(ec_.q_heads)};
        const auto out = tensor(a.o, {shape_.hq, shape_.d});
        ASSERT_OK(keyhole_session_attend(sessions_[i].get(), l, &tq, &tk, &tv, &out, a.lse.data()));
        if (i == 0) first = a;
        ASSERT_EQ(first.o, a.o) << "layer " << l << ", session " << i;
        ASSERT_EQ(first.lse, a.lse);
        const auto t = layer_tokens(sessions_[i].get(), l);
        ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
        ASSERT_EQ(layer_tokens(sessions_[0].get(), l).indexed, t.indexed);
      }
      model_.append(l, k, v);
      if (!exact_ || sessions_.empty()) continue;
      std::vector<double> true_lse;
      const auto o = model_.attend_all(l, q, true_lse);
      expect_near(first, o, true_lse);
    }
  }
  /// Sets whether steps compare the answers with exact attention, too.
  void expect_exact_answers(bool on) { exact_ = on; }

  /// Checks that every session in exact mode holds the right K and V.
  void expect_right_tokens() {
    for (const auto& s : sessions_) {
      ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 0));
      for (uint32_t l = 0; l < ec_.layers && tokens() != 0; ++l)
        expect_exact(s.get(), model_, shape_, l, numbers_);
      ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_INDEXED, 0));
    }
  }

 private:
  keyhole_engine_config ec_;
  Shape shape_;
  Model model_;
  Numbers numbers_;
  std::vector<SessionPtr> sessions_;
  bool exact_ = false;
};

}  // namespace keyhole::test
