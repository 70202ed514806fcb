// The prefill's blocked attention against a plain one in double precision.
#include "tools/llama/causal_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/normal.h"
#include "tools/llama/blas.h"

namespace keyhole::tools {
namespace {

struct Problem {
  AttentionShape shape;
  size_t tokens;
  std::vector<float> q, k, v;
  size_t window = 0;
};

Problem random_problem(const AttentionShape& shape, size_t tokens, float spread, uint32_t seed) {
  std::mt19937 random(seed);
  keyhole::test::Normal<float> normal(0.0F, spread);
  Problem problem{shape, tokens, {}, {}, {}, 0};
  problem.q.resize(tokens * shape.q_heads * shape.head_dim);
  problem.k.resize(tokens * shape.kv_heads * shape.head_dim);
  problem.v.resize(problem.k.size());
  for (auto* values : {&problem.q, &problem.k, &problem.v}) {
    for (float& value : *values) value = normal(random);
  }
  return problem;
}

/// Output of one token and query head.
std::vector<double> causal_reference(const Problem& p, size_t token, size_t head) {
  const size_t d = p.shape.head_dim;
  const size_t kv_head = head / p.shape.group();
  const float* q = &p.q[(token * p.shape.q_heads + head) * d];
  std::vector<double> logits(token + 1);
  const size_t oldest = p.window == 0 || token < p.window ? 0 : token + 1 - p.window;
  double best = -1e300;
  for (size_t t = oldest; t <= token; ++t) {
    const float* k = &p.k[(t * p.shape.kv_heads + kv_head) * d];
    double dot = 0.0;
    for (size_t i = 0; i < d; ++i) dot += static_cast<double>(q[i]) * k[i];
    logits[t] =
        dot * (p.shape.scale > 0.0 ? p.shape.scale : 1.0 / std::sqrt(static_cast<double>(d)));
    if (p.shape.softcap > 0.0) {
      logits[t] = p.shape.softcap * std::tanh(logits[t] / p.shape.softcap);
    }
    best = std::max(best, logits[t]);
  }
  double sum = 0.0;
  std::vector<double> out(d, 0.0);
  for (size_t t = oldest; t <= token; ++t) {
    const double weight = std::exp(logits[t] - best);
    sum += weight;
    const float* v = &p.v[(t * p.shape.kv_heads + kv_head) * d];
    for (size_t i = 0; i < d; ++i) out[i] += weight * v[i];
  }
  for (double& value : out) value /= sum;
  return out;
}

void expect_attention(const Problem& problem, size_t first_query, Team& team, double tolerance) {
  const SingleThreadedBlas single_threaded(4);
  std::vector<float> out = problem.q;
  size_t cells = 0;
  CausalAttention(problem.shape, team)
      .run(
          out.data(), problem.k.data(), problem.v.data(), problem.tokens, first_query,
          [&](size_t more) { cells += more; }, problem.window);
  EXPECT_EQ(cells, causal_cells(problem.tokens, first_query, problem.window));
  const size_t d = problem.shape.head_dim;
  const size_t width = problem.shape.q_heads * d;
  for (size_t i = 0; i < first_query * width; ++i) ASSERT_EQ(out[i], problem.q[i]);
  // Every token near the ends of tiles, some of the others.
  for (size_t token = first_query; token < problem.tokens; ++token) {
    if (token % 64 > 1 && token % 64 < 62 && token % 17 != 0) continue;
    for (size_t head = 0; head < problem.shape.q_heads; ++head) {
      const std::vector<double> expected = causal_reference(problem, token, head);
      for (size_t i = 0; i < d; ++i) {
        ASSERT_NEAR(out[token * width + head * d + i], expected[i], tolerance)
            << "token " << token << " head " << head << " component " << i;
      }
    }
  }
}

TEST(CausalAttention, EveryGroupAndHeadDimension) {
  Team team(2);
  uint32_t seed = 0;
  for (const AttentionShape shape :
       {AttentionShape{8, 2, 128}, {6, 2, 64}, {4, 4, 80}, {16, 1, 96}, {3, 1, 256}, {1, 1, 64}}) {
    for (const size_t tokens : {1, 2, 63, 64, 65, 300}) {
      SCOPED_TRACE(::testing::Message() << shape.q_heads << "/" << shape.kv_heads << " heads, d "
                                        << shape.head_dim << ", " << tokens << " tokens");
      const Problem problem = random_problem(shape, tokens, 1.0F, ++seed);
      expect_attention(problem, 0, team, 1e-5);
      expect_attention(problem, tokens - 1, team, 1e-5);
      expect_attention(problem, tokens / 3, team, 1e-5);
    }
  }
}

TEST(CausalAttention, LongerThanABlockOfKeys) {
  Team team(2);
  const Problem problem = random_problem({4, 1, 64}, 1100, 1.0F, 11);
  expect_attention(problem, 0, team, 1e-5);
  expect_attention(problem, 777, team, 1e-5);
}

TEST(CausalAttention, WindowsThatSlide) {
  Team team(2);
  uint32_t seed = 100;
  for (const size_t window : {1, 2, 64, 65, 300, 511, 512, 513, 1200}) {
    SCOPED_TRACE(window);
    Problem problem = random_problem({4, 2, 64}, 1100, 1.0F, ++seed);
    problem.window = window;
    expect_attention(problem, 0, team, 1e-5);
    expect_attention(problem, 777, team, 1e-5);
    expect_attention(problem, 1099, team, 1e-5);
  }
}

TEST(CausalAttention, CellsOfAWindow) {
  for (const size_t window : {0, 1, 3, 10, 11}) {
    for (size_t first = 0; first <= 10; ++first) {
      size_t expected = 0;
      for (size_t token = first; token < 10; ++token) {
        expected += window == 0 ? token + 1 : std::min<size_t>(token + 1, window);
      }
      EXPECT_EQ(causal_cells(10, first, window), expected) << window << " from " << first;
    }
  }
}

TEST(CausalAttention, SoftCapAndScale) {
  Team team(2);
  AttentionShape shape{4, 2, 64};
  shape.scale = 0.3;
  expect_attention(random_problem(shape, 600, 1.0F, 201), 0, team, 1e-5);
  shape.softcap = 2.5;
  Problem problem = random_problem(shape, 600, 1.0F, 202);
  expect_attention(problem, 0, team, 1e-5);
  problem.window = 100;
  expect_attention(problem, 33, team, 1e-5);
}

TEST(CausalAttention, SharpLogits) {
  Team team(1);
  // Spread 5 gives logits of about +-25 * sqrt(64): the softmax is nearly one-hot, and its maximum moves
  // from block to block.
  expect_attention(random_problem({2, 1, 64}, 600, 5.0F, 12), 0, team, 2e-3);
}

TEST(CausalAttention, SameBitsForAnyNumberOfThreads) {
  const Problem problem = random_problem({8, 2, 128}, 700, 1.0F, 13);
  std::vector<std::vector<float>> outs;
  for (const unsigned threads : {1U, 3U}) {
    const SingleThreadedBlas single_threaded(4);
    Team team(threads);
    outs.push_back(problem.q);
    CausalAttention(problem.shape, team)
        .run(outs.back().data(), problem.k.data(), problem.v.data(), problem.tokens, 0, {});
  }
  EXPECT_EQ(outs[0], outs[1]);
}

}  // namespace
}  // namespace keyhole::tools
