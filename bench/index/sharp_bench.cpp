// Codes where logits spread by up to hundreds of nats (index/scan/code_scan_doubt.cpp): 32,768 keys of norm 100 with
// d = 128, a group of 4, 16 rows to be read exactly, one thread; beside plain reading of the codes' bytes. Arguments:
// the standard deviation of the logits times 10, bits, bias of the keys (tests/index/sharp_heads.h: 0 none, 1 all
// channels, 2 few, 3 turned by the position).
//
//   x_floor      time of the pass, with what it reads in doubt / time of reading the codes
//   error, lse   the largest of the group against exact attention in double: |o - o*| / |o*|, |lse - lse*|
//   rows         read exactly; all of them where codes cannot tell
//   sharp        heads of the group that have 0.9 of their weight on 16 rows or fewer
#include <benchmark/benchmark.h>

#include "bench/cpu/beside_floor.h"
#include "bench/cpu/floors.h"
#include "bench/index/code_pass.h"
#include "tests/index/sharp_heads.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kDim = 128;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kExactRows = 16;

void sharp(benchmark::State& state) {
  const auto bits = static_cast<uint32_t>(state.range(1));
  const auto bias = static_cast<test::Bias>(state.range(2));
  test::SharpHead head({kDim, 32768, bias, 100.0F, false}, 1);
  const cpu::Kernels& kernels = cpu::select_kernels();
  const std::vector<float> train = head.queries(64, 1.0);
  const RowsView queries = dense_rows(train.data(), 64, kDim, DType::f32);
  KvCodes codes({kDim, bits, bits}, learn_balance(kernels, head.kv(), queries));
  codes.extend(kernels, head.kv());
  const std::vector<float> q = head.queries(kGroup, static_cast<double>(state.range(0)) / 10.0);
  const LogitParams logits{1.0F / std::sqrt(static_cast<float>(kDim)), 0.0F};
  const CodeSearch search{&kernels, {&codes}, q.data(), kGroup, logits, kExactRows, nullptr};
  bench::CodePass pass(codes.shape(), kGroup, kExactRows);
  std::vector<float> o(2 * kGroup * kDim), lse(2 * kGroup);
  const StateView exact{o.data(), lse.data()}, coded{o.data() + kGroup * kDim, &lse[kGroup]};
  CodeDoubt doubt;
  const size_t bytes = codes.blocks() * codes.shape().block_bytes();
  bench::BesideFloor timer(state);
  for (auto _ : state) {
    timer.iterate(
        [&] { benchmark::DoNotOptimize(bench::read_all(codes.block(0), bytes / 256 * 256)); },
        [&] {
          const auto rows = pass.choose(search);
          cpu::attend_ids(kernels, head.kv(), rows, q.data(), kGroup, logits, exact);
          pass.scan.finish(search, exact.lse, pass.parts, coded);
          doubt = pass.scan.settle(search, head.kv(), pass.parts, exact, coded);
        });
  }
  timer.report(static_cast<double>(bytes), static_cast<double>(codes.count()));
  const StateView both[] = {exact, coded};
  cpu::merge_states(both, kGroup, kDim, exact);
  double error = 0.0, lse_error = 0.0, count = 0.0;
  for (uint32_t h = 0; h < kGroup; ++h) {
    const test::SharpTruth truth(head, q.data() + h * kDim, logits);
    error = std::max(error, truth.error(exact.o + h * kDim));
    lse_error = std::max(lse_error, std::abs(double{exact.lse[h]} - truth.lse));
    count += truth.is_sharp() ? 1.0 : 0.0;
  }
  state.counters["error"] = error;
  state.counters["lse"] = lse_error;
  state.counters["rows"] = kExactRows + doubt.more;
  state.counters["sharp"] = count;
}

void spreads(benchmark::internal::Benchmark* b) {
  for (const int64_t bias : {0, 3}) {
    for (const int64_t bits : {4, 2, 1}) {
      for (const int64_t tenths : {5, 10, 20, 30, 40, 50, 80, 120, 200, 500, 1200, 5000}) {
        b->Args({tenths, bits, bias});
      }
    }
  }
  b->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK(sharp)->Apply(spreads);

}  // namespace
}  // namespace keyhole::index
