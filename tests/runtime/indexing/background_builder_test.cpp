// The builder by itself, with an index whose appends last as long as the test wants, and fail when it wants.
#include "runtime/indexing/background_builder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "index/progress.h"
#include "index/types/flat.h"

namespace keyhole::runtime {
namespace {

using namespace std::chrono_literals;

struct Addition final : index::Addition {
  explicit Addition(std::atomic<std::thread::id>& destroyer) : destroyed_on(destroyer) {}
  ~Addition() override { destroyed_on = std::this_thread::get_id(); }
  std::atomic<std::thread::id>& destroyed_on;
};

/// Appends that take `steps` milliseconds, asking at each whether to go on.
class SlowIndex final : public index::Index {
 public:
  explicit SlowIndex(int milliseconds, bool fails = false)
      : milliseconds_(milliseconds), fails_(fails) {}

  [[nodiscard]] std::unique_ptr<index::Addition> prepare_append(
      const RowsView&, const index::Progress& progress) const override {
    ++begun;
    prepared_on = std::this_thread::get_id();
    index::ProgressMeter meter(progress, milliseconds_);
    for (int i = 0; i < milliseconds_; ++i) {
      meter.advance(1.0);
      std::this_thread::sleep_for(1ms);
    }
    if (fails_) throw std::bad_alloc();
    ++ended;
    return std::make_unique<Addition>(destroyed_on);
  }

  void build(const index::BuildInput&, const index::Progress&) override {}
  std::unique_ptr<index::Addition> commit_append(std::unique_ptr<index::Addition> a) override {
    return a;
  }
  void truncate(size_t) override {}
  [[nodiscard]] size_t count() const override { return 0; }
  [[nodiscard]] uint32_t dim() const override { return 64; }
  [[nodiscard]] std::unique_ptr<index::Scratch> make_scratch(uint32_t, uint32_t) const override {
    return nullptr;
  }
  void reserve_explore(index::Scratch&) const override {}
  void set_search_params(std::string_view) override {}
  void search(const index::SearchArgs&, index::Scratch&, index::Hits&) const override {}
  void explore(const index::SearchArgs&, index::Scratch&, index::Scored&) const override {}
  [[nodiscard]] const index::TypeDecl& type() const override { return index::kFlatType; }
  [[nodiscard]] index::Sharing sharing() const override { return index::Sharing::rows; }
  [[nodiscard]] index::IndexInfo info() const override { return {}; }
  [[nodiscard]] size_t bytes() const override { return 0; }
  [[nodiscard]] size_t bytes_of_others() const override { return 0; }
  [[nodiscard]] std::unique_ptr<Index> share(const RowsView&) const override { return nullptr; }
  void save(std::ostream&) const override {}
  void load(std::istream&, const RowsView&) override {}

  mutable std::atomic<int> begun{0}, ended{0};
  mutable std::atomic<std::thread::id> prepared_on, destroyed_on;

