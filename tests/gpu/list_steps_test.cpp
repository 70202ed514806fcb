// Steps that choose among lists of codes on the device, against the host's choice and double precision.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gpu/cuda/common/stream.h"
#include "tests/captured_graph.h"
#include "tests/gpu/list_layer.h"
#include "tests/gpu/list_runs.h"

namespace keyhole::gpu::test {
namespace {

TEST(ListSteps, AttendEveryShape) {
  KEYHOLE_NEEDS_GPU();
  const uint32_t exact[] = {16, 64, 1, 16, 0};
  uint32_t i = 0;
  for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U}) {
    for (const uint32_t group : {1U, 4U, 5U, 8U, 16U}) {
      ListCase c;
      c.dim = dim;
      c.group = group;
      c.bits = i % 2 == 0 ? 4 : 2;
      c.exact_rows = exact[i % 5];
      c.blocks = 9;
      c.listed = 8;
      c.stretch = 4;
      ++i;
      run_case(c);
    }
  }
}

TEST(ListSteps, AttendEveryGroup) {
  KEYHOLE_NEEDS_GPU();
  for (uint32_t group = 1; group <= 16; ++group) {
    ListCase c;
    c.group = group;
    c.bits = group % 2 == 0 ? 2 : 4;
    c.dim = 64;
    c.blocks = 7;
    c.listed = 6;
    c.stretch = 3;
    run_case(c);
  }
}

TEST(ListSteps, ReadOneListOrAllOfFewOrMany) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t list_rows : {16U, 64U, 256U}) {
    for (const float share : {1e-6F, 0.1F, 1.0F}) {
      ListCase c;
      c.list_rows = list_rows;
      c.share = share;
      c.blocks = c.listed;  // no newer rows
      c.bits = list_rows == 64 ? 2 : 4;
      run_case(c);
    }
  }
}

/// How many lists of all KV heads the last step has read, and how many the host chooses by the share of the rows alone.
struct Counts {
  size_t read = 0, by_rows = 0;
};
Counts count(const ListLayer& layer) {
  Counts counts;
  for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
    index::ListChoice choice;
    layer.choose(h, choice);
    const std::vector<bool> read = layer.lists_read(h);
    counts.read += static_cast<size_t>(std::count(read.begin(), read.end(), true));
    counts.by_rows += choice.chosen().size();
  }
  return counts;
}

TEST(ListSteps, ReadMoreWhereOtherListsHoldMuchOfTheOutput) {
  KEYHOLE_NEEDS_GPU();
  const uint32_t groups[] = {4, 1, 8, 16, 5};
  uint32_t i = 0;
  size_t more = 0;
  for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U}) {
    for (const float miss : {0.1F, 0.5F, 3.0F}) {
      ListCase c;
      c.dim = dim;
      c.group = groups[i % 5];
      c.bits = i % 2 == 0 ? 4 : 2;
      c.share = i / 3 % 2 == 0 ? 1e-6F : 0.1F;
      c.miss = miss;
      c.spread = i % 4 == 1 ? 0.2F : 1.5F;
      c.softcap = i % 4 == 3 ? 20.0F : 0.0F;
      c.blocks = 9;
      c.listed = 8;
      c.stretch = 4;
      ++i;
      SCOPED_TRACE("miss " + std::to_string(miss));
      if (!c.is_chosen_here()) continue;
      run_case(c);
      ListLayer layer(c, i);
      layer.take(layer.ways()[i % layer.ways().size()]);
      layer.run();
      const Counts counts = count(layer);
      EXPECT_GE(counts.read, counts.by_rows);
      // Outputs are some 0.5 long: up to a tenth of that there is much to read, and nothing up to three times of it.
      if (miss < 0.2F) {
        EXPECT_GT(counts.read, counts.by_rows);
      }
      if (miss > 2.0F) {
        EXPECT_LT(counts.read, layer.kv_heads() * layer.lists(0).lists());
      }
      more += counts.read - counts.by_rows;
    }
  }
  EXPECT_GT(more, 0U);
}

