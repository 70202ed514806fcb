// A Team does every item exactly once, with every number of threads, and survives a caller that gives up.
#include "tools/llama/team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace keyhole::tools {
namespace {

TEST(Team, DoesEveryItemOnce) {
  for (const unsigned threads : {1U, 2U, 5U}) {
    Team team(threads);
    EXPECT_EQ(team.size(), threads);
    for (const size_t count : {0, 1, 2, 7, 1000}) {
      for (int round = 0; round < 20; ++round) {
        std::vector<int> done(count, 0);  // each item is one thread's: no atomics needed
        std::atomic<bool> known_member{true};
        team.for_each(count, [&](size_t item, unsigned member) {
          ++done[item];
          if (member >= threads) known_member = false;
        });
        EXPECT_EQ(done, std::vector<int>(count, 1));
        EXPECT_TRUE(known_member);
      }
    }
  }
}

TEST(Team, NeverHasMoreThreadsThanOpenBlasServes) {
  EXPECT_EQ(Team(1000).size(), 64U);
  EXPECT_GE(Team(0).size(), 1U);
}

TEST(Team, ACallerMayThrowAndGoOn) {
  Team team(3);
  for (int round = 0; round < 50; ++round) {
    std::atomic<bool> caller_came{false};
    std::atomic<size_t> done{0};
    EXPECT_THROW(team.for_each(1000,
                               [&](size_t, unsigned member) {
                                 if (member == 0) {
                                   caller_came = true;
                                   throw std::runtime_error("enough");
                                 }
                                 // Without this the others may leave the caller nothing to do.
                                 while (!caller_came) std::this_thread::yield();
                                 ++done;
                               }),
                 std::runtime_error);
    EXPECT_LT(done, 1000U);
    std::atomic<size_t> after{0};
    team.for_each(100, [&](size_t, unsigned) { ++after; });
    EXPECT_EQ(after, 100U);
  }
}

}  // namespace
}  // namespace keyhole::tools
