// A layer's step over codes on the device against a reference in double precision: rows that were read exactly from
// their own bytes, all others from the same codes on the host, resident tokens merged.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/cuda/codes/row_exchange.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "tests/captured_graph.h"
#include "tests/gpu/codes_layer.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

/// While it lives a thread of the host reads the rows of a layer's steps, in place of the device, which does not know
/// where they lie.
class RowsByHost {
 public:
  explicit RowsByHost(Layer& layer, std::chrono::milliseconds delay = {},
                      const RowWaits& waits = {})
      : layer_(&layer),
        source_{rows_of(layer.step(), layer.step().keys),
                rows_of(layer.step(), layer.step().values)},
        steps_(std::vector<uint32_t>(kKvHeads, 0)),
        exchange_(layer.codes_shape(), steps_.get()) {
    CodesStep& step = layer.step();
    step.host_rows = exchange_.params(kLayer, waits);
    step.keys = step.values = nullptr;
    if (delay.count() < 0) return;
    thread_ = std::thread([this, delay] {
      while (!stop_) {
        for (uint32_t h = 0; h < kKvHeads; ++h) {
          served_[h] = exchange_.serve(h, [&](uint32_t of) {
            EXPECT_EQ(of, kLayer);
            std::this_thread::sleep_for(delay);
            return source_;
          });
        }
      }
    });
  }
  ~RowsByHost() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    CodesStep& step = layer_->step();
    step.host_rows = {};
    step.keys = source_.keys.data;
    step.values = source_.values.data;
  }
  RowsByHost(const RowsByHost&) = delete;
  RowsByHost& operator=(const RowsByHost&) = delete;

  /// Every KV head has asked in as many steps, and was served.
  void expect_served(uint32_t steps) const {
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (const auto& head : served_) {
      while (head < steps && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
      EXPECT_EQ(head, steps);
    }
    EXPECT_EQ(steps_.read(), std::vector<uint32_t>(kKvHeads, steps));
  }
  RowExchange& exchange() { return exchange_; }

  static constexpr uint32_t kLayer = 5;

 private:
  static RowsView rows_of(const CodesStep& step, const std::byte* data) {
    return {{.data = data,
             .token_stride = step.shape.dim,
             .head_stride = static_cast<ptrdiff_t>(step.kv_head_stride / dtype_size(step.dtype)),
             .tokens = size_t{step.block_capacity} * kCodeBlock,
             .heads = kKvHeads,
             .dim = step.shape.dim,
             .dtype = step.dtype}};
  }

  Layer* layer_;
  KvView source_;
  DeviceVector<uint32_t> steps_;
  RowExchange exchange_;
  std::atomic<uint32_t> served_[kKvHeads]{};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class CodesOnDevice : public testing::TestWithParam<std::tuple<Case, bool>> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
    const Case c = of_test();
    if (c.cluster && !has_clusters()) GTEST_SKIP() << "no clusters of thread blocks";
    CodesStep step = step_of(c, c.blocks + c.spare + 3);
    size_t needs = 0;
    ASSERT_EQ(prepare_codes(step, 0, &needs), cudaSuccess)
        << "a thread block takes " << needs << " bytes of shared memory";
    if (step.cluster != c.cluster) GTEST_SKIP() << "a cluster takes too much shared memory";
  }
  static Case of_test() {
    Case c = std::get<0>(GetParam());
    c.cluster = std::get<1>(GetParam());
    return c;
  }
};

TEST_P(CodesOnDevice, StatesAreThoseOfTheHost) {
  const Case c = of_test();
  Layer layer(c);
  for (const uint32_t exact_rows : {0U, 1U, 16U, 64U}) {
    layer.run(exact_rows, exact_rows != 1);
    layer.check(c.blocks);
  }
}

TEST_P(CodesOnDevice, LseAndChosenRowsNeedNotBeWanted) {
  Case c = of_test();
  c.blocks = std::min(c.blocks, 9U);
  Layer layer(c);
  layer.clear_out();  // rows are further apart than they are long
  layer.run(16);
  const std::vector<std::byte> with = layer.out();
  layer.clear_out();
  layer.step().lse = nullptr;
  layer.step().chosen = nullptr;
  layer.run(16);
  EXPECT_EQ(layer.out(), with);
}