TEST(ListSteps, ReadNextToAllListsOfAHeadThatLooksAtEverything) {
  KEYHOLE_NEEDS_GPU();
  // With a scale of 0 all rows weigh alike, and next to nothing may be left: the share alone would leave nine tenths.
  ListCase c;
  c.spread = 0.0F;
  c.share = 0.1F;
  for (const float miss : {0.0F, 1e-4F}) {
    c.miss = miss;
    ListLayer layer(c, 11);
    for (const ListWay& way : layer.ways()) {
      SCOPED_TRACE(way.name());
      layer.take(way);
      layer.run();
      for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
        const std::vector<bool> read = layer.lists_read(h);
        size_t rows = 0;
        for (uint32_t l = 0; l < read.size(); ++l) {
          rows += read[l] ? layer.lists(h).ids(l).size() : 0;
        }
        const size_t listed = size_t{c.listed} * kCodeBlock;
        if (miss == 0.0F) {
          EXPECT_LE(rows, listed / 2);
        } else {
          EXPECT_GE(rows, listed - listed / 64 - 1);
        }
      }
    }
  }
}

/// Of ListShare::miss: heads that look at everything have next to all lists read.
constexpr float kLittleMiss = 1e-4F;

/// A query of zeros looks at everything.
void look_at_everything(ListLayer& layer, const ListCase& c) {
  for (uint32_t h = 0; h < layer.shape().q_heads; ++h) {
    layer.set_query(h, std::vector<float>(c.dim));
  }
}

/// With a scale of 0 every row weighs the same, by code, by mean or exactly: the log-sum-exp counts them.
void expect_count(const ListLayer& layer, uint32_t blocks) {
  std::vector<float> lse(layer.shape().q_heads);
  ASSERT_EQ(cudaMemcpy(lse.data(), layer.step().lse, lse.size() * 4, cudaMemcpyDeviceToHost),
            cudaSuccess);
  for (const float x : lse) EXPECT_NEAR(std::exp(x), 256.0 * blocks, 0.1);
}

TEST(ListSteps, ReadAllBlocksWhereListsWouldTakeLonger) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t bits : {2U, 4U}) {
    ListCase c;
    c.bits = bits;
    c.share = 0.1F;
    c.miss = kLittleMiss;
    c.most = 0.4F;
    const uint32_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", bits " + std::to_string(bits));
    ListLayer layer(c, seed);
    const auto run = [&](bool in_blocks) {
      for (const ListWay& way : layer.ways()) {
        SCOPED_TRACE(way.name());
        layer.take(way);
        layer.run();
        EXPECT_EQ(layer.reads_blocks(0), in_blocks);
        EXPECT_EQ(layer.reads_blocks(1), in_blocks);
        layer.check();
      }
    };
    look_at_everything(layer, c);
    for (uint32_t i = 0; i < 2; ++i) {
      run(true);
      layer.append(1);
    }
    layer.set_miss(0.0F);
    layer.draw_queries();
    run(false);
  }
}

TEST(ListSteps, AttendEveryRowOnceWhereTheyReadAllBlocks) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.spread = 0.0F;
  c.share = 0.1F;
  c.miss = kLittleMiss;
  c.most = 0.3F;
  c.keeps = 2;
  c.asks_doubt = true;
  for (const ListWay& way : c.ways()) {
    SCOPED_TRACE(way.name());
    c.way = way;
    ListLayer layer(c, 5);
    for (const uint32_t blocks : {14U, 13U, 12U}) {
      layer.truncate(blocks);
      layer.run();
      EXPECT_TRUE(layer.reads_blocks(0) && layer.reads_blocks(1));
      expect_count(layer, blocks);
      for (const double error : layer.errors()) EXPECT_LT(error, 0.02);
    }
  }
}

