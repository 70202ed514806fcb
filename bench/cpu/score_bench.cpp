// Gathered scoring beside a bare prefetched gather + dot loop, one thread, d = 128, random ids.
//
//   Gather/<type>/<group>/<rows>   rows: how many there are to choose from; ids come in a new random order
//                                  every iteration. `x_floor` is time over the bare loop's time.
#include <memory>
#include <random>

#include "bench/cpu/beside_floor.h"
#include "bench/cpu/floors.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"

namespace keyhole::bench {
namespace {

using namespace keyhole::cpu;

constexpr uint32_t kDim = 128;
constexpr size_t kIds = 65536;       // scored per iteration
constexpr size_t kFloorAhead = 16;   // rows: the best of 4, 8, 16, 32 for both types

struct Setup {
  ReservedBuffer keys;
  std::vector<uint32_t> ids;
  std::vector<float> queries, scores;
  std::vector<int8_t> queries_i8;
  std::vector<float> query_scales;
  std::mt19937_64 rng{5};

  Setup(size_t rows, size_t row_bytes, uint32_t group)
      : keys(rows * row_bytes + kPadding),
        ids(kIds),
        queries(size_t{group} * kDim),
        scores(group * kIds),
        queries_i8(size_t{group} * kDim),
        query_scales(group, 0.01F) {
    // Bytes in [0x20, 0x3F]: ordinary numbers both as int8 and as fp16.
    for (size_t i = 0; i < keys.bytes(); i += 8) {
      const uint64_t x = (rng() & 0x1F1F1F1F1F1F1F1FULL) | 0x2020202020202020ULL;
      __builtin_memcpy(keys.data() + i, &x, sizeof x);
    }
    for (float& x : queries) x = static_cast<float>(rng() % 100) * 0.01F;
    for (int8_t& x : queries_i8) x = static_cast<int8_t>(static_cast<int>(rng() % 255) - 127);
  }
  [[nodiscard]] const std::byte* rows() const { return keys.data() + kPadding; }
  void shuffle(size_t rows) {
    for (uint32_t& id : ids) id = static_cast<uint32_t>(rng() % rows);
  }

 private:
  static constexpr size_t kPadding = size_t{2} << 20;  // small pages lie before it
};

void gather_f16(benchmark::State& state, uint32_t group, size_t rows) {
  Setup s(rows, kDim * 2, group);
  const Kernels& kernels = select_kernels();
  const ScoreArgs args = {s.queries.data(), group, kDim, s.rows(), kDim * 2, s.ids.data(), kIds,
                          s.scores.data(), kIds};
  BesideFloor beside(state);
  for (auto _ : state) {
    s.shuffle(rows);
    beside.iterate(
        [&] {
          gather_dot_f16(s.rows(), s.ids.data(), kIds, s.queries.data(), group, kFloorAhead,
                         s.scores.data());
        },
        [&] { kernels.score[static_cast<size_t>(DType::f16)](args); });
  }
  beside.report(kIds * kDim * 2.0, kIds);
}

void gather_i8(benchmark::State& state, uint32_t group, size_t rows) {
  Setup s(rows, kDim, group);
  const Kernels& kernels = select_kernels();
  const auto* keys = reinterpret_cast<const int8_t*>(s.rows());
  const ScoreI8Args args = {s.queries_i8.data(), s.query_scales.data(), group, kDim, keys, kDim,
                            nullptr, s.ids.data(), kIds, s.scores.data(), kIds};
  BesideFloor beside(state);
  for (auto _ : state) {
    s.shuffle(rows);
    beside.iterate(
        [&] {
          gather_dot_i8(keys, s.ids.data(), kIds, s.queries_i8.data(), group, kFloorAhead,
                        s.scores.data());
        },
        [&] { kernels.score_i8(args); });
  }
  beside.report(kIds * double{kDim}, kIds);
}

const int kRegistered = [] {
  if (!has_gather_floors()) return 0;
  for (const size_t rows : {size_t{131072}, size_t{1} << 20, size_t{1} << 22}) {
    for (const uint32_t group : {1, 4}) {
      const std::string suffix = "/group" + std::to_string(group) + "/rows" + std::to_string(rows);
      benchmark::RegisterBenchmark(("Gather/f16" + suffix).c_str(),
                                   [=](benchmark::State& s) { gather_f16(s, group, rows); })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
      benchmark::RegisterBenchmark(("Gather/i8" + suffix).c_str(),
                                   [=](benchmark::State& s) { gather_i8(s, group, rows); })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  return 0;
}();

}  // namespace
}  // namespace keyhole::bench