TEST_P(CodesOnDevice, AGraphIsReplayedWhileBlocksCome) {
  Case c = of_test();
  c.blocks = std::min(c.blocks, 9U);
  c.spare = 3;
  c.resident = true;
  Layer layer(c);
  layer.step().exact_rows = 16;
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  const CapturedGraph graph(stream, cudaStreamCaptureModeGlobal,
                            [&] { layer.enqueue(stream, true); });
  for (uint32_t blocks = 0; blocks <= c.blocks; blocks += blocks < 2 ? 1 : 3) {
    layer.set_count(blocks);
    graph.run();
    layer.check(blocks);
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_P(CodesOnDevice, RowsThatTheHostReadsGiveTheSameBits) {
  Layer layer(of_test());
  for (const uint32_t exact_rows : {0U, 1U, 7U, 16U, 64U}) {
    SCOPED_TRACE("exact rows " + std::to_string(exact_rows));
    layer.clear_out();
    layer.run(exact_rows);
    const std::vector<std::byte> out = layer.out();
    const std::vector<float> lse = layer.lse();
    const std::vector<uint32_t> chosen = layer.chosen(1);
    const RowsByHost host(layer, std::chrono::milliseconds(exact_rows == 7 ? 5 : 0));
    for (uint32_t i = 1; i <= 3; ++i) {
      layer.clear_out();
      layer.run(exact_rows, i != 1);
      EXPECT_EQ(layer.out(), out);
      EXPECT_EQ(layer.lse(), lse);
      EXPECT_EQ(layer.chosen(1), chosen);
      host.expect_served(i);
    }
  }
}

TEST_P(CodesOnDevice, RowsThatTheHostReadsComeInGraphs) {
  Case c = of_test();
  c.blocks = std::min(c.blocks, 9U);
  Layer layer(c);
  layer.step().exact_rows = 16;
  std::vector<std::vector<std::byte>> out;
  for (uint32_t blocks = 0; blocks <= c.blocks; ++blocks) {
    layer.set_count(blocks);
    layer.clear_out();
    layer.run(16);
    out.push_back(layer.out());
  }
  const RowsByHost host(layer);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  const CapturedGraph graph(stream, cudaStreamCaptureModeGlobal, [&] {
    for (int i = 0; i < 3; ++i) layer.enqueue(stream, true);
  });
  for (uint32_t blocks = 0; blocks <= c.blocks; ++blocks) {
    layer.set_count(blocks);
    layer.clear_out();
    graph.run();
    EXPECT_EQ(layer.out(), out[blocks]) << blocks << " blocks";
  }
  host.expect_served(3 * (c.blocks + 1));
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_P(CodesOnDevice, AHostThatReadsNoRowsIsNoted) {
  Case c = of_test();
  c.blocks = std::min(c.blocks, 9U);
  Layer layer(c);
  layer.run(16);
  const std::vector<std::byte> right = layer.out();
  const PinnedBuffer line(sizeof(FailureLine));
  DeviceVector<uint64_t> sums(std::vector<uint64_t>(2 * kKvHeads, 0));
  const auto failure = [&] { return std::exchange(line.as<FailureLine>()->word, uint64_t{0}); };
  const auto is_nan = [&] {
    // Rows of `out` are further apart than they are long.
    const std::vector<std::byte> bytes = layer.out();
    for (size_t h = 0; h < layer.q_heads(); ++h) {
      std::vector<float> row(c.dim);
      const std::byte* from = bytes.data() + h * (c.dim + 8) * (c.out == DType::f32 ? 4 : 2);
      if (c.out == DType::f32) {
        std::memcpy(row.data(), from, c.dim * 4);
      } else {
        cpu::select_kernels().to_f32[static_cast<size_t>(c.out)](from, row.data(), c.dim);
      }
      for (const float x : row) {
        if (!std::isnan(x)) return false;
      }
    }
    return true;
  };
  const RowWaits waits{line.device<FailureLine>(), reinterpret_cast<WaitSums*>(sums.get()),
                       20'000'000};
  {
    const RowsByHost nobody(layer, std::chrono::milliseconds(-1), waits);
    layer.run(16);
    EXPECT_TRUE(is_nan());
    const uint64_t word = failure();
    EXPECT_EQ(word >> 56U, static_cast<uint64_t>(FailureKind::rows_in_time));
    EXPECT_EQ((word >> 44U) & 0xfffU, RowsByHost::kLayer);
    EXPECT_EQ(static_cast<uint32_t>(word), 1U);
    for (uint32_t h = 0; h < kKvHeads; ++h) EXPECT_GE(sums.read()[2 * h], 20'000'000U);
  }
  {
    RowsByHost gone(layer, std::chrono::milliseconds(-1), RowWaits{waits.failure, nullptr});
    gone.exchange().give_up(1);
    layer.run(16);  // at once: it would wait for 20 seconds
    EXPECT_TRUE(is_nan());
    EXPECT_EQ(failure() >> 56U, static_cast<uint64_t>(FailureKind::rows_given_up));
  }
  const RowsByHost host(layer);
  layer.run(16);
  EXPECT_EQ(layer.out(), right);
  EXPECT_EQ(failure(), 0U);
}

TEST_P(CodesOnDevice, OfEqualWeightsTheFirstRowsAreExact) {
  Case c = of_test();
  c.q_size = 0.0F;
  Layer layer(c);
  for (const uint32_t exact_rows : {16U, 64U}) {
    layer.run(exact_rows);
    layer.check(c.blocks);
    const std::vector<uint32_t> rows = layer.chosen(1);
    for (uint32_t i = 0; i < exact_rows; ++i) EXPECT_EQ(rows[i], i);
  }
}

/// Steps of several tokens with more query rows than one choice is made for.
class StepsInParts : public CodesOnDevice {};

TEST_P(StepsInParts, EveryPartReadsItsOwnHeaviestRows) {
  Layer layer(of_test());
  ASSERT_TRUE(layer.step().wide);
  ASSERT_GT(layer.parts().count, 1U);
  for (const uint32_t exact_rows : {0U, 16U, 64U}) {
    layer.clear_out();
    layer.run(exact_rows);
    layer.check(of_test().blocks);
  }
}

TEST_P(StepsInParts, HaveTheSameBitsAgain) {
  Layer layer(of_test());
  layer.run(16);
  const std::vector<std::byte> out = layer.out();
  const std::vector<float> lse = layer.lse();
  for (int i = 0; i < 3; ++i) {
    layer.clear_out();
    layer.run(16);
    EXPECT_EQ(layer.out(), out);
    EXPECT_EQ(layer.lse(), lse);
  }
}

std::string kernel_of(bool cluster) { return cluster ? "cluster" : "single"; }

INSTANTIATE_TEST_SUITE_P(
    Shapes, CodesOnDevice,
    testing::Combine(
        testing::Values(
            Case{128, 2, 4, 1, 1.0F}, Case{128, 2, 4, 40, 1.0F}, Case{128, 2, 4, 300, 4.0F},
            Case{128, 2, 1, 17, 1.0F}, Case{128, 2, 3, 9, 2.0F}, Case{128, 2, 8, 33, 1.0F},
            Case{128, 2, 16, 10, 1.0F}, Case{128, 2, 12, 10, 1.0F}, Case{128, 4, 4, 33, 1.0F},
            Case{128, 4, 6, 9, 1.0F}, Case{128, 4, 8, 9, 1.0F}, Case{128, 4, 13, 9, 1.0F},
            Case{128, 4, 16, 5, 1.0F}, Case{64, 2, 4, 21, 1.0F}, Case{64, 4, 8, 5, 1.0F},
            Case{64, 2, 1, 9, 1.0F},
            Case{64, 2, 12, 21, 1.0F}, Case{64, 4, 1, 5, 1.0F}, Case{64, 4, 3, 5, 1.0F},
            Case{64, 4, 4, 70, 4.0F}, Case{64, 4, 16, 9, 1.0F},
            Case{80, 2, 4, 21, 1.0F}, Case{80, 4, 2, 5, 1.0F}, Case{80, 2, 16, 5, 1.0F},
            Case{96, 2, 4, 21, 1.0F}, Case{96, 4, 5, 5, 1.0F}, Case{96, 4, 16, 5, 1.0F},
            Case{256, 2, 4, 17, 1.0F}, Case{256, 2, 1, 5, 2.0F}, Case{256, 2, 5, 9, 1.0F},
            Case{256, 2, 8, 21, 1.0F}, Case{256, 2, 12, 9, 1.0F}, Case{256, 2, 16, 9, 1.0F},
            Case{256, 4, 4, 17, 1.0F}, Case{256, 4, 2, 1, 1.0F}, Case{256, 4, 8, 9, 1.0F},
            Case{256, 4, 16, 5, 1.0F}, Case{512, 2, 8, 21, 1.0F}, Case{512, 2, 1, 5, 2.0F},
            Case{512, 2, 12, 9, 1.0F}, Case{512, 4, 8, 17, 1.0F}, Case{512, 4, 4, 1, 1.0F},
            Case{512, 4, 3, 40, 2.0F}, Case{512, 4, 16, 5, 1.0F},
            // More groups of rows than one round of loads of a thread block takes: 4096, and 1024 of 16 heads.
            Case{64, 2, 4, 520, 2.0F}, Case{64, 2, 16, 140, 1.0F}),
        testing::Bool()),
    [](const auto& test) {
      const Case& c = std::get<0>(test.param);
      return "dim" + std::to_string(c.dim) + "bits" + std::to_string(c.bits) + "group" +
             std::to_string(c.group) + "blocks" + std::to_string(c.blocks) +
             kernel_of(std::get<1>(test.param));
    });

INSTANTIATE_TEST_SUITE_P(
    Kinds, CodesOnDevice,
    testing::Combine(
        testing::Values(
            Case{128, 2, 4, 7, 3.0F, 5.0F}, Case{80, 4, 3, 7, 3.0F, 2.0F},
            Case{128, 2, 4, 7, 1.0F, 0.0F, DType::f32, DType::f16, DType::f16},
            Case{128, 4, 4, 7, 1.0F, 0.0F, DType::bf16, DType::bf16, DType::bf16, true},
            Case{96, 2, 8, 7, 1.0F, 0.0F, DType::f32, DType::bf16, DType::f32, true, 2},
            Case{64, 2, 16, 7, 1.0F, 8.0F, DType::bf16, DType::f16, DType::f16, true, 1},
            Case{128, 2, 4, 7, 1.0F, 0.0F, DType::i8, DType::f16, DType::f16, true},
            Case{64, 4, 8, 5, 2.0F, 0.0F, DType::i8, DType::f32, DType::f32, false, 1},
            Case{80, 2, 16, 9, 1.0F, 4.0F, DType::i8, DType::bf16, DType::f32, true},
            Case{96, 4, 3, 21, 1.0F, 0.0F, DType::i8}, Case{256, 2, 4, 7, 3.0F, 5.0F},
            Case{256, 4, 3, 7, 1.0F, 0.0F, DType::bf16, DType::bf16, DType::bf16, true},
            Case{256, 2, 8, 9, 1.0F, 0.0F, DType::f32, DType::f16, DType::f32, true, 2},
            Case{256, 2, 11, 7, 1.0F, 4.0F, DType::i8, DType::f16, DType::f16, true},
            Case{256, 4, 1, 5, 1.0F, 0.0F, DType::i8, DType::f32, DType::bf16},
            Case{512, 4, 8, 7, 3.0F, 5.0F, DType::f16, DType::f16, DType::f16, true},
            Case{512, 2, 4, 9, 1.0F, 0.0F, DType::f32, DType::bf16, DType::f32, true, 2},
            Case{512, 4, 16, 5, 1.0F, 4.0F, DType::i8, DType::f16, DType::bf16, true},
            Case{512, 2, 2, 5, 1.0F, 0.0F, DType::bf16, DType::f32, DType::f32},
            Case{128, 4, 4, 7, 3.0F, 5.0F},
            Case{128, 2, 12, 7, 1.0F, 0.0F, DType::i8, DType::f16, DType::f16, true, 1},
            Case{64, 4, 8, 7, 1.0F, 0.0F, DType::bf16, DType::bf16, DType::f32, true}),
        testing::Bool()),
    [](const auto& test) {
      return "kind" + std::to_string(test.index / 2) + kernel_of(std::get<1>(test.param));
    });

Case of_tokens(uint32_t dim, uint32_t bits, uint32_t heads, uint32_t tokens, uint32_t blocks,
               float scale = 1.0F, DType rows = DType::f16) {
  Case c{dim, bits, heads * tokens, blocks, scale};
  c.rows = rows;
  c.tokens = tokens;
  return c;
}

/// Of any number of tokens, the last with fewer than the others: a device takes as many as run at once.
TEST(StepsInPartsOfAnySize, EveryPartReadsItsOwnHeaviestRows) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  const bool has_room = shared_memory_of(0).of_block > size_t{200} << 10U;
  for (Case c :
       {of_tokens(128, 4, 4, 5, 5), of_tokens(128, 2, 3, 8, 5), of_tokens(96, 4, 5, 4, 5),
        of_tokens(256, 4, 6, 4, 5), of_tokens(512, 2, 3, 5, 5), of_tokens(64, 4, 2, 9, 5)}) {
    for (const bool cluster : {true, false}) {
      if (cluster && (!has_clusters() || !has_room)) continue;
      c.cluster = cluster;
      const uint32_t heads = c.group / c.tokens, most = step_parts(heads, c.tokens).tokens;
      for (uint32_t each = (c.tokens + kMostStepParts - 1) / kMostStepParts; each <= most; ++each) {
        c.part_tokens = each;
        SCOPED_TRACE("dim " + std::to_string(c.dim) + ", " + std::to_string(c.tokens) +
                     " tokens by " + std::to_string(each) + (cluster ? "" : ", single"));
        Layer layer(c);
        ASSERT_TRUE(layer.step().wide);
        EXPECT_EQ(layer.parts().count, (c.tokens + each - 1) / each);
        layer.run(16);
        layer.check(c.blocks);
      }
    }
  }
  // More parts than there are places for, and more rows in one than kernels have.
  for (const auto& [tokens, each] : {std::pair{9U, 1U}, {5U, 5U}}) {
    Case c = of_tokens(128, 4, 4, tokens, 5);
    c.cluster = has_clusters() && has_room;
    CodesStep step = Layer(c).step();
    step.part_tokens = each;
    EXPECT_EQ(prepare_codes(step, 0), cudaErrorInvalidValue) << tokens;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Tokens, StepsInParts,
    testing::Combine(testing::Values(of_tokens(128, 4, 4, 5, 9), of_tokens(128, 4, 4, 8, 5, 4.0F),
                                     of_tokens(128, 2, 3, 7, 9),
                                     of_tokens(64, 2, 4, 6, 17, 2.0F, DType::i8),
                                     of_tokens(96, 2, 8, 3, 5), of_tokens(256, 4, 6, 4, 9),
                                     of_tokens(256, 4, 6, 8, 9), of_tokens(256, 2, 6, 5, 17),
                                     of_tokens(64, 4, 8, 6, 9), of_tokens(128, 4, 6, 8, 9, 2.0F),
                                     of_tokens(256, 2, 8, 4, 5, 1.0F, DType::bf16),
                                     of_tokens(512, 4, 8, 4, 9), of_tokens(512, 4, 8, 3, 5, 2.0F),
                                     of_tokens(512, 2, 4, 8, 9, 1.0F, DType::i8),
                                     of_tokens(512, 2, 16, 2, 5, 1.0F, DType::bf16)),
                     testing::Bool()),
    [](const auto& test) {
      const Case& c = std::get<0>(test.param);
      return "dim" + std::to_string(c.dim) + "bits" + std::to_string(c.bits) + "heads" +
             std::to_string(c.group / c.tokens) + "tokens" + std::to_string(c.tokens) + "blocks" +
             std::to_string(c.blocks) + kernel_of(std::get<1>(test.param));
    });

// Of several tokens the pass for many rows has no place for merged states of resident tokens, be the rows no more than
// those of one token may be.
TEST(WideSteps, OfSeveralTokensRefuseStatesOfResidentTokens) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  for (Case c :
       {of_tokens(512, 4, 8, 2, 5), of_tokens(512, 2, 3, 4, 5), of_tokens(128, 4, 4, 5, 5)}) {
    SCOPED_TRACE("dim " + std::to_string(c.dim) + ", " + std::to_string(c.tokens) + " tokens");
    c.cluster = false;
    Layer layer(c);
    ASSERT_TRUE(layer.step().wide);
    layer.run(16);
    const size_t components = layer.q_heads() * c.dim;
    const DeviceVector<float> states(std::vector<float>(components + layer.q_heads()));
    layer.step().resident_o = states.get();
    layer.step().resident_lse = states.get() + components;
    EXPECT_EQ(attend_codes(layer.step(), nullptr, false), cudaErrorInvalidValue);
    EXPECT_EQ(finish_codes(layer.step(), nullptr, false), cudaErrorInvalidValue);
  }
}

// Logits that spread by tens of nats: what the noise takes is at its bound, and the rows' exact weights are far from
// those by their codes. These steps take no second look (sharp_codes_test.cpp); without one, at 2 bits, and at 60 nats,
// the device's sums are not the host's.
INSTANTIATE_TEST_SUITE_P(Sharp, CodesOnDevice,
                         testing::Combine(testing::Values(Case{128, 4, 4, 9, 8.0F},
                                                          Case{128, 4, 4, 33, 20.0F}),
                                          testing::Bool()),
                         [](const auto& test) {
                           return "sharp" + std::to_string(test.index / 2) +
                                  kernel_of(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace keyhole::gpu
