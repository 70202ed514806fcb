// The engine's accelerator over made-up workspaces: how threads share them, and what becomes of failures.
#include "runtime/engine/gpu_accelerator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "gpu/device.h"
#include "tests/index/keys.h"

namespace keyhole::runtime {
namespace {

struct World {
  std::atomic<int> alive{0}, made{0}, running{0}, most_running{0}, calls{0};
  Status fault = Status::ok;
  bool no_workspaces = false;
  std::atomic<int> logged{0};
  std::string text;

  Log log() {
    return {[](void* user, int32_t, const char* t) {
              auto* world = static_cast<World*>(user);
              ++world->logged;
              world->text = t;
            },
            this};
  }
  void work() {
    ++calls;
    const int now = ++running;
    int most = most_running;
    while (now > most && !most_running.compare_exchange_weak(most, now)) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    --running;
    if (fault != Status::ok) throw Error(fault, "planted");
  }
};

class Search final : public gpu::NeighbourSearch {
 public:
  explicit Search(World& world) : world_(world) {
    if (world.no_workspaces) throw Error(Status::out_of_device_memory, "none left");
    ++world_.alive;
    ++world_.made;
  }
  ~Search() override { --world_.alive; }
  void run(const gpu::NeighbourTask& task, const gpu::NeighbourLists& lists) override {
    EXPECT_FALSE(busy_.exchange(true)) << "two threads in one workspace";
    try {
      world_.work();
    } catch (...) {
      busy_ = false;
      throw;
    }
    for (size_t q = 0; q < task.queries.tokens; ++q) {
      lists.counts[q] = 1;
      lists.ids[q * task.most] = static_cast<uint32_t>(task.limits != nullptr ? task.limits[q] : 7);
    }
    busy_ = false;
  }
  [[nodiscard]] gpu::NeighbourFigures figures() const override { return {}; }
  [[nodiscard]] size_t bytes() const override { return 0; }

 private:
  World& world_;
  std::atomic<bool> busy_{false};
};

class Clusters final : public gpu::KMeans {
 public:
  explicit Clusters(World& world) : world_(world) {}
  void train(const gpu::KMeansPoints& points, const gpu::KMeansTraining& training, float* centroids,
             uint32_t* labels) override {
    world_.work();
    EXPECT_TRUE(training.spherical);
    EXPECT_EQ(training.seed, 9U);
    centroids[0] = static_cast<float>(points.count);
    labels[0] = training.iterations;
  }
  void assign(const gpu::KMeansPoints&, const float*, const float*, size_t, uint32_t*) override {}
  [[nodiscard]] size_t bytes() const override { return 0; }

 private:
  World& world_;
};

class Workspaces final : public gpu::Device {
 public:
  explicit Workspaces(World& world) : world_(&world) {}
  const std::string& name() const override { return name_; }
  bool has(gpu::DevicePart part) const override { return part == gpu::DevicePart::builds; }
  std::unique_ptr<gpu::Resident> make_resident(
      const gpu::ResidentShape&, const std::shared_ptr<gpu::SessionOnDevice>&) const override {
    return nullptr;
  }
  std::unique_ptr<gpu::NeighbourSearch> make_neighbours(
      const gpu::NeighbourConfig&) const override {
    return std::make_unique<Search>(*world_);
  }
  std::unique_ptr<gpu::KMeans> make_kmeans(const gpu::KMeansConfig&) const override {
    return std::make_unique<Clusters>(*world_);
  }

