// The data of bench-step: what turning must keep, and which token comes from where.
#include "tools/commands/bench_step/step_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

#include "runtime/files/float16.h"
#include "tests/temporary_folder.h"
#include "tests/tools/cli/synthetic_trace.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

double dot(const float* a, const float* b, size_t n) {
  return std::inner_product(a, a + n, b, 0.0, std::plus<>(),
                            [](double x, double y) { return x * y; });
}

std::vector<float> as_f32(const std::vector<uint16_t>& in) {
  std::vector<float> out;
  for (const uint16_t x : in) out.push_back(f16_to_f32(x));
  return out;
}

std::string kind_name(const testing::TestParamInfo<TurnKind>& kind) {
  return kind.param == TurnKind::permute ? "permute" : "rotate";
}

class HeadTurns : public testing::TestWithParam<TurnKind> {};

TEST_P(HeadTurns, KeepInnerProducts) {
  for (const size_t d : {64U, 80U, 96U, 128U, 256U}) {
    const std::vector<float> rows = normal_numbers(20 * d, 7 + d);
    std::vector<float> turned(rows.size());
    HeadTurn(GetParam(), d, 3).apply(rows.data(), 20, turned.data());
    for (size_t i = 0; i < 20; ++i) {
      for (size_t j = 0; j < 20; ++j) {
        EXPECT_NEAR(dot(turned.data() + i * d, turned.data() + j * d, d),
                    dot(rows.data() + i * d, rows.data() + j * d, d),
                    1e-4 * static_cast<double>(d));
      }
    }
  }
}

TEST_P(HeadTurns, DependOnTheSeedAlone) {
  const std::vector<float> rows = normal_numbers(128, 1);
  const auto turned = [&](uint64_t seed) {
    std::vector<float> out(128);
    HeadTurn(GetParam(), 128, seed).apply(rows.data(), 1, out.data());
    return out;
  };
  EXPECT_EQ(turned(5), turned(5));
  EXPECT_NE(turned(5), turned(6));
  EXPECT_NE(turned(5), rows);
}

INSTANTIATE_TEST_SUITE_P(Kinds, HeadTurns, testing::Values(TurnKind::permute, TurnKind::rotate),
                         kind_name);

TEST(HeadTurn, APermutationKeepsMagnitudes) {
  std::vector<float> row = normal_numbers(96, 2);
  std::vector<float> turned(96);
  HeadTurn(TurnKind::permute, 96, 9).apply(row.data(), 1, turned.data());
  for (auto* numbers : {&row, &turned}) {
    for (float& x : *numbers) x = std::abs(x);
    std::sort(numbers->begin(), numbers->end());
  }
  EXPECT_EQ(row, turned);
}

TEST(NormalNumbers, HaveMeanZeroAndVarianceOne) {
  const std::vector<float> numbers = normal_numbers(100001, 11);
  ASSERT_EQ(numbers.size(), 100001U);
  const double mean = std::accumulate(numbers.begin(), numbers.end(), 0.0) / 100001;
  EXPECT_NEAR(mean, 0, 0.02);
  EXPECT_NEAR(dot(numbers.data(), numbers.data(), numbers.size()) / 100001, 1, 0.03);
}

class TraceHeads : public testing::Test {
 protected:
  TraceHeads() : seed_(std::random_device{}()) {
    SCOPED_TRACE("seed " + std::to_string(seed_));
    std::mt19937 random(seed_);
    SyntheticShape shape;
    shape.tokens = 400;
    made_ = make_synthetic_trace(shape, random);
    made_.write(folder_ / "t.safetensors");
  }

