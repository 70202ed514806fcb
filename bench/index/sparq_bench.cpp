// SparQ beside dense attention over the same keys and values: one step of one KV head (d = 128, fp16, one
// thread), search and attention to what it found against attention to everything. Heads take turns, so that
// both come from memory.
//
//   Step/<codec>/rows/group/r     k = 128
//     of_dense       time of dense attention / time of the SparQ step
//     predicted      the same by the paper's transfers: (2 S d + 2 d) / (S r + 2 k d + 4 d) elements
//     predicted_read the same by the bytes that were read, of the keys that each head found
//   Scan/<codec>/group/r          step 1 alone, beside the plain read of as many bytes
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "bench/cpu/beside_floor.h"
#include "bench/cpu/floors.h"
#include "cpu/attention.h"
#include "index/scan/component_blocks.h"
#include "index/scan/component_choice.h"
#include "index/types/factory.h"
#include "tests/index/synthetic.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kDim = 128;
constexpr uint32_t kTop = 128;
constexpr size_t kHeads = 8;
constexpr size_t kRowBytes = kDim * sizeof(uint16_t);
constexpr LogitParams kLogits = {.scale = 0.088388F, .softcap = 0.0F};

Context context() { return {&cpu::select_kernels(), nullptr}; }

/// Keys and values of several heads, the same numbers in each: only where they lie matters.
struct Data {
  Data(size_t rows, uint32_t heads) : n(rows), group(heads) {
    std::mt19937 random(1);
    const std::vector<float> keys = test::attention_keys(n, kDim, random);
    const std::vector<float> values = test::gaussian(n, kDim, random);
    const auto row = [&](size_t i, float* out) { std::copy_n(keys.data() + i * kDim, kDim, out); };
    queries = test::attention_queries(kHeads * group, kDim, n, row, random);
    const auto store = context().kernels->from_f32[static_cast<size_t>(DType::f16)];
    for (size_t h = 0; h < kHeads; ++h) {
      for (const auto* x : {&keys, &values}) {
        arrays.emplace_back(n * kRowBytes);
        arrays.back().advise_huge(0, n * kRowBytes);
        store(x->data(), arrays.back().data(), x->size());
      }
    }
  }
  [[nodiscard]] KvView kv(size_t head) const {
    const auto view = [&](size_t i) { return dense_rows(arrays[i].data(), n, kDim, DType::f16); };
    return {view(2 * head), view(2 * head + 1)};
  }
  [[nodiscard]] const float* group_of(size_t head) const {
    return queries.data() + head * group * kDim;
  }

  size_t n;
  uint32_t group;
  std::vector<cpu::ReservedBuffer> arrays;  // K, V of each head
  std::vector<float> queries;               // [kHeads, group, kDim]
};

