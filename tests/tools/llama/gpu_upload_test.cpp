// Numbers on their way to the GPU through two pinned buffers.
#include <random>

#include "tests/tools/llama/gpu_arrays.h"
#include "tools/llama/cuda/upload.h"

namespace keyhole::tools {
namespace {

TEST(GpuUpload, EveryByteArrivesOnceInItsPlace) {
  KEYHOLE_NEEDS_GPU();
  // More than two buffers of 32 MiB, and ends within a piece.
  std::vector<uint32_t> numbers(((size_t{75} << 20) + 4097 * 4) / 4);
  std::mt19937 random(1);
  for (uint32_t& number : numbers) number = random();
  const std::vector<uint32_t> few(numbers.begin(), numbers.begin() + 1001);
  cuda::Buffer<uint32_t> all(numbers.size()), some(few.size());
  const size_t bytes = numbers.size() * 4;
  const size_t total = bytes + few.size() * 4;
  std::vector<uint64_t> told;
  const LoadProgress progress = [&](uint64_t done, uint64_t of) {
    EXPECT_EQ(of, total);
    told.push_back(done);
  };
  cuda::Upload upload(total, progress);
  upload.copy(some.get(), few.data(), few.size() * 4);
  upload.count(few.size() * 4);
  upload.copy(all.get(), numbers.data(), bytes);
  upload.count(bytes);
  upload.wait();
  EXPECT_EQ(told, (std::vector<uint64_t>{few.size() * 4, total}));
  std::vector<uint32_t> back(numbers.size()), some_back(few.size());
  cuda::copy_now(back.data(), all.get(), back.size());
  cuda::copy_now(some_back.data(), some.get(), some_back.size());
  EXPECT_TRUE(back == numbers);
  EXPECT_TRUE(some_back == few);
}

}  // namespace
}  // namespace keyhole::tools
