// What a tail costs a step (g = 4 heads, d = 128, fp16, one thread): the estimate beside attention over 2 % of
// the keys, which is what a step reads otherwise.
//
//   x_floor       time of the estimate (begin and state, 300 or so rows read) / time of attending 2 % of the rows
//   begin_us      of it, ranking and dividing partitions, and taking out what was read
//   state_us      of it, the sum of values
//   coarse        partitions whose means are looked at in every step
//   build_s       one thread
//
// Rows read are the 100 best of each head. The keys are synthetic (tests/index/synthetic.h).
#include <benchmark/benchmark.h>

#include <map>
#include <set>

#include "bench/cpu/beside_floor.h"
#include "index/scan/topk.h"
#include "index/tail/tail_estimate.h"
#include "tests/index/synthetic.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kDim = 128;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kTop = 100;
constexpr size_t kQueries = 16;
constexpr size_t kRowBytes = kDim * sizeof(uint16_t);
constexpr float kScale = 0.08838834764F;

Context context() { return {&cpu::select_kernels(), nullptr}; }

/// What a search has found for one group.
struct Read {
  std::vector<uint32_t> rows;
  std::vector<float> scores;  // [kGroup, rows]
  std::vector<float> seen = std::vector<float>(kGroup);
  std::vector<float> caps = std::vector<float>(kGroup);
};

struct Data {
  std::vector<std::byte> keys, values;
  std::vector<float> queries;  // [kQueries, kGroup, kDim]
  std::vector<Read> read;
  std::unique_ptr<TailTree> tree;

  [[nodiscard]] static RowsView view(const std::vector<std::byte>& bytes) {
    return dense_rows(bytes.data(), bytes.size() / kRowBytes, kDim, DType::f16);
  }
  [[nodiscard]] KvView kv() const { return {view(keys), view(values)}; }
  [[nodiscard]] const float* group(size_t i) const { return queries.data() + i * kGroup * kDim; }
};

std::vector<std::byte> as_f16(const std::vector<float>& x) {
  std::vector<std::byte> bytes(x.size() * sizeof(uint16_t));
  context().kernels->from_f32[static_cast<size_t>(DType::f16)](x.data(), bytes.data(), x.size());
  return bytes;
}

Read read_best(const Data& data, size_t i) {
  const cpu::Kernels& kernels = *context().kernels;
  const size_t n = data.kv().keys.tokens;
  const auto score = [&](const uint32_t* ids, size_t count, std::vector<float>& out) {
    out.resize(kGroup * count);
    kernels.score[static_cast<size_t>(DType::f16)]({.queries = data.group(i),
                                                    .group = kGroup,
                                                    .keys = data.kv().keys,
                                                    .ids = ids,
                                                    .count = count,
                                                    .scores = out.data(),
                                                    .score_stride = count});
  };
  std::vector<float> all;
  score(nullptr, n, all);
  Read read;
  std::set<uint32_t> rows;
  std::vector<uint64_t> ranks(n);
  for (uint32_t h = 0; h < kGroup; ++h) {
    for (uint32_t row = 0; row < n; ++row) ranks[row] = pack_rank(all[h * n + row], row);
    select_ranks(ranks.data(), n, kTop);
    const uint64_t last = *std::min_element(ranks.begin(), ranks.begin() + kTop);
    read.caps[h] = rank_score(last) * kScale;
    for (uint32_t j = 0; j < kTop; ++j) rows.insert(rank_row(ranks[j]));
  }
  read.rows.assign(rows.begin(), rows.end());
  score(read.rows.data(), read.rows.size(), read.scores);
  for (uint32_t h = 0; h < kGroup; ++h) {
    read.seen[h] = kernels.log_sum_exp(read.scores.data() + h * read.rows.size(), read.rows.size(),
                                       {kScale, 0.0F});
  }
  return read;
}

const Data& data_of(size_t n) {
  static std::map<size_t, Data> all;
  const auto [at, is_new] = all.try_emplace(n);
  Data& data = at->second;
  if (!is_new) return data;
  std::mt19937 random(1);
  const std::vector<float> keys = test::attention_keys(n, kDim, random);
  data.keys = as_f16(keys);
  data.values = as_f16(test::gaussian(n, kDim, random));
  const auto row = [&](size_t i, float* out) { std::copy_n(keys.data() + i * kDim, kDim, out); };
  data.queries = test::attention_queries(kQueries * kGroup, kDim, n, row, random);
  for (size_t i = 0; i < kQueries; ++i) data.read.push_back(read_best(data, i));
  data.tree = std::make_unique<TailTree>(context(), kDim, DType::f16, TailParams{});
  data.tree->build(data.kv(), {});
  return data;
}

void estimate(benchmark::State& state, TailMode mode) {
  const auto n = static_cast<size_t>(state.range(0));
  const Data& data = data_of(n);
  const cpu::Kernels& kernels = *context().kernels;
  TailEstimate tail;
  tail.reserve(*data.tree, kGroup);
  std::mt19937 random(2);
  std::vector<uint32_t> ids(n / 50);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(random() % n);
  std::vector<float> o(kGroup * kDim);
  std::vector<float> lse(kGroup);
  bench::BesideFloor timer(state);
  double begin = 0.0;
  double end = 0.0;
  double bytes = 0.0;
  size_t i = 0;
  for (auto _ : state) {
    const Read& read = data.read[i % kQueries];
    const float* queries = data.group(i % kQueries);
    const TailQuery query = {.queries = queries,
                             .group = kGroup,
                             .logits = {kScale, 0.0F},
                             .mode = mode,
                             .seen_lse = read.seen.data(),
                             .caps = read.caps.data()};
    const ReadRows rows = {read.rows, read.scores.data(), read.rows.size()};
    const auto scan = [&] {
      cpu::attend_ids(kernels, data.kv(), ids, queries, kGroup, {kScale, 0.0F},
                      {o.data(), lse.data()});
    };
    timer.iterate(scan, [&] {
      begin +=
          bench::BesideFloor::thread_seconds([&] { tail.begin(*data.tree, kernels, query, rows); });
      end += bench::BesideFloor::thread_seconds([&] {
        tail.state(data.kv().values, {o.data(), lse.data()});
      });
    });
    bytes += static_cast<double>(tail.bytes_read());
    ++i;
  }
  const auto steps = static_cast<double>(i);
  timer.report(0.0, 1.0);
  state.counters["begin_us"] = begin / steps * 1e6;
  state.counters["state_us"] = end / steps * 1e6;
  state.counters["bytes"] = bytes / steps;
  state.counters["read"] = static_cast<double>(data.read[0].rows.size());
  state.counters["coarse"] = static_cast<double>(data.tree->coarse().count());
  state.counters["build_s"] = data.tree->build_seconds();
  state.counters["bytes/key"] = static_cast<double>(data.tree->bytes()) / static_cast<double>(n);
}

void sizes(benchmark::internal::Benchmark* b) {
  b->Arg(32768)->Arg(131072)->Arg(1048576)->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(estimate, second, TailMode::second)->Apply(sizes);
BENCHMARK_CAPTURE(estimate, mean, TailMode::mean)->Apply(sizes);

}  // namespace
}  // namespace keyhole::index
