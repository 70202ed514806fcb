// Threads that keep memory busy: they copy until they are told to stop, and say how much.
#include "tools/commands/bench_step/busy.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace keyhole::tools {
namespace {

TEST(BusyThreads, CopyUntilTheyAreStopped) {
  BusyThreads busy(3, (5U << 20U) + 1000);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double bandwidth = busy.stop();
  EXPECT_GT(bandwidth, 1e6);   // nobody copies a megabyte in a second
  EXPECT_LT(bandwidth, 1e13);  // nor ten terabytes
  EXPECT_EQ(busy.stop(), bandwidth);
}

TEST(BusyThreads, NoneCopyNothing) {
  BusyThreads busy(0);
  EXPECT_EQ(busy.stop(), 0.0);
}

TEST(BusyThreads, AreRefusedWhereTheirBlocksHaveNoRoom) {
  constexpr uint64_t kGib = uint64_t{1} << 30U;
  EXPECT_EQ(busy_refusal(0, 0), "");
  EXPECT_EQ(busy_refusal(8, kGib), "");
  EXPECT_EQ(busy_refusal(9, kGib),
            "--busy 9 takes 1.12 GiB, 128 MiB a thread, and 1 GiB are free; allowed: up to 8 "
            "threads");
  EXPECT_GT(available_memory(), uint64_t{1} << 20U);
  EXPECT_LT(available_memory(), uint64_t{1} << 50U);
}

TEST(BusyThreads, EndWithTheirOwner) {
  for (int i = 0; i < 5; ++i) const BusyThreads busy(2, 1U << 16U);
  SUCCEED();  // a thread that outlived it would touch freed memory, which sanitizers see
}

}  // namespace
}  // namespace keyhole::tools