 private:
  int milliseconds_;
  bool fails_;
};

std::unique_ptr<AppendJob> job_of(std::initializer_list<const SlowIndex*> indexes) {
  std::vector<AppendJob::Part> parts;
  for (const SlowIndex* index : indexes) parts.emplace_back().index = index;
  return std::make_unique<AppendJob>(1, std::move(parts));
}

class Builder : public ::testing::Test {
 protected:
  cpu::Pool pool_{cpu::PoolConfig{2, false, 0}};
};

TEST_F(Builder, WorksInOrderOnAThreadOfItsOwn) {
  const SlowIndex a(2), b(2), c(2);
  BackgroundBuilder builder(pool_);
  const auto first = job_of({&a, &b});
  const auto second = job_of({&c});
  builder.submit(*first);
  builder.submit(*second);
  while (c.ended == 0) {
    EXPECT_LE(c.begun, b.ended.load()) << "the second job began before the first was done";
    std::this_thread::sleep_for(100us);
  }
  while (builder.finish(*second)) {
  }
  EXPECT_FALSE(builder.finish(*first));
  for (const SlowIndex* index : {&a, &b, &c}) {
    EXPECT_EQ(1, index->begun);
    EXPECT_EQ(a.prepared_on.load(), index->prepared_on.load());
  }
  EXPECT_NE(std::this_thread::get_id(), a.prepared_on.load());
  for (const auto* job : {first.get(), second.get()}) {
    for (const auto& part : job->parts) EXPECT_NE(part.addition, nullptr);
    EXPECT_GT(job->background_seconds, 0.001);
  }
}

TEST_F(Builder, WhoComesTooEarlyDoesWhatIsNotBegun) {
  const SlowIndex endless(1000000), a(1), b(1);
  BackgroundBuilder builder(pool_);
  const auto before = job_of({&endless});
  const auto job = job_of({&a, &b});
  builder.submit(*before);
  builder.submit(*job);
  while (endless.begun == 0) std::this_thread::sleep_for(100us);
  EXPECT_TRUE(builder.finish(*job));  // does not wait for the job before
  for (const auto& part : job->parts) EXPECT_NE(part.addition, nullptr);
  EXPECT_EQ(0.0, job->background_seconds);
  builder.cancel(*before);
  EXPECT_EQ(0, endless.ended);
}

TEST_F(Builder, AJobThatWasNeverSubmittedIsDoneByItsOwner) {
  const SlowIndex a(1), b(1), c(0, true);
  BackgroundBuilder builder(pool_);
  const auto job = job_of({&a, &b, &c});
  EXPECT_TRUE(builder.finish(*job));
  EXPECT_NE(job->parts[0].addition, nullptr);
  EXPECT_NE(job->parts[1].addition, nullptr);
  EXPECT_EQ(job->parts[2].addition, nullptr);
  EXPECT_THROW(std::rethrow_exception(job->parts[2].error), std::bad_alloc);
  builder.cancel(*job);  // over already
  builder.retire(job_of({&a}));
}

TEST_F(Builder, AFailureStopsNobodyElse) {
  const SlowIndex bad(1, true), good(1);
  BackgroundBuilder builder(pool_);
  const auto job = job_of({&bad, &good});
  const auto next = job_of({&good});
  builder.submit(*job);
  builder.submit(*next);
  (void)builder.finish(*next);
  (void)builder.finish(*job);
  EXPECT_THROW(std::rethrow_exception(job->parts[0].error), std::bad_alloc);
  EXPECT_NE(job->parts[1].addition, nullptr);
  EXPECT_EQ(nullptr, job->parts[1].error);
  EXPECT_NE(next->parts[0].addition, nullptr);
}

TEST_F(Builder, CancelEndsTheWorkThatIsUnderWay) {
  const SlowIndex endless(1000000), after(1), other(1);
  BackgroundBuilder builder(pool_);
  const auto job = job_of({&endless, &after});
  const auto next = job_of({&other});
  builder.submit(*job);
  builder.submit(*next);
  while (endless.begun == 0) std::this_thread::sleep_for(100us);
  builder.cancel(*job);
  EXPECT_EQ(0, endless.ended);
  EXPECT_EQ(0, after.begun);
  while (other.ended == 0) std::this_thread::sleep_for(100us);
  (void)builder.finish(*next);
}

TEST_F(Builder, ItsEndCancels) {
  const SlowIndex endless(1000000), after(1);
  const auto job = job_of({&endless, &after});
  {
    BackgroundBuilder builder(pool_);
    builder.submit(*job);
    while (endless.begun == 0) std::this_thread::sleep_for(100us);
  }
  EXPECT_EQ(0, endless.ended);
  EXPECT_EQ(0, after.begun);
}

TEST_F(Builder, WhatWasReplacedIsDestroyedOnItsThread) {
  const SlowIndex index(1);
  auto job = job_of({&index});
  {
    BackgroundBuilder builder(pool_);
    builder.submit(*job);
    while (index.ended == 0) std::this_thread::sleep_for(100us);
    (void)builder.finish(*job);
    builder.retire(std::move(job));
    const SlowIndex later(1);
    const auto next = job_of({&later});
    builder.submit(*next);
    while (later.ended == 0) std::this_thread::sleep_for(100us);
    (void)builder.finish(*next);
  }
  EXPECT_EQ(index.prepared_on.load(), index.destroyed_on.load());
}

TEST_F(Builder, AnyOrderOfEndsIsFine) {
  for (int round = 0; round < 60; ++round) {
    const SlowIndex quick(0), slow(2), bad(1, true);
    BackgroundBuilder builder(pool_);
    std::vector<std::unique_ptr<AppendJob>> jobs;
    for (int i = 0; i < 6; ++i) {
      jobs.push_back(i % 2 == 0 ? job_of({&quick, &slow}) : job_of({&bad, &quick, &slow}));
      builder.submit(*jobs.back());
    }
    for (int i = 0; i < 6; ++i) {
      AppendJob& job = *jobs[static_cast<size_t>((i * 5 + round) % 6)];
      if ((i + round) % 3 == 0) {
        builder.cancel(job);
      } else {
        (void)builder.finish(job);
        for (const auto& part : job.parts) ASSERT_TRUE(part.addition != nullptr || part.error);
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::runtime
