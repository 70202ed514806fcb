// The query sample, the selection, the host device's window, the checksum: from inside.
#include <deque>
#include <map>
#include <set>

#include "index/types/factory.h"
#include "runtime/engine/host_device.h"
#include "runtime/indexing/query_sample.h"
#include "runtime/plan/config.h"
#include "runtime/save/checksum_io.h"
#include "runtime/step/selection.h"
#include "tests/runtime/fixture.h"

namespace keyhole::runtime {
namespace {

using test::Numbers;

TEST(QuerySample, IsBoundedEvenAndFairToTheHeads) {
  for (const uint32_t group : {1U, 4U, 7U}) {
    QuerySample sample(512, group, 64);
    std::vector<float> q(64);
    std::map<int, int> heads;
    for (uint32_t p = 0; p < 100000; ++p) {
      const int head = sample.wanted_head(p);
      if (head < 0) continue;
      ASSERT_LT(head, static_cast<int>(group));
      q[0] = static_cast<float>(p);
      sample.add(p, q.data());
      ASSERT_LE(sample.size(), 512U);
    }
    ASSERT_GE(sample.size(), 256U);
    const auto& positions = sample.positions();
    for (size_t i = 1; i < positions.size(); ++i) {
      ASSERT_EQ(sample.stride(), positions[i] - positions[i - 1]);
    }
    for (size_t i = 0; i < positions.size(); ++i) {
      ASSERT_EQ(static_cast<float>(positions[i]), sample.rows()[i * 64]);
      ++heads[sample.wanted_head(positions[i])];
    }
    ASSERT_EQ(group, heads.size());
    for (const auto& [head, n] : heads) {
      EXPECT_GT(n, static_cast<int>(positions.size() / group / 2)) << "head " << head;
    }
    sample.truncate(50000);
    for (const uint32_t p : sample.positions()) ASSERT_LT(p, 50000U);
    EXPECT_FALSE(sample.positions().empty());
  }
}

/// Queries of positions 0, 4, ..., all of whose components are their position's number; turned ones have 1000 more.
TEST(QuerySample, WhatLiesBehindTokensThatWentMovesAndIsTurned) {
  constexpr uint32_t kDim = 64;
  const auto number = [](uint32_t position) { return static_cast<float>(position); };
  QuerySample from(64, 1, kDim);
  from.restore(4, {0, 4, 8, 12, 16, 20}, [&] {
    std::vector<float> rows;
    for (uint32_t p = 0; p <= 20; p += 4) rows.insert(rows.end(), kDim, number(p));
    return rows;
  }());
  const auto moved = [&](uint32_t first, uint32_t count) {
    QuerySample sample(64, 1, kDim);
    sample.take_moved(from, first, count, [&](float* row) {
      for (uint32_t j = 0; j < kDim; ++j) row[j] += 1000.0F;
    });
    return sample;
  };
  const auto expect_sample = [&](const QuerySample& sample, uint32_t stride,
                                 const std::vector<uint32_t>& positions,
                                 const std::vector<float>& numbers) {
    EXPECT_EQ(sample.stride(), stride);
    EXPECT_EQ(std::vector<uint32_t>(sample.positions().begin(), sample.positions().end()),
              positions);
    ASSERT_EQ(sample.rows().size(), numbers.size() * kDim);
    for (size_t i = 0; i < numbers.size(); ++i) {
      EXPECT_EQ(sample.rows()[i * kDim], numbers[i]) << i;
      EXPECT_EQ(sample.rows()[i * kDim + kDim - 1], numbers[i]) << i;
    }
  };
  // A gap of whole strides; of half a one; one that no stride but 1 allows; nothing behind; nothing left; nothing gone,
  // but turned.
  expect_sample(moved(4, 8), 4, {0, 4, 8, 12}, {0, 1012, 1016, 1020});
  expect_sample(moved(5, 2), 2, {0, 4, 6, 10, 14, 18}, {0, 4, 1008, 1012, 1016, 1020});
  expect_sample(moved(8, 7), 1, {0, 4, 9, 13}, {0, 4, 1016, 1020});
  expect_sample(moved(17, UINT32_MAX - 17), 4, {0, 4, 8, 12, 16}, {0, 4, 8, 12, 16});
  EXPECT_EQ(moved(0, UINT32_MAX).size(), 0U);
  expect_sample(moved(12, 0), 4, {0, 4, 8, 12, 16, 20}, {0, 4, 8, 1012, 1016, 1020});
  EXPECT_EQ(from.rows()[kDim * 5], 20.0F) << "the other sample keeps its own";
}

TEST(QuerySample, OfCapacityZeroWantsNothing) {
  const QuerySample sample(0, 4, 64);
  for (uint32_t p = 0; p < 100; ++p) EXPECT_EQ(-1, sample.wanted_head(p));
}

TEST(Selection, TheUnionHoldsEveryHitOnce) {
  Numbers numbers(9);
  const auto& kernels = cpu::select_kernels();
  cpu::Pool pool(cpu::PoolConfig{1, false, 0});
  for (int round = 0; round < 20; ++round) {
    const uint32_t n = 1 + numbers.below(500);
    const uint32_t group = test::some_group(numbers.below(1000));
    const uint32_t k = 1 + numbers.below(60);
    const auto keys = numbers.many(size_t{n} * 64);
    const auto queries = numbers.many(size_t{group} * 64);
    const RowsView view = dense_rows(keys.data(), n, 64, DType::f32);
    auto index = index::make_index("flat", 64, DType::f32, {&kernels, &pool});
    index::BuildInput input;
    input.keys = view;
    index->build(input, nullptr);
    Selection selection;
    selection.reserve(*index, group, k, KEYHOLE_ATTEND_TOPK);
    std::vector<float> o(size_t{group} * 64), lse(group);
    for (int again = 0; again < 3; ++again) {
      const auto cost = selection.search_and_attend(*index,
                                                    {.kernels = &kernels,
                                                     .kv = {view, view},
                                                     .queries = queries.data(),
                                                     .group = group,
                                                     .logits = {0.1F, 0.0F}},
                                                    {.k = k}, {}, {{o.data(), lse.data()}});
      std::set<uint32_t> expected;
      for (uint32_t h = 0; h < group; ++h) {
        ASSERT_EQ(std::min(k, n), selection.hits().counts[h]);
        for (uint32_t i = 0; i < selection.hits().counts[h]; ++i) {
          expected.insert(selection.hits().ids[size_t{h} * k + i]);
        }
      }
      const std::set<uint32_t> seen(selection.attended().begin(), selection.attended().end());
      EXPECT_EQ(expected, seen);
      EXPECT_EQ(seen.size(), selection.attended().size());
      EXPECT_EQ(group * seen.size(), cost.keys_attended);
    }
  }
}

TEST(HostDevice, TheWindowKeepsTheNewestInOrder) {
  gpu::ResidentShape shape;
  shape.layers = 2;
  shape.q_heads = shape.kv_heads = 2;
  shape.head_dim = 64;
  shape.dtype = DType::f32;
  shape.sink = 3;
  shape.window_capacity = 7;
  HostDevice device(shape, cpu::select_kernels());
  const auto token = [&](float x) { return std::vector<float>(128, x); };
  const auto bytes = [](const std::vector<float>& v) {
    return reinterpret_cast<const std::byte*>(v.data());
  };
  std::deque<float> window;
  for (int i = 0; i < 3; ++i) {
    const auto t = token(static_cast<float>(i));
    device.append_sink(1, bytes(t), bytes(t), 1);
  }
  Numbers numbers(2);
  float next = 100;
  for (int step = 0; step < 300; ++step) {
    if (window.size() < 7 && numbers.below(3) != 0) {
      const auto t = token(next);
      device.append_window(1, bytes(t), bytes(t), 1);
      window.push_back(next++);
    } else if (!window.empty() && numbers.below(4) == 0) {
      window.pop_back();
      device.truncate(1, 3, static_cast<uint32_t>(window.size()));
    } else if (!window.empty()) {
      std::vector<float> k(128), v(128);
      device.evict(1, reinterpret_cast<std::byte*>(k.data()),
                   reinterpret_cast<std::byte*>(v.data()), 1);
      EXPECT_EQ(window.front(), k[127]);
      EXPECT_EQ(window.front(), v[0]);
      window.pop_front();
    }
    ASSERT_EQ(window.size(), device.window_count(1));
    ASSERT_EQ(0U, device.window_count(0));
    std::vector<float> k((3 + window.size()) * 128), v(k.size());
    device.read(1, reinterpret_cast<std::byte*>(k.data()), reinterpret_cast<std::byte*>(v.data()));
    for (size_t i = 0; i < 3 + window.size(); ++i) {
      ASSERT_EQ(i < 3 ? static_cast<float>(i) : window[i - 3], k[i * 128 + 64]);
    }
  }
}

TEST(Checksum, NoticesEveryBitAndEveryCut) {
  std::vector<std::byte> data(77);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 37);
  const auto sum = [&](size_t n) {
    index::Checksum c;
    c.update(data.data(), n);
    return c.value();
  };
  const uint64_t whole = sum(data.size());
  std::set<uint64_t> seen;
  for (size_t n = 0; n <= data.size(); ++n) seen.insert(sum(n));
  EXPECT_EQ(data.size() + 1, seen.size());
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_NE(whole, sum(data.size()));
    data[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
}

// Llama 3.1's published rule: wavelengths above original/low are stretched by the factor, those below
// original/high are kept.
TEST(RopeParams, Llama3ScalingStretchesOnlyTheLongWaves) {
  keyhole_engine_config c = test::small_engine();
  c.head_dim = 128;
  c.rope_theta = 500000.0F;
  c.rope_scaling = KEYHOLE_ROPE_LLAMA3;
  c.rope_factor = 8.0F;
  c.rope_low_freq_factor = 1.0F;
  c.rope_high_freq_factor = 4.0F;
  c.rope_original_context = 8192;
  const auto rope = check_ropes(c).front();
  ASSERT_EQ(64U, rope.inv_freq_scale.size());
  for (size_t i = 0; i < 64; ++i) {
    const double wavelength = 2 * M_PI * std::pow(500000.0, 2.0 * static_cast<double>(i) / 128);
    if (wavelength > 8192) {
      EXPECT_FLOAT_EQ(0.125F, rope.inv_freq_scale[i]);
    } else if (wavelength < 2048) {
      EXPECT_FLOAT_EQ(1.0F, rope.inv_freq_scale[i]);
    } else {
      EXPECT_GT(rope.inv_freq_scale[i], 0.125F);
      EXPECT_LT(rope.inv_freq_scale[i], 1.0F);
    }
  }
}

}  // namespace
}  // namespace keyhole::runtime
