// Scoring, one thread, d = 128.
//
//   Gather/<type>/<group>/<rows>   random ids, new ones every iteration, beside a bare prefetched gather + dot
//                                  loop; rows: how many there are to choose from
//   Scan/<type>/<group>            131072 rows in order, beside the plain read of the same bytes; a new array
//                                  every iteration, so that both come from memory
// `x_floor` is time over the floor's time.
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
constexpr size_t kIds = 65536;      // scored per iteration
constexpr size_t kFloorAhead = 64;  // rows that the floor prefetches ahead: the best of 16, 32, 64

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
  const RowsView keys = dense_rows(s.rows(), rows, kDim, DType::f16);
  const ScoreArgs args = {s.queries.data(), group, keys, s.ids.data(), kIds, s.scores.data(), kIds};
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
  const ScoreI8Args args = {s.queries_i8.data(),
                            s.query_scales.data(),
                            group,
                            kDim,
                            keys,
                            kDim,
                            s.ids.data(),
                            kIds,
                            s.scores.data(),
                            kIds};
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

/// type: DType::f16 or DType::i8.
void scan(benchmark::State& state, DType type, uint32_t group) {
  constexpr size_t kRows = 131072;
  const size_t row_bytes = kDim * dtype_size(type);
  const size_t bytes = kRows * row_bytes;
  const size_t arrays = (size_t{512} << 20) / bytes;  // more than the last-level cache holds
  Setup s(kRows * arrays, row_bytes, group);
  std::vector<float> scores(group * kRows);
  const Kernels& kernels = select_kernels();
  BesideFloor beside(state);
  size_t next = 0;
  for (auto _ : state) {
    const std::byte* one = s.rows() + next % arrays * bytes;
    const std::byte* other = s.rows() + (next + arrays / 2) % arrays * bytes;
    ++next;
    beside.iterate([&] { benchmark::DoNotOptimize(read_all(one, bytes)); },
                   [&] {
                     if (type == DType::i8) {
                       kernels.score_i8({s.queries_i8.data(), s.query_scales.data(), group, kDim,
                                         reinterpret_cast<const int8_t*>(other), row_bytes, nullptr,
                                         kRows, scores.data(), kRows});
                     } else {
                       kernels.score[static_cast<size_t>(type)](
                           {s.queries.data(), group, dense_rows(other, kRows, kDim, type), nullptr,
                            kRows, scores.data(), kRows});
                     }
                   });
  }
  beside.report(static_cast<double>(bytes), kRows);
}

const int kRegistered = [] {
  for (const DType type : {DType::f16, DType::i8}) {
    for (const uint32_t group : {1, 4}) {
      const std::string name =
          std::string("Scan/") + dtype_name(type) + "/group" + std::to_string(group);
      benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& s) { scan(s, type, group); })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
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
