// Heads whose codes cannot tell which rows weigh, on the device: against attention in double precision over the sweep
// of tests/index/sharp_heads_test.cpp; what a step does in doubt, and that it does nothing else.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/captured_graph.h"
#include "tests/gpu/codes_session.h"
#include "tests/gpu/sharp_layer.h"

namespace keyhole::gpu::test {
namespace {

constexpr double kDeviations[] = {0.5, 1.0, 2.0, 4.0, 8.0, 20.0, 60.0, 500.0};

std::vector<SharpHead> heads_of(const SharpShape& shape, uint32_t kv_heads, uint64_t seed) {
  std::vector<SharpHead> heads;
  for (uint32_t kv = 0; kv < kv_heads; ++kv) heads.emplace_back(shape, seed * 100 + kv);
  return heads;
}

class SharpCodes : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override { KEYHOLE_NEEDS_GPU(); }
};

TEST_P(SharpCodes, ErrorsStaySmallWhateverTheSpreadOfLogits) {
  const uint32_t dim = GetParam();
  uint64_t seed = dim;
  size_t sharp = 0, number = 0;
  uint64_t doubted = 0;
  for (const Bias bias : {Bias::none, Bias::all, Bias::few, Bias::turned}) {
    const float norm = std::vector{1.0F, 30.0F, 1000.0F}[seed % 3];
    const SharpShape shape{dim, 2048, bias, norm, seed % 2 == 0};
    const std::vector<SharpHead> heads = heads_of(shape, 2, ++seed);
    for (const uint32_t bits : {2U, 4U}) {
      for (const float softcap : {0.0F, 30.0F}) {
        const SharpSetting set{bits, std::vector{1U, 4U, 6U, 16U}[number % 4], softcap,
                               number % 3 != 0};
        ++number;
        SharpLayer layer(heads, set);
        for (size_t i = 0; i < std::size(kDeviations); ++i) {
          std::ostringstream what;
          what << "seed " << seed << ", d " << dim << ", bias " << bias_name(bias) << ", norm "
               << norm << ", " << bits << " bits, group " << set.group << ", deviation "
               << kDeviations[i] << ", soft-cap " << softcap << (set.cluster ? "" : ", single");
          SCOPED_TRACE(what.str());
          // The other KV head is never as sharp.
          layer.ask({kDeviations[i], kDeviations[i / 2]});
          layer.run();
          sharp += layer.check();
          layer.expect_clean();
        }
        doubted += layer.board().doubted;
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(sharp, 300U);
  EXPECT_GT(doubted, 50U);
}

INSTANTIATE_TEST_SUITE_P(Dims, SharpCodes, testing::Values(64U, 80U, 128U, 256U, 512U),
                         [](const auto& test) { return "dim" + std::to_string(test.param); });

class CodesInDoubt : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override { KEYHOLE_NEEDS_GPU(); }
};

TEST_P(CodesInDoubt, HeadsThatAreNotKeepTheirBits) {
  uint64_t doubted = 0;
  for (const bool cluster : {true, false}) {
    for (const uint32_t group : {1U, 4U, 6U, 16U}) {
      SCOPED_TRACE("group " + std::to_string(group) + (cluster ? "" : ", single"));
      SharpSetting set{GetParam(), group, 0.0F, cluster};
      SharpLayer layer(heads_of({128, 4096, Bias::none, 30.0F, false}, 3, group), set);
      layer.ask({1.0, 12.0, 0.5});
      layer.ask_doubt(false);
      layer.run();
      const std::vector<float> out = layer.out(), lse = layer.lse();
      layer.ask_doubt(true);
      layer.run();
      layer.check();
      const uint64_t of_step = layer.board().doubted;
      EXPECT_LE(of_step, 1U);
      doubted += of_step;
      for (const uint32_t kv : {0U, 1U, 2U}) {
        const bool same = layer.of_head(layer.out(), kv) == layer.of_head(out, kv) &&
                          layer.of_head(layer.lse(), kv) == layer.of_head(lse, kv);
        EXPECT_EQ(same, kv != 1 || of_step == 0) << "KV head " << kv;
      }
      // Now no head is sharp.
      layer.ask({1.0, 0.8, 0.5});
      layer.ask_doubt(false);
      layer.run();
      const std::vector<float> quiet = layer.out();
      layer.ask_doubt(true);
      layer.run();
      EXPECT_TRUE(layer.out() == quiet);
      EXPECT_EQ(layer.board().doubted, of_step);
    }
  }
  EXPECT_GE(doubted, 4U);
}

TEST_P(CodesInDoubt, BitsAreTheSameAgainAndAgain) {
  SharpLayer layer(heads_of({128, 8192, Bias::turned, 300.0F, true}, 4, 5), {GetParam(), 6});
  layer.ask({20.0, 3.0, 1.0, 8.0});
  layer.run();
  layer.check();
  const std::vector<float> out = layer.out(), lse = layer.lse();
  EXPECT_GT(layer.board().doubted, 0U);
  for (int i = 0; i < 20; ++i) {
    layer.run();
    ASSERT_EQ(layer.out(), out);
    ASSERT_EQ(layer.lse(), lse);
  }
}

TEST_P(CodesInDoubt, AGraphIsReplayedWithOtherQueries) {
  SharpLayer layer(heads_of({64, 4096, Bias::few, 30.0F, false}, 2, 6), {GetParam(), 4});
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  const CapturedGraph graph(stream, cudaStreamCaptureModeGlobal, [&] {
    for (int i = 0; i < 3; ++i) {  // one is launched ahead of the end of the other
      ASSERT_EQ(attend_codes(layer.step(), stream, has_clusters()), cudaSuccess);
      ASSERT_EQ(finish_codes(layer.step(), stream, has_clusters()), cudaSuccess);
      ASSERT_EQ(settle_codes(layer.step(), stream), cudaSuccess);
    }
  });
  for (const auto& [a, b] :
       {std::pair{1.0, 60.0}, std::pair{60.0, 60.0}, std::pair{1.0, 0.5}, std::pair{8.0, 20.0}}) {
    layer.ask({a, b});
    layer.clear();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    graph.run();
    layer.check();
    layer.expect_clean();
    const std::vector<float> out = layer.out();
    layer.run();
    EXPECT_EQ(layer.out(), out);
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// Hundreds of rows might be among those that weigh.
TEST_P(CodesInDoubt, WhereMoreThanAnEighthMightWeighItIsCounted) {
  if (GetParam() == 4) GTEST_SKIP() << "4 bits tell";
  SharpLayer layer(heads_of({64, 2048, Bias::none, 1.0F, false}, 2, 9), {2, 2});
  for (const double deviation : {4.0, 5.0, 6.0}) {
    layer.ask({deviation, deviation});
    layer.run();
    layer.check();
  }
  const DoubtBoard board = layer.board();
  EXPECT_GT(board.given_up, 0U);
  EXPECT_LE(board.given_up, board.doubted);
  EXPECT_GT(board.rows, board.given_up * 2048 / 8);
}

// The output of several tokens may lie where their queries do.
TEST_P(CodesInDoubt, SeveralTokensAnswerInPlace) {
  for (const auto& [heads, tokens] : {std::pair{4U, 2U}, {4U, 5U}}) {
    for (const bool cluster : {true, false}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens of " + std::to_string(heads) + " heads" +
                   (cluster ? "" : ", single"));
      SharpLayer layer(heads_of({128, 4096, Bias::turned, 100.0F, false}, 3, 10),
                       {GetParam(), heads * tokens, 0.0F, cluster, 64, tokens});
      layer.answer_in_place();
      for (const double deviation : {1.0, 20.0, 60.0}) {
        layer.ask({deviation, 0.5, deviation});
        layer.run();
        layer.check();
        layer.expect_clean();
      }
      EXPECT_GT(layer.board().doubted, 0U);
    }
  }
}

TEST_P(CodesInDoubt, StepsOfSeveralSessions) {
  if (!has_clusters()) GTEST_SKIP() << "no clusters of thread blocks";
  std::vector<std::unique_ptr<SharpLayer>> layers;
  const size_t rows[] = {2048, 8192, 512, 4096};
  for (size_t i = 0; i < 4; ++i) {
    layers.push_back(std::make_unique<SharpLayer>(
        heads_of({128, rows[i], i % 2 == 0 ? Bias::none : Bias::turned, 30.0F, false}, 2, 20 + i),
        SharpSetting{GetParam(), 4}));
  }
  const auto run = [&] {
    std::vector<CodesStep> steps;
    for (const auto& layer : layers) {
      layer->clear();
      steps.push_back(layer->step());
    }
    ASSERT_EQ(step_codes(steps, nullptr, true), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  for (const auto& deviations :
       {std::vector{1.0, 60.0, 1.0, 0.5}, std::vector{20.0, 60.0, 8.0, 500.0},
        std::vector{1.0, 1.0, 1.0, 60.0}, std::vector{0.5, 1.0, 1.0, 0.5}}) {
    for (size_t i = 0; i < 4; ++i) layers[i]->ask({deviations[i], 1.0});
    run();
    std::vector<std::vector<float>> out;
    for (const auto& layer : layers) {
      layer->check();
      layer->expect_clean();
      out.push_back(layer->out());
    }
    run();
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(layers[i]->out(), out[i]);
  }
  EXPECT_GT(layers[3]->board().doubted, 0U);
}

INSTANTIATE_TEST_SUITE_P(Bits, CodesInDoubt, testing::Values(2U, 4U),
                         [](const auto& test) { return std::to_string(test.param); });

/// Bits, tokens and whether there are clusters: small enough for compute-sanitizer.
class HeadsOf512InDoubt : public testing::TestWithParam<std::tuple<uint32_t, uint32_t, bool>> {};

TEST_P(HeadsOf512InDoubt, AreSettledInEveryPart) {
  KEYHOLE_NEEDS_GPU();
  const auto [bits, tokens, cluster] = GetParam();
  SharpLayer layer(heads_of({512, 1024, Bias::none, 30.0F, false}, 2, 11),
                   {bits, 8 * tokens, 0.0F, cluster, 16, tokens});
  layer.answer_in_place();
  layer.ask({20.0, 1.0});
  layer.run();
  EXPECT_GT(layer.check(), 0U);
  layer.expect_clean();
  EXPECT_GT(layer.board().doubted, 0U);
}

INSTANTIATE_TEST_SUITE_P(Ways, HeadsOf512InDoubt,
                         testing::Combine(testing::Values(2U, 4U), testing::Values(1U, 4U),
                                          testing::Bool()));

// Rows of which one is a hundred thousand times as long as those that the balance was learned from, or values of a
// block, all of them some ten thousand times.
TEST(CodesInDoubtOnce, WhatFp16CannotHoldIsRead) {
  KEYHOLE_NEEDS_GPU();
  constexpr uint32_t kDim = 64, kRows = 4 * kCodeBlock;
  enum class Long { key, value, block_of_values };
  for (const Long is_long : {Long::key, Long::value, Long::block_of_values}) {
    const bool of_keys = is_long == Long::key;
    for (const uint32_t bits : {2U, 4U}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(is_long)) + ", bits " + std::to_string(bits));
      CodesShape shape;
      shape.layers = 1;
      shape.kv_heads = 2;
      shape.q_heads = 6;
      shape.code = {kDim, bits, bits};
      shape.dtype = DType::f32;
      shape.blocks = kRows / kCodeBlock;
      shape.exact_rows = 16;
      shape.logits.scale = 0.125F;
      ResidentShape r = small_shape(kDim, DType::f32, 3);
      r.layers = 1;
      r.logits = shape.logits;
      CudaConfig config;
      config.probe_signal = false;
      const auto resident = make_cuda_resident(r, config);
      ASSERT_EQ(r.kv_heads, shape.kv_heads);
      const auto codes = make_cuda_codes(*resident, shape);
      OffloadedLayer rows(shape, kRows);
      std::mt19937 rng(bits);
      const size_t row = size_t{shape.kv_heads} * kDim;
      for (uint32_t i = 0; i < kRows; ++i) {
        auto k = random_floats(rng, row, 1e-3F), v = random_floats(rng, row, 1e-3F);
        // Only rows of the second KV head are made long.
        const bool in_block = is_long == Long::block_of_values && i / kCodeBlock == 2;
        for (size_t j = kDim; (in_block || i == 700) && j < row; ++j)
          (of_keys ? k : v)[j] *= in_block ? 3e4F : 1e6F;
        rows.append(k, v);
        if (i + 1 == kCodeBlock) rows.learn(random_floats(rng, row * 3));
      }
      rows.tell(*codes, 0);
      rows.extend();
      OwnedStream stream;
      codes->encode(0, 0, shape.blocks, stream.get());
      for (uint32_t kv = 0; kv < shape.kv_heads; ++kv) {
        std::vector<std::byte> block(shape.code.block_bytes());
        codes->read(0, kv, 2, block.data());
        float noise;
        std::memcpy(&noise, block.data() + shape.code.noise_at(), 4);
        EXPECT_EQ(noise == kUnknownNoise, kv == 1);
        EXPECT_EQ(std::memcmp(block.data(), rows.codes(kv).block(2), block.size()), 0);
      }
      // A token that the sink takes, whose weight is small.
      LayerTensors t(r, DType::f32, 0);
      const auto q = random_floats(rng, row * 3, of_keys ? 2.0F : 100.0F);
      t.q.write(q);
      t.k.write(std::vector<float>(row, 0.0F));
      t.v.write(std::vector<float>(row, 0.0F));
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const TensorView k = t.k.rows(), v = t.v.rows();
      StreamSteps& steps = *resident->stream_steps();
      steps.step(0, t.q.rows(), &k, &v, {codes.get()}, t.out.rows(), t.lse.floats(), stream.get());
      steps.synchronize(stream.get());
      const CodesDoubts doubts = codes->doubts();
      EXPECT_GE(doubts.doubted, 1U);
      EXPECT_GE(doubts.rows, kCodeBlock - 16U);
      const auto out = t.out.read(), lse = t.lse.read();
      for (uint32_t h = 3; h < 6; ++h) {
        std::vector<double> logits(kRows + 1, 0.0), o(kDim, 0.0);
        for (uint32_t i = 0; i < kRows; ++i) {
          const auto key = rows.row(rows.head(1).keys, i);
          for (uint32_t j = 0; j < kDim; ++j) {
            logits[i] += double{q[h * kDim + j]} * double{key[j]} * 0.125;
          }
        }
        const double top = *std::max_element(logits.begin(), logits.end());
        double sum = 0.0, error = 0.0, norm = 0.0;
        for (const double x : logits) sum += std::exp(x - top);
        for (uint32_t i = 0; i < kRows; ++i) {
          const auto value = rows.row(rows.head(1).values, i);
          for (uint32_t j = 0; j < kDim; ++j) {
            o[j] += std::exp(logits[i] - top) / sum * double{value[j]};
          }
        }
        for (uint32_t j = 0; j < kDim; ++j) {
          error += (out[h * kDim + j] - o[j]) * (out[h * kDim + j] - o[j]);
          norm += o[j] * o[j];
        }
        // Where the long row weighs nothing, nothing does: values by their codes.
        if (of_keys && logits[700] < 0.0) continue;
        EXPECT_LT(std::sqrt(error / norm), 0.02) << "head " << h;
        EXPECT_NEAR(lse[h], top + std::log(sum), 0.02) << "head " << h;
      }
    }
  }
}

// Whole steps, with sink and window, of logits that spread by 40 nats.
TEST(CodesInDoubtOnce, WholeStepsOfASession) {
  KEYHOLE_NEEDS_GPU();
  for (const CodesWay way : {CodesWay::step, CodesWay::begin_end, CodesWay::graph}) {
    for (const uint32_t bits : {2U, 4U}) {
      for (const bool int8 : {false, true}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(way)) + ", bits " + std::to_string(bits));
        CodesSetting set;
        set.way = way;
        set.bits = bits;
        set.int8 = int8;
        set.spread = 40.0F;
        set.asks_doubt = true;
        set.group = int8 ? 5 : 4;
        CodesSession session(set, 11);
        session.prefill(3, 290);
        session.serve(3);
        session.round();
        session.flush();
        session.round();
        session.truncate(2);
        session.round();
        EXPECT_GT(session.codes().doubts().doubted, 0U);
        EXPECT_GT(session.codes().doubts().rows, 0U);
      }
    }
  }
}

// Where the host reads rows, doubt is counted, and nothing else changes.
TEST(CodesInDoubtOnce, WhereTheHostReadsRowsItIsCounted) {
  KEYHOLE_NEEDS_GPU();
  CodesSetting set;
  set.rows_by_host = true;
  set.bits = 4;
  set.spread = 8.0F;
  set.asks_doubt = true;
  CodesSession session(set, 12);
  session.prefill(4, 100);
  session.serve(2);
  session.round();
  session.round();
  EXPECT_GT(session.codes().doubts().doubted, 0U);
  EXPECT_EQ(session.codes().doubts().given_up, 0U);
  EXPECT_EQ(session.codes().doubts().rows, 0U);
}

}  // namespace
}  // namespace keyhole::gpu::test
