// Sessions beside the tokens that they should hold, and new tokens of several of them at once.
#pragma once

#include <vector>

#include "tests/runtime/new_tokens.h"

namespace keyhole::test {

struct Member {
  SessionPtr session;
  Model model;
};

/// New tokens of some sessions in one layer, as many for each as `counts` says, and what they answered.
struct Batch {
  Batch(const Shape& shape, uint32_t number, const std::vector<uint32_t>& counts, Numbers& numbers,
        float key_size = 1.0F)
      : layer(number), start{0}, statuses(counts.size(), 99), shape_(shape) {
    for (const uint32_t n : counts) start.push_back(start.back() + n);
    tokens = new_tokens(shape, start.back(), numbers);
    for (float& x : tokens.k) x *= key_size;
  }
  [[nodiscard]] keyhole_status run(const std::vector<keyhole_session*>& sessions) {
    return extend_batch(sessions, shape_, layer, tokens, start.data(), statuses.data());
  }
  /// The tokens of member i, and its answers.
  [[nodiscard]] NewTokens of(size_t i) const {
    return part_of(tokens, shape_, start[i], start[i + 1]);
  }
  /// What member i's session answers to the same tokens by itself.
  [[nodiscard]] Answer alone(keyhole_session* s, size_t i) const {
    NewTokens own = of(i);
    EXPECT_OK(extend(s, shape_, layer, own));
    return own.answer;
  }
  /// Appends the member's tokens to its model; the answers are its exact ones.
  void expect_truth(Member& m, size_t i, double tolerance = 1e-4) const {
    SCOPED_TRACE("session " + std::to_string(i));
    const NewTokens own = of(i);
    m.model.append(layer, own.k, own.v);
    expect_answers(m.model, shape_, layer, own, nullptr, tolerance);
  }

  uint32_t layer;
  std::vector<uint32_t> start;
  NewTokens tokens;
  std::vector<keyhole_status> statuses;

 private:
  Shape shape_;
};

}  // namespace keyhole::test