  [[nodiscard]] std::unique_ptr<HeadSource> source(uint64_t context, uint32_t sink) const {
    return make_trace_source(Trace::open(folder_ / "t.safetensors"), context, sink, 5);
  }
  [[nodiscard]] std::vector<float> recorded(uint32_t head, size_t token) const {
    const size_t d = made_.info.head_dim;
    const auto begin = made_.keys[head].begin() + static_cast<ptrdiff_t>(token * d);
    return {begin, begin + static_cast<ptrdiff_t>(d)};
  }
  [[nodiscard]] std::vector<float> key(const HeadSource& source, uint32_t head,
                                       uint64_t token) const {
    std::vector<float> out(made_.info.head_dim);
    source.rows(head, HeadSource::Part::keys, token, 1, out.data());
    return out;
  }

  unsigned seed_;
  TemporaryFolder folder_;
  SyntheticTrace made_;
};

TEST_F(TraceHeads, AShortContextIsTheBeginningAndTheEnd) {
  const size_t before = made_.options.query_positions.front();
  const auto heads = source(100, 10);
  EXPECT_EQ(heads->copied_tokens(), 0U);
  EXPECT_EQ(key(*heads, 3, 0), recorded(3, 0));
  EXPECT_EQ(key(*heads, 3, 9), recorded(3, 9));
  EXPECT_EQ(key(*heads, 3, 10), recorded(3, before - 90));
  EXPECT_EQ(key(*heads, 3, 99), recorded(3, before - 1));
}

TEST_F(TraceHeads, ALongContextIsFilledUpWithNoisyCopies) {
  const size_t before = made_.options.query_positions.front();
  const uint64_t context = 3 * before;
  const auto heads = source(context, 10);
  EXPECT_EQ(heads->copied_tokens(), 2 * before);
  EXPECT_NE(heads->description().find("noisy copies"), std::string::npos);
  EXPECT_EQ(key(*heads, 0, 9), recorded(0, 9));
  EXPECT_EQ(key(*heads, 0, context - 1), recorded(0, before - 1));
  EXPECT_EQ(key(*heads, 0, context - before + 10), recorded(0, 10));
  // A copy is near its original, and no two copies are alike.
  const std::vector<float> original = recorded(0, 10);
  const std::vector<float> first = key(*heads, 0, 10);
  const std::vector<float> second = key(*heads, 0, 10 + (before - 10));
  EXPECT_NE(first, second);
  for (const auto& copy : {first, second}) {
    std::vector<float> difference = copy;
    for (size_t i = 0; i < copy.size(); ++i) difference[i] -= original[i];
    const double share = std::sqrt(dot(difference.data(), difference.data(), copy.size()) /
                                   dot(original.data(), original.data(), copy.size()));
    EXPECT_GT(share, 0.05);
    EXPECT_LT(share, 0.2);
  }
}

TEST_F(TraceHeads, StepsBringTheRecordedTokensInTurn) {
  const auto& positions = made_.options.query_positions;
  const auto heads = source(100, 10);
  const auto count = static_cast<uint32_t>(positions.size());
  const size_t d = made_.info.head_dim;
  for (const uint32_t step : {0U, 3U, count + 1}) {
    EXPECT_EQ(key(*heads, 1, 100 + step), recorded(1, positions[step % count]));
    std::vector<float> query(d);
    heads->step_query(1, step, 1, query.data());
    const auto begin =
        made_.queries[1].begin() + static_cast<ptrdiff_t>((step % count * 2 + 1) * d);
    EXPECT_EQ(query, std::vector<float>(begin, begin + static_cast<ptrdiff_t>(d)));
  }
}

TEST_F(TraceHeads, ATraceThatIsAllSinkIsRefused) {
  EXPECT_THROW((void)source(4000, 395), UsageError);
}

class Layers : public testing::TestWithParam<TurnKind> {};

