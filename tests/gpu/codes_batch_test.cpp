// Steps of several layers' codes in one launch of each kernel, against double precision and against the same steps one
// by one.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/captured_graph.h"
#include "tests/gpu/codes_layer.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

constexpr uint32_t kExactRows = 16;

/// Layers whose steps go together, with as many blocks as each has now.
class Members {
 public:
  void set_count(size_t member, uint32_t blocks) {
    layers_[member]->set_count(blocks);
    counts_[member] = blocks;
  }
  [[nodiscard]] uint32_t count(size_t member) const { return counts_[member]; }
  [[nodiscard]] size_t size() const { return layers_.size(); }
  [[nodiscard]] Layer& layer(size_t member) { return *layers_[member]; }
  [[nodiscard]] std::vector<CodesStep> steps() {
    std::vector<CodesStep> steps;
    for (const auto& layer : layers_) steps.push_back(layer->step());
    return steps;
  }
  void clear_out() {
    for (const auto& layer : layers_) layer->clear_out();
  }
  void run(bool ahead = true) {
    clear_out();
    ASSERT_EQ(step_codes(steps(), nullptr, ahead), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  void check() {
    for (size_t i = 0; i < size(); ++i) {
      SCOPED_TRACE("member " + std::to_string(i) + " of " + std::to_string(size()));
      layers_[i]->check(counts_[i]);
    }
  }
  /// Captures the steps once, and launches them `rounds` times; change(i): member i is about to be another, not in the
  /// first.
  template <class Change>
  void replay(uint32_t rounds, const Change& change) {
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    // Twice: the second pass is launched ahead of the first's end.
    const CapturedGraph graph(stream, cudaStreamCaptureModeGlobal, [&] {
      const std::vector<CodesStep> both = steps();
      ASSERT_EQ(step_codes(both, stream, true), cudaSuccess);
      ASSERT_EQ(step_codes(both, stream, true), cudaSuccess);
    });
    for (uint32_t round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < size() && round != 0; ++i) change(i);
      clear_out();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      graph.run();
      check();
      if (testing::Test::HasFailure()) break;
    }
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }

 protected:
  void add(const Case& c, uint32_t blocks, uint32_t fill) {
    layers_.push_back(std::make_unique<Layer>(c));
    layers_.back()->step().fill = fill;
    layers_.back()->step().exact_rows = kExactRows;
    counts_.push_back(blocks);
    set_count(counts_.size() - 1, blocks);
  }

 private:
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<uint32_t> counts_;
};

class Batch : public Members {
 public:
  /// Blocks of each; fill: thread blocks of a KV head of all members.
  Batch(Case c, const std::vector<uint32_t>& blocks, uint32_t fill) {
    for (const uint32_t n : blocks) {
      c.blocks = std::max(n, 1U);
      add(c, n, fill);
    }
  }
};

class CodesInBatches : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
    if (!has_clusters()) GTEST_SKIP() << "no clusters of thread blocks";
  }
};

TEST_P(CodesInBatches, RaggedMembersHaveTheStatesOfTheHost) {
  const std::vector<std::vector<uint32_t>> batches{
      {33, 33},
      {0, 1},
      {1, 70, 3},
      {0, 0, 0},
      {5, 0, 40, 1, 9, 2, 17, 3, 3, 1, 64, 0, 7, 12, 2, 1}};
  for (const auto& blocks : batches) {
    Batch batch(GetParam(), blocks, 1);
    for (const uint32_t fill : {1U, 7U, 33U, 132U}) {
      SCOPED_TRACE("fill " + std::to_string(fill));
      for (size_t i = 0; i < batch.size(); ++i) batch.layer(i).step().fill = fill;
      batch.run(fill != 7);
      batch.check();
      if (HasFailure()) return;
    }
  }
}

TEST_P(CodesInBatches, WithAsManySplitsTheBitsAreThoseOfOneStep) {
  // More thread blocks than all members have splits: each has its own number.
  Batch batch(GetParam(), {40, 1, 9}, 200);
  batch.run();
  for (size_t i = 0; i < batch.size(); ++i) {
    const std::vector<std::byte> out = batch.layer(i).out();
    const std::vector<float> lse = batch.layer(i).lse();
    const std::vector<uint32_t> chosen = batch.layer(i).chosen(1);
    batch.layer(i).clear_out();
    batch.layer(i).run(kExactRows);
    EXPECT_EQ(batch.layer(i).out(), out) << "member " << i;
    EXPECT_EQ(batch.layer(i).lse(), lse) << "member " << i;
    EXPECT_EQ(batch.layer(i).chosen(1), chosen) << "member " << i;
  }
}

