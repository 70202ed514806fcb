#include "runtime/stream/stream_server.h"

#include <chrono>
#include <optional>
#include <string>
#include <system_error>

#include "cpu/types.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

int difference(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

StreamServer::StreamServer(cpu::Pool& pool, uint32_t spin_us, Serve serve)
    : pool_(&pool), spin_us_(spin_us), serve_(std::move(serve)), ring_(kCapacity) {
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error& e) {
    throw Error(Status::out_of_memory,
                std::string("cannot start the thread that serves stream steps: ") + e.what());
  }
}

void StreamServer::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true);
  submitted_.fetch_add(1);  // wakes it
  submitted_.notify_one();
  thread_.join();
}

uint32_t StreamServer::submit(const StreamStep& step) {
  const int at = submitted_.load(std::memory_order_relaxed);
  if (difference(at, served_.load(std::memory_order_acquire)) >= static_cast<int>(kCapacity)) {
    wait(static_cast<uint32_t>(at) - kCapacity + 1);
  }
  ring_[static_cast<uint32_t>(at) % kCapacity] = step;
  const auto next = static_cast<int>(static_cast<uint32_t>(at) + 1);
  submitted_.store(next);
  submitted_.notify_one();
  return static_cast<uint32_t>(next);
}

void StreamServer::wait(uint32_t ticket) {
  const auto reached = [&](int served) {
    return difference(served, static_cast<int>(ticket)) >= 0;
  };
  if (reached(served_.load(std::memory_order_acquire))) return;
  // Sequentially consistent, as in the server: either the server sees waiting_, or this thread
  // sees its count.
  wanted_.store(static_cast<int>(ticket));
  waiting_.store(true);
  for (int seen = served_.load(); !reached(seen); seen = served_.load()) served_.wait(seen);
  waiting_.store(false);
}

void StreamServer::work() {
  std::optional<cpu::Pool::Awake> awake;
  for (int at = 0;;) {
    int submitted = submitted_.load(std::memory_order_acquire);
    if (submitted == at) {
      const auto end = Clock::now() + std::chrono::microseconds(spin_us_);
      while ((submitted = submitted_.load(std::memory_order_acquire)) == at && Clock::now() < end) {
        for (int i = 0; i < 16; ++i) pause();
      }
      if (submitted == at) {
        awake.reset();
        submitted_.wait(at, std::memory_order_acquire);
        continue;
      }
    }
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!awake) awake.emplace(*pool_);
    serve_(ring_[static_cast<uint32_t>(at) % kCapacity]);
    at = static_cast<int>(static_cast<uint32_t>(at) + 1);
    served_.store(at);
    if (waiting_.load() && difference(at, wanted_.load()) >= 0) served_.notify_all();
  }
}

}  // namespace keyhole::runtime
