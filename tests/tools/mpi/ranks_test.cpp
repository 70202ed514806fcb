#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tools/mpi/nccl_ranks.h"
#include "tools/mpi/ranks.h"

namespace keyhole::tools {
namespace {

TEST(Cores, AreDividedEquallyAndInOrder) {
  for (uint32_t n = 1; n <= 20; ++n) {
    std::vector<int> cores;
    for (uint32_t i = 0; i < n; ++i) cores.push_back(static_cast<int>(100 - 3 * i));
    for (uint32_t size = 1; size <= n; ++size) {
      std::vector<int> all;
      size_t fewest = n, most = 0;
      for (uint32_t rank = 0; rank < size; ++rank) {
        const std::vector<int> share = share_of_cores(cores, rank, size);
        fewest = std::min(fewest, share.size());
        most = std::max(most, share.size());
        all.insert(all.end(), share.begin(), share.end());
      }
      EXPECT_EQ(all, cores) << n << " cores, " << size << " ranks";
      EXPECT_LE(most - fewest, 1U) << n << " cores, " << size << " ranks";
    }
  }
}

TEST(Cores, OfMoreRanksThanCoresAreShared) {
  for (uint32_t rank = 0; rank < 7; ++rank) {
    EXPECT_EQ(share_of_cores({5, 6, 9}, rank, 7).size(), 1U);
  }
}

TEST(Cores, OfThisProcessAreThere) {
  std::vector<int> cores = cores_by_node();
  ASSERT_FALSE(cores.empty());
  std::sort(cores.begin(), cores.end());
  EXPECT_EQ(std::adjacent_find(cores.begin(), cores.end()), cores.end());
}

TEST(Gpus, AreTakenInTurn) {
  for (uint32_t rank = 0; rank < 5; ++rank) {
    EXPECT_EQ(gpu_of_rank(nullptr, 2, rank), std::to_string(rank % 2));
    EXPECT_EQ(gpu_of_rank("3,GPU-7a,1", 8, rank),
              (std::vector<std::string>{"3", "GPU-7a", "1"})[rank % 3]);
    // There is one, or the launcher has given each rank its own.
    EXPECT_EQ(gpu_of_rank(nullptr, 1, rank), "");
    EXPECT_EQ(gpu_of_rank(nullptr, 0, rank), "");
    EXPECT_EQ(gpu_of_rank("5", 8, rank), "");
    EXPECT_EQ(gpu_of_rank("", 8, rank), "");
  }
}

NcclReadiness ready(unsigned char gpu) {
  NcclReadiness r;
  r.wants = 1;
  r.gpu[15] = gpu;
  return r;
}

TEST(Ranks, GoOverNcclWhereEachHasAGpuOfItsOwn) {
  std::vector<NcclReadiness> all = {ready(1), ready(2), ready(3)};
  EXPECT_EQ(nccl_obstacle(all), "");
  all[2].gpu = all[1].gpu;
  EXPECT_EQ(nccl_obstacle(all), "rank 1 and rank 2 share a GPU");
  // Both must have told NCCL that they may: it is one rank's environment alone that says so otherwise.
  all[2].may_share = 1;
  EXPECT_EQ(nccl_obstacle(all), "rank 1 and rank 2 share a GPU");
  all[1].may_share = 1;
  EXPECT_EQ(nccl_obstacle(all), "");
  all[0].lacks[0] = 'x';
  EXPECT_EQ(nccl_obstacle(all), "rank 0: x");
  all[0] = {};
  EXPECT_EQ(nccl_obstacle(all), "rank 0 has its sessions on the host");
  all = {{}, {}};
  EXPECT_EQ(nccl_obstacle(all), "no rank has a GPU");
}

TEST(Ranks, AProcessThatAsksForNoneIsAlone) {
  char name[] = "keyhole", command[] = "decode";
  char* arguments[] = {name, command};
  join_ranks(2, arguments);
  EXPECT_EQ(ranks().size, 1U);
  EXPECT_TRUE(ranks().speaks());
  EXPECT_EQ(ranks().communicator, nullptr);
}

}  // namespace
}  // namespace keyhole::tools