TEST_P(CodesInBatches, BitsAreTheSameAgainAndAgain) {
  Batch batch(GetParam(), {40, 3, 0, 21}, 33);
  batch.run();
  std::vector<std::vector<std::byte>> out;
  for (size_t i = 0; i < batch.size(); ++i) out.push_back(batch.layer(i).out());
  for (uint32_t round = 0; round < 5; ++round) {
    batch.run(round % 2 == 0);
    for (size_t i = 0; i < batch.size(); ++i) EXPECT_EQ(batch.layer(i).out(), out[i]);
  }
}

TEST_P(CodesInBatches, MembersMayHaveOtherExactRows) {
  Batch batch(GetParam(), {20, 9, 33}, 33);
  batch.layer(0).step().exact_rows = 0;
  batch.layer(2).step().exact_rows = 64;
  batch.run();
  batch.check();
}

TEST_P(CodesInBatches, AGraphIsReplayedWhileBlocksComeAndGo) {
  Batch batch(GetParam(), {12, 40, 3, 25}, 33);
  std::mt19937 rng(7);
  batch.replay(6, [&](size_t i) {
    batch.set_count(i, static_cast<uint32_t>(rng()) % (batch.layer(i).of().blocks + 1));
  });
}

TEST_P(CodesInBatches, WhatIsNotFiniteStaysItsMembers) {
  const Case c = GetParam();
  Batch batch(c, {20, 9, 33}, 33);
  batch.run();
  const std::vector<std::byte> first = batch.layer(0).out(), last = batch.layer(2).out();
  const std::vector<float> nan(batch.layer(1).q_heads() * c.dim, NAN);
  const DeviceVector<float> q(nan);
  batch.layer(1).step().q = dense_tensor(reinterpret_cast<const std::byte*>(q.get()), 1,
                                         static_cast<uint32_t>(batch.layer(1).q_heads()), c.dim,
                                         DType::f32, Memory::device);
  batch.run();
  EXPECT_EQ(batch.layer(0).out(), first);
  EXPECT_EQ(batch.layer(2).out(), last);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CodesInBatches,
    testing::Values(Case{128, 2, 4, 1, 1.0F}, Case{128, 2, 1, 1, 2.0F}, Case{128, 2, 8, 1, 1.0F},
                    Case{128, 4, 4, 1, 1.0F}, Case{128, 4, 7, 1, 1.0F}, Case{64, 2, 4, 1, 1.0F},
                    Case{64, 2, 5, 1, 1.0F}, Case{64, 4, 3, 1, 1.0F},
                    Case{64, 4, 8, 1, 1.0F, 0.0F, DType::bf16, DType::f16, DType::f16},
                    Case{128, 2, 4, 1, 3.0F, 5.0F, DType::i8, DType::bf16, DType::bf16}),
    [](const auto& test) {
      const Case& c = test.param;
      return "dim" + std::to_string(c.dim) + "bits" + std::to_string(c.bits) + "group" +
             std::to_string(c.group) + dtype_name(c.rows);
    });

struct Member {
  uint32_t blocks;  ///< of codes
  uint32_t family;  ///< 0: none
  uint32_t shared;  ///< blocks that the family has in common
};

/// Members that have the same rows, and queries of their own.
class Relatives : public Members {
 public:
  Relatives(Case c, const std::vector<Member>& members) {
    constexpr uint32_t kFill = 33;
    for (const Member& m : members) c.blocks = std::max(c.blocks, m.blocks);
    for (const Member& m : members) {
      c.twin += 1;
      add(c, m.blocks, kFill);
      shared_.push_back(std::make_unique<DeviceVector<uint32_t>>(std::vector<uint32_t>{m.shared}));
      CodesStep& step = layer(size() - 1).step();
      step.family_count = shared_.back()->get();
      if (m.family != 0) step.family = &families_[m.family];
    }
  }
  void set_shared(size_t i, uint32_t shared) { shared_[i]->write(std::vector<uint32_t>{shared}); }

 private:
  std::vector<std::unique_ptr<DeviceVector<uint32_t>>> shared_;
  char families_[4] = {};  ///< whose addresses tell families apart
};

