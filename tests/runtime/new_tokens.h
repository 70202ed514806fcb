// New tokens of a layer, one or several at once, and the answers to them, beside the model of their sequence.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/stream.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

/// New tokens of a layer, and the answers to them. What is under way on a stream reads and writes here.
struct NewTokens {
  std::vector<float> q, k, v;
  uint32_t n = 0;
  Answer answer;
};

inline NewTokens new_tokens(const Shape& shape, uint32_t n, Numbers& numbers) {
  NewTokens t{numbers.many(shape.q(n)), numbers.many(shape.kv(n)), {}, n, {}};
  t.v = shape.values_of(t.k, numbers);
  t.answer = {std::vector<float>(shape.o(n), NAN),
              std::vector<float>(static_cast<size_t>(n * shape.hq), NAN)};
  return t;
}

/// Tokens [begin, end) of these.
inline NewTokens part_of(const NewTokens& t, const Shape& shape, uint32_t begin, uint32_t end) {
  const auto hq = static_cast<size_t>(shape.hq);
  return {
      slice(t.q, shape.q(begin), shape.q(end)),
      slice(t.k, shape.kv(begin), shape.kv(end)),
      slice(t.v, shape.v(begin), shape.v(end)),
      end - begin,
      {slice(t.answer.o, shape.o(begin), shape.o(end)), slice(t.answer.lse, begin * hq, end * hq)}};
}

/// Takes the numbers of as many others in place, as a graph goes on reading the same memory; answers become NaN.
inline void refill(NewTokens& t, const NewTokens& others) {
  std::copy(others.q.begin(), others.q.end(), t.q.begin());
  std::copy(others.k.begin(), others.k.end(), t.k.begin());
  std::copy(others.v.begin(), others.v.end(), t.v.begin());
  std::fill(t.answer.o.begin(), t.answer.o.end(), NAN);
  std::fill(t.answer.lse.begin(), t.answer.lse.end(), NAN);
}

/// The tensors of the tokens; as_step: without an axis of tokens, of which there is one.
struct NewTensors {
  keyhole_tensor q, k, v, out;

  NewTensors(const NewTokens& t, const Shape& shape, keyhole_memory memory, bool as_step = false) {
    const auto made = [&](const std::vector<float>& x, int64_t heads, int64_t dim) {
      keyhole_tensor one = as_step ? tensor(x, {heads, dim}) : tensor(x, {t.n, heads, dim});
      one.memory = memory;
      return one;
    };
    q = made(t.q, shape.hq, shape.d);
    k = made(t.k, shape.hkv, shape.d);
    v = made(t.v, shape.hkv, shape.dv);
    out = made(t.answer.o, shape.hq, shape.dv);
  }
};

inline keyhole_status extend(keyhole_session* s, const Shape& shape, uint32_t layer, NewTokens& t,
                             const uint64_t* mask = nullptr, keyhole_memory memory = KEYHOLE_HOST) {
  const NewTensors x(t, shape, memory);
  return keyhole_session_extend(s, layer, &x.q, &x.k, shape.given(x.v), mask, &x.out,
                                t.answer.lse.data());
}

/// start: of each session's tokens, and their end. statuses: of each session; null: not wanted.
inline keyhole_status extend_batch(const std::vector<keyhole_session*>& sessions,
                                   const Shape& shape, uint32_t layer, NewTokens& t,
                                   const uint32_t* start, keyhole_status* statuses = nullptr,
                                   keyhole_memory memory = KEYHOLE_HOST) {
  const NewTensors x(t, shape, memory);
  return keyhole_session_extend_batch(sessions.data(), static_cast<uint32_t>(sessions.size()),
                                      layer, &x.q, &x.k, shape.given(x.v), start, &x.out,
                                      t.answer.lse.data(), statuses);
}

/// A step, of a single token. halves: as attend_begin and attend_end.
inline keyhole_status attend(keyhole_session* s, const Shape& shape, uint32_t layer, NewTokens& t,
                             keyhole_memory memory = KEYHOLE_HOST, bool halves = false) {
  const NewTensors x(t, shape, memory, true);
  float* const lse = t.answer.lse.data();
  if (!halves) {
    return keyhole_session_attend(s, layer, &x.q, &x.k, shape.given(x.v), &x.out, lse);
  }
  const keyhole_status status =
      keyhole_session_attend_begin(s, layer, &x.q, &x.k, shape.given(x.v));
  return status != KEYHOLE_OK ? status : keyhole_session_attend_end(s, &x.out, lse);
}

/// Checks the answers to every `step`-th token and the last, when the model has the tokens as its newest.
inline void expect_answers(const Model& model, const Shape& shape, uint32_t layer,
                           const NewTokens& t, const uint64_t* mask = nullptr,
                           double tolerance = 1e-4, uint32_t step = 1) {
  const uint32_t before = model.tokens(layer) - t.n;
  for (uint32_t i = 0; i < t.n; i = i + 1 == t.n ? t.n : std::min(t.n - 1, i + step)) {
    SCOPED_TRACE("layer " + std::to_string(layer) + ", token " + std::to_string(i) + " of " +
                 std::to_string(t.n) + " after " + std::to_string(before));
    const NewTokens one = part_of(t, shape, i, i + 1);
    std::vector<double> lse;
    const auto o = model.attend(layer, one.q, lse, [&](uint32_t token) {
      if (token < before) return true;
      const uint32_t j = token - before;
      return j <= i && (mask == nullptr || (mask[i] >> j & 1U) != 0);
    });
    expect_near(one.answer, o, lse, tolerance);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace keyhole::test
