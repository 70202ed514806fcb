// Steps of several tokens, as of drafts, that choose among lists of codes on the device: one choice for the queries of
// all, against the host's choice and double precision, and beside a step of one token that has all these queries.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda/codes/codes_variants.h"
#include "tests/gpu/list_layer.h"
#include "tests/gpu/list_runs.h"

namespace keyhole::gpu::test {
namespace {

struct Shape {
  uint32_t heads, tokens;  ///< query heads of a KV head and token
};
/// Up to 16 rows of queries for a KV head: every group of at most 8, with as many tokens as fit, and with two.
constexpr Shape kShapes[] = {{1, 2}, {1, 8}, {2, 3}, {2, 8}, {3, 2}, {3, 5},
                             {4, 2}, {4, 4}, {5, 3}, {6, 2}, {7, 2}, {8, 2}};

ListCase case_of(const Shape& shape, uint32_t dim, uint32_t number) {
  ListCase c;
  c.dim = dim;
  c.group = shape.heads * shape.tokens;
  c.tokens = shape.tokens;
  c.bits = number % 2 == 0 ? 4 : 2;
  c.miss = number % 3 == 1 ? 0.2F : 0.0F;
  c.most = number % 6 == 4 ? 0.3F : 1e9F;
  c.exact_rows = number % 4 == 3 ? 0 : 4;
  c.blocks = 9;
  c.listed = 8;
  c.stretch = 4;
  return c;
}

TEST(ListDrafts, AttendEveryShape) {
  KEYHOLE_NEEDS_GPU();
  uint32_t i = 0, run = 0;
  for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U}) {
    for (const Shape& shape : kShapes) {
      const ListCase c = case_of(shape, dim, i++);
      const CodesVariants variants(c.shape(), CodesLayout(c.shape()), 0, 0);
      if (variants.most_listed() < c.tokens) continue;
      run_case(c);
      ++run;
    }
  }
  EXPECT_GE(run, 30U);
}

/// Where 99 KiB of shared memory are too little for the rows of several tokens, one token has lists, and they have not.
TEST(ListDrafts, AreChosenForAsManyTokensAsTheDeviceHasSharedMemoryFor) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t dim : {64U, 128U, 256U}) {
    for (const uint32_t heads : {1U, 4U, 6U, 8U, 16U}) {
      ListCase c;
      c.dim = dim;
      c.group = heads;
      if (!c.is_chosen_here()) continue;
      const CodesShape shape = c.shape();
      const CodesVariants variants(shape, CodesLayout(shape), 0, 0);
      SCOPED_TRACE("dim " + std::to_string(dim) + ", group " + std::to_string(heads));
      const uint32_t most = variants.most_listed();
      EXPECT_GE(most, 1U);
      EXPECT_LE(most * heads, 16U);
      for (uint32_t tokens = 1; tokens <= most; ++tokens) {
        EXPECT_EQ(variants.listed(tokens).tokens, tokens);
        EXPECT_EQ(variants.listed(tokens).group, heads * tokens);
      }
      if (most == most_listed_tokens(shape)) continue;
      // The first number of tokens without lists is a group for which the device has none.
      ListCase more = c;
      more.group = heads * (most + 1);
      EXPECT_FALSE(more.is_chosen_here());
    }
  }
}

/// Bit for bit: one token with all queries, or several that have a part of them each.
TEST(ListDrafts, ChooseAndAttendAsOneTokenWithAllQueriesDoes) {
  KEYHOLE_NEEDS_GPU();
  uint32_t i = 0, compared = 0;
  for (const uint32_t dim : {128U, 256U}) {
    for (const Shape& shape : kShapes) {
      ListCase of_drafts = case_of(shape, dim, i++), one = of_drafts;
      one.tokens = 1;
      one.exact_rows *= of_drafts.tokens;
      const CodesVariants variants(of_drafts.shape(), CodesLayout(of_drafts.shape()), 0, 0);
      if (!one.is_chosen_here() || variants.most_listed() < of_drafts.tokens) continue;
      SCOPED_TRACE("dim " + std::to_string(dim) + ", " + std::to_string(shape.heads) +
                   " heads of " + std::to_string(shape.tokens) + " tokens");
      ListLayer drafts(of_drafts, i), single(one, i);
      ASSERT_EQ(drafts.step().tokens, shape.tokens);
      ASSERT_EQ(drafts.step().exact_rows, single.step().exact_rows);
      for (const ListWay& way : drafts.ways()) {
        SCOPED_TRACE(way.name());
        drafts.take(way);
        single.take(way);
        drafts.run();
        single.run();
        EXPECT_EQ(drafts.out(), single.out());
        ++compared;
      }
    }
  }
  EXPECT_GE(compared, 12U);
}

/// Choosing for more queries takes longer, and so gains from more rows on.
TEST(ListDrafts, ChooseFromMoreRowsOn) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;  // 12 blocks in lists
  for (const auto& [more, is_listed] : {std::pair{3071U, true}, std::pair{3072U, false}}) {
    c.from_more = more;
    ListLayer layer(c, 12);
    const TensorView q = layer.step().q;
    EXPECT_NE(layer.codes().describe(0, q, 1).lists.list_capacity, 0U);
    EXPECT_EQ(layer.codes().describe(0, q, 2).lists.list_capacity != 0, is_listed) << more;
  }
}

/// Tokens that stay and such that do not: the step of the next one finds what this one has left.
TEST(ListDrafts, LeaveTheNextStepItsOwnChoice) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.group = 4;
  c.miss = 0.1F;
  ListLayer layer(c, 11);
  layer.run();
  const std::vector<float> right = layer.out();
  const CodesStep one = layer.step();
  ASSERT_NE(one.lists.list_capacity, 0U);
  // Two tokens that both have the layer's queries.
  std::vector<float> q;
  const std::vector<float> token = layer.q();
  for (uint32_t t = 0; t < 2; ++t) q.insert(q.end(), token.begin(), token.end());
  const DeviceVector<float> device_q(q), out(q.size());
  const auto tensor = [&](float* x) {
    return dense_tensor(reinterpret_cast<std::byte*>(x), 2, c.group * c.kv_heads, c.dim, DType::f32,
                        Memory::device);
  };
  CodesStep several = layer.codes().describe(0, tensor(device_q.get()), 2);
  ASSERT_NE(several.lists.list_capacity, 0U);
  several.out = tensor(out.get());
  several.lists.share.miss = c.miss;
  const bool ahead = layer.codes().launches_ahead();
  ASSERT_EQ(attend_codes(several, nullptr, ahead), cudaSuccess);
  ASSERT_EQ(finish_codes(several, nullptr, ahead), cudaSuccess);
  ASSERT_EQ(settle_codes(several, nullptr), cudaSuccess);
  layer.run();
  EXPECT_EQ(layer.out(), right);
  // Both ask the same, and get the same.
  const std::vector<float> of_tokens = out.read();
  for (size_t j = 0; j < token.size(); ++j) {
    ASSERT_EQ(of_tokens[j], of_tokens[token.size() + j]);
  }
}

}  // namespace
}  // namespace keyhole::gpu::test
