// The worker pool on threads of the caller's (PoolConfig::run): every task once, whoever comes and when.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/pool.h"
#include "cpu/types.h"
#include "tests/cpu/task_witness.h"

namespace keyhole::cpu::test {
namespace {

using Part = void (*)(void* context, uint32_t i);
using Run = void (*)(void* user, Part part, void* context, uint32_t count);

void in_order(void* /*user*/, Part part, void* context, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) part(context, i);
}
void backwards(void* /*user*/, Part part, void* context, uint32_t count) {
  for (uint32_t i = count; i > 0; --i) part(context, i - 1);
}
void on_threads(void* /*user*/, Part part, void* context, uint32_t count) {
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < count; ++i) threads.emplace_back(part, context, i);
  for (std::thread& thread : threads) thread.join();
}
/// Breaks its promise: no call at all.
void nobody(void* /*user*/, Part /*part*/, void* /*context*/, uint32_t /*count*/) {}

struct Way {
  const char* name;
  Run run;
};
constexpr Way kWays[] = {{"in order", in_order},
                         {"backwards", backwards},
                         {"on threads", on_threads},
                         {"nobody", nobody}};

PoolConfig lent(Run run, uint32_t threads) {
  PoolConfig config;
  config.threads = threads;
  config.run = run;
  return config;
}

size_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(PoolOfTheCaller, RunsEveryTaskOnceAndStartsNoThread) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    const size_t before = threads_of_process();
    Pool pool(lent(way.run, 4));
    EXPECT_EQ(threads_of_process(), before);
    EXPECT_EQ(pool.threads(), 4U);
    for (const uint32_t count : {0U, 1U, 2U, 3U, 4U, 5U, 300U}) {
      Witness witness(count, 4);
      pool.run(count, Witness::call, &witness);
      witness.expect_all_once();
      Witness asynchronous(count, 4);
      Job job;
      pool.start(job, count, Witness::call, &asynchronous);
      pool.finish(job);
      asynchronous.expect_all_once();
    }
  }
}

/// What was asked of the caller's function.
struct Asked {
  std::vector<uint32_t> counts;
  static void run(void* user, Part part, void* context, uint32_t count) {
    static_cast<Asked*>(user)->counts.push_back(count);
    in_order(nullptr, part, context, count);
  }
};

TEST(PoolOfTheCaller, AsksForNoMoreThanThereIsToDo) {
  Asked asked;
  PoolConfig config = lent(Asked::run, 3);
  config.run_user = &asked;
  Pool pool(config);
  for (const uint32_t count : {0U, 1U, 2U, 3U, 100U}) pool.run(count, [](uint32_t, uint32_t) {});
  EXPECT_EQ(asked.counts, (std::vector<uint32_t>{2, 3, 3}));
  config.threads = 1;
  Pool alone(config);
  alone.run(100, [](uint32_t, uint32_t) {});
  EXPECT_EQ(asked.counts.size(), 3U) << "one thread asks nobody";
}

TEST(PoolOfTheCaller, ResultsAreVisibleToTheCaller) {
  Pool pool(lent(on_threads, 3));
  std::vector<uint64_t> out(200);
  for (uint64_t round = 1; round <= 20; ++round) {
    pool.run(200, [&](uint32_t task, uint32_t) { out[task] += task * round; });
  }
  for (uint64_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i * 20 * 21 / 2);
}

TEST(PoolOfTheCaller, ARunInsideATaskGoesInline) {
  Pool pool(lent(on_threads, 3));
  std::atomic<uint32_t> inner{0};
  std::atomic<uint32_t> strays{0};
  pool.run(9, [&](uint32_t, uint32_t worker) {
    const auto thread = std::this_thread::get_id();
    pool.run(5, [&](uint32_t, uint32_t inner_worker) {
      ++inner;
      if (std::this_thread::get_id() != thread || inner_worker != worker) ++strays;
    });
  });
  EXPECT_EQ(inner.load(), 45U);
  EXPECT_EQ(strays.load(), 0U);
  const Pool::Inline here(pool);
  const auto me = std::this_thread::get_id();
  pool.run(9, [&](uint32_t, uint32_t) { strays += std::this_thread::get_id() == me ? 0 : 1; });
  EXPECT_EQ(strays.load(), 0U);
}

TEST(PoolOfTheCaller, TheFirstExceptionIsRethrownAndTheOtherTasksStillRun) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    Pool pool(lent(way.run, 3));
    std::atomic<uint32_t> ran{0};
    try {
      pool.run(40, [&](uint32_t task, uint32_t) {
        ++ran;
        if (task % 10 == 3) throw Error(Status::io, "task " + std::to_string(task));
      });
      FAIL() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::io);
    }
    EXPECT_EQ(ran.load(), 40U);
  }
}

TEST(PoolOfTheCaller, SeveralCallersAtOnce) {
  Pool pool(lent(on_threads, 3));
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 10; ++round) {
        Witness witness(17, 3);
        pool.run(17, Witness::call, &witness);
        witness.expect_all_once();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace keyhole::cpu::test
