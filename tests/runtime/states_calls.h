// keyhole_session_attend_offloaded, keyhole_session_attend_tokens and keyhole_session_search_tokens beside the
// double-precision model of a session.
#pragma once

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "keyhole/attention.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

inline Answer attend_offloaded(keyhole_session* s, const Shape& shape, uint32_t layer,
                               const std::vector<float>& q) {
  Answer a{std::vector<float>(shape.o(1), NAN),
           std::vector<float>(static_cast<size_t>(shape.hq), NAN)};
  const auto tq = tensor(q, {shape.hq, shape.d}), out = tensor(a.o, {shape.hq, shape.dv});
  EXPECT_OK(keyhole_session_attend_offloaded(s, layer, &tq, &out, a.lse.data()));
  return a;
}

inline Answer attend_tokens(keyhole_session* s, const Shape& shape, uint32_t layer,
                            const std::vector<float>& q, const std::vector<uint32_t>& ids,
                            const std::vector<uint32_t>& counts, bool with_resident) {
  Answer a{std::vector<float>(shape.o(1), NAN),
           std::vector<float>(static_cast<size_t>(shape.hq), NAN)};
  const auto tq = tensor(q, {shape.hq, shape.d}), out = tensor(a.o, {shape.hq, shape.dv});
  EXPECT_OK(keyhole_session_attend_tokens(s, layer, &tq, ids.data(), counts.data(),
                                          with_resident ? 1 : 0, &out, a.lse.data()));
  return a;
}

/// Whether a token is offloaded.
inline bool is_offloaded(const keyhole_layer_tokens& t, uint32_t token) {
  return token >= t.sink && token < t.total - t.window;
}

/// Attention to every offloaded token, by the model; fills lse.
inline std::vector<double> offloaded_truth(keyhole_session* s, const Model& model, uint32_t layer,
                                           const std::vector<float>& q, std::vector<double>& lse) {
  const keyhole_layer_tokens t = layer_tokens(s, layer);
  return model.attend(layer, q, lse, [&](uint32_t id) { return is_offloaded(t, id); });
}

/// Checks a session whose budget reads every key.
inline void expect_offloaded_exact(keyhole_session* s, const Model& model,
                                   const keyhole_engine_config& ec, uint32_t layer,
                                   const std::vector<float>& q) {
  const Answer a = attend_offloaded(s, Shape(ec), layer, q);
  std::vector<double> lse;
  const auto o = offloaded_truth(s, model, layer, q, lse);
  expect_near(a, o, lse);
}

/// Attends random tokens of every KV head, in random order; now and then none, or all.
inline void expect_tokens_exact(keyhole_session* s, const Model& model,
                                const keyhole_engine_config& ec, uint32_t layer, Numbers& numbers) {
  const Shape shape(ec);
  const uint32_t group = ec.q_heads / ec.kv_heads;
  const uint32_t total = model.tokens(layer);
  const auto q = numbers.many(shape.q(1));
  const bool with_resident = numbers.below(2) == 0;
  std::vector<uint32_t> ids, counts;
  std::vector<std::set<uint32_t>> sets(ec.kv_heads);
  for (uint32_t h = 0; h < ec.kv_heads; ++h) {
    const uint32_t share = numbers.below(5);  // quarters of the tokens
    std::vector<uint32_t> own;
    for (uint32_t t = 0; t < total; ++t) {
      if (numbers.below(4) < share) own.push_back(t);
    }
    for (size_t i = own.size(); i > 1; --i) {
      std::swap(own[i - 1], own[numbers.below(static_cast<uint32_t>(i))]);
    }
    sets[h] = {own.begin(), own.end()};
    ids.insert(ids.end(), own.begin(), own.end());
    counts.push_back(static_cast<uint32_t>(own.size()));
  }
  const Answer a = attend_tokens(s, shape, layer, q, ids, counts, with_resident);
  const keyhole_layer_tokens t = layer_tokens(s, layer);
  for (uint32_t h = 0; h < ec.kv_heads; ++h) {
    std::vector<double> lse;
    const auto o = model.attend(layer, q, lse, [&](uint32_t id) {
      return sets[h].count(id) != 0 || (with_resident && !is_offloaded(t, id));
    });
    for (uint32_t g = h * group; g < (h + 1) * group; ++g) {
      if (lse[g] == -INFINITY) {
        ASSERT_EQ(a.lse[g], -INFINITY);
      } else {
        ASSERT_NEAR(a.lse[g], lse[g], 1e-4) << "head " << g;
      }
      for (size_t i = g * shape.o(1) / ec.q_heads; i < (g + 1) * shape.o(1) / ec.q_heads; ++i) {
        ASSERT_NEAR(a.o[i], o[i], 1e-4) << "head " << g;
      }
    }
  }
}

