// resident_bytes against sizes counted by hand, and its refusal to wrap around.
#include "gpu/device.h"

#include <gtest/gtest.h>

#include <limits>

namespace keyhole::gpu {
namespace {

ResidentShape llama_8b() {
  ResidentShape shape;
  shape.layers = 32;
  shape.q_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  shape.dtype = DType::f16;
  shape.sink = 128;
  shape.window_capacity = 512;
  return shape;
}

TEST(ResidentBytes, OfAnEightBillionModel) {
  // 640 tokens of 128 KiB each (2 x 32 layers x 8 heads x 128 components x 2 bytes).
  EXPECT_EQ(resident_bytes(llama_8b()), size_t{640} * 131072);
}

TEST(ResidentBytes, FollowsTheDtype) {
  ResidentShape shape = llama_8b();
  const size_t half = resident_bytes(shape);
  shape.dtype = DType::bf16;
  EXPECT_EQ(resident_bytes(shape), half);
  shape.dtype = DType::f32;
  EXPECT_EQ(resident_bytes(shape), 2 * half);
}

TEST(ResidentBytes, CountsSinkAndWindowAlike) {
  ResidentShape shape = llama_8b();
  shape.sink = 0;
  shape.window_capacity = 1;
  const size_t token = resident_bytes(shape);
  shape.sink = 1;
  shape.window_capacity = 0;
  EXPECT_EQ(resident_bytes(shape), token);
  shape.sink = 7;
  shape.window_capacity = 35;
  EXPECT_EQ(resident_bytes(shape), 42 * token);
}

TEST(ResidentBytes, EmptyShapeTakesNothing) {
  EXPECT_EQ(resident_bytes(ResidentShape{}), 0U);
  ResidentShape shape = llama_8b();
  shape.sink = 0;
  shape.window_capacity = 0;
  EXPECT_EQ(resident_bytes(shape), 0U);
}

TEST(ResidentBytes, DoesNotDependOnQueryHeads) {
  ResidentShape shape = llama_8b();
  const size_t bytes = resident_bytes(shape);
  shape.q_heads = 128;
  EXPECT_EQ(resident_bytes(shape), bytes);
}

TEST(ResidentBytes, RefusesASizeThatWouldWrap) {
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  ResidentShape shape = llama_8b();
  shape.kv_heads = kMost;
  shape.head_dim = kMost;
  shape.sink = kMost;
  shape.window_capacity = kMost;
  shape.layers = kMost;
  try {
    (void)resident_bytes(shape);
    FAIL() << "accepted a size beyond 2^64";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("2^64"), std::string::npos) << error.what();
  }
}

TEST(ResidentBytes, IsExactRightUpToTheLimit) {
  // 2 x 2^31 layers x 2^31 slots x 1 head x 1 component x 1 byte = 2^63, the largest power that
  // fits.
  ResidentShape shape;
  shape.layers = 1U << 31U;
  shape.kv_heads = 1;
  shape.head_dim = 1;
  shape.dtype = DType::i8;
  shape.window_capacity = 1U << 31U;
  EXPECT_EQ(resident_bytes(shape), size_t{1} << 63U);
  shape.sink = shape.window_capacity;  // 2^64
  EXPECT_THROW((void)resident_bytes(shape), Error);
}

TEST(UnsupportedReason, NamesTheDeviceWhatItHasAndWhatIsNeeded) {
  EXPECT_EQ(unsupported_reason({"new", 1, 8, 0}), "");
  EXPECT_EQ(unsupported_reason({"newer", 1, 12, 0}), "");
  const std::string reason = unsupported_reason({"NVIDIA T4", 1, 7, 5});
  for (const char* part : {"NVIDIA T4", "7.5", "8.0"}) {
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  }
}

}  // namespace
}  // namespace keyhole::gpu
