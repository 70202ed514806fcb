// What the sessions of an engine take together: beside the figures of each, and beside what the system says of the
// pages in which K and V lie.
#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

keyhole_memory_use memory_of(const keyhole_engine* engine) {
  keyhole_memory_use memory;
  keyhole_memory_use_init(&memory);
  EXPECT_OK(keyhole_engine_get_memory(engine, &memory));
  EXPECT_EQ(memory.host_bytes,
            memory.kv_bytes + memory.resident_bytes + memory.index_bytes + memory.work_bytes);
  return memory;
}

/// Bytes of the process in pages of shared memory without a file, each page once.
uint64_t shared_pages_of_process() {
  std::ifstream maps("/proc/self/smaps");
  uint64_t bytes = 0;
  bool is_shared_memory = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key.find('-') != std::string::npos && key.back() != ':') {
      is_shared_memory = line.find("/dev/zero (deleted)") != std::string::npos;
    } else if (key == "Pss:" && is_shared_memory) {
      uint64_t kib = 0;
      words >> kib;
      bytes += kib * 1024;
    }
  }
  return bytes;
}

class Memory : public testing::Test {
 protected:
  void fill(keyhole_session* s, uint32_t n) {
    for (uint32_t l = 0; l < config_.layers; ++l) {
      Model unused(config_);
      prefill_both(s, unused, shape_, l, n, numbers_);
    }
  }
  /// The sum over all sessions, by what each of them says.
  static uint64_t sum(const std::vector<keyhole_session*>& sessions) {
    uint64_t bytes = 0;
    for (const keyhole_session* s : sessions) {
      const auto one = statistics(s);
      bytes += one.host_bytes - one.shared_bytes + one.device_bytes;
    }
    return bytes;
  }

  keyhole_engine_config config_ = small_engine();
  EnginePtr engine_ = make_engine(config_);
  Shape shape_{config_};
  Numbers numbers_{17};
};

TEST_F(Memory, IsThatOfAllSessionsWithWhatCopiesShareOnce) {
  EXPECT_EQ(0U, memory_of(engine_.get()).host_bytes);
  auto sc = small_session();
  sc.index = "ivf:C=8,probe=8";
  sc.training_queries = 0;
  auto first = make_session(engine_.get(), sc);
  const auto other = make_session(engine_.get(), sc);
  fill(first.get(), 3000);
  fill(other.get(), 500);
  ASSERT_OK(keyhole_session_build(first.get(), nullptr, nullptr));
  const auto two = memory_of(engine_.get());
  EXPECT_EQ(2U, two.sessions);
  EXPECT_EQ(sum({first.get(), other.get()}), two.host_bytes);
  // K and V in f16, of 2 layers, of all that has left the window.
  uint64_t offloaded = 0;
  for (const auto* s : {first.get(), other.get()}) {
    for (uint32_t l = 0; l < config_.layers; ++l) {
      const auto t = layer_tokens(s, l);
      offloaded += 2 * 2 * shape_.kv(t.indexed + t.pending);
    }
  }
  EXPECT_EQ(offloaded, two.kv_bytes);
  EXPECT_EQ(offloaded, two.shared_page_bytes);
  EXPECT_EQ(statistics(first.get()).index_bytes, two.index_bytes);
  EXPECT_EQ(statistics(first.get()).device_bytes + statistics(other.get()).device_bytes,
            two.resident_bytes);
  EXPECT_EQ(0U, two.device_bytes);
  EXPECT_EQ(0U, two.pinned_bytes);

  // Copies have sink and window, and the page where their rows go on; they add no index.
  auto copy = fork_of(first.get());
  const auto three = memory_of(engine_.get());
  EXPECT_EQ(3U, three.sessions);
  EXPECT_EQ(sum({first.get(), other.get(), copy.get()}), three.host_bytes);
  EXPECT_EQ(two.index_bytes, three.index_bytes);
  EXPECT_LE(three.kv_bytes, two.kv_bytes + size_t{4} * config_.layers * 2 * 4096);
  // What the first one leaves behind is the copy's.
  first.reset();
  const auto left = memory_of(engine_.get());
  EXPECT_EQ(2U, left.sessions);
  EXPECT_EQ(sum({other.get(), copy.get()}), left.host_bytes);
  EXPECT_EQ(two.index_bytes, left.index_bytes);
  EXPECT_EQ(two.kv_bytes, left.kv_bytes);
  copy.reset();
  EXPECT_EQ(sum({other.get()}), memory_of(engine_.get()).host_bytes);
}

