// Walks of roargraph by codec: one search of a group of 4 heads, k = 100, one thread.
//
//   p50_us        of one search, processor time
//   recall        share of the exact best 100 that were found
//   scored        distinct rows that have a score; exact: those whose key was read for it, the others' code was
//   ns/scored     time per row of `scored`, which all heads are scored for at once
//   KiB           read by one search
//   bytes/key     memory of the index
//
// Synthetic keys (tests/index/synthetic.h, 32k and 128k) with training queries of the same distribution, or, with
// KEYHOLE_BENCH_TRACE=FILE, KV heads of a recorded trace (`keyhole record --task kv --training 2048 --out FILE`), layer 0 not
// among them. KEYHOLE_BENCH_HEADS: how many heads, 4 unless given. Searches take the heads in turn, so that the caches
// are full of the others' keys; with one head they stay warm, which shows what waiting for memory costs.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "bench/cpu/beside_floor.h"
#include "index/types/factory.h"
#include "tests/index/synthetic.h"
#include "tools/io/trace.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kTop = 100;
constexpr size_t kQueries = 48;

size_t most_heads() {
  const char* most = std::getenv("KEYHOLE_BENCH_HEADS");
  return most != nullptr ? std::strtoul(most, nullptr, 10) : 4;
}

Context context() { return {&cpu::select_kernels(), nullptr}; }

struct Answer {
  explicit Answer(uint32_t group) : ids(group * kTop), scores(group * kTop), counts(group) {}
  std::vector<uint32_t> ids;
  std::vector<float> scores;
  std::vector<uint32_t> counts;
  Hits hits{ids.data(), scores.data(), counts.data()};
};

/// One KV head: keys, decode-time queries, training queries, and the exact answers.
struct Head {
  uint32_t dim = 128, group = 4;
  std::vector<std::byte> keys;
  std::vector<float> queries;   // `[n, group, dim]`
  std::vector<float> training;  // `[t, dim]`
  std::vector<Answer> truth;

  [[nodiscard]] RowsView view() const {
    const size_t row = dim * sizeof(uint16_t);
    return dense_rows(keys.data(), keys.size() / row, dim, DType::f16);
  }
  [[nodiscard]] size_t searches() const { return queries.size() / group / dim; }
  [[nodiscard]] const float* of(size_t i) const { return queries.data() + i * group * dim; }
  [[nodiscard]] BuildInput input() const {
    BuildInput input;
    input.keys = view();
    input.queries.rows = dense_rows(training.data(), training.size() / dim, dim, DType::f32);
    return input;
  }
  void find_truth() {
    const auto flat = make_index("flat", dim, DType::f16, context());
    flat->build(input(), {});
    const auto scratch = flat->make_scratch(group, kTop);
    for (size_t i = 0; i < searches(); ++i) {
      flat->search(of(i), group, kTop, *scratch, truth.emplace_back(group).hits);
    }
  }
};

void put_half(const std::vector<float>& values, std::vector<std::byte>& out) {
  out.resize(values.size() * sizeof(uint16_t));
  context().kernels->from_f32[static_cast<size_t>(DType::f16)](values.data(), out.data(),
                                                               values.size());
}

std::vector<Head> trace_heads(const char* path) {
  const tools::Trace trace = tools::Trace::open(path);
  std::vector<Head> heads;
  for (const tools::TraceHead& from : trace.heads()) {
    if (from.layer == 0) continue;  // dense, as a rule
    if (heads.size() == most_heads()) break;
    Head& head = heads.emplace_back();
    head.dim = trace.info().head_dim;
    head.group = trace.info().group();
    put_half(from.keys.to_f32(), head.keys);
    head.queries = from.queries.to_f32();
    head.queries.resize(std::min(head.queries.size(), kQueries * head.group * head.dim));
    if (from.training_queries.has_value()) head.training = from.training_queries->to_f32();
    head.find_truth();
  }
  return heads;
}

std::vector<Head> synthetic_heads(size_t n) {
  std::vector<Head> heads(most_heads());
  for (size_t i = 0; i < heads.size(); ++i) {
    Head& head = heads[i];
    std::mt19937 random(static_cast<uint32_t>(i) + 1);
    const std::vector<float> keys = test::attention_keys(n, head.dim, random);
    put_half(keys, head.keys);
    const auto row = [&](size_t r, float* out) {
      std::copy_n(keys.data() + r * head.dim, head.dim, out);
    };
    head.queries = test::attention_queries(kQueries * head.group, head.dim, n, row, random);
    head.training = test::attention_queries(4096, head.dim, n, row, random);
    head.find_truth();
  }
  return heads;
}