 private:
  World* world_;
  std::string name_ = "workspaces";
};

std::shared_ptr<const gpu::Device> device(World& world) {
  return std::make_shared<const Workspaces>(world);
}

// Large enough to be worth it; the numbers are never read.
struct Task {
  std::vector<uint32_t> rows = std::vector<uint32_t>(4096 * 4),
                        counts = std::vector<uint32_t>(4096);
  std::vector<uint32_t> limits = std::vector<uint32_t>(4096, 5);
  index::NearestTask task;
  Task() {
    task.keys = dense_rows(nullptr, 65536, 128, DType::f16);
    task.queries = dense_rows(nullptr, 4096, 128, DType::f32);
    task.limits = limits.data();
    task.most = 4;
  }
  bool run(index::Accelerator& accelerator) {
    return accelerator.nearest_keys(task, {rows.data(), counts.data()});
  }
};

TEST(GpuAccelerator, ThreadsShareTwoWorkspaces) {
  World world;
  GpuAccelerator accelerator(device(world), world.log());
  std::vector<std::thread> threads;
  std::atomic<int> done{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] {
      Task task;
      for (int i = 0; i < 5; ++i) {
        done += task.run(accelerator) ? 1 : 0;
        EXPECT_EQ(task.rows[4], 5U);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(done, 30);
  EXPECT_EQ(world.most_running, 2);
  EXPECT_EQ(world.made, 2);
  EXPECT_EQ(world.alive, 2);
  accelerator.release();
  EXPECT_EQ(world.alive, 0);
  Task task;
  EXPECT_TRUE(task.run(accelerator));
  EXPECT_EQ(world.alive, 1);
  EXPECT_EQ(world.logged, 0);
}

TEST(GpuAccelerator, WhatIsSmallOrUnusualIsDeclined) {
  World world;
  GpuAccelerator accelerator(device(world), world.log());
  Task task;
  task.task.most = 129;
  EXPECT_FALSE(task.run(accelerator));
  task.task.most = 4;
  task.task.keys.tokens = 100;
  EXPECT_FALSE(task.run(accelerator));
  float centroid = 0.0F;
  uint32_t label = 0;
  index::KMeansTask small;
  small.n = 100;
  small.dim = 64;
  small.config = {.clusters = 4, .iterations = 3};
  EXPECT_FALSE(accelerator.kmeans(small, {&centroid, &label}));
  EXPECT_EQ(world.calls, 0);
  EXPECT_EQ(world.logged, 0);
}

TEST(GpuAccelerator, KMeansPassesThrough) {
  World world;
  GpuAccelerator accelerator(device(world), world.log());
  float centroid = 0.0F;
  uint32_t label = 0;
  index::KMeansTask task;
  task.n = 100000;
  task.dim = 64;
  task.config = {
      .clusters = 100, .iterations = 3, .nearness = index::Nearness::inner_product, .seed = 9};
  EXPECT_TRUE(accelerator.kmeans(task, {&centroid, &label}));
  EXPECT_EQ(centroid, 100000.0F);
  EXPECT_EQ(label, 3U);
}

TEST(GpuAccelerator, LackOfMemoryIsToldOnceAndTriedAgain) {
  World world;
  GpuAccelerator accelerator(device(world), world.log());
  world.fault = Status::out_of_device_memory;
  Task task;
  EXPECT_FALSE(task.run(accelerator));
  EXPECT_FALSE(task.run(accelerator));
  EXPECT_EQ(world.alive, 0);  // a workspace that failed gives back what it held
  EXPECT_EQ(world.logged, 1);
  EXPECT_NE(world.text.find("planted"), std::string::npos);
  world.fault = Status::ok;
  EXPECT_TRUE(task.run(accelerator));
  EXPECT_EQ(world.logged, 1);
}

TEST(GpuAccelerator, WorkspacesThatCannotBeMadeLeaveNobodyWaiting) {
  World world;
  world.no_workspaces = true;
  GpuAccelerator accelerator(device(world), world.log());
  Task task;
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(task.run(accelerator));
  world.no_workspaces = false;
  EXPECT_TRUE(task.run(accelerator));
}

TEST(GpuAccelerator, ABrokenDeviceIsLeftAlone) {
  World world;
  GpuAccelerator accelerator(device(world), world.log());
  world.fault = Status::device_error;
  Task task;
  EXPECT_FALSE(task.run(accelerator));
  world.fault = Status::ok;
  EXPECT_FALSE(task.run(accelerator));
  EXPECT_EQ(world.calls, 1);
  EXPECT_EQ(world.logged, 1);
}

TEST(GpuAccelerator, BuildsOnACudaDevice) {
  if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
  World world;
  const auto accelerator = std::make_unique<GpuAccelerator>(gpu::make_cuda_device({}), world.log());
  std::mt19937 random(5);
  constexpr size_t kKeys = 6000;
  index::test::Keys keys(kKeys, 64, DType::f16);
  keys.put(0, index::test::attention_keys(kKeys, 64, random));
  const std::vector<float> training = index::test::attention_queries(2000, 64, keys, random);
  const auto build = [&](const char* spec, index::Accelerator* with) {
    index::Context context = index::test::context();
    context.accelerator = with;
    auto built = index::make_index(spec, 64, DType::f16, context);
    index::BuildInput input;
    input.keys = keys.view();
    input.queries.rows = dense_rows(training.data(), 2000, 64, DType::f32);
    built->build(input, {});
    return built;
  };
  const std::vector<float> asked = index::test::attention_queries(64, 64, keys, random);
  const auto recall = [&](const index::Index& built) {
    double found = 0.0;
    for (size_t q = 0; q < 64; ++q) {
      const std::vector<float> one(asked.begin() + static_cast<std::ptrdiff_t>(q * 64),
                                   asked.begin() + static_cast<std::ptrdiff_t>((q + 1) * 64));
      const auto answer = index::test::search(built, one, 64, 20);
      const auto best = index::test::truth(keys, one.data());
      for (size_t i = 0; i < 20; ++i) {
        const auto& ids = answer.heads[0].ids;
        found += std::count(ids.begin(), ids.end(), best[i].second) != 0 ? 1.0 : 0.0;
      }
    }
    return found / (64 * 20);
  };
  for (const char* spec : {"roargraph:M=8,ef=120", "ivf:C=128,probe=12", "saap:C=128,probe=12"}) {
    SCOPED_TRACE(spec);
    const auto theirs = build(spec, accelerator.get());
    EXPECT_GE(recall(*theirs), recall(*build(spec, nullptr)) - 0.1);
    const auto again = build(spec, accelerator.get());
    EXPECT_EQ(again->info().diagnostics, theirs->info().diagnostics);
    EXPECT_EQ(recall(*again), recall(*theirs));
  }
  accelerator->release();
  EXPECT_EQ(world.logged, 0) << world.text;
}

}  // namespace
}  // namespace keyhole::runtime
