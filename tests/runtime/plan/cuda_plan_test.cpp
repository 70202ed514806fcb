// A plan on a machine with a GPU: what it asks of it.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <utility>

#include "gpu/device.h"
#include "gpu/kernel_limits.h"
#include "keyhole/inspect.h"
#include "tests/runtime/fixture.h"
#include "tests/scoped_variable.h"

namespace keyhole::test {
namespace {

/// Whether this process has a context on the first GPU; false where there is no GPU.
bool has_context() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) return false;
  using Init = int (*)(unsigned);
  using State = int (*)(int, unsigned*, int*);
  const auto init = reinterpret_cast<Init>(dlsym(driver, "cuInit"));
  const auto state = reinterpret_cast<State>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
  unsigned flags = 0;
  int active = 0;
  return init != nullptr && state != nullptr && init(0) == 0 && state(0, &flags, &active) == 0 &&
         active != 0;
}

keyhole_engine_config grouped() {
  keyhole_engine_config c;
  keyhole_engine_config_init(&c);
  c.layers = 16;
  c.q_heads = 32;
  c.kv_heads = 2;
  c.head_dim = 128;
  c.device = KEYHOLE_DEVICE_CUDA;
  return c;
}

uint64_t code_bytes(const keyhole_engine_config& engine, const char* index) {
  keyhole_session_config session;
  keyhole_session_config_init(&session);
  session.index = index;
  session.budget.tail = KEYHOLE_TAIL_CODES;
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  if (keyhole_plan(&engine, &session, 131072, 0, 0, &plan) != KEYHOLE_OK) std::abort();
  return plan.code_bytes;
}

constexpr const char* kCodes = "codes:k=4,v=4";
constexpr const char* kLists = "codes:k=4,v=4,lists=64,from=32768";

/// Plans in a process that has done nothing else, and leaves with 1 where the GPU has a context then, or had one
/// before.
[[noreturn]] void plan_and_leave() {
  const bool before = has_context();
  const bool are_planned = code_bytes(grouped(), kLists) >= code_bytes(grouped(), kCodes);
  std::exit(before || has_context() || !are_planned ? 1 : 0);
}

TEST(CudaPlanDeathTest, MakesNoContext) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(plan_and_leave(), testing::ExitedWithCode(0), "");
}

/// Groups of 16 heads of 128 components with 4 bits have lists on all of them, and heads of 512 on none.
TEST(CudaPlan, AsksTheGpuThatIsHereForItsLists) {
  keyhole_engine_config engine = grouped(), longer = grouped();
  longer.head_dim = 512;
  if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
  for (const auto& [text, number] : {std::pair("8.0", 80U), std::pair("8.9", 89U),
                                     std::pair("9.0", 90U), std::pair("12.0", 120U)}) {
    engine.device_capability = number;
    const uint64_t foreseen = code_bytes(engine, kLists);
    engine.device_capability = KEYHOLE_AUTO;
    const keyhole::test::ScopedVariable forced("KEYHOLE_CUDA_CAPABILITY", text);
    EXPECT_EQ(code_bytes(engine, kLists), foreseen) << text;
    EXPECT_GT(foreseen, code_bytes(engine, kCodes)) << text;
    EXPECT_EQ(code_bytes(longer, kLists), code_bytes(longer, kCodes)) << text;
  }
}

/// Without clusters every KV head takes 8 multiprocessors. Of a card that is not here their number is not known.
TEST(CudaPlan, AsksTheGpuThatIsHereForItsMultiprocessors) {
  if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
  const keyhole::test::ScopedVariable forced("KEYHOLE_CUDA_CAPABILITY", "8.9");
  keyhole_engine_config engine = grouped();
  const auto most = static_cast<uint32_t>(gpu::kernel_limits(0).multiprocessors / 8);
  for (const uint32_t kv_heads : {most, most + 1}) {
    engine.q_heads = engine.kv_heads = kv_heads;
    engine.device_capability = KEYHOLE_AUTO;
    EXPECT_EQ(code_bytes(engine, kLists) > code_bytes(engine, kCodes), kv_heads == most);
    engine.device_capability = 89;
    EXPECT_GT(code_bytes(engine, kLists), code_bytes(engine, kCodes));
  }
}

}  // namespace
}  // namespace keyhole::test
