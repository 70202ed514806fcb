// The probe answers on every machine: with devices, without, and in a build without CUDA.
#include <gtest/gtest.h>

#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

TEST(CudaProbe, EveryDeviceIsDescribed) {
  for (const DeviceInfo& device : cuda_devices()) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_GE(device.memory_bytes, size_t{1} << 30U) << device.name;
    EXPECT_GE(device.compute_major, 5) << device.name;
    EXPECT_GE(device.compute_minor, 0) << device.name;
  }
}

TEST(CudaProbe, StatusAgreesWithTheDevices) {
  const std::string status = cuda_status();
  ASSERT_FALSE(status.empty());
  const bool counts_devices =
      status.find(" CUDA device") != std::string::npos && status.find_first_of("123456789") == 0;
  EXPECT_EQ(counts_devices, !cuda_devices().empty()) << status;
}

TEST(CudaProbe, AnswersTheSameTwice) {
  const auto first = cuda_devices();
  const auto second = cuda_devices();
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].name, second[i].name);
    EXPECT_EQ(first[i].memory_bytes, second[i].memory_bytes);
  }
}

TEST(CudaProbe, StatusNamesABuildWithoutCuda) {
#ifdef KEYHOLE_TEST_CUDA
  EXPECT_NE(cuda_status(), "built without CUDA");
#else
  EXPECT_EQ(cuda_status(), "built without CUDA");
  EXPECT_TRUE(cuda_devices().empty());
#endif
}

}  // namespace
}  // namespace keyhole::gpu