/// Graphs of steps of which some read all blocks, and remember it.
void run_remembering(const ListWay& way) {
  SCOPED_TRACE(way.name());
  for (const uint32_t bits : {2U, 4U}) {
    ListCase c;
    c.way = way;
    c.bits = bits;
    c.share = 0.3F;
    c.miss = kLittleMiss;
    c.most = bits == 2 ? 0.6F : 1e9F;
    c.keeps = 3;
    c.choosers = bits == 2 ? 16 : 8;
    c.spare = 6;
    const uint32_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", bits " + std::to_string(bits));
    ListLayer layer(c, seed);
    const OwnStream stream;
    const auto captured = [&](float miss) {
      layer.set_miss(miss);
      return std::make_unique<CapturedGraph>(stream.get(), cudaStreamCaptureModeThreadLocal,
                                             [&] { layer.enqueue(stream.get()); });
    };
    const auto wide = captured(kLittleMiss), narrow = captured(0.0F);
    // left: steps that are still to read all blocks. in_blocks: whether this one has.
    const auto run = [&](const CapturedGraph& graph, uint32_t left, bool in_blocks) {
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      graph.run();
      EXPECT_EQ(layer.memory().left, left);
      for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
        EXPECT_EQ(layer.reads_blocks(h), in_blocks) << "KV head " << h;
      }
    };
    run(*narrow, 0, false);
    layer.check();
    look_at_everything(layer, c);
    run(*wide, 3, bits == 2);  // without a bound a step reads its lists, however many
    layer.draw_queries();
    run(*narrow, 2, true);
    layer.check();
    layer.append(1);
    run(*wide, 1, true);
    layer.check();
    run(*narrow, 0, true);
    layer.check();
    run(*narrow, 0, false);
    layer.check();
    look_at_everything(layer, c);
    run(*wide, 3, bits == 2);
    // Other lists are chosen among at once, and so are those of a copy.
    layer.append(3);
    layer.list(12, 6);
    EXPECT_EQ(layer.memory().left, 0U);
    run(*wide, 3, bits == 2);
    CudaCodes copy(layer.shape());
    layer.rows().tell(copy, 0);
    copy.copy_layer(0, layer.codes());
    ListMemory memory{1, 1};
    ASSERT_EQ(cudaMemcpy(&memory, copy.describe(0, layer.step().q).lists.memory, sizeof(memory),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(memory.left, 0U);
    EXPECT_EQ(memory.sums, 0U);
    EXPECT_EQ(layer.memory().left, 3U);
    layer.truncate(12);
    EXPECT_EQ(layer.memory().left, 0U);
  }
}

TEST(ListSteps, RememberThatAllBlocksAreFaster) {
  KEYHOLE_NEEDS_GPU();
  for (const ListWay& way : ListCase{}.ways()) run_remembering(way);
}

