// The choice among lists of codes by thread blocks that tell each other by the device's memory, beside that by a
// cluster of as many; what it leaves in its counters; and such choices of two sessions at the same time.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda/common/stream.h"
#include "tests/captured_graph.h"
#include "tests/gpu/list_layer.h"

namespace keyhole::gpu::test {
namespace {

constexpr ListWay kByMemory{true, false, false};

/// All that a choice leaves for the pass, with ones where it has written nothing.
struct Chosen {
  std::vector<std::byte> ends, table, weights;
};
Chosen choose(const CodesStep& s) {
  codes::CodesParams params;
  (void)codes::lay_out(s, codes::kernels_of(s), params);
  const size_t ends = s.kv_heads * sizeof(codes::ChosenLists);
  const size_t table = size_t{s.kv_heads} * codes::most_groups(s) * sizeof(ListedPair);
  const size_t weights =
      size_t{s.kv_heads} * s.lists.list_capacity * params.padded_heads * sizeof(float);
  const auto clear = [](void* at, size_t bytes) {
    EXPECT_EQ(cudaMemset(at, 0xFF, bytes), cudaSuccess);
  };
  clear(params.list_ends, ends);
  clear(params.list_pairs, table);
  clear(params.list_weights, weights);
  EXPECT_EQ(choose_lists(s, nullptr, false), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto read = [](const void* from, size_t bytes) {
    std::vector<std::byte> to(bytes);
    EXPECT_EQ(cudaMemcpy(to.data(), from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return to;
  };
  return {read(params.list_ends, ends), read(params.list_pairs, table),
          read(params.list_weights, weights)};
}

/// Bit for bit: both add in the same order.
TEST(ListWays, ChooseByMemoryWhatAClusterOfAsManyChooses) {
  KEYHOLE_NEEDS_GPU();
  if (!has_clusters()) GTEST_SKIP() << "no clusters of thread blocks";
  const uint32_t groups[] = {4, 1, 8, 16, 5};
  uint32_t i = 0;
  const std::pair<uint32_t, uint32_t> blocks_of_dims[] = {{64, 8},  {80, 8},   {96, 8},  {128, 8},
                                                          {256, 8}, {128, 16}, {256, 16}};
  for (const auto& [dim, blocks] : blocks_of_dims) {
    for (const float miss : {0.0F, 0.1F, 1e-4F}) {
      ListCase c;
      c.dim = dim;
      c.group = groups[i % 5];
      c.bits = i % 2 == 0 ? 4 : 2;
      c.list_rows = i % 3 == 0 ? 16 : 64;
      c.share = 0.1F;
      c.miss = miss;
      c.most = i % 4 == 3 ? 0.3F : 1e9F;
      c.softcap = i % 4 == 2 ? 20.0F : 0.0F;
      c.blocks = 9;
      c.listed = 8;
      c.stretch = 4;
      c.choosers = blocks;
      ++i;
      if (!c.is_chosen_here()) continue;
      // For 16 heads of 256 it takes 117 KiB; where there are 99 the choice is by memory in any case.
      const codes::ListKernel cluster = codes::list_kernel_of(dim, c.group, c.choosers);
      if (cluster.shared_of(c.shape().list_share) > shared_memory_of(0).of_block) continue;
      SCOPED_TRACE("dim " + std::to_string(dim) + ", group " + std::to_string(c.group) + ", miss " +
                   std::to_string(miss) + ", " + std::to_string(blocks) + " thread blocks");
      ListLayer layer(c, i);
      CodesStep by_cluster = layer.step();
      layer.take({true, true, false});
      CodesStep by_memory = layer.step();
      ASSERT_FALSE(by_cluster.lists.by_memory);
      ASSERT_TRUE(by_memory.lists.by_memory);
      ASSERT_EQ(by_cluster.lists.blocks, blocks);
      ASSERT_EQ(by_memory.lists.blocks, blocks);
      // All lists are kept, some, or none. What is left of these where all blocks are read depends on how many.
      const uint32_t all = std::min(by_cluster.lists.kept, by_memory.lists.kept);
      const uint32_t some = c.list_rows == 16 ? 16 : 0;
      for (CodesStep* s : {&by_cluster, &by_memory}) s->lists.kept = i % 2 == 0 ? all : some;
      const Chosen right = choose(by_cluster), seen = choose(by_memory), again = choose(by_memory);
      for (const Chosen& x : {seen, again}) {
        EXPECT_EQ(x.ends, right.ends);
        EXPECT_EQ(x.table, right.table);
        EXPECT_EQ(x.weights, right.weights);
      }
      const std::vector<std::byte> nothing(right.ends.size(), std::byte{0xFF});
      EXPECT_NE(seen.ends, nothing);
    }
  }
}

/// Behind a step a counter stands where the next one can begin: at a multiple of the thread blocks.
void expect_multiples(uint32_t choosers) {
  SCOPED_TRACE(std::to_string(choosers) + " thread blocks");
  ListCase c;
  c.choosers = choosers;
  c.share = 0.1F;
  c.most = 0.4F;
  c.way = kByMemory;
  ListLayer layer(c, 3);
  ASSERT_EQ(layer.step().lists.blocks, choosers);
  std::vector<uint32_t> before = layer.arrivals();
  EXPECT_EQ(before, std::vector<uint32_t>(layer.kv_heads()));
  // With `miss` there are more barriers, and more again where a head has more lists read.
  for (const float miss : {0.0F, 100.0F, 0.1F, 1e-4F}) {
    SCOPED_TRACE("miss " + std::to_string(miss));
    layer.set_miss(miss);
    for (uint32_t i = 0; i < 2; ++i) {
      layer.draw_queries();
      layer.run();
      const std::vector<uint32_t> now = layer.arrivals();
      for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
        EXPECT_EQ(now[h] % choosers, 0U);
        EXPECT_GT(now[h], before[h]) << "no thread block has waited for another";
      }
      before = now;
    }
  }
  CudaCodes copy(layer.shape());
  layer.rows().tell(copy, 0);
  copy.copy_layer(0, layer.codes());
  std::vector<uint32_t> of_copy(layer.kv_heads(), 1);
  ASSERT_EQ(cudaMemcpy(of_copy.data(), copy.describe(0, layer.step().q).lists.arrivals,
                       of_copy.size() * 4, cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(of_copy, std::vector<uint32_t>(layer.kv_heads())) << "a step may be under way";
}
TEST(ListWays, CountersComeToMultiplesOfTheThreadBlocks) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t choosers : {kListGridBlocks, kMostListGridBlocks}) expect_multiples(choosers);
}

/// After 2^32 arrivals, some 10^8 steps.
TEST(ListWays, CountersMayOverflow) {
  KEYHOLE_NEEDS_GPU();
  for (const float miss : {0.0F, 1e-4F}) {
    ListCase c;
    c.share = 0.1F;
    c.miss = miss;
    c.way = kByMemory;
    ListLayer layer(c, 4);
    layer.run();
    const std::vector<float> right = layer.out();
    const std::vector<uint32_t> counts = layer.arrivals();
    for (uint32_t below = 0; below <= counts[0]; below += kListGridBlocks) {
      const std::vector<uint32_t> late(layer.kv_heads(), 0U - below);
      ASSERT_EQ(cudaMemcpy(layer.step().lists.arrivals, late.data(), late.size() * 4,
                           cudaMemcpyHostToDevice),
                cudaSuccess);
      layer.run();
      EXPECT_EQ(layer.out(), right);
      for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
        EXPECT_EQ(layer.arrivals()[h], counts[h] - below);
      }
    }
  }
}

/// Choices that have all multiprocessors but for a few, a thread block on each, and wait for all of their own: were
/// those of two sessions started in part each, neither would end.
TEST(ListWays, OfTwoSessionsEndAtTheSameTime) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.dim = 64;
  c.group = 2;
  c.kv_heads = static_cast<uint32_t>(
      std::clamp<size_t>(kernel_limits(0).multiprocessors / kListGridBlocks, 1, 32));
  c.blocks = 5;
  c.listed = 4;
  c.stretch = 4;
  c.miss = 0.1F;
  c.way = kByMemory;
  ListLayer one(c, 5), two(c, 6);
  const OwnStream stream_of_one, stream_of_two;
  struct Session {
    const ListLayer* layer;
    cudaStream_t stream;
    CodesStep step;
    std::vector<float> right;
  };
  std::vector<Session> sessions{{&one, stream_of_one.get(), one.step(), {}},
                                {&two, stream_of_two.get(), two.step(), {}}};
  const bool ahead = one.codes().launches_ahead();
  const auto enqueue = [&](const Session& s) {
    ASSERT_EQ(attend_codes(s.step, s.stream, ahead), cudaSuccess);
    ASSERT_EQ(finish_codes(s.step, s.stream, ahead), cudaSuccess);
    ASSERT_EQ(settle_codes(s.step, s.stream), cudaSuccess);
  };
  for (Session& s : sessions) {
    // As much shared memory as there is: room for lists that are not there.
    const codes::ListKernel kernel = codes::list_grid_kernel_of(c.dim, c.group, kListGridBlocks);
    const ListShare& share = s.step.lists.share;
    const size_t lists = (s.step.block_shared - kernel.shared_of(share)) / kernel.list_of(share);
    s.step.lists.kept = static_cast<uint32_t>(lists) / 16 * 16;
    enqueue(s);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    s.right = s.layer->out();
  }
  constexpr uint32_t kSteps = 200, kOfGraph = 20;
  const auto expect_right = [&] {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (const Session& s : sessions) {
      EXPECT_EQ(s.layer->out(), s.right);
      for (const uint32_t count : s.layer->arrivals()) EXPECT_EQ(count % kListGridBlocks, 0U);
    }
  };
  for (uint32_t i = 0; i < kSteps; ++i) {
    for (const Session& s : sessions) enqueue(s);
  }
  expect_right();
  std::vector<CapturedGraph> graphs;
  for (const Session& s : sessions) {
    graphs.emplace_back(s.stream, cudaStreamCaptureModeThreadLocal, [&] {
      for (uint32_t i = 0; i < kOfGraph; ++i) enqueue(s);
    });
  }
  for (uint32_t i = 0; i < kSteps; i += kOfGraph) {
    for (const CapturedGraph& graph : graphs) graph.launch();
  }
  expect_right();
}

}  // namespace
}  // namespace keyhole::gpu::test
