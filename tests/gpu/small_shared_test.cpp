// Codes in the 99 KiB of shared memory that GPUs for desktops give a thread block, on any device: the shapes whose
// usual kernels take more, by the ways that these have, against double precision.
#include <gtest/gtest.h>

#include <string>

#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/codes_variants.h"
#include "gpu/cuda/codes/warpgroup_kernels.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "tests/gpu/codes_layer.h"
#include "tests/scoped_variable.h"

namespace keyhole::gpu::test {
namespace {

constexpr size_t kSmall = size_t{99} << 10U;

Case of_tokens(uint32_t dim, uint32_t bits, uint32_t heads, uint32_t tokens) {
  Case c{dim, bits, heads * tokens, 5};
  c.tokens = tokens;
  return c;
}

TEST(CodesInSmallShared, EveryShapeHasItsAnswers) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  const keyhole::test::ScopedVariable forced("KEYHOLE_CUDA_CAPABILITY", "8.6");
  ASSERT_LE(shared_memory_of(0).of_block, kSmall);
  for (Case c : {Case{512, 4, 1, 9}, Case{512, 4, 8, 9}, Case{512, 2, 12, 5}, Case{512, 4, 16, 5},
                 Case{256, 4, 6, 9}, Case{256, 4, 12, 5}, Case{256, 2, 16, 5}, Case{128, 4, 13, 9},
                 of_tokens(512, 4, 8, 4), of_tokens(256, 4, 6, 4), of_tokens(256, 2, 8, 5),
                 of_tokens(128, 4, 6, 8)}) {
    SCOPED_TRACE("dim " + std::to_string(c.dim) + ", " + std::to_string(c.bits) + " bits, " +
                 std::to_string(c.group) + " query rows of " + std::to_string(c.tokens) +
                 " tokens");
    c.cluster = false;
    Layer layer(c);
    // Thread blocks have 8 of these heads, whose codes of 2 bits leave room enough.
    const bool is_usual = c.dim == 256 && c.bits == 2 && c.group <= 16;
    EXPECT_NE(layer.step().wide, is_usual);
    EXPECT_LE(layer.step().block_shared, kSmall);
    for (const uint32_t exact_rows : {0U, 16U}) {
      layer.run(exact_rows);
      layer.check(c.blocks);
    }
  }
}

/// Expects that a step can be prepared with no more shared memory than there is.
void prepare(const CodeShape& shape, uint32_t rows, uint32_t tokens, size_t most) {
  SCOPED_TRACE("dim " + std::to_string(shape.dim) + ", " + std::to_string(shape.key_bits) +
               " bits, " + std::to_string(rows) + " rows of " + std::to_string(tokens) + " tokens");
  CodesStep step;
  step.shape = shape;
  step.kv_heads = 2;
  step.tokens = tokens;
  step.group = rows;
  step.block_capacity = 64;
  step.wide = codes_are_wide(shape, rows, most, tokens);
  size_t needs = 0;
  EXPECT_EQ(prepare_codes(step, 0, &needs), cudaSuccess);
  EXPECT_LE(needs, most);
}

/// Every shape is prepared, and takes no more than there is.
TEST(CodesInSmallShared, EveryShapeFits) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  for (const char* capability : {"8.6", "8.0", "12.0"}) {
    const keyhole::test::ScopedVariable forced("KEYHOLE_CUDA_CAPABILITY", capability);
    SCOPED_TRACE(capability);
    const size_t most = shared_memory_of(0).of_block;
    for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U, 512U}) {
      for (const uint32_t bits : {2U, 4U}) {
        for (uint32_t rows = 1; rows <= (dim == 512 ? 32U : 48U); ++rows) {
          // Of several tokens as few as divide the rows, each of 16 heads at most; so many rows as one token may have
          // of two, too, for which some shapes have other kernels.
          uint32_t tokens = 1;
          while (tokens < rows && (rows % tokens != 0 || rows / tokens > 16)) ++tokens;
          prepare({dim, bits, bits}, rows, tokens, most);
          if (rows > 8 && rows <= 16 && rows % 2 == 0) prepare({dim, bits, bits}, rows, 2, most);
        }
      }
    }
  }
}

/// Two tokens of 256 components in 4 bits take the pass by warpgroups where it has the room; else what one token of as
/// many heads takes.
TEST(CodesInSmallShared, TwoTokensGoWithoutWarpgroups) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  const CodeShape shape{256, 4, 4};
  for (uint32_t rows = 10; rows <= 16; rows += 2) {
    SCOPED_TRACE(std::to_string(rows) + " rows");
    const bool as_one = codes_are_wide(shape, rows, kSmall, 1);
    EXPECT_EQ(codes_are_wide(shape, rows, kSmall, 2), as_one);
    if (!codes::warpgroups_run_here()) continue;
    EXPECT_FALSE(codes::group_kernels_of(shape, rows).fits(kSmall));
    EXPECT_TRUE(codes_are_wide(shape, rows, size_t{227} << 10U, 2));
    EXPECT_FALSE(codes_are_wide(shape, rows, size_t{227} << 10U, 1));
  }
}

