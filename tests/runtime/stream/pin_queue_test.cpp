// Pinning beside the work of a session, on memory that takes its time and can refuse.
#include "runtime/stream/pin_queue.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/runtime/fake_codes.h"

namespace keyhole::runtime {
namespace {

constexpr size_t kPage = gpu::kPinAlignment;

class PinQueueTest : public testing::Test {
 protected:
  PinQueueTest() {
    auto memory = std::make_unique<test::FakePinned>(&limit_, &pause_us_);
    memory_ = memory.get();
    queue_ = std::make_unique<PinQueue>(std::move(memory));
  }
  /// Pages [first, first + n), one range each; no memory is touched.
  static std::vector<PinQueue::Range> pages(size_t first, size_t n) {
    std::vector<PinQueue::Range> ranges;
    for (size_t i = 0; i < n; ++i) {
      ranges.push_back({reinterpret_cast<const std::byte*>((first + i + 1) * kPage), kPage});
    }
    return ranges;
  }
  [[nodiscard]] bool holds(size_t first, size_t n) const {
    return memory_->is_pinned(pages(first, 1)[0].data, n * kPage);
  }

  std::atomic<size_t> limit_{SIZE_MAX};
  std::atomic<uint32_t> pause_us_{0};
  test::FakePinned* memory_;
  std::unique_ptr<PinQueue> queue_;
};

TEST_F(PinQueueTest, PinsBatchesInTheirOrder) {
  pause_us_ = 200;
  std::vector<uint64_t> batches;
  for (size_t b = 0; b < 10; ++b) batches.push_back(queue_->add(pages(b * 10, 5)));
  EXPECT_FALSE(queue_->is_pinned(batches[9]));
  queue_->wait(batches[4]);
  for (size_t b = 0; b <= 4; ++b) {
    EXPECT_TRUE(queue_->is_pinned(batches[b]));
    EXPECT_TRUE(holds(b * 10, 5));
  }
  queue_->wait(batches[9]);
  EXPECT_TRUE(holds(90, 5));
  EXPECT_EQ(queue_->bytes(), 50 * kPage);
}

TEST_F(PinQueueTest, StopsWhereMemoryIsRefusedUntilItIsTold) {
  limit_ = 7 * kPage;
  const uint64_t first = queue_->add(pages(0, 5)), second = queue_->add(pages(10, 5)),
                 third = queue_->add(pages(20, 2));
  queue_->wait(first);
  EXPECT_THROW(queue_->wait(second), Error);
  EXPECT_THROW(queue_->wait(third), Error) << "which would have fitted";
  EXPECT_THROW(queue_->check(third), Error);
  EXPECT_THROW(queue_->check(second), Error);
  EXPECT_NO_THROW(queue_->check(first)) << "which is pinned";
  EXPECT_TRUE(queue_->is_pinned(first));
  EXPECT_EQ(memory_->bytes(), 7 * kPage);
  queue_->resume();  // there is no more than before
  EXPECT_THROW(queue_->wait(second), Error);
  queue_->drop(first, pages(0, 5));
  queue_->resume();
  queue_->wait(third);
  EXPECT_NO_THROW(queue_->check(third));
  EXPECT_FALSE(holds(0, 1));
  EXPECT_TRUE(holds(10, 5));
  EXPECT_TRUE(holds(20, 2));
}

TEST_F(PinQueueTest, GoesOnWhereTheBatchThatFailedIsDropped) {
  limit_ = 7 * kPage;
  const uint64_t first = queue_->add(pages(0, 5)), second = queue_->add(pages(10, 5)),
                 third = queue_->add(pages(20, 2));
  queue_->wait(first);
  EXPECT_THROW(queue_->wait(second), Error);
  queue_->drop(second, pages(10, 5));
  EXPECT_NO_THROW(queue_->wait(third));
  EXPECT_EQ(memory_->bytes(), 7 * kPage);
  EXPECT_FALSE(holds(10, 1)) << "of a batch of which two were pinned";
}

TEST_F(PinQueueTest, DropsBatchesInAnyState) {
  std::mt19937 rng(3);
  for (int round = 0; round < 200; ++round) {
    pause_us_ = rng() % 3 * 20;
    std::vector<uint64_t> batches;
    for (size_t b = 0; b < 5; ++b) batches.push_back(queue_->add(pages(b * 10, 1 + b)));
    std::this_thread::sleep_for(std::chrono::microseconds(rng() % 300));
    std::vector<size_t> order{0, 1, 2, 3, 4};
    std::shuffle(order.begin(), order.end(), rng);
    const size_t kept = order.back();
    order.pop_back();
    for (const size_t b : order) {
      queue_->drop(batches[b], pages(b * 10, 1 + b));
      ASSERT_FALSE(holds(b * 10, 1)) << "round " << round << ", batch " << b;
    }
    queue_->wait(batches[kept]);
    ASSERT_EQ(memory_->bytes(), (1 + kept) * kPage);
    queue_->drop(batches[kept], pages(kept * 10, 1 + kept));
    ASSERT_EQ(memory_->bytes(), 0U);
  }
}

TEST_F(PinQueueTest, EndsWhileThereIsWork) {
  pause_us_ = 1000;
  for (size_t b = 0; b < 100; ++b) (void)queue_->add(pages(b * 10, 5));
  queue_->wait(1);
  queue_.reset();  // after a range, not after 500
}

}  // namespace
}  // namespace keyhole::runtime
