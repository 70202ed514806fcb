// What codes take on a device, and which shapes there are: no device needed.
#include "gpu/codes_layout.h"

#include <gtest/gtest.h>

#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

CodesShape of_8b(uint32_t blocks) {
  CodesShape s;
  s.layers = 32;
  s.q_heads = 32;
  s.kv_heads = 8;
  s.code = {128, 2, 2};
  s.blocks = blocks;
  s.exact_rows = 16;
  return s;
}

Status status_of(const CodesShape& shape) {
  try {
    (void)codes_bytes(shape);
  } catch (const Error& e) {
    return e.status();
  }
  return Status::ok;
}

TEST(CodesLayout, BytesAreThoseOfBlocksAndALittle) {
  // 2 bits of K and of V are 64 bytes a row, factors 4, and a block has two means and the noise.
  const size_t blocks = size_t{32} * 8 * 512 * (256 * 68 + 640);
  const size_t bytes = codes_bytes(of_8b(512));
  EXPECT_GT(bytes, blocks);
  EXPECT_LT(bytes, blocks + (size_t{20} << 20U));
  const size_t more = codes_bytes(of_8b(513));
  EXPECT_GE(more - bytes, blocks / 512);
}

/// A device with clusters chooses by these, another by thread blocks that all run at once. 99 KiB are enough for all
/// that either want.
TEST(CodesLayout, ListsOfEveryDeviceAreThoseOfHeadsUpTo256) {
  CodesShape shape = of_8b(512);
  EXPECT_FALSE(chooses_among_lists(shape, {})) << "it asks for none";
  shape.list_rows = 64;
  EXPECT_TRUE(chooses_among_lists(shape, {}));
  shape.rows_by_host = true;
  EXPECT_FALSE(chooses_among_lists(shape, {}));
  EXPECT_FALSE(chooses_among_lists(shape, limits_of_capability(8, 9)));
  shape.rows_by_host = false;
  struct Card {
    int major, minor;
    bool is_small;  ///< its thread blocks have 99 KiB
  };
  for (const Card& card : {Card{8, 0, false}, Card{8, 6, true}, Card{8, 9, true}, Card{9, 0, false},
                           Card{10, 0, false}, Card{12, 0, true}}) {
    const KernelLimits limits = limits_of_capability(card.major, card.minor);
    ASSERT_EQ(limits.shared_of_block <= size_t{99} << 10U, card.is_small);
    for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U, 512U}) {
      for (uint32_t group = 1; group <= 16; ++group) {
        shape.q_heads = 8 * group;
        const uint32_t bits = group % 2 == 0 ? 4 : 2;
        shape.code = {dim, bits, bits};
        // A step of more rows has more places to choose the heaviest from, for which a cluster has no room in 99 KiB:
        // one thread block chooses them then.
        for (const uint32_t blocks : {256U, 4096U}) {
          shape.blocks = blocks;
          EXPECT_EQ(chooses_among_lists(shape, limits), dim <= 256)
              << card.major << "." << card.minor << ", dim " << dim << ", group " << group << ", "
              << blocks << " blocks";
        }
      }
    }
  }
}

/// Without clusters 8 thread blocks of every KV head run at once, each on a multiprocessor.
TEST(CodesLayout, ListsWantMultiprocessorsWhereThereAreNoClusters) {
  CodesShape shape = of_8b(512);  // 8 KV heads
  shape.list_rows = 64;
  KernelLimits limits = limits_of_capability(8, 9);
  limits.multiprocessors = 64;
  EXPECT_TRUE(chooses_among_lists(shape, limits));
  limits.multiprocessors = 63;
  EXPECT_FALSE(chooses_among_lists(shape, limits));
  shape.kv_heads = 7;
  shape.q_heads = 28;
  EXPECT_TRUE(chooses_among_lists(shape, limits));
  shape = of_8b(512);
  shape.list_rows = 64;
  limits = limits_of_capability(12, 0);
  limits.multiprocessors = 8;
  EXPECT_TRUE(chooses_among_lists(shape, limits)) << "clusters need no more";
  // For more than 8 heads of 256 a cluster that chooses among lists takes more than 99 KiB.
  shape.code = {256, 4, 4};
  shape.q_heads = 64;
  EXPECT_TRUE(chooses_among_lists(shape, limits));
  shape.q_heads = 72;
  EXPECT_FALSE(chooses_among_lists(shape, limits));
  limits.multiprocessors = 64;
  EXPECT_TRUE(chooses_among_lists(shape, limits));
}