/// A layer's shape whose steps choose among lists, with room for so many blocks.
CodesShape listed_shape(const CodeShape& code, uint32_t kv_heads, uint32_t group, uint32_t blocks) {
  CodesShape shape;
  shape.layers = 1;
  shape.kv_heads = kv_heads;
  shape.q_heads = kv_heads * group;
  shape.code = code;
  shape.blocks = blocks;
  shape.exact_rows = 16;
  shape.list_rows = 64;
  return shape;
}

/// What plans foresee of lists is what steps then have.
TEST(CodesInSmallShared, ListsAreWherePlansSayThatTheyAre) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  uint32_t with = 0, without = 0;
  for (const char* capability : {"", "8.0", "8.9", "9.0", "12.0"}) {
    const keyhole::test::ScopedVariable forced("KEYHOLE_CUDA_CAPABILITY", capability);
    const KernelLimits limits = kernel_limits(0);
    const auto check = [&](const CodesShape& shape) {
      SCOPED_TRACE("'" + std::string(capability) + "', dim " + std::to_string(shape.code.dim) +
                   ", " + std::to_string(shape.code.key_bits) + " bits, " +
                   std::to_string(shape.q_heads) + "/" + std::to_string(shape.kv_heads) +
                   " heads, " + std::to_string(shape.blocks) + " blocks");
      const CodesVariants variants(shape, CodesLayout(shape), 0, 640);
      EXPECT_EQ(variants.has_lists(), chooses_among_lists(shape, limits));
      (variants.has_lists() ? with : without) += 1;
      EXPECT_EQ(variants.of(1).lists.list_capacity, 0U);
      if (!variants.has_lists()) return;
      const CodesStep& s = variants.listed(1);
      EXPECT_FALSE(s.wide);
      EXPECT_EQ(s.narrow, codes_are_narrow(s.shape, s.group, limits.shared_of_block));
      // Without clusters neither lists nor rows are chosen by one.
      EXPECT_TRUE(limits.clusters || (s.lists.by_memory && !s.cluster));
      EXPECT_TRUE(s.lists.blocks == 8 || s.lists.blocks == 16) << s.lists.blocks;
      EXPECT_TRUE(!s.lists.by_memory || s.lists.blocks * s.kv_heads <= s.processors);
      EXPECT_LE(codes_work_bytes(s), CodesLayout(shape).work_bytes);
    };
    for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U}) {
      for (const uint32_t bits : {2U, 4U}) {
        for (const uint32_t group : {1U, 4U, 6U, 8U, 12U, 16U}) {
          for (const uint32_t blocks : {128U, 4096U}) {
            check(listed_shape({dim, bits, bits}, 2, group, blocks));
          }
        }
      }
    }
    // As many KV heads as may choose at once without clusters, and one more.
    const auto most = static_cast<uint32_t>(limits.multiprocessors / kListGridBlocks);
    for (const uint32_t kv_heads : {most, most + 1}) {
      check(listed_shape({64, 4, 4}, kv_heads, 1, 128));
    }
  }
  EXPECT_GT(with, 0U);
  EXPECT_GT(without, 0U);
}

/// At 4 bits 99 KiB are too little for more than 4 heads of 256, or 8 of 128, in one thread block. With lists each has
/// so many of them.
TEST(CodesInSmallShared, ListsOfLongHeadsAreAttendedSomeHeadsAtATime) {
  if (cuda_devices().empty()) GTEST_SKIP() << cuda_status();
  for (const uint32_t dim : {64U, 128U, 256U}) {
    for (const uint32_t bits : {2U, 4U}) {
      for (const uint32_t group : {1U, 4U, 5U, 8U, 16U}) {
        SCOPED_TRACE("dim " + std::to_string(dim) + ", " + std::to_string(bits) + " bits, group " +
                     std::to_string(group));
        const CodeShape code{dim, bits, bits};
        const bool is_narrow = codes_are_narrow(code, group, kSmall);
        const bool is_large = (dim == 256 && group > 4) || (dim == 128 && group > 8);
        EXPECT_EQ(is_narrow, bits == 4 && is_large);
        if (is_narrow) {
          EXPECT_TRUE(codes_are_wide(code, group, kSmall));
        }
        EXPECT_FALSE(codes_are_narrow(code, group, size_t{227} << 10U));
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::gpu::test