TEST_P(CodesInBatches, FamiliesHaveTheStatesOfTheHost) {
  const std::vector<std::vector<Member>> batches{
      {{20, 1, 20}, {20, 1, 20}},
      {{10, 1, 10}, {13, 1, 7}, {5, 0, 0}, {9, 1, 9}, {13, 1, 12}, {2, 1, 13}},
      {{5, 1, 0}, {0, 1, 9}, {4, 2, 4}, {5, 2, 4}, {5, 3, 5}},
      {{4, 1, 4},
       {4, 2, 3},
       {4, 1, 3},
       {4, 2, 4},
       {4, 1, 4},
       {4, 2, 4},
       {4, 1, 4},
       {4, 2, 4},
       {4, 1, 4},
       {4, 1, 4},
       {4, 1, 1},
       {4, 0, 4},
       {3, 1, 3},
       {4, 1, 4},
       {4, 1, 4},
       {4, 1, 4}}};
  for (const auto& members : batches) {
    Relatives batch(GetParam(), members);
    ASSERT_TRUE(batch.layer(0).step().shares);
    for (const uint32_t fill : {1U, 7U, 33U, 132U}) {
      SCOPED_TRACE("fill " + std::to_string(fill));
      for (size_t i = 0; i < batch.size(); ++i) batch.layer(i).step().fill = fill;
      batch.run(fill != 7);
      batch.check();
      if (HasFailure()) return;
    }
  }
}

TEST_P(CodesInBatches, AGraphIsReplayedWhileFamiliesPart) {
  Relatives batch(GetParam(),
                  {{6, 1, 6}, {15, 1, 6}, {6, 1, 6}, {12, 1, 6}, {15, 1, 6}, {3, 0, 0}});
  std::mt19937 rng(7);
  batch.replay(5, [&](size_t i) {
    const uint32_t blocks = static_cast<uint32_t>(rng()) % 16;
    batch.set_count(i, blocks);
    batch.set_shared(i, static_cast<uint32_t>(rng()) % (blocks + 1));
  });
}

class KindsOfCodes : public CodesInBatches {};

TEST_F(KindsOfCodes, DoNotMix) {
  const Case usual{128, 2, 4, 3};
  const auto kind = [](const Case& c) {
    Layer layer(c);
    return codes_kind(layer.step());
  };
  EXPECT_NE(kind(usual).attend, nullptr);
  EXPECT_EQ(kind(usual), kind({128, 2, 3, 9}));
  for (const Case& other : {Case{64, 2, 4, 3}, Case{128, 4, 4, 3}, Case{128, 2, 8, 3}}) {
    EXPECT_NE(kind(other).attend, nullptr);
    EXPECT_NE(kind(usual), kind(other));
  }
  for (const Case& alone : {Case{96, 2, 4, 3}, Case{128, 2, 16, 3}, Case{256, 2, 4, 3}}) {
    EXPECT_EQ(kind(alone).attend, nullptr);
  }
  Case single = usual;
  single.cluster = false;
  EXPECT_EQ(kind(single).attend, nullptr);

  Layer a(usual), b({64, 2, 4, 3});
  EXPECT_EQ(step_codes(std::vector<CodesStep>{a.step(), b.step()}, nullptr, true),
            cudaErrorInvalidValue);
  EXPECT_EQ(step_codes({}, nullptr, true), cudaErrorInvalidValue);
  const std::vector<CodesStep> many(kMostJointSteps + 1, a.step());
  EXPECT_EQ(step_codes(many, nullptr, true), cudaErrorInvalidValue);
}

TEST(CodeSplits, CountResidentTokens) {
  const CodeShape shape{128, 2, 2};
  EXPECT_EQ(code_fill(shape, 8, 4, 132), 33U);
  EXPECT_EQ(code_splits(shape, 8, 4, 512, 132), 33U);
  // Few codes and a long window: the tokens of the window are work enough for all.
  EXPECT_EQ(code_splits(shape, 8, 4, 2, 132), 2U);
  EXPECT_EQ(code_splits(shape, 8, 4, 2, 132, SIZE_MAX, 640), 22U);
  EXPECT_EQ(code_splits(shape, 8, 4, 2, 132, SIZE_MAX, 32768), 33U);
  EXPECT_EQ(code_splits(shape, 8, 4, 0, 132, SIZE_MAX, 0), 1U);
}

}  // namespace
}  // namespace keyhole::gpu
