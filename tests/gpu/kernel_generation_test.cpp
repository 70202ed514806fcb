// Which kernels run on a device: its own, or those of an older one where KEYHOLE_CUDA_CAPABILITY asks for them.
#include "gpu/cuda/common/kernel_generation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/gpu/cuda_fixture.h"
#include "tests/scoped_variable.h"

namespace keyhole::gpu::test {
namespace {

/// Sets KEYHOLE_CUDA_CAPABILITY for a scope; null: takes it away.
struct Forced : keyhole::test::ScopedVariable {
  explicit Forced(const char* value) : ScopedVariable("KEYHOLE_CUDA_CAPABILITY", value) {}
};

TEST(KernelGeneration, IsAtMostTheDevices) {
  KEYHOLE_NEEDS_GPU();
  const Forced none(nullptr);
  EXPECT_GE(kernels_major(0), 8);
  EXPECT_LE(kernels_major(0), cuda_devices().front().compute_major);
  EXPECT_EQ(kernels_have_clusters(0), kernels_major(0) >= 9);
}

/// What plans go by, who ask no kernel.
TEST(KernelGeneration, IsKnownWithoutAskingKernels) {
  KEYHOLE_NEEDS_GPU();
  for (const char* capability : {"", "8.0", "8.9", "9.0", "12.0"}) {
    const Forced forced(capability);
    const KernelLimits limits = kernel_limits(0);
    EXPECT_EQ(limits.clusters, kernels_have_clusters(0)) << capability;
    EXPECT_EQ(limits.shared_of_block, shared_memory_of(0).of_block) << capability;
    int multiprocessors = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0),
              cudaSuccess);
    EXPECT_EQ(limits.multiprocessors, static_cast<size_t>(multiprocessors)) << capability;
  }
  // Of a card that is not here it is not known.
  EXPECT_EQ(limits_of_capability(8, 9).multiprocessors, SIZE_MAX);
}

TEST(KernelGeneration, CanBeLoweredAndNotRaised) {
  KEYHOLE_NEEDS_GPU();
  int own = 0;
  {
    const Forced none("");
    own = kernels_major(0);
  }
  for (const char* older : {"8.0", "8.9"}) {
    const Forced forced(older);
    EXPECT_EQ(kernels_major(0), 8) << older;
    EXPECT_FALSE(kernels_have_clusters(0)) << older;
  }
  const Forced forced("99.0");
  EXPECT_EQ(kernels_major(0), own);
}

/// A device of 9.0 takes the ways of 12.0 where these are asked for: clusters, and no instructions of its own.
TEST(KernelGeneration, HopperHasNoKernelsOfItsOwnWhereAnotherIsAskedFor) {
  KEYHOLE_NEEDS_GPU();
  bool own = false;
  int major = 0;
  {
    const Forced none(nullptr);
    own = hopper_kernels_run_on(0);
    major = kernels_major(0);
  }
  {
    const Forced hopper("9.0");
    EXPECT_EQ(hopper_kernels_run_on(0), own);
  }
  for (const char* other : {"8.6", "10.0", "12.0"}) {
    const Forced forced(other);
    EXPECT_FALSE(hopper_kernels_run_on(0)) << other;
  }
  const Forced newer("12.0");
  EXPECT_EQ(kernels_have_clusters(0), major >= 9);
}

TEST(KernelGeneration, HasNoMoreSharedMemoryThanItsDevices) {
  KEYHOLE_NEEDS_GPU();
  SharedMemory own;
  {
    const Forced none(nullptr);
    own = shared_memory_of(0);
  }
  EXPECT_GE(own.of_block, size_t{99} << 10U);
  struct Known {
    const char* capability;
    size_t kib;
  };
  for (const Known& k : {Known{"8.0", 163}, Known{"8.6", 99}, Known{"8.9", 99}, Known{"9.0", 227},
                         Known{"12.0", 99}, Known{"99.0", size_t{1} << 20U}}) {
    const Forced forced(k.capability);
    const SharedMemory seen = shared_memory_of(0);
    EXPECT_EQ(seen.of_block, std::min(own.of_block, k.kib << 10U)) << k.capability;
    EXPECT_EQ(seen.of_multiprocessor,
              std::min(own.of_multiprocessor, (k.kib << 10U) + kReservedOfBlock))
        << k.capability;
  }
}

TEST(KernelGeneration, RefusesWhatIsNoCapability) {
  KEYHOLE_NEEDS_GPU();
  for (const char* text : {"8", "8.", "7.5", "sm_80", "8.0a", "8.10", "-8.0", "100.0"}) {
    const Forced forced(text);
    try {
      (void)kernels_major(0);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("8.0"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace keyhole::gpu::test
