// Which kernels run on a device: its own, or those of an older one where KEYHOLE_CUDA_CAPABILITY asks for them.
#include "gpu/cuda/common/kernel_generation.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu::test {
namespace {

/// Sets KEYHOLE_CUDA_CAPABILITY for a scope; null: takes it away.
class Forced {
 public:
  explicit Forced(const char* value) {
    if (const char* old = std::getenv(kName)) old_ = old;
    set(value);
  }
  ~Forced() { set(old_ ? old_->c_str() : nullptr); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;

 private:
  static constexpr const char* kName = "KEYHOLE_CUDA_CAPABILITY";
  static void set(const char* value) {
    if (value != nullptr) {
      setenv(kName, value, 1);
    } else {
      unsetenv(kName);
    }
  }
  std::optional<std::string> old_;
};

TEST(KernelGeneration, IsAtMostTheDevices) {
  KEYHOLE_NEEDS_GPU();
  const Forced none(nullptr);
  EXPECT_GE(kernels_major(0), 8);
  EXPECT_LE(kernels_major(0), cuda_devices().front().compute_major);
  EXPECT_EQ(kernels_have_clusters(0), kernels_major(0) >= 9);
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
