// The thread that serves the steps of a stream: the session's own, or the caller that waits for them.
#include "runtime/stream/stream_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace keyhole::runtime {
namespace {

StreamStep light(uint32_t number) {
  StreamStep step;
  step.sequence = number;
  step.coded = true;
  return step;
}

class StreamServerTest : public testing::Test {
 protected:
  void make(StreamServer::Await await) {
    server_ =
        std::make_unique<StreamServer>(pool_, 20, std::move(await), [this](const StreamStep& step) {
          EXPECT_FALSE(serving_.exchange(true)) << "two at once";
          served_.push_back(step.sequence);
          served_count_ += 1;
          if (std::this_thread::get_id() == self_) by_caller_ += 1;
          serving_ = false;
        });
  }
  void expect_in_order(uint32_t n) {
    ASSERT_EQ(served_.size(), n);
    for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(served_[i], i);
  }

  const std::thread::id self_ = std::this_thread::get_id();
  cpu::Pool pool_{cpu::PoolConfig{.threads = 1}};
  std::atomic<bool> serving_{false}, released_{false};
  std::atomic<uint32_t> here_{0};  // steps below it can be served
  std::atomic<uint32_t> served_count_{
      0};  // of served_, which may be read only where no step is under way
  std::vector<uint32_t> served_;
  uint32_t by_caller_ = 0;
  std::unique_ptr<StreamServer> server_;
};

TEST_F(StreamServerTest, TheCallerServesLightStepsWhileTheThreadIsHeldUp) {
  make([this](const StreamStep&, bool waits) {
    if (waits) released_.wait(false);
    return true;
  });
  for (uint32_t i = 0; i < 100; ++i) server_->submit(light(i));
  server_->drain();
  expect_in_order(100);
  EXPECT_EQ(by_caller_, 100U);
  // More steps than there is room for: the place of the one in which the thread is held up is used again.
  for (uint32_t i = 100; i < 3 * StreamServer::kCapacity; ++i) server_->submit(light(i));
  server_->drain();
  expect_in_order(3 * StreamServer::kCapacity);
  released_ = true;
  released_.notify_all();
  for (uint32_t i = 0; i < 100; ++i) server_->submit(light(3 * StreamServer::kCapacity + i));
  server_->drain();
  expect_in_order(3 * StreamServer::kCapacity + 100);
}

TEST_F(StreamServerTest, ACallerWaitsForStepsThatAreNotHere) {
  make([this](const StreamStep& step, bool waits) {
    while (here_ <= step.sequence) {
      if (!waits) return false;
      std::this_thread::yield();
    }
    return true;
  });
  for (uint32_t i = 0; i < 50; ++i) server_->submit(light(i));
  std::thread stream([this] {
    for (uint32_t i = 0; i < 50; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      here_ += 1;
    }
  });
  server_->wait(30);  // tickets count from 1
  EXPECT_GE(served_count_, 30U);
  server_->drain();
  stream.join();
  expect_in_order(50);
}

TEST_F(StreamServerTest, WhatIsNotLightIsLeftToTheThread) {
  make([](const StreamStep&, bool) { return true; });
  for (uint32_t i = 0; i < 200; ++i) {
    StreamStep step = light(i);
    step.coded = i % 2 == 0;
    server_->submit(step);
    if (i % 8 == 7) server_->drain();
  }
  server_->drain();
  expect_in_order(200);
  EXPECT_LE(by_caller_, 100U);
}

}  // namespace
}  // namespace keyhole::runtime