TEST(ListSteps, ReadAllCodesInOneLaunchWithOthers) {
  KEYHOLE_NEEDS_GPU();
  if (!has_clusters()) GTEST_SKIP() << "no clusters of thread blocks, which such launches take";
  ListCase c;
  c.share = 0.1F;
  ListLayer a(c, 11), b(c, 12);
  const auto without = [](CodesStep s) {
    s.lists = {};
    return s;
  };
  ASSERT_NE(a.step().lists.list_capacity, 0U);
  EXPECT_EQ(codes_kind(a.step()), codes_kind(without(a.step())));
  EXPECT_NE(codes_kind(a.step()).attend, nullptr);
  const auto run = [&](const std::vector<CodesStep>& steps) {
    EXPECT_EQ(step_codes(steps, nullptr, true), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return std::vector<std::vector<float>>{a.out(), b.out()};
  };
  const auto together = run({a.step(), b.step()});
  EXPECT_EQ(together, run({without(a.step()), without(b.step())}));
  EXPECT_NE(together, run({a.step()})) << "lists are as good as all codes";
  a.check();
  a.take({true, true, false});  // how they would choose is nothing to others
  EXPECT_EQ(together, run({a.step(), b.step()}));
  a.take({});
  // Long ones go alone, but for copies of one session, which read the same codes.
  CodesStep large = a.step();
  large.block_capacity = 16384;
  EXPECT_EQ(codes_kind(large).attend, nullptr);
  const char family = 0;
  large.family = &family;
  EXPECT_NE(codes_kind(large).attend, nullptr);
}

TEST(ListSteps, ChooseAmongListsThatAreNotKept) {
  KEYHOLE_NEEDS_GPU();
  // As of contexts with more lists than a thread block has shared memory for.
  for (const uint32_t kept : {0U, 16U}) {
    for (const float miss : {0.0F, 0.2F}) {
      ListCase c;
      c.list_rows = 16;
      c.kept = kept;
      c.miss = miss;
      c.bits = kept == 0 ? 4 : 2;
      run_case(c);
    }
  }
}

TEST(ListSteps, ChooseByTwiceAsManyThreadBlocks) {
  KEYHOLE_NEEDS_GPU();
  uint32_t i = 0;
  for (const uint32_t dim : {128U, 256U}) {
    for (const uint32_t group : {4U, 6U, 16U}) {
      ListCase c;
      c.choosers = 16;
      c.dim = dim;
      c.group = group;
      c.list_rows = 16;
      c.bits = i % 2 == 0 ? 4 : 2;
      c.miss = i % 2 == 0 ? 0.2F : 0.0F;
      c.kept = i % 3 == 2 ? 16 : ~0U;
      ++i;
      run_case(c);
      if (!c.is_chosen_here()) continue;
      ListLayer layer(c, i);
      EXPECT_EQ(layer.step().lists.blocks, 16U) << "the device has too small clusters";
      layer.take({true, false, false});
      EXPECT_TRUE(layer.step().lists.by_memory);
      EXPECT_EQ(layer.step().lists.blocks, 16U) << "the device has too few multiprocessors";
    }
  }
  ListCase c;  // of other dimensions there is no such kernel
  c.choosers = 16;
  c.dim = 64;
  EXPECT_EQ(ListLayer(c, 1).step().lists.blocks, 8U);
  run_case(c);
}

TEST(ListSteps, TakeSoftCapsAndRowsOfEveryType) {
  KEYHOLE_NEEDS_GPU();
  for (const DType rows : {DType::f16, DType::bf16, DType::f32, DType::i8}) {
    ListCase c;
    c.rows = rows;
    c.softcap = rows == DType::bf16 || rows == DType::i8 ? 5.0F : 0.0F;
    c.blocks = 7;
    c.listed = 6;
    c.stretch = 3;
    run_case(c);
  }
}

TEST(ListSteps, AttendEveryRowOnce) {
  KEYHOLE_NEEDS_GPU();
  for (const float share : {1e-6F, 0.2F, 1.0F}) {
    SCOPED_TRACE("share " + std::to_string(share));
    ListCase c;
    c.spread = 0.0F;
    c.share = share;
    c.miss = share == 0.2F ? 0.3F : 0.0F;
    ListLayer layer(c, 7);
    for (const uint32_t blocks : {14U, 13U, 12U, 9U}) {
      layer.truncate(blocks);
      for (const ListWay& way : layer.ways()) {
        SCOPED_TRACE(way.name());
        layer.take(way);
        layer.run();
        expect_count(layer, blocks);
      }
    }
  }
}

TEST(ListSteps, FollowTruncationAndNewLists) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.miss = 0.3F;
  c.spare = 6;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ListLayer layer(c, seed);
  layer.truncate(13);
  run_every_way(layer);
  // A cut through lists takes all that were made together.
  layer.truncate(9);
  EXPECT_EQ(layer.codes().listed(0), 6 * kCodeBlock);
  run_every_way(layer);
  layer.append(5);
  run_every_way(layer);
  layer.list(6, 3);
  run_every_way(layer);
  layer.list(9, 5);
  EXPECT_EQ(layer.codes().listed(0), 14 * kCodeBlock);
  run_every_way(layer);
  // What is encoded anew is in no list.
  layer.codes().encode(0, 13, 1, {});
  EXPECT_EQ(layer.codes().listed(0), 9 * kCodeBlock);
  layer.truncate(14);
  layer.run();
  layer.truncate(0);
  EXPECT_EQ(layer.codes().listed(0), 0U);
  EXPECT_EQ(layer.step().lists.list_capacity, 0U);
}

void run_in_a_graph(const ListWay& way) {
  SCOPED_TRACE(way.name());
  ListCase c;
  c.way = way;
  c.miss = 0.3F;
  c.spare = 6;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ListLayer layer(c, seed);
  const OwnStream stream;
  const CapturedGraph graph(stream.get(), cudaStreamCaptureModeThreadLocal,
                            [&] { layer.enqueue(stream.get()); });
  const auto run = [&] {
    graph.run();
    layer.check();
  };
  run();
  layer.append(4);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  run();
  layer.list(12, 6);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  run();
  layer.truncate(12);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  run();
  // Without a list all rows are read as blocks.
  layer.truncate(5);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(layer.codes().listed(0), 0U);
  graph.run();
  for (const double error : layer.errors()) EXPECT_LT(error, 0.1);
}

