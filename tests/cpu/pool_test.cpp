// The worker pool: every task once, whatever the threads, callers and jobs; exceptions; nesting; sleep.
#include "cpu/pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/types.h"
#include "tests/cpu/task_witness.h"

namespace keyhole::cpu::test {
namespace {

TEST(Pool, RunsEveryTaskOnceForAnyThreadsAndCount) {
  for (const uint32_t threads : {1, 2, 3, 8}) {
    for (const uint32_t spin_us : {0, 50}) {
      Pool pool({.threads = threads, .spin_us = spin_us});
      ASSERT_EQ(pool.threads(), threads);
      for (const uint32_t count : {0, 1, 2, 7, 64, 1000}) {
        Witness witness(count, threads);
        pool.run(count, witness);
        witness.expect_all_once();
      }
    }
  }
}

TEST(Pool, ResultsAreVisibleToTheCaller) {
  Pool pool({.threads = 4});
  std::vector<uint64_t> out(1000);
  for (uint64_t round = 1; round <= 200; ++round) {
    pool.run(1000, [&](uint32_t task, uint32_t) { out[task] += task * round; });
  }
  for (uint64_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i * 200 * 201 / 2);
}

TEST(Pool, ManyCallersWithManyJobsAtOnce) {
  for (const uint32_t threads : {1, 2, 4}) {
    Pool pool({.threads = threads, .spin_us = 10});
    std::vector<std::thread> callers;
    for (uint32_t caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&, caller] {
        std::mt19937 rng(caller);
        for (int round = 0; round < 100; ++round) {
          const size_t jobs_at_once = 1 + rng() % 5;
          std::vector<std::unique_ptr<Witness>> witnesses;
          std::vector<Job> jobs(jobs_at_once);
          std::vector<size_t> order;
          for (size_t j = 0; j < jobs_at_once; ++j) {
            const uint32_t count = rng() % 20;
            witnesses.push_back(std::make_unique<Witness>(count, threads));
            pool.start(jobs[j], count, Witness::call, witnesses[j].get());
            order.push_back(j);
          }
          std::shuffle(order.begin(), order.end(), rng);
          for (const size_t j : order) {
            pool.finish(jobs[j]);
            witnesses[j]->expect_all_once();
          }
          Witness witness(17, threads);
          pool.run(17, witness);
          witness.expect_all_once();
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
}

TEST(Pool, AJobMayBeFinishedByAnotherThread) {
  Pool pool({.threads = 3});
  for (int round = 0; round < 50; ++round) {
    Witness witness(20, 3);
    Job job;
    pool.start(job, 20, Witness::call, &witness);
    std::thread([&] { pool.finish(job); }).join();
    witness.expect_all_once();
  }
}

TEST(Pool, MoreJobsAtOnceThanItHasSlots) {
  Pool pool({.threads = 2});
  std::vector<Job> jobs(200);
  std::vector<std::unique_ptr<Witness>> witnesses;
  for (Job& job : jobs) {
    witnesses.push_back(std::make_unique<Witness>(3, 2));
    pool.start(job, 3, Witness::call, witnesses.back().get());
  }
  for (Job& job : jobs) pool.finish(job);
  for (const auto& witness : witnesses) witness->expect_all_once();
}

TEST(Pool, ARunInsideATaskGoesInlineOnTheSameThreadAndWorker) {
  for (const uint32_t threads : {1, 4}) {
    Pool pool({.threads = threads});
    std::atomic<uint32_t> inner{0};
    std::atomic<uint32_t> strays{0};
    pool.run(20, [&](uint32_t, uint32_t worker) {
      const auto thread = std::this_thread::get_id();
      pool.run(5, [&](uint32_t, uint32_t inner_worker) {
        inner.fetch_add(1);
        if (std::this_thread::get_id() != thread || inner_worker != worker) strays.fetch_add(1);
      });
    });
    EXPECT_EQ(inner.load(), 100U);
    EXPECT_EQ(strays.load(), 0U);
  }
}

TEST(Pool, LeavesSpareCoresToOthers) {
  const uint32_t all = Pool(PoolConfig{}).threads();
  PoolConfig config;
  for (const uint32_t spare : {0U, 1U, 2U, 5000U}) {
    config.spare = spare;
    EXPECT_EQ(Pool(config).threads(), all > spare ? all - spare : 1U) << spare;
    config.threads = 3;
    EXPECT_EQ(Pool(config).threads(), 3U) << "asked for";
    config.threads = 0;
  }
}

TEST(Pool, WorkersThatAreKeptAwakeTakeJobsAndSleepAfterwards) {
  Pool pool(PoolConfig{3, false, 0});
  const auto cpu_seconds = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  for (int round = 0; round < 3; ++round) {
    {
      const Pool::Awake outer(pool);
      const Pool::Awake inner(pool);
      for (int i = 0; i < 50; ++i) {
        Witness witness(7, 3);
        pool.run(7, &Witness::call, &witness);
        witness.expect_all_once();
      }
    }
    // Nobody spins any more: 100 ms of sleep take next to no time of any core.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const double before = cpu_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_LT(cpu_seconds() - before, 0.05) << round;
  }
}

TEST(Pool, ARunGoesInlineWhereTheThreadSaidSo) {
  Pool pool(PoolConfig{4, false, 50});
  const auto all_here = [&] {
    std::atomic<int> elsewhere{0};
    const auto me = std::this_thread::get_id();
    pool.run(64, [&](uint32_t, uint32_t) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (std::this_thread::get_id() != me) ++elsewhere;
    });
    return elsewhere == 0;
  };
  {
    const Pool::Inline outer(pool);
    {
      const Pool::Inline inner(pool);
      EXPECT_TRUE(all_here());
    }
    EXPECT_TRUE(all_here());
  }
  EXPECT_FALSE(all_here());
}

TEST(Pool, AJobMayBeStartedAndFinishedInsideATask) {
  Pool pool({.threads = 3});
  std::vector<std::unique_ptr<Witness>> witnesses;
  for (int i = 0; i < 30; ++i) witnesses.push_back(std::make_unique<Witness>(10, 3));
  pool.run(30, [&](uint32_t task, uint32_t) {
    Job job;
    pool.start(job, 10, Witness::call, witnesses[task].get());
    pool.finish(job);
  });
  for (const auto& witness : witnesses) witness->expect_all_once();
}

TEST(Pool, TheFirstExceptionIsRethrownAndTheOtherTasksStillRun) {
  for (const uint32_t threads : {1, 4}) {
    Pool pool({.threads = threads});
    for (int round = 0; round < 50; ++round) {
      std::atomic<uint32_t> ran{0};
      try {
        pool.run(40, [&](uint32_t task, uint32_t) {
          ran.fetch_add(1);
          if (task % 10 == 3) throw Error(Status::io, "task " + std::to_string(task));
        });
        FAIL() << "nothing was thrown";
      } catch (const Error& e) {
        EXPECT_EQ(e.status(), Status::io);
        EXPECT_EQ(std::string(e.what()).substr(0, 5), "task ");
      }
      EXPECT_EQ(ran.load(), 40U);
      Witness witness(10, threads);  // and the pool goes on
      pool.run(10, witness);
      witness.expect_all_once();
    }
  }
}

TEST(Pool, ADestroyedJobWaitsForItsTasks) {
  Pool pool({.threads = 3});
  for (int round = 0; round < 50; ++round) {
    Witness witness(20, 3);
    try {
      Job job;
      pool.start(job, 20, Witness::call, &witness);
      throw Error(Status::timeout, "between start and finish");
    } catch (const Error&) {
      witness.expect_all_once();
    }
  }
}

TEST(Pool, BrokenPromisesAreRefused) {
  Pool pool({.threads = 2});
  Pool other({.threads = 2});
  Job job;
  EXPECT_THROW(pool.finish(job), Error);
  Witness witness(4, 2);
  pool.start(job, 4, Witness::call, &witness);
  EXPECT_THROW(pool.start(job, 4, Witness::call, &witness), Error);
  EXPECT_THROW(other.finish(job), Error);
  pool.finish(job);
  witness.expect_all_once();
  EXPECT_THROW(pool.finish(job), Error);
}

TEST(Pool, SleepingWorkersWakeUp) {
  Pool pool({.threads = 4, .spin_us = 0});
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    // Tasks that wait for each other: all four threads must take part.
    std::atomic<uint32_t> arrived{0};
    pool.run(4, [&](uint32_t, uint32_t) {
      arrived.fetch_add(1);
      while (arrived.load() < 4) std::this_thread::yield();
    });
    EXPECT_EQ(arrived.load(), 4U);
  }
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return t.tv_sec + t.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(Pool, IdleWorkersDoNotBurnCores) {
  Pool pool({.threads = 4, .spin_us = 50});
  pool.run(100, [](uint32_t, uint32_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(cpu_seconds() - before, 0.1);  // one spinning worker alone would take 0.3
}

/// Restores the calling thread's affinity.
class SavedAffinity {
 public:
  SavedAffinity() { sched_getaffinity(0, sizeof set_, &set_); }
  ~SavedAffinity() { sched_setaffinity(0, sizeof set_, &set_); }
  SavedAffinity(const SavedAffinity&) = delete;
  SavedAffinity& operator=(const SavedAffinity&) = delete;
  [[nodiscard]] int cores() const { return CPU_COUNT(&set_); }
  [[nodiscard]] int first() const {
    int core = 0;
    while (!CPU_ISSET(core, &set_)) ++core;
    return core;
  }

 private:
  cpu_set_t set_{};
};

TEST(Pool, ThreadsDefaultToTheCoresThatTheProcessMayUse) {
  const SavedAffinity saved;
  EXPECT_EQ(Pool({}).threads(), static_cast<uint32_t>(saved.cores()));
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(saved.first(), &one);
  sched_setaffinity(0, sizeof one, &one);
  EXPECT_EQ(Pool({}).threads(), 1U);
}

TEST(Pool, PinnedWorkersHaveOneCoreAndTheCallerKeepsItsOwn) {
  const SavedAffinity saved;
  Pool pool({.threads = 3, .pin = true});
  std::atomic<uint32_t> arrived{0};
  std::atomic<int> cores[3] = {0, 0, 0};
  pool.run(3, [&](uint32_t, uint32_t worker) {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    cores[worker].store(CPU_COUNT(&set));
    arrived.fetch_add(1);
    while (arrived.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(cores[0].load(), saved.cores());
  EXPECT_EQ(cores[1].load(), 1);
  EXPECT_EQ(cores[2].load(), 1);
}

TEST(Pool, AbsurdThreadCountsAreRefused) {
  for (const uint32_t threads : {Pool::kMaxThreads + 1, 1U << 31, ~0U}) {
    try {
      const Pool pool({.threads = threads});
      FAIL() << threads << " threads were accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::invalid_argument);
      EXPECT_NE(std::string(e.what()).find(std::to_string(threads)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace keyhole::cpu::test
