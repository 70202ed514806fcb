#include "runtime/stream/stream_server.h"

#include <chrono>
#include <string>
#include <system_error>

#include "cpu/spin_pause.h"
#include "cpu/types.h"
#include "runtime/stream/cyclic_count.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// How long a caller sleeps that could serve the step which it waits for, once its queries are here: a fraction of a
// token.
constexpr std::chrono::microseconds kCallerNap{100};

int next_of(int count) { return static_cast<int>(static_cast<uint32_t>(count) + 1); }

bool has_reached(int served, uint32_t ticket) {
  return difference(served, static_cast<int>(ticket)) >= 0;
}

}  // namespace

StreamServer::StreamServer(cpu::Pool& pool, uint32_t spin_us, Await await, Serve serve)
    : pool_(&pool),
      spin_us_(spin_us),
      await_(std::move(await)),
      serve_(std::move(serve)),
      ring_(kCapacity) {
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
  submitted_.store(next_of(at));
  submitted_.notify_one();
  return static_cast<uint32_t>(next_of(at));
}

// ---- Serving -------------------------------------------------------------------------------------

void StreamServer::serve_claimed(int at) {
  serve_(ring_[static_cast<uint32_t>(at) % kCapacity]);
  served_.store(next_of(at));
}

void StreamServer::serve(int at) {
  {
    const std::lock_guard claim(serving_);
    if (served_.load(std::memory_order_relaxed) != at) return;  // the caller has
    serve_claimed(at);
  }
  // Sequentially consistent, as in sleep(): either this thread sees waiting_, or that one sees the count.
  if (!waiting_.load() || difference(next_of(at), wanted_.load()) < 0) return;
  { const std::lock_guard lock(sleeping_); }  // it sleeps, or has not looked at the count yet
  awake_.notify_one();
}

bool StreamServer::help(int at) {
  if (!await_(ring_[static_cast<uint32_t>(at) % kCapacity], false)) return false;
  const std::unique_lock claim(serving_, std::try_to_lock);
  if (!claim.owns_lock()) return false;  // the thread is at it
  if (served_.load(std::memory_order_relaxed) == at) serve_claimed(at);
  return true;
}

std::optional<StreamStep> StreamServer::step_at(int at) {
  const std::lock_guard claim(serving_);
  if (served_.load(std::memory_order_relaxed) != at) return std::nullopt;
  return ring_[static_cast<uint32_t>(at) % kCapacity];
}

void StreamServer::work() {
  std::optional<cpu::Pool::Awake> awake;
  for (;;) {
    const int at = served_.load(std::memory_order_acquire);
    int submitted = submitted_.load(std::memory_order_acquire);
    if (submitted == at) {
      const auto end = Clock::now() + std::chrono::microseconds(spin_us_);
      while ((submitted = submitted_.load(std::memory_order_acquire)) == at && Clock::now() < end) {
        for (int i = 0; i < 16; ++i) cpu::spin_pause();
      }
      if (submitted == at) {
        awake.reset();
        submitted_.wait(at, std::memory_order_acquire);
        continue;
      }
    }
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!awake) awake.emplace(*pool_);
    if (const std::optional<StreamStep> step = step_at(at); step && await_(*step, true)) serve(at);
  }
}

// ---- Waiting -------------------------------------------------------------------------------------

void StreamServer::wait(uint32_t ticket) {
  for (int at = served_.load(std::memory_order_acquire); !has_reached(at, ticket);
       at = served_.load(std::memory_order_acquire)) {
    const bool can_help = ring_[static_cast<uint32_t>(at) % kCapacity].coded;
    if (can_help && help(at)) continue;
    sleep(ticket, can_help);
  }
}

void StreamServer::sleep(uint32_t ticket, bool can_help) {
  std::unique_lock lock(sleeping_);
  wanted_.store(static_cast<int>(ticket));
  waiting_.store(true);
  const auto is_served = [&] { return has_reached(served_.load(), ticket); };
  if (can_help) {
    awake_.wait_for(lock, kCallerNap, is_served);
  } else {
    awake_.wait(lock, is_served);
  }
  waiting_.store(false);
}

}  // namespace keyhole::runtime
