// Streaming attention beside the plain read of the same bytes, one thread.
//
//   Streaming/<dtype>/<group>/<level>   131072 rows of K and V, d = 128, a new KV head every iteration:
//                                       8 heads are more than the last-level cache holds, so both come
//                                       from memory, as in a decoding step that visits every head
//   Cached/...                          2048 rows from the second-level cache: what the arithmetic costs
//   Gathered/...                        2048 rows by random ids, beside a bare prefetched read of such rows
//   Scored/...                          the same with inner products given: values only, beside a bare read of
//                                       the values
//   LogSumExp/<level>, KeepAbove/<level>  over 4 heads x 4096 scores; KeepAbove keeps a tenth. No floor
// `of_floor` is the share of the floor's bandwidth that the kernel reaches.
#include <cstring>
#include <memory>
#include <random>

#include "bench/cpu/beside_floor.h"
#include "bench/cpu/floors.h"
#include "cpu/attention.h"
#include "cpu/memory.h"

namespace keyhole::bench {
namespace {

using namespace keyhole::cpu;

constexpr uint32_t kDim = 128;
constexpr size_t kRows = 131072;
constexpr size_t kHeads = 8;
constexpr size_t kFloorAhead =
    32;  // rows that the gathered floor prefetches ahead: the best of 8, 16, 32

/// K and V of several heads, random values in fp16, bf16 or fp32.
class Cache {
 public:
  Cache(DType dtype, size_t rows, size_t heads)
      : dtype_(dtype),
        rows_(rows),
        keys_(heads * head_bytes() + kPadding),
        values_(heads * head_bytes() + kPadding) {
    fill(keys_, 1);
    fill(values_, 2);
  }
  [[nodiscard]] size_t head_bytes() const { return rows_ * kDim * dtype_size(dtype_); }
  [[nodiscard]] KvView head(size_t h) const { return {view(keys_, h), view(values_, h)}; }

 private:
  // The buffers' first 2 MiB are on small pages.
  static constexpr size_t kPadding = size_t{2} << 20;

  [[nodiscard]] RowsView view(const ReservedBuffer& b, size_t h) const {
    return dense_rows(b.data() + kPadding + h * head_bytes(), rows_, kDim, dtype_);
  }
  void fill(const ReservedBuffer& b, uint64_t seed) const {
    // One megabyte of random rows, repeated: values do not matter, but their spread does (no subnormals).
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> gaussian;
    std::vector<float> block(size_t{256} * kDim);
    for (float& x : block) x = gaussian(rng);
    std::vector<std::byte> encoded(block.size() * dtype_size(dtype_));
    select_kernels().from_f32[static_cast<size_t>(dtype_)](block.data(), encoded.data(),
                                                           block.size());
    for (size_t at = kPadding; at + encoded.size() <= b.bytes(); at += encoded.size()) {
      std::memcpy(b.data() + at, encoded.data(), encoded.size());
    }
  }