/// All heads of `n` rows; 0: of the trace.
const std::vector<Head>& heads_of(size_t n) {
  static std::map<size_t, std::vector<Head>> all;
  const auto at = all.find(n);
  if (at != all.end()) return at->second;
  return all[n] = n == 0 ? trace_heads(std::getenv("KEYHOLE_BENCH_TRACE")) : synthetic_heads(n);
}

using Indexes = std::vector<std::unique_ptr<Index>>;

/// Built once for each codec: ef is a parameter of searches.
const Indexes& indexes_of(size_t n, const std::string& codec) {
  static std::map<std::pair<size_t, std::string>, Indexes> all;
  Indexes& indexes = all[{n, codec}];
  for (size_t i = indexes.size(); i < heads_of(n).size(); ++i) {
    const Head& head = heads_of(n)[i];
    indexes.push_back(make_index("roargraph:codec=" + codec, head.dim, DType::f16, context()));
    indexes.back()->build(head.input(), {});
  }
  return indexes;
}

size_t common(const Answer& found, const Answer& truth) {
  size_t hits = 0;
  for (size_t h = 0; h < truth.counts.size(); ++h) {
    const auto begin = found.ids.begin() + static_cast<std::ptrdiff_t>(h * kTop);
    for (size_t i = 0; i < kTop; ++i) {
      hits +=
          static_cast<size_t>(std::count(begin, begin + found.counts[h], truth.ids[h * kTop + i]));
    }
  }
  return hits;
}

void walk(benchmark::State& state, const std::string& codec, size_t n) {
  const std::vector<Head>& heads = heads_of(n);
  const Indexes& indexes = indexes_of(n, codec);
  const std::string spec = "roargraph:codec=" + codec + ",ef=" + std::to_string(state.range(0));
  for (const auto& index : indexes) index->set_search_params(spec);
  const uint32_t group = heads[0].group;
  const auto scratch = indexes[0]->make_scratch(group, kTop);
  Answer answer(group);
  double found = 0.0, scored = 0.0, exact = 0.0, bytes = 0.0, searches = 0.0;
  for (size_t i = 0; i < heads.size(); ++i) {
    for (size_t q = 0; q < heads[i].searches(); ++q) {
      indexes[i]->search(heads[i].of(q), group, kTop, *scratch, answer.hits);
      found += static_cast<double>(common(answer, heads[i].truth[q])) / (kTop * group);
      scored += static_cast<double>(answer.hits.keys_scored) / group;
      exact += static_cast<double>(answer.hits.exact_rows);
      bytes += static_cast<double>(answer.hits.bytes_read);
      searches += 1.0;
    }
  }
  const size_t in_turn = heads[0].searches() * heads.size();
  size_t next = 0;
  std::vector<double> times;
  for (auto _ : state) {
    const size_t i = next++ % in_turn;
    const size_t h = i % heads.size();
    times.push_back(bench::BesideFloor::thread_seconds([&] {
      indexes[h]->search(heads[h].of(i / heads.size()), group, kTop, *scratch, answer.hits);
    }));
    state.SetIterationTime(times.back());
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  const double median = times[times.size() / 2];
  state.counters["p50_us"] = median * 1e6;
  state.counters["recall"] = found / searches;
  state.counters["scored"] = scored / searches;
  state.counters["exact"] = exact / searches;
  state.counters["ns/scored"] = median * 1e9 / (scored / searches);
  state.counters["KiB"] = bytes / searches / 1024;
  const IndexInfo info = indexes[0]->info();
  state.counters["bytes/key"] = static_cast<double>(info.bytes) / static_cast<double>(info.count);
  state.counters["build_s"] = info.build_seconds;
}

void register_all() {
  std::vector<size_t> sizes = {32768, 131072};
  if (std::getenv("KEYHOLE_BENCH_TRACE") != nullptr) sizes = {0};
  for (const size_t n : sizes) {
    const std::string keys = n == 0 ? "trace" : std::to_string(n / 1024) + "k";
    for (const char* codec : {"none", "int8"}) {
      const std::string name = std::string("walk/") + codec + "/" + keys;
      auto* b = benchmark::RegisterBenchmark(
          name.c_str(), [=](benchmark::State& state) { walk(state, codec, n); });
      for (const int64_t ef : {16, 32, 64, 128, 256}) b->Arg(ef);
      b->UseManualTime()->Unit(benchmark::kMicrosecond)->ArgName("ef");
    }
  }
}

const bool registered = (register_all(), true);

}  // namespace
}  // namespace keyhole::index
