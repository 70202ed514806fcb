// An error in the middle of a step on the machine's CUDA device. A kernel that reads an address without memory ends all
// CUDA work of its process, so this is a program of its own with a single case.
#include <gtest/gtest.h>

#include "gpu/device.h"
#include "keyhole/stream.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

TEST(CudaFault, AnErrorInTheMiddleOfAStepIsReported) {
  if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
  keyhole_engine_config config = small_engine(4);
  config.device = KEYHOLE_DEVICE_CUDA;
  config.timeout_ms = 2000;
  const EnginePtr engine = make_engine(config);
  SessionPtr session = make_session(engine.get(), small_session());
  const auto nowhere = [&](uint32_t heads) {
    const int64_t shape[] = {heads, config.head_dim};
    keyhole_tensor t =
        keyhole_tensor_host(reinterpret_cast<void*>(uintptr_t{16}), KEYHOLE_F32, 2, shape);
    t.memory = KEYHOLE_DEVICE;
    return t;
  };
  const keyhole_tensor q = nowhere(config.q_heads), kv = nowhere(config.kv_heads);
  keyhole_status status = keyhole_session_attend(session.get(), 0, &q, &kv, &kv, &q, nullptr);
  if (status == KEYHOLE_OK) status = keyhole_session_synchronize(session.get());
  EXPECT_EQ(status, KEYHOLE_DEVICE_ERROR) << keyhole_last_error();
  EXPECT_EQ(keyhole_session_attend(session.get(), 0, &q, &kv, &kv, &q, nullptr),
            KEYHOLE_DEVICE_ERROR)
      << keyhole_last_error();
  EXPECT_FALSE(std::string(keyhole_last_error()).empty());
  session.reset();  // ends, although nothing on the device does any more
}

}  // namespace
}  // namespace keyhole::test