/// Checks that what a search returns is distinct, offloaded, scored right and in order, and that no pending token
/// that belongs among the best is missing. Returns the share of the true best that it has found.
inline double expect_search_sound(keyhole_session* s, const Model& model,
                                  const keyhole_engine_config& ec, uint32_t layer, uint32_t top_k,
                                  Numbers& numbers) {
  const Shape shape(ec);
  const auto q = numbers.many(shape.q(1));
  const auto tq = tensor(q, {shape.hq, shape.d});
  std::vector<uint32_t> ids(size_t{ec.q_heads} * top_k, UINT32_MAX), counts(ec.q_heads);
  std::vector<float> scores(ids.size());
  EXPECT_OK(keyhole_session_search_tokens(s, layer, &tq, top_k, ids.data(), scores.data(),
                                          counts.data()));
  const keyhole_layer_tokens t = layer_tokens(s, layer);
  const uint32_t offloaded = t.indexed + t.pending;
  const uint32_t group = ec.q_heads / ec.kv_heads;
  Model copy = model;
  const std::vector<float>& keys = copy.keys(layer);
  size_t found = 0, wanted = 0;
  for (uint32_t h = 0; h < ec.q_heads; ++h) {
    std::vector<double> dots(model.tokens(layer));
    for (uint32_t token = 0; token < dots.size(); ++token) {
      const float* k = &keys[(size_t{token} * ec.kv_heads + h / group) * ec.head_dim];
      for (uint32_t i = 0; i < ec.head_dim; ++i) {
        dots[token] += double{k[i]} * double{q[size_t{h} * ec.head_dim + i]};
      }
    }
    const auto dot = [&](uint32_t token) { return dots[token]; };
    std::vector<uint32_t> best(offloaded);
    std::iota(best.begin(), best.end(), t.sink);
    std::stable_sort(best.begin(), best.end(),
                     [&](uint32_t a, uint32_t b) { return dot(a) > dot(b); });
    best.resize(std::min(top_k, offloaded));
    const uint32_t* own = ids.data() + size_t{h} * top_k;
    EXPECT_LE(counts[h], best.size());
    std::set<uint32_t> seen;
    for (uint32_t i = 0; i < counts[h]; ++i) {
      if (!is_offloaded(t, own[i])) {
        ADD_FAILURE() << "token " << own[i] << " is not offloaded";
        return 0.0;
      }
      EXPECT_TRUE(seen.insert(own[i]).second) << "token " << own[i] << " twice";
      EXPECT_NEAR(scores[size_t{h} * top_k + i], dot(own[i]), 1e-3);
      if (i == 0) continue;
      // Numbers and their products are exact in fp32.
      const double before = dot(own[i - 1]), here = dot(own[i]);
      EXPECT_TRUE(before > here || (before == here && own[i - 1] < own[i])) << "number " << i;
    }
    for (const uint32_t token : best) {
      found += seen.count(token);
      if (token >= t.sink + t.indexed) {
        EXPECT_EQ(seen.count(token), 1U) << "pending token " << token;
      }
    }
    wanted += best.size();
  }
  return wanted == 0 ? 1.0 : static_cast<double>(found) / static_cast<double>(wanted);
}

}  // namespace keyhole::test