TEST_P(Layers, KeepTheScoresOfTheirSource) {
  const StepShape shape{3, 8, 4, 64};
  const auto source = make_synthetic_source(64, 17);
  Team team(3);
  constexpr uint64_t kContext = 1000;
  LayerData data(*source, shape, GetParam(), 4, 2, kContext, team);
  std::vector<uint16_t> k(kContext * shape.kv_elements(), 0xffff);
  std::vector<uint16_t> v = k;
  data.rows(0, kContext, k.data(), v.data());
  std::vector<uint16_t> token(shape.token_elements(), 0xffff);
  data.step(1, token.data());
  const std::vector<float> keys = as_f32(k);
  const std::vector<float> values = as_f32(v);
  const std::vector<float> step = as_f32(token);
  for (uint32_t h = 0; h < 4; ++h) {
    const uint32_t from = (2 * 4 + h) % source->heads();
    std::vector<float> plain_keys(kContext * 64);
    std::vector<float> plain_values(kContext * 64);
    std::vector<float> query(64);
    source->rows(from, HeadSource::Part::keys, 0, kContext, plain_keys.data());
    source->rows(from, HeadSource::Part::values, 0, kContext, plain_values.data());
    for (uint32_t j = 0; j < 2; ++j) {
      source->step_query(from, 1, j, query.data());
      for (size_t t = 0; t < kContext; t += 37) {
        const double expected = dot(query.data(), plain_keys.data() + t * 64, 64);
        const double tolerance =
            1e-3 * std::sqrt(dot(query.data(), query.data(), 64) *
                             dot(plain_keys.data() + t * 64, plain_keys.data() + t * 64, 64));
        EXPECT_NEAR(dot(step.data() + (h * 2 + j) * 64, keys.data() + (t * 4 + h) * 64, 64),
                    expected, tolerance);
      }
    }
    for (size_t t = 1; t < kContext; t += 37) {
      const float* a = values.data() + ((t - 1) * 4 + h) * 64;
      const float* b = values.data() + (t * 4 + h) * 64;
      EXPECT_NEAR(dot(a, b, 64),
                  dot(plain_values.data() + (t - 1) * 64, plain_values.data() + t * 64, 64), 0.2);
    }
  }
}

TEST_P(Layers, AreTheSameInAnyPieces) {
  const StepShape shape{1, 4, 2, 80};
  const auto source = make_synthetic_source(80, 17);
  Team team(2);
  constexpr size_t kContext = 700;
  const auto made = [&](uint64_t seed, size_t piece) {
    LayerData data(*source, shape, GetParam(), seed, 0, kContext, team);
    std::vector<uint16_t> all(kContext * (2 * shape.kv_elements() + shape.q_elements()));
    uint16_t* k = all.data();
    uint16_t* v = k + kContext * shape.kv_elements();
    uint16_t* q = v + kContext * shape.kv_elements();
    for (size_t first = 0; first < kContext; first += piece) {
      const size_t n = std::min(piece, kContext - first);
      data.rows(first, n, k + first * shape.kv_elements(), v + first * shape.kv_elements());
      EXPECT_TRUE(data.queries(first, n, q + first * shape.q_elements()));
    }
    return all;
  };
  EXPECT_EQ(made(1, 700), made(1, 256));
  EXPECT_NE(made(1, 700), made(2, 700));
}

INSTANTIATE_TEST_SUITE_P(Kinds, Layers, testing::Values(TurnKind::permute, TurnKind::rotate),
                         kind_name);

TEST(SyntheticHeads, AreDrawnToTheSink) {
  // Softmax over a thousand keys: the four tokens of the sink weigh more than they would by chance.
  const auto source = make_synthetic_source(128, 3);
  std::vector<float> keys(1000 * 128);
  std::vector<float> query(128);
  for (uint32_t head = 0; head < source->heads(); ++head) {
    source->rows(head, HeadSource::Part::keys, 0, 1000, keys.data());
    double share = 0;
    for (uint32_t step = 0; step < 50; ++step) {
      source->step_query(head, step, 0, query.data());
      double sink = 0;
      double all = 0;
      for (size_t t = 0; t < 1000; ++t) {
        all += std::exp(dot(query.data(), keys.data() + t * 128, 128) / std::sqrt(128.0));
        if (t == 3) sink = all;
      }
      share += sink / all / 50;
    }
    EXPECT_GT(share, 0.05) << head;
    EXPECT_LT(share, 0.98) << head;
  }
}

}  // namespace
}  // namespace keyhole::tools