// Only pages of offloaded K and V are shared memory: the system counts as many as we do, but for the ends of arrays.
TEST_F(Memory, InSharedPagesIsWhatTheSystemSays) {
  const uint64_t before = shared_pages_of_process();
  auto sc = small_session();
  auto first = make_session(engine_.get(), sc);
  fill(first.get(), 3300);
  std::vector<SessionPtr> copies;
  const auto touch = [&](keyhole_session* s) {
    for (uint32_t l = 0; s != nullptr && l < config_.layers; ++l) {
      (void)attend_only(s, shape_, l, numbers_.many(shape_.q(1)));
    }
  };
  const auto expect_as_many = [&] {
    // Pages that a copy has taken over are shown once it reads them, as all are read here.
    touch(first.get());
    for (const SessionPtr& copy : copies) touch(copy.get());
    const auto memory = memory_of(engine_.get());
    const uint64_t seen = shared_pages_of_process() - before;
    // Of each session, layer, KV head, K and V the last page, and a page that was taken in advance.
    const uint64_t ends = memory.sessions * config_.layers * config_.kv_heads * 2 * 2 * 4096;
    EXPECT_GT(memory.shared_page_bytes, uint64_t{1} << 20);
    // Pss is rounded down to whole KiB for each range of addresses.
    EXPECT_GE(seen + ends, memory.shared_page_bytes);
    EXPECT_LE(seen, memory.shared_page_bytes + ends);
  };
  if (memory_of(engine_.get()).shared_page_bytes == 0) {
    GTEST_SKIP() << "this system has no shared memory";
  }
  expect_as_many();
  for (int i = 0; i < 2; ++i) {
    copies.push_back(fork_of(first.get()));
    fill(copies.back().get(), 700);
  }
  expect_as_many();
  first.reset();
  expect_as_many();
  ASSERT_OK(keyhole_session_truncate(copies[0].get(), 1500));
  expect_as_many();
}

// Sessions decode, come and go in their threads while another one looks: no call is refused because of it.
TEST_F(Memory, IsLookedAtWhileSessionsAreInUse) {
  const int rounds = kSanitized ? 4 : 20;
  std::atomic<int> running{3};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      Numbers numbers(static_cast<uint64_t>(t));
      for (int round = 0; round < rounds; ++round) {
        const auto session = make_session(engine_.get(), small_session());
        Model model(config_);
        prefill_both(session.get(), model, shape_, 0, 200, numbers);
        for (int i = 0; i < 20; ++i)
          (void)attend_only(session.get(), shape_, 0, numbers.many(shape_.q(1)));
        const auto copy = fork_of(session.get());
        (void)attend_only(copy.get(), shape_, 0, numbers.many(shape_.q(1)));
      }
      --running;
    });
  }
  uint64_t most = 0;
  while (running != 0) {
    const auto memory = memory_of(engine_.get());
    EXPECT_LE(memory.sessions, 6U);
    most = std::max(most, memory.sessions);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(0U, most);
  EXPECT_EQ(0U, memory_of(engine_.get()).sessions);
}

TEST_F(Memory, BetweenBeginAndEndIsThatFromBefore) {
  const auto session = make_session(engine_.get(), small_session());
  fill(session.get(), 100);
  const auto before = memory_of(engine_.get());
  const auto q = numbers_.many(shape_.q(1));
  std::vector<float> o(shape_.o(1));
  const auto tq = tensor(q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
  ASSERT_OK(keyhole_session_attend_begin(session.get(), 0, &tq, nullptr, nullptr));
  EXPECT_EQ(before.host_bytes, memory_of(engine_.get()).host_bytes);
  ASSERT_OK(keyhole_session_attend_end(session.get(), &out, nullptr));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_engine_get_memory(nullptr, nullptr));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_engine_get_memory(engine_.get(), nullptr));
}

TEST_F(Memory, OfADeviceIsWhatItsSessionsSay) {
  StreamEngine engine(config_);
  auto sc = small_session();
  sc.flush_block = 256;
  sc.index = "codes:k=4,v=4";
  const auto a = make_session(engine.handle.get(), sc), b = make_session(engine.handle.get(), sc);
  fill(a.get(), 900);
  fill(b.get(), 300);
  keyhole_memory_use memory = memory_of(engine.handle.get());
  uint64_t device = 0, codes = 0, pinned = 0, host = 0;
  for (const auto* s : {a.get(), b.get()}) {
    const auto one = statistics(s);
    device += one.device_bytes;
    codes += one.code_bytes;
    pinned += one.pinned_bytes;
    host += one.host_bytes - one.shared_bytes;
  }
  EXPECT_EQ(device, memory.device_bytes);
  EXPECT_EQ(codes, memory.code_bytes);
  EXPECT_EQ(pinned, memory.pinned_bytes);
  EXPECT_EQ(host, memory.host_bytes);
  EXPECT_NE(0U, memory.device_bytes);
}

}  // namespace
}  // namespace keyhole::test
