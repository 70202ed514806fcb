// The device that an engine takes, on machines that a test makes up.
#include "runtime/engine/device_choice.h"

#include <gtest/gtest.h>

namespace keyhole::runtime {
namespace {

using gpu::DeviceInfo;

const DeviceInfo kHopper{"NVIDIA H200", size_t{141} << 30U, 9, 0};
const DeviceInfo kAmpere{"NVIDIA A100", size_t{80} << 30U, 8, 0};
const DeviceInfo kTuring{"NVIDIA T4", size_t{16} << 30U, 7, 5};

bool says(const std::string& text, const char* what) {
  return text.find(what) != std::string::npos;
}

Error error_of(keyhole_device device, uint32_t ordinal, const std::vector<DeviceInfo>& gpus) {
  try {
    (void)choose_device(device, ordinal, gpus, "the status");
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << "no error";
  return {Status::ok, ""};
}

TEST(DeviceChoice, AGpuOfTheLeastCapabilityServes) {
  for (const keyhole_device device : {KEYHOLE_DEVICE_AUTO, KEYHOLE_DEVICE_CUDA}) {
    EXPECT_TRUE(choose_device(device, 0, {kHopper}, "").cuda);
    EXPECT_TRUE(choose_device(device, 0, {kAmpere}, "").cuda);
    EXPECT_TRUE(choose_device(device, 1, {kTuring, kHopper}, "").cuda);
  }
  EXPECT_FALSE(choose_device(KEYHOLE_DEVICE_HOST, 0, {kHopper}, "").cuda);
}

TEST(DeviceChoice, AutoFallsBackToTheHostAndSaysWhichGpuIsTooOld) {
  const DeviceChoice choice = choose_device(KEYHOLE_DEVICE_AUTO, 0, {kTuring, kHopper}, "status");
  EXPECT_FALSE(choice.cuda);
  EXPECT_TRUE(says(choice.reason, "NVIDIA T4")) << choice.reason;
  EXPECT_TRUE(says(choice.reason, "7.5")) << choice.reason;
  EXPECT_TRUE(says(choice.reason, "8.0")) << choice.reason;
}

TEST(DeviceChoice, CudaOnAGpuThatIsTooOldIsUnsupported) {
  const Error e = error_of(KEYHOLE_DEVICE_CUDA, 0, {kTuring});
  EXPECT_EQ(e.status(), Status::unsupported);
  EXPECT_TRUE(says(e.what(), "NVIDIA T4")) << e.what();
  EXPECT_TRUE(says(e.what(), "7.5")) << e.what();
  EXPECT_TRUE(says(e.what(), "8.0")) << e.what();
}

TEST(DeviceChoice, AModelWithoutKernelsRunsOnTheHost) {
  EXPECT_EQ(gpu::unsupported_shape(32, 2, 256), "");
  const std::string why = gpu::unsupported_shape(71, 1, 64);
  EXPECT_TRUE(says(why, "71 query heads")) << why;
  EXPECT_TRUE(says(why, "1..16")) << why;
  EXPECT_EQ(gpu::unsupported_shape(8, 2, 512), "");
  const std::string too_wide = gpu::unsupported_shape(8, 2, 576);
  EXPECT_TRUE(says(too_wide, "head_dim 576")) << too_wide;
  EXPECT_TRUE(says(too_wide, "64, 80, 96, 128, 256, 512")) << too_wide;
  EXPECT_NE(gpu::unsupported_shape(8, 2, 112), "");
  const DeviceChoice choice = choose_device(KEYHOLE_DEVICE_AUTO, 0, {kHopper}, "status", why);
  EXPECT_FALSE(choice.cuda);
  EXPECT_EQ(choice.reason, why);
  try {
    (void)choose_device(KEYHOLE_DEVICE_CUDA, 0, {kHopper}, "status", why);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::unsupported);
    EXPECT_TRUE(says(e.what(), why.c_str())) << e.what();
  }
}

TEST(DeviceChoice, WithoutAGpuTheStatusSaysWhy) {
  const DeviceChoice choice = choose_device(KEYHOLE_DEVICE_AUTO, 0, {}, "no driver");
  EXPECT_FALSE(choice.cuda);
  EXPECT_EQ(choice.reason, "no driver");
  EXPECT_FALSE(choose_device(KEYHOLE_DEVICE_AUTO, 1, {kHopper}, "").cuda);
  const Error none = error_of(KEYHOLE_DEVICE_CUDA, 0, {});
  EXPECT_EQ(none.status(), Status::unsupported);
  EXPECT_TRUE(says(none.what(), "the status")) << none.what();
  const Error beyond = error_of(KEYHOLE_DEVICE_CUDA, 1, {kHopper});
  EXPECT_EQ(beyond.status(), Status::invalid_argument);
  EXPECT_TRUE(says(beyond.what(), "device_ordinal is 1")) << beyond.what();
  EXPECT_EQ(error_of(17, 0, {kHopper}).status(), Status::invalid_argument);
}

}  // namespace
}  // namespace keyhole::runtime