/// Maxima of the rows of queries, with those that fill tiles, and a bit for each four of them, in every part that a
/// step may be divided into; and the states of splits.
TEST(CodesLayout, WorkSpaceIsEnoughForEveryPartsOfEveryStep) {
  for (const uint32_t dim : {64U, 128U, 256U, 512U}) {
    for (const uint32_t kv_heads : {1U, 8U}) {
      for (uint32_t group = 1; group <= 16; ++group) {
        CodesShape shape = of_8b(16384);
        shape.kv_heads = kv_heads;
        shape.q_heads = kv_heads * group;
        shape.code = {dim, 4, 4};
        const size_t planned = CodesLayout(shape).work_bytes;
        for (uint32_t tokens = 1; tokens <= most_codes_tokens(shape); ++tokens) {
          for (uint32_t each = 1; each <= tokens && each * group <= 16; ++each) {
            size_t numbers = 0;
            for (uint32_t first = 0; first < tokens; first += each) {
              const uint32_t rows = group * each, own = group * std::min(each, tokens - first);
              const uint32_t tile = rows <= 4 && dim <= 256 ? 4 : rows <= 8 ? 8 : 16;
              numbers += size_t{kv_heads} * shape.blocks * 8 * (tile + (own + 3) / 4);
              numbers += size_t{kv_heads} * most_code_splits(kv_heads) * own * (dim + 3);
            }
            EXPECT_LE(numbers * sizeof(float), planned)
                << "dim " << dim << ", group " << group << ", " << tokens << " tokens by " << each;
          }
        }
      }
    }
  }
}

/// Of layers of several shapes those with kernels have lists.
TEST(CodesLayout, ListsAreThoseOfALayerAtLeast) {
  CodesShape shape = of_8b(256);
  shape.list_rows = 64;
  shape.layers = 2;
  shape.shapes = {{32, 8, 512}, {32, 8, 512}};
  shape.coded = {1, 1};
  EXPECT_FALSE(chooses_among_lists(shape, {}));
  shape.shapes[1] = {32, 8, 128};
  EXPECT_TRUE(chooses_among_lists(shape, {}));
  shape.coded[1] = 0;
  EXPECT_FALSE(chooses_among_lists(shape, {})) << "that layer has no codes";
}

TEST(CodesLayout, TakesMemoryForTheLayersThatHaveCodes) {
  CodesShape some = of_8b(64), few = of_8b(64);
  some.coded_layers = 5;
  few.layers = 5;
  EXPECT_EQ(codes_bytes(some), codes_bytes(few));
  some.coded_layers = 32;
  EXPECT_EQ(codes_bytes(some), codes_bytes(of_8b(64)));
}

TEST(CodesLayout, RowsByTheHostTakeALittlePinnedMemory) {
  CodesShape shape = of_8b(512);
  shape.q_heads =
      16;  // steps of 8 tokens have 16 query rows of a KV head, as many as the host reads rows for
  EXPECT_EQ(codes_pinned_bytes(shape), 0U);
  const size_t without = codes_bytes(shape);
  shape.rows_by_host = true;
  const CodesLayout l(shape);
  EXPECT_EQ(l.copied_blocks, 4U);
  EXPECT_GE(l.copied, l.row_steps + 8 * sizeof(uint32_t));
  EXPECT_GE(l.work, l.copied + size_t{2} * 8 * 4 * 256 * 128 * 2);
  EXPECT_GT(codes_bytes(shape), without);
  for (const uint32_t n : {0U, 1U, 16U, 64U}) {
    shape.exact_rows = n;
    const RowExchangeLayout e(shape);
    EXPECT_GE(e.request_words, 1 + n);
    EXPECT_EQ(e.request_words % 16, 0U) << "heads share a line";
    EXPECT_EQ(e.row_bytes, 256U);
    EXPECT_GE(e.answers, e.requests + size_t{8} * e.request_words * 8);
    EXPECT_GE(e.rows, e.answers + size_t{8} * 128);
    EXPECT_GE(e.bytes, e.rows + size_t{8} * n * 2 * 256);
    EXPECT_EQ(codes_pinned_bytes(shape), e.bytes);
    EXPECT_EQ(e.answers % 256, 0U);
    EXPECT_EQ(e.rows % 256, 0U);
  }
}

TEST(CodesLayout, PartsDoNotOverlap) {
  const CodesShape shape = of_8b(3);
  const CodesLayout l(shape);
  EXPECT_GE(l.blocks_bytes, 32 * l.layer_stride);
  EXPECT_GE(l.layer_stride, 3 * l.block_stride);
  EXPECT_GE(l.block_stride, 8 * l.head_stride);
  EXPECT_GE(l.value_scales, l.key_scales + size_t{32} * 8 * 128 * 4);
  EXPECT_GE(l.counts, l.value_scales + size_t{32} * 8 * 4);
  EXPECT_GE(l.work, l.counts + size_t{32} * 2 * 4);
  EXPECT_GE(l.others_bytes, l.work + l.work_bytes);
  EXPECT_EQ(l.bytes, l.blocks_bytes + l.others_bytes);
  for (const size_t at : {l.blocks_bytes, l.key_scales, l.value_scales, l.counts, l.work}) {
    EXPECT_EQ(at % 256, 0U);
  }
}

