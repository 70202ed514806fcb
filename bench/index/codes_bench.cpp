// Attention by codes (index/scan/code_scan.h), group of 4, d = 128, 16 rows to be read exactly, beside plain reading of
// as many bytes; and encoding.
//   pass     one KV head, one thread
//   threads  32 KV heads (4 layers of 8) that no cache holds, on so many threads; the floor reads on as many
//
//   x_floor   time of the pass / time of reading the codes
//   ns/item   per row
#include <benchmark/benchmark.h>

#include <random>

#include "bench/cpu/beside_floor.h"
#include "bench/cpu/floors.h"
#include "bench/index/code_pass.h"
#include "cpu/pool.h"
#include "index/scan/code_scan.h"
#include "tests/index/synthetic.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kDim = 128;
constexpr uint32_t kGroup = 4;

struct Data {
  explicit Data(size_t n) : rows(n * kDim * 2) {
    std::mt19937 random(1);
    const std::vector<float> keys = test::attention_keys(n, kDim, random);
    cpu::select_kernels().from_f32[static_cast<size_t>(DType::f16)](keys.data(), rows.data(),
                                                                    keys.size());
    std::normal_distribution<float> normal;
    for (float& q : queries) q = normal(random);
  }
  [[nodiscard]] KvView kv() const {
    const RowsView view = dense_rows(rows.data(), rows.size() / (kDim * 2), kDim, DType::f16);
    return {view, view};
  }
  std::vector<std::byte> rows;
  std::vector<float> queries = std::vector<float>(kGroup * kDim);
};

void encode(benchmark::State& state) {
  const Data data(static_cast<size_t>(state.range(0)));
  const auto bits = static_cast<uint32_t>(state.range(1));
  const cpu::Kernels& kernels = cpu::select_kernels();
  const Balance balance = learn_balance(kernels, data.kv(), {});
  for (auto _ : state) {
    KvCodes codes({kDim, bits, bits}, balance);
    codes.extend(kernels, data.kv());
    benchmark::DoNotOptimize(codes.block(0));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void pass(benchmark::State& state, cpu::Level level) {
  const cpu::Kernels* kernels = cpu::kernels_for(level);
  if (kernels == nullptr) return state.SkipWithError("this machine lacks the level");
  const Data data(static_cast<size_t>(state.range(0)));
  const auto bits = static_cast<uint32_t>(state.range(1));
  KvCodes codes({kDim, bits, bits}, learn_balance(*kernels, data.kv(), {}));
  codes.extend(*kernels, data.kv());
  const CodeSearch search{kernels, {&codes}, data.queries.data(), kGroup, {0.088F, 0.0F}, 16};
  bench::CodePass pass(codes.shape(), kGroup, 16);
  std::vector<float> o(kGroup * kDim), lse(kGroup), exact(kGroup, 0.0F);
  const size_t bytes = codes.blocks() * codes.shape().block_bytes();
  bench::BesideFloor timer(state);
  for (auto _ : state) {
    timer.iterate(
        [&] { benchmark::DoNotOptimize(bench::read_all(codes.block(0), bytes / 256 * 256)); },
        [&] {
          benchmark::DoNotOptimize(pass.choose(search));
          pass.scan.finish(search, exact.data(), pass.parts, {o.data(), lse.data()});
        });
  }
  timer.report(static_cast<double>(bytes), static_cast<double>(codes.count()));
}

void threads(benchmark::State& state, cpu::Level level) {
  constexpr size_t kHeads = 32;
  const cpu::Kernels* kernels = cpu::kernels_for(level);
  if (kernels == nullptr) return state.SkipWithError("this machine lacks the level");
  const auto workers = static_cast<uint32_t>(state.range(0));
  const auto bits = static_cast<uint32_t>(state.range(1));
  // The heads are alike, and each has memory of its own. Blocks of one part of a pass, over and over.
  const size_t blocks = 512;
  const Data data(24 * kCodeBlock);
  KvCodes few({kDim, bits, bits}, learn_balance(*kernels, data.kv(), {}));
  few.extend(*kernels, data.kv());
  const size_t size = few.shape().block_bytes();
  std::vector<std::byte> all(blocks * size);
  for (size_t b = 0; b < blocks; ++b) {
    std::copy_n(few.block(b % few.blocks()), size, all.begin() + static_cast<long>(b * size));
  }
  std::vector<KvCodes> heads;
  for (size_t h = 0; h < kHeads; ++h) heads.emplace_back(few.shape(), few.balance(), all);
  cpu::Pool pool({.threads = workers});
  std::vector<CodeScan> scans(workers);
  std::vector<CodeParts> parts(kHeads);
  for (CodeScan& s : scans) s.reserve(few.shape(), kGroup, 16);
  for (CodeParts& p : parts) p.reserve(few.shape(), kGroup, 16);
  const CodeCut cut = code_cut(blocks);
  const auto tasks = static_cast<uint32_t>(kHeads * cut.parts);
  bench::BesideFloor timer(state);
  for (auto _ : state) {
    const double floor = bench::BesideFloor::wall_seconds([&] {
      pool.run(tasks, [&](uint32_t task, uint32_t) {
        const size_t first = size_t{task % cut.parts} * cut.blocks;
        const size_t n = std::min<size_t>(cut.blocks, blocks - first) * size / 256 * 256;
        benchmark::DoNotOptimize(bench::read_all(heads[task / cut.parts].block(first), n));
      });
    });
    for (CodeParts& p : parts) p.begin();
    const double kernel = bench::BesideFloor::wall_seconds([&] {
      pool.run(tasks, [&](uint32_t task, uint32_t worker) {
        const size_t head = task / cut.parts;
        const CodeSearch search{kernels, {&heads[head]}, data.queries.data(),
                                kGroup,  {0.088F, 0.0F}, 16};
        scans[worker].scan(search, task % cut.parts, {}, parts[head]);
      });
    });
    timer.record(floor, kernel);
  }
  timer.report(static_cast<double>(kHeads * blocks * size),
               static_cast<double>(kHeads * blocks * kCodeBlock));
}

void teams(benchmark::internal::Benchmark* b) {
  for (const int64_t workers : {16, 8, 2, 1}) {
    for (const int64_t bits : {1, 2, 4}) b->Args({workers, bits});
  }
  b->UseManualTime()->Unit(benchmark::kMicrosecond);
}

void sizes(benchmark::internal::Benchmark* b) {
  for (const int64_t n : {6144, 32768, 131072}) {
    for (const int64_t bits : {1, 2, 4}) b->Args({n, bits});
  }
  b->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(pass, avx512vnni, cpu::Level::avx512vnni)->Apply(sizes);
BENCHMARK_CAPTURE(pass, avx512, cpu::Level::avx512)->Apply(sizes);
BENCHMARK_CAPTURE(pass, avx2, cpu::Level::avx2)->Apply(sizes);
BENCHMARK_CAPTURE(threads, avx512vnni, cpu::Level::avx512vnni)->Apply(teams);
BENCHMARK_CAPTURE(threads, avx2, cpu::Level::avx2)->Apply(teams);
BENCHMARK(encode)->Args({131072, 2})->Args({131072, 4})->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace keyhole::index