TEST(ListSteps, ReadNewNumbersInAGraph) {
  KEYHOLE_NEEDS_GPU();
  for (const ListWay& way : ListCase{}.ways()) run_in_a_graph(way);
}

/// A row of a list that the rule leaves unread, and a query along what sets the row apart from its list's mean: the row
/// outweighs all others, and the mean says nothing of it.
struct HiddenRow {
  uint32_t list = 0, row = 0;
  std::vector<float> query;
};
/// Looks for one in KV head 0, with its first query head set to the query. list: ~0 if there is none.
HiddenRow hide_row(ListLayer& layer) {
  const index::CodeLists& lists = layer.lists(0);
  const RowsView keys = layer.rows().head(0).keys;
  const uint32_t dim = layer.shape().code.dim;
  for (uint32_t l = 0; l < lists.lists(); ++l) {
    if (lists.ids(l).size() < 8) continue;
    std::vector<float> mean(dim);
    for (const uint32_t id : lists.ids(l)) {
      const std::vector<float> key = layer.rows().row(keys, id);
      for (uint32_t j = 0; j < dim; ++j) {
        mean[j] += key[j] / static_cast<float>(lists.ids(l).size());
      }
    }
    HiddenRow hidden{l, lists.ids(l)[0], layer.rows().row(keys, lists.ids(l)[0])};
    for (uint32_t j = 0; j < dim; ++j) hidden.query[j] = 8.0F * (hidden.query[j] - mean[j]);
    layer.set_query(0, hidden.query);
    index::ListChoice choice;
    layer.choose(0, choice);
    if (!std::binary_search(choice.chosen().begin(), choice.chosen().end(), l)) return hidden;
  }
  return {~0U, 0, {}};
}

TEST(ListSteps, HideNoRowThatOutweighsAllOthers) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.bits = 4;
  c.share = 0.05F;
  c.spread = 1.0F;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  // The same layer twice: one asks for doubt.
  ListLayer plain(c, seed);
  c.asks_doubt = true;
  ListLayer asking(c, seed);
  const HiddenRow hidden = hide_row(plain);
  ASSERT_NE(hidden.list, ~0U) << "the rule reads every list";
  asking.set_query(0, hidden.query);
  index::ListChoice choice;
  asking.choose(0, choice);
  ASSERT_FALSE(std::binary_search(choice.chosen().begin(), choice.chosen().end(), hidden.list));
  uint64_t doubted = 0;
  for (const ListWay& way : plain.ways()) {
    SCOPED_TRACE(way.name());
    plain.take(way);
    asking.take(way);
    plain.run();
    asking.run();
    EXPECT_GT(plain.errors()[0], 0.5) << "row " << hidden.row << " weighs nothing";
    EXPECT_LT(asking.errors()[0], 0.01) << "row " << hidden.row << " of list " << hidden.list;
    const uint64_t now = asking.codes().doubts().doubted;
    EXPECT_GT(now, doubted);
    doubted = now;
  }
}

TEST(ListSteps, SettleHeadsInDoubtByAllCodes) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t bits : {2U, 4U}) {
    ListCase c;
    c.bits = bits;
    c.spread = 20.0F;
    c.asks_doubt = true;
    const uint32_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", bits " + std::to_string(bits));
    ListLayer layer(c, seed);
    uint64_t doubted = 0;
    for (const ListWay& way : layer.ways()) {
      SCOPED_TRACE(way.name());
      layer.take(way);
      for (uint32_t i = 0; i < 3; ++i) {
        layer.draw_queries();
        layer.run();
        for (const double error : layer.errors()) EXPECT_LT(error, 0.07);
      }
      const uint64_t now = layer.codes().doubts().doubted;
      EXPECT_GT(now, doubted);
      doubted = now;
    }
  }
}

}  // namespace
}  // namespace keyhole::gpu::test