TEST(CodesLayout, RefusesWhatNoSessionHas) {
  const CodesShape good = of_8b(16);
  EXPECT_EQ(status_of(good), Status::ok);
  EXPECT_TRUE(codes_supported(good));
  const auto with = [&](auto change) {
    CodesShape s = good;
    change(s);
    return status_of(s);
  };
  using S = CodesShape;
  EXPECT_EQ(with([](S& s) { s.kv_heads = 0; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.q_heads = 33; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.q_heads = 8 * 17; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.code.dim = 72; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.code.key_bits = 3; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.code.key_bits = 0; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.code.value_bits = 8; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.dtype = static_cast<DType>(9); }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.dtype = DType::i8; }), Status::ok);
  EXPECT_EQ(with([](S& s) { s.exact_rows = 65; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.blocks = 1U << 31U; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.coded_layers = 33; }), Status::invalid_argument);
  EXPECT_EQ(with([](S& s) {
              s.layers = ~0U, s.kv_heads = 65535, s.q_heads = 65535, s.blocks = 1U << 14U;
            }),
            Status::invalid_argument);
  EXPECT_EQ(with([](S& s) { s.blocks = 0; }), Status::ok);
}

TEST(CodesLayout, SaysWhichShapesHaveNoKernels) {
  const auto why = [](uint32_t dim, uint32_t key_bits, uint32_t value_bits) {
    CodesShape s = of_8b(16);
    s.code = {dim, key_bits, value_bits};
    return why_no_codes(s);
  };
  for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U, 512U}) {
    EXPECT_EQ(why(dim, 2, 2), "");
    EXPECT_EQ(why(dim, 4, 4), "");
    // Codes that the host alone has: 1 bit, or other bits of values than of keys.
    EXPECT_EQ(why(dim, 1, 1),
              "no device has kernels for codes with key_bits 1 and value_bits 1; allowed are 2 of "
              "both or 4 of both");
    for (const uint32_t keys : {1U, 2U, 4U}) {
      for (const uint32_t values : {0U, 1U, 2U, 4U}) {
        if (values == keys) continue;
        const std::string seen =
            "key_bits " + std::to_string(keys) + " and value_bits " + std::to_string(values);
        EXPECT_NE(why(dim, keys, values).find(seen), std::string::npos) << why(dim, keys, values);
      }
    }
  }
}

/// What sessions whose codes are the host's ask, too, before they know that.
TEST(CodesLayout, HasBytesForWhatHasNoKernels) {
  CodesShape shape = of_8b(16);
  for (const uint32_t values : {0U, 1U, 4U}) {
    shape.code.value_bits = values;
    EXPECT_EQ(status_of(shape), Status::ok);
    EXPECT_FALSE(codes_supported(shape));
  }
}

/// There are no kernels that choose among lists of heads of 512.
TEST(CodesLayout, HasRoomForListsWhereTheyCanBeChosenFrom) {
  for (const uint32_t dim : {64U, 256U, 512U}) {
    CodesShape shape = of_8b(16);
    shape.code.dim = dim;
    const size_t without = CodesLayout(shape).bytes;
    shape.list_rows = 64;
    const CodesLayout layout(shape);
    EXPECT_EQ(layout.list_bytes != 0, dim != 512) << dim;
    EXPECT_EQ(layout.bytes != without, dim != 512) << dim;
  }
}

/// What thread blocks that choose tell each other by the device's memory, and their counters.
TEST(CodesLayout, HasRoomForChoicesByMemory) {
  CodesShape shape = of_8b(16);
  EXPECT_EQ(CodesLayout(shape).list_arrivals, 0U);
  for (const uint32_t group : {4U, 8U, 16U}) {
    shape.q_heads = 8 * group;
    shape.list_rows = 0;
    const size_t codes = CodesLayout(shape).work_bytes;
    shape.list_rows = 64;
    const CodesLayout layout(shape);
    // In each of 8 blocks of 8 KV heads: 512 bins of two numbers, and for each head as many of one and sums over 32
    // components.
    const size_t told = size_t{8} * 8 * (512 * 8 + group * (512 + 32) * 4);
    EXPECT_GE(layout.work_bytes, codes + told);
    EXPECT_EQ(layout.list_arrivals % 128, 0U);
    EXPECT_GE(layout.list_arrivals, layout.list_memory + kMemoryOfLists);
    EXPECT_GE(layout.list_totals, layout.list_arrivals + shape.kv_heads * sizeof(uint32_t));
    EXPECT_EQ(told_bytes(group) % 128, 0U) << "the next block's begins on a line of its own";
  }
}

TEST(CudaDevice, SaysThatThereIsNone) {
  if (!cuda_devices().empty()) GTEST_SKIP() << "there is one";
  try {
    (void)make_cuda_device({});
    ADD_FAILURE() << "there is one";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::unsupported) << e.what();
  }
}

}  // namespace
}  // namespace keyhole::gpu
