// Attention by codes (index/scan/code_scan.h): one pass over the codes of a KV head (group of 4, d = 128, 16 rows to be
// read exactly, one thread), beside plain reading of as many bytes; and encoding.
//
//   x_floor   time of the pass / time of reading the codes
//   ns/item   per row
#include <benchmark/benchmark.h>

#include <random>

#include "bench/cpu/beside_floor.h"
#include "bench/cpu/floors.h"
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
    const RowsView view{rows.data(), kDim * 2, rows.size() / (kDim * 2), kDim, DType::f16};
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
  const CodeSearch search{kernels, &codes, data.queries.data(), kGroup, {0.088F, 0.0F}, 16};
  CodeParts parts;
  CodeScan scan;
  parts.reserve(codes.shape(), kGroup, 16);
  scan.reserve(codes.shape(), kGroup, 16);
  std::vector<float> o(kGroup * kDim), lse(kGroup), exact(kGroup, 0.0F);
  const size_t bytes = codes.blocks() * codes.shape().block_bytes();
  bench::BesideFloor timer(state);
  for (auto _ : state) {
    timer.iterate(
        [&] { benchmark::DoNotOptimize(bench::read_all(codes.block(0), bytes / 256 * 256)); },
        [&] {
          for (uint32_t p = 0; p < code_cut(codes.blocks()).parts; ++p) {
            scan.scan(search, p, {}, parts);
          }
          benchmark::DoNotOptimize(scan.choose(search, parts));
          scan.finish(search, exact.data(), parts, {o.data(), lse.data()});
        });
  }
  timer.report(static_cast<double>(bytes), static_cast<double>(codes.count()));
}

void sizes(benchmark::internal::Benchmark* b) {
  for (const int64_t n : {32768, 131072}) {
    for (const int64_t bits : {1, 2, 4}) b->Args({n, bits});
  }
  b->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(pass, avx512vnni, cpu::Level::avx512vnni)->Apply(sizes);
BENCHMARK_CAPTURE(pass, avx512, cpu::Level::avx512)->Apply(sizes);
BENCHMARK_CAPTURE(pass, avx2, cpu::Level::avx2)->Apply(sizes);
BENCHMARK(encode)->Args({131072, 2})->Args({131072, 4})->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace keyhole::index