  DType dtype_;
  size_t rows_;
  ReservedBuffer keys_, values_;
};

std::vector<float> random_queries(uint32_t group) {
  std::mt19937_64 rng(3);
  std::normal_distribution<float> gaussian;
  std::vector<float> q(size_t{group} * kDim);
  for (float& x : q) x = gaussian(rng);
  return q;
}

void streaming(benchmark::State& state, Level level, DType dtype, uint32_t group, size_t rows,
               size_t heads) {
  const Kernels& kernels = *kernels_for(level);
  const Cache cache(dtype, rows, heads);
  const auto queries = random_queries(group);
  std::vector<float> o(size_t{group} * kDim);
  std::vector<float> lse(group);
  BesideFloor beside(state);
  size_t h = 0;
  for (auto _ : state) {
    beside.iterate(
        [&] {
          const KvView kv = cache.head(h % heads);
          benchmark::DoNotOptimize(read_all(kv.keys.data, cache.head_bytes()));
          benchmark::DoNotOptimize(read_all(kv.values.data, cache.head_bytes()));
        },
        [&] {
          attend_range(kernels, cache.head((h + heads / 2) % heads), queries.data(), group,
                       {0.0884F, 0.0F}, {o.data(), lse.data()});
        });
    ++h;
  }
  beside.report(2.0 * static_cast<double>(cache.head_bytes()), static_cast<double>(rows));
}

void gathered(benchmark::State& state, Level level, DType dtype, uint32_t group, size_t count) {
  const Kernels& kernels = *kernels_for(level);
  const Cache cache(dtype, kRows, kHeads);
  const auto queries = random_queries(group);
  std::vector<float> o(size_t{group} * kDim);
  std::vector<float> lse(group);
  std::mt19937_64 rng(4);
  std::vector<uint32_t> ids(count);
  BesideFloor beside(state);
  size_t h = 0;
  for (auto _ : state) {
    const KvView one = cache.head(h % kHeads);
    const KvView other = cache.head((h + kHeads / 2) % kHeads);
    for (uint32_t& id : ids) id = static_cast<uint32_t>(rng() % kRows);
    beside.iterate(
        [&] {
          benchmark::DoNotOptimize(gather_read(one.keys.data, one.values.data, one.keys.row_bytes(),
                                               ids.data(), count, kFloorAhead));
        },
        [&] {
          attend_ids(kernels, other, ids, queries.data(), group, {0.0884F, 0.0F},
                     {o.data(), lse.data()});
        });
    ++h;
  }
  beside.report(2.0 * static_cast<double>(count * kDim * dtype_size(dtype)),
                static_cast<double>(count));
}

std::vector<float> random_scores(size_t n) {
  std::mt19937_64 rng(5);
  std::normal_distribution<float> gaussian(0.0F, 20.0F);
  std::vector<float> scores(n);
  for (float& x : scores) x = gaussian(rng);
  return scores;
}

void scored(benchmark::State& state, Level level, DType dtype, uint32_t group, size_t count) {
  const Kernels& kernels = *kernels_for(level);
  const Cache cache(dtype, kRows, kHeads);
  const auto scores = random_scores(group * count);
  std::vector<float> o(size_t{group} * kDim);
  std::vector<float> lse(group);
  std::mt19937_64 rng(4);
  std::vector<uint32_t> ids(count);
  BesideFloor beside(state);
  size_t h = 0;
  for (auto _ : state) {
    const RowsView one = cache.head(h % kHeads).values;
    const RowsView other = cache.head((h + kHeads / 2) % kHeads).values;
    for (uint32_t& id : ids) id = static_cast<uint32_t>(rng() % kRows);
    beside.iterate(
        [&] {
          benchmark::DoNotOptimize(
              gather_read(one.data, one.row_bytes(), ids.data(), count, kFloorAhead));
        },
        [&] {
          kernels.attend_scored[static_cast<size_t>(dtype)]({.scores = scores.data(),
                                                             .score_stride = count,
                                                             .group = group,
                                                             .values = other,
                                                             .ids = ids.data(),
                                                             .count = count,
                                                             .logits = {0.0884F, 0.0F},
                                                             .o = o.data(),
                                                             .lse = lse.data()});
        });
    ++h;
  }
  beside.report(static_cast<double>(count * kDim * dtype_size(dtype)), static_cast<double>(count));
}

constexpr uint32_t kFilterGroup = 4;
constexpr size_t kFilterCount = 4096;

void log_sum_exp(benchmark::State& state, Level level) {
  const Kernels& kernels = *kernels_for(level);
  const auto scores = random_scores(kFilterGroup * kFilterCount);
  for (auto _ : state) {
    for (uint32_t h = 0; h < kFilterGroup; ++h) {
      benchmark::DoNotOptimize(
          kernels.log_sum_exp(scores.data() + h * kFilterCount, kFilterCount, {0.0884F, 0.0F}));
    }
  }
}

void keep_above(benchmark::State& state, Level level) {
  const Kernels& kernels = *kernels_for(level);
  const auto scores = random_scores(kFilterGroup * kFilterCount);
  const float thresholds[kFilterGroup] = {39.0F, 39.0F, 39.0F, 39.0F};  // 2.6 % of each head
  std::vector<float> work(scores.size());
  std::vector<uint32_t> ids(kFilterCount);
  for (auto _ : state) {
    state.PauseTiming();
    work = scores;
    state.ResumeTiming();
    benchmark::DoNotOptimize(kernels.keep_above({.scores = work.data(),
                                                 .score_stride = kFilterCount,
                                                 .group = kFilterGroup,
                                                 .ids = ids.data(),
                                                 .count = kFilterCount,
                                                 .thresholds = thresholds}));
  }
}

const int kRegistered = [] {
  const auto name = [](const char* what, DType dtype, uint32_t group, Level level) {
    return std::string(what) + "/" + dtype_name(dtype) + "/group" + std::to_string(group) + "/" +
           level_name(level);
  };
  for (const Level level : available_levels()) {
    if (level == Level::avx512vnni) continue;  // attends with level avx512's functions
    benchmark::RegisterBenchmark((std::string("LogSumExp/") + level_name(level)).c_str(),
                                 [=](benchmark::State& s) { log_sum_exp(s, level); })
        ->Unit(benchmark::kMicrosecond);
    benchmark::RegisterBenchmark((std::string("KeepAbove/") + level_name(level)).c_str(),
                                 [=](benchmark::State& s) { keep_above(s, level); })
        ->Unit(benchmark::kMicrosecond);
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      for (const uint32_t group : {1, 4, 8}) {
        if (level == Level::scalar && (group != 4 || dtype != DType::f16)) continue;
        const size_t heads = level == Level::scalar ? 2 : kHeads;
        benchmark::RegisterBenchmark(
            name("Streaming", dtype, group, level).c_str(),
            [=](benchmark::State& s) { streaming(s, level, dtype, group, kRows, heads); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
        benchmark::RegisterBenchmark(
            name("Cached", dtype, group, level).c_str(),
            [=](benchmark::State& s) { streaming(s, level, dtype, group, 2048, 2); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
        benchmark::RegisterBenchmark(
            name("Gathered", dtype, group, level).c_str(),
            [=](benchmark::State& s) { gathered(s, level, dtype, group, 2048); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
        benchmark::RegisterBenchmark(
            name("Scored", dtype, group, level).c_str(),
            [=](benchmark::State& s) { scored(s, level, dtype, group, 2048); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
  return 0;
}();

}  // namespace
}  // namespace keyhole::bench
