// One group search (g = 4 heads, d = 128, fp16 keys, k = 100, one thread) of each index type, beside the time
// that plain sequential reading of as many bytes takes.
//
//   x_floor       time of the search / time of reading bytes_read
//   scan          share of the keys that were scored, mean over heads
//   recall        share of flat's 100 rows that were found
//   GB/s          bytes_read per second
//   build_s       one thread
//
// The keys are synthetic (tests/index/synthetic.h): speed carries over to real ones, recall does not.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "bench/cpu/beside_floor.h"
#include "bench/cpu/floors.h"
#include "index/types/factory.h"
#include "tests/index/synthetic.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kDim = 128;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kTop = 100;
constexpr size_t kQueries = 64;
constexpr size_t kRowBytes = kDim * sizeof(uint16_t);

Context context() { return {&cpu::select_kernels(), nullptr}; }

struct Answer {
  std::vector<uint32_t> ids = std::vector<uint32_t>(kGroup * kTop);
  std::vector<float> scores = std::vector<float>(kGroup * kTop);
  std::vector<uint32_t> counts = std::vector<uint32_t>(kGroup);
  Hits hits{ids.data(), scores.data(), counts.data()};
};

struct Data {
  std::vector<std::byte> keys;
  std::vector<float> queries;  // [kQueries, kGroup, kDim]
  std::vector<Answer> truth;

  [[nodiscard]] RowsView view() const {
    return dense_rows(keys.data(), keys.size() / kRowBytes, kDim, DType::f16);
  }
  [[nodiscard]] const float* group(size_t i) const {
    return queries.data() + (i % kQueries) * kGroup * kDim;
  }
};

std::unique_ptr<Index> build(const std::string& spec, const Data& data) {
  auto index = make_index(spec, kDim, DType::f16, context());
  BuildInput input;
  input.keys = data.view();
  index->build(input, {});
  return index;
}

const Data& data_of(size_t n) {
  static std::map<size_t, Data> all;
  const auto [at, is_new] = all.try_emplace(n);
  Data& data = at->second;
  if (!is_new) return data;
  std::mt19937 random(1);
  const std::vector<float> keys = test::attention_keys(n, kDim, random);
  data.keys.resize(n * kRowBytes);
  context().kernels->from_f32[static_cast<size_t>(DType::f16)](keys.data(), data.keys.data(),
                                                               keys.size());
  const auto row = [&](size_t i, float* out) { std::copy_n(keys.data() + i * kDim, kDim, out); };
  data.queries = test::attention_queries(kQueries * kGroup, kDim, n, row, random);
  const auto flat = build("flat", data);
  const auto scratch = flat->make_scratch(kGroup, kTop);
  for (size_t i = 0; i < kQueries; ++i) {
    Answer& answer = data.truth.emplace_back();
    flat->search(data.group(i), kGroup, kTop, *scratch, answer.hits);
  }
  return data;
}

double recall(const Answer& found, const Answer& truth) {
  size_t hits = 0;
  for (size_t h = 0; h < kGroup; ++h) {
    const auto begin = found.ids.begin() + static_cast<std::ptrdiff_t>(h * kTop);
    const auto end = begin + found.counts[h];
    for (size_t i = 0; i < kTop; ++i) {
      hits += static_cast<size_t>(std::count(begin, end, truth.ids[h * kTop + i]));
    }
  }
  return static_cast<double>(hits) / (kGroup * kTop);
}

void search(benchmark::State& state, const std::string& spec) {
  const auto n = static_cast<size_t>(state.range(0));
  const Data& data = data_of(n);
  const auto index = build(spec, data);
  const auto scratch = index->make_scratch(kGroup, kTop);

  double found = 0.0;
  double scored = 0.0;
  double bytes = 0.0;
  Answer answer;
  for (size_t i = 0; i < kQueries; ++i) {
    index->search(data.group(i), kGroup, kTop, *scratch, answer.hits);
    found += recall(answer, data.truth[i]) / kQueries;
    scored += static_cast<double>(answer.hits.keys_scored) / (kQueries * kGroup);
    bytes += static_cast<double>(answer.hits.bytes_read) / kQueries;
  }

  // The floor reads as many bytes in one stream from as large an array; more than all keys, several times.
  const size_t floor_bytes = static_cast<size_t>(bytes) / 256 * 256;
  bench::BesideFloor timer(state);
  size_t i = 0;
  for (auto _ : state) {
    const auto floor = [&] {
      uint64_t sum = 0;
      for (size_t rest = floor_bytes; rest > 0;) {
        const size_t piece = std::min(rest, data.keys.size());
        sum += bench::read_all(data.keys.data(), piece);
        rest -= piece;
      }
      benchmark::DoNotOptimize(sum);
    };
    timer.iterate(floor,
                  [&] { index->search(data.group(i), kGroup, kTop, *scratch, answer.hits); });
    ++i;
  }
  timer.report(bytes, scored);
  const IndexInfo info = index->info();
  state.counters["scan"] = scored / static_cast<double>(n);
  state.counters["keys_scored"] = scored;
  state.counters["recall"] = found;
  state.counters["build_s"] = info.build_seconds;
  state.counters["bytes/key"] = static_cast<double>(info.bytes) / static_cast<double>(n);
}

void sizes(benchmark::internal::Benchmark* b) {
  b->Arg(32768)->Arg(131072)->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(search, flat, "flat")->Apply(sizes);
BENCHMARK_CAPTURE(search, ivf, "ivf")->Apply(sizes);
BENCHMARK_CAPTURE(search, ivf_narrow, "ivf:probe=32")->Apply(sizes);
BENCHMARK_CAPTURE(search, ivf_fine, "ivf:C=8192")->Apply(sizes);
// A quarter of the default beam of the build: these graphs are here for the speed of their search.
BENCHMARK_CAPTURE(search, hnsw, "hnsw:efc=50")->Apply(sizes);
BENCHMARK_CAPTURE(search, hnsw_narrow, "hnsw:efc=50,ef=100")->Apply(sizes);
BENCHMARK_CAPTURE(search, hnsw_wide, "hnsw:efc=50,ef=400")->Apply(sizes);

}  // namespace
}  // namespace keyhole::index
