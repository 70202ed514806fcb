// What tests of the pool see of a job's tasks.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace keyhole::cpu::test {

/// A job's witness: counts each task, and sees two tasks that run at once on one worker number.
class Witness {
 public:
  Witness(uint32_t tasks, uint32_t threads) : ran_(tasks), busy_(threads) {}

  void operator()(uint32_t task, uint32_t worker) {
    if (worker >= busy_.size() || task >= ran_.size()) {
      faults_.fetch_add(1);
      return;
    }
    if (busy_[worker].exchange(true)) faults_.fetch_add(1);
    ran_[task].fetch_add(1);
    for (int i = 0; i < 50; ++i) spin_.fetch_add(1, std::memory_order_relaxed);
    busy_[worker].store(false);
  }
  static void call(void* self, uint32_t task, uint32_t worker) {
    (*static_cast<Witness*>(self))(task, worker);
  }
  void expect_all_once() const {
    EXPECT_EQ(faults_.load(), 0U);
    for (const auto& ran : ran_) ASSERT_EQ(ran.load(), 1U);
  }

 private:
  std::vector<std::atomic<uint32_t>> ran_;
  std::vector<std::atomic<bool>> busy_;
  std::atomic<uint32_t> faults_{0};
  std::atomic<uint32_t> spin_{0};
};

}  // namespace keyhole::cpu::test