void step(benchmark::State& state, const std::string& codec) {
  const auto n = static_cast<size_t>(state.range(0));
  const auto group = static_cast<uint32_t>(state.range(1));
  const auto r = static_cast<uint32_t>(state.range(2));
  const Data data(n, group);
  std::vector<std::unique_ptr<Index>> indexes;
  for (size_t h = 0; h < kHeads; ++h) {
    indexes.push_back(make_index("sparq:r=" + std::to_string(r) + ",codec=" + codec, kDim,
                                 DType::f16, context()));
    BuildInput input;
    input.keys = data.kv(h).keys;
    indexes.back()->build(input, {});
  }
  const auto scratch = indexes.front()->make_scratch(group, kTop);
  indexes.front()->reserve_explore(*scratch);
  std::vector<float> o(size_t{group} * kDim);
  std::vector<float> lse(group);
  const StateView out{o.data(), lse.data()};

  bench::BesideFloor timer(state);
  double read = 0.0;
  size_t steps = 0;
  for (auto _ : state) {
    const size_t head = steps++ % kHeads;
    const KvView kv = data.kv(head);
    const float* queries = data.group_of(head);
    timer.iterate(
        [&] { cpu::attend_range(*context().kernels, kv, queries, group, kLogits, out); },
        [&] {
          Scored scored;
          indexes[head]->explore({.queries = queries, .group = group, .k = kTop}, *scratch, scored);
          benchmark::DoNotOptimize(cpu::attend_scored(*context().kernels, kv.values, scored.rows,
                                                      scored.scores, scored.stride, group, kLogits,
                                                      out));
          read += static_cast<double>(scored.bytes_read + scored.rows.size() * kRowBytes);
        });
  }
  timer.report(0, 1);
  state.counters["of_dense"] = state.counters["of_floor"];
  state.counters["us"] = state.counters["ns/item"] * 1e-3;
  state.counters["dense_us"] = state.counters["floor_ns/item"] * 1e-3;
  for (const char* name : {"of_floor", "x_floor", "ns/item", "floor_ns/item"}) {
    state.counters.erase(name);
  }
  const double elements = static_cast<double>(n) * r + 2.0 * kTop * kDim + 4.0 * kDim;
  const double dense = 2.0 * static_cast<double>(n) * kDim;
  state.counters["predicted"] = (dense + 2.0 * kDim) / elements;
  state.counters["predicted_read"] = dense * 2 / (read / static_cast<double>(steps));
}

void scan(benchmark::State& state, bool coded) {
  const auto group = static_cast<uint32_t>(state.range(0));
  const auto r = static_cast<uint32_t>(state.range(1));
  const size_t n = 131072;
  const Data data(n, group);
  std::vector<ComponentBlocks> copies;
  for (size_t h = 0; h < kHeads; ++h) {
    copies.emplace_back(*context().kernels, kDim, DType::f16, coded);
    ComponentBlocks::Growth all = copies.back().grow(data.kv(h).keys, nullptr, {});
    copies.back().take(all);
  }
  ComponentBlocks::Queries queries;
  queries.group = group;
  queries.chosen = r;
  constexpr size_t kPiece = 256;
  std::vector<float> scores(group * kPiece);
  const size_t bytes = n * r * copies.front().element_bytes();
  bench::BesideFloor timer(state);
  size_t i = 0;
  for (auto _ : state) {
    const size_t head = i++ % kHeads;
    const ComponentBlocks& copy = copies[head];
    timer.iterate(
        [&] {
          benchmark::DoNotOptimize(
              bench::read_all(data.arrays[2 * head].data(), bytes / 256 * 256));
        },
        [&] {
          choose_components(data.group_of(head), group, kDim, {}, r, queries.components);
          copy.encode_queries(data.group_of(head), queries);
          for (size_t first = 0; first < n; first += kPiece) {
            copy.score(queries, first, kPiece, scores.data(), kPiece);
          }
          benchmark::DoNotOptimize(scores.data());
        });
  }
  timer.report(static_cast<double>(bytes), static_cast<double>(n));
}

void steps(benchmark::internal::Benchmark* b) {
  for (const int64_t rows : {32768, 131072}) {
    for (const int64_t group : {1, 4}) {
      for (const int64_t r : {16, 32, 64}) b->Args({rows, group, r});
    }
  }
  b->UseManualTime()->Unit(benchmark::kMicrosecond);
}
void scans(benchmark::internal::Benchmark* b) {
  for (const int64_t group : {1, 4}) {
    for (const int64_t r : {16, 32, 64}) b->Args({group, r});
  }
  b->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(step, none, "none")->Name("Step/none")->Apply(steps);
BENCHMARK_CAPTURE(step, int8, "int8")->Name("Step/int8")->Apply(steps);
BENCHMARK_CAPTURE(scan, none, false)->Name("Scan/none")->Apply(scans);
BENCHMARK_CAPTURE(scan, int8, true)->Name("Scan/int8")->Apply(scans);

}  // namespace
}  // namespace keyhole::index
