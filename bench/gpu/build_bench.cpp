// Builds of many heads, as a session's pool threads make them, with and without the device's help: wall time, and the
// seconds of all threads by stage.
//   build_bench [keys per head] [threads] [heads] [host heads]
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gpu/device.h"
#include "index/graph/guided_graph.h"
#include "index/graph/training_neighbours.h"
#include "index/scan/key_codes.h"
#include "index/tail/tail_tree.h"
#include "index/types/factory.h"
#include "runtime/engine/gpu_accelerator.h"
#include "tests/index/synthetic.h"

namespace {

using namespace keyhole;         // NOLINT
using namespace keyhole::index;  // NOLINT
using Clock = std::chrono::steady_clock;

constexpr uint32_t kDim = 128;
constexpr double kHeadsOfAModel = 32 * 8;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Seconds of several threads.
class Seconds {
 public:
  void add(double s) { nanoseconds_ += static_cast<uint64_t>(s * 1e9); }
  [[nodiscard]] double sum() const { return static_cast<double>(nanoseconds_) * 1e-9; }

 private:
  std::atomic<uint64_t> nanoseconds_{0};
};

/// Another accelerator, and how long its callers waited for it.
class Timed final : public Accelerator {
 public:
  explicit Timed(Accelerator* inner) : inner_(inner) {}
  bool nearest_keys(const NearestTask& task, const NearestLists& lists) override {
    const auto start = Clock::now();
    const bool done = inner_ != nullptr && inner_->nearest_keys(task, lists);
    (task.thin != 0 ? keys : queries).add(since(start));
    return done;
  }
  bool kmeans(const KMeansTask& task, const KMeansResult& result) override {
    const auto start = Clock::now();
    const bool done = inner_ != nullptr && inner_->kmeans(task, result);
    clusters.add(since(start));
    return done;
  }
  void release() override {
    if (inner_ != nullptr) inner_->release();
  }
  Seconds keys, queries, clusters;

 private:
  Accelerator* inner_;
};

struct Head {
  std::vector<float> numbers, training;
  std::vector<std::byte> bytes;
  std::vector<uint32_t> positions;
  RowsView keys;
  TrainingQueries queries;

  Head(size_t n, const cpu::Kernels& kernels) {
    std::mt19937 random(1);
    numbers = index::test::attention_keys(n, kDim, random);
    bytes.resize(n * kDim * 2);
    kernels.from_f32[static_cast<size_t>(DType::f16)](numbers.data(), bytes.data(), n * kDim);
    keys = dense_rows(bytes.data(), n, kDim, DType::f16);
    constexpr size_t kQueries = 8192;
    training = index::test::attention_queries(
        kQueries, kDim, n,
        [&](size_t i, float* out) { std::copy_n(numbers.data() + i * kDim, kDim, out); }, random);
    for (size_t i = 0; i < kQueries; ++i) {
      positions.push_back(static_cast<uint32_t>((i + 1) * n / kQueries));
    }
    queries = {dense_rows(training.data(), kQueries, kDim, DType::f32), positions.data()};
  }
};

void build_graph(const Context& context, const Head& head, Seconds& neighbours, Seconds& lift,
                 Seconds& graph, Seconds& coding) {
  const Progress none;
  ProgressMeter meter(none, 1.0);
  auto start = Clock::now();
  const auto lap = [&](Seconds& to) {
    to.add(since(start));
    start = Clock::now();
  };
  // The queries that index/types/roargraph.cpp chooses with its defaults.
  const std::vector<uint32_t> chosen = choose_queries(head.queries, 4096);
  const Neighbours found = nearest_keys(context, head.keys, 0, head.queries, chosen, 100, meter);
  lap(neighbours);
  const LiftedKeys lifted(*context.kernels, head.keys,
                          Lift::of(*context.kernels, head.keys, {}, 0.999), {});
  lap(lift);
  const GuidedGraph built = build_guided(context, lifted, found, {.m = 16, .beam = 100}, meter);
  lap(graph);
  KeyCodes codes(*context.kernels, kDim);
  codes.build(head.keys, 2 * head.keys.tokens);
  lap(coding);
}

void measure(const char* who, const Head& head, uint32_t threads, uint32_t heads,
             Accelerator* device) {
  if (heads == 0) return;
  cpu::Pool pool({.threads = threads});
  Timed timed(device);
  Context context;
  context.kernels = &cpu::select_kernels();
  context.pool = &pool;
  context.accelerator = device != nullptr ? &timed : nullptr;
  const auto run = [&](const char* what, const auto& build) {
    const auto start = Clock::now();
    pool.run(heads, [&](uint32_t, uint32_t) { build(); });
    const double wall = since(start);
    std::printf(
        "%-5s %-9s %3u heads of %zu keys, %2u threads: %8.3f s, %6.1f ms a head, 256 heads %6.1f "
        "s\n",
        who, what, heads, head.keys.tokens, threads, wall, wall / heads * 1e3,
        wall / heads * kHeadsOfAModel);
  };
  Seconds neighbours, lift, graph, coding;
  run("roargraph", [&] { build_graph(context, head, neighbours, lift, graph, coding); });
  std::printf(
      "      ms of a thread per head: neighbours of queries %.1f, of keys %.1f, lift %.1f, links "
      "%.1f, codes %.1f\n",
      neighbours.sum() / heads * 1e3, timed.keys.sum() / heads * 1e3, lift.sum() / heads * 1e3,
      (graph.sum() - timed.keys.sum()) / heads * 1e3, coding.sum() / heads * 1e3);
  run("ivf", [&] {
    const auto ivf = make_index("ivf", kDim, DType::f16, context);
    BuildInput input;
    input.keys = head.keys;
    ivf->build(input, {});
  });
  const double trained = timed.clusters.sum();
  run("tail", [&] {
    TailTree tail(context, kDim, DType::f16, TailParams{});
    tail.build({head.keys, head.keys}, {});
  });
  std::printf("      ms of a thread per head: k-means on the device %.1f of ivf, %.1f of tail\n",
              trained / heads * 1e3, (timed.clusters.sum() - trained) / heads * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int at, size_t otherwise) {
    return argc > at ? std::strtoul(argv[at], nullptr, 10) : otherwise;
  };
  const size_t keys = number(1, 131072);
  const auto threads =
      static_cast<uint32_t>(number(2, std::max(1U, std::thread::hardware_concurrency())));
  const auto heads = static_cast<uint32_t>(number(3, 4UL * threads));
  const auto host_heads = static_cast<uint32_t>(number(4, 0));
  const Head head(keys, cpu::select_kernels());
  if (gpu::cuda_devices().empty()) {
    std::printf("%s\n", gpu::cuda_status().c_str());
  } else {
    const runtime::Log log{[](void*, int32_t, const char* text) { std::printf("%s\n", text); },
                           nullptr};
    const auto device = std::make_unique<runtime::GpuAccelerator>(gpu::make_cuda_device({}), log);
    measure("warm", head, threads, 2, device.get());
    measure("cuda", head, threads, heads, device.get());
  }
  measure("host", head, threads, host_heads, nullptr);
  return 0;
}
