#include "runtime/stream/row_server.h"

#include <chrono>
#include <string>
#include <system_error>

#include "cpu/spin_pause.h"
#include "cpu/types.h"
#include "runtime/stream/cyclic_count.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// A step that was submitted comes within the time of a model layer's other kernels, 100 us to 1 ms. Beyond that the
// stream has a prefill before it, or is not launched at all: then the thread naps.
constexpr std::chrono::microseconds kSpin{3000};
constexpr std::chrono::microseconds kServerNap{20};
// After so long without a request the thread yields: what the device waits for may need this core.
constexpr std::chrono::microseconds kAlone{20};

}  // namespace

RowServer::RowServer(gpu::Codes& codes, uint32_t kv_heads, const Waits& waits)
    : codes_(&codes), kv_heads_(kv_heads), waits_(waits) {
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error& e) {
    throw Error(Status::out_of_memory,
                std::string("cannot start the thread that reads rows for the device: ") + e.what());
  }
}

RowServer::~RowServer() {
  stop_.store(true);
  expect();  // wakes it
  thread_.join();
  codes_->give_up_rows(static_cast<uint32_t>(expected_.load()));
}

void RowServer::expect() {
  expected_.fetch_add(1);
  expected_.notify_one();
}

bool RowServer::serve() {
  int least = 0;
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    const auto at = static_cast<int>(codes_->serve_rows(h));
    if (h == 0 || difference(at, least) < 0) least = at;
  }
  return served_.exchange(least) != least;
}

void RowServer::work() {
  auto since = Clock::now();  // a step was expected, or served
  int last = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    const int expected = expected_.load(std::memory_order_acquire);
    if (expected != last) since = Clock::now();
    last = expected;
    const auto alone = Clock::now() - since;
    const bool is_idle = difference(served_.load(std::memory_order_relaxed), expected) >= 0;
    if ((is_idle && alone >= std::chrono::microseconds(waits_.spin_us)) ||
        alone >= std::chrono::milliseconds(waits_.timeout_ms)) {
      expected_.wait(expected, std::memory_order_acquire);
      continue;
    }
    if (is_idle) {
      cpu::spin_pause();
      continue;
    }
    try {
      if (serve()) {
        since = Clock::now();
        continue;
      }
    } catch (...) {
      // A request that no step makes. The device says of this step and of those to come that they were given up.
      codes_->give_up_rows(static_cast<uint32_t>(expected) + (1U << 30U));
      return;
    }
    if (alone >= kSpin) {
      std::this_thread::sleep_for(kServerNap);
    } else if (alone >= kAlone) {
      std::this_thread::yield();
    } else {
      cpu::spin_pause();
    }
  }
}

}  // namespace keyhole::runtime
