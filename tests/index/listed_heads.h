// A head whose rows are in lists of codes, and a step over it.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "cpu/attention_state.h"
#include "index/scan/code_scan.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {

/// Keys in clusters, values beside them, queries that favour some.
struct ListedHead {
  ListedHead(size_t n, uint32_t d, uint32_t seed)
      : random(seed), keys(n, d, DType::f32), values(n, d, DType::f32) {
    keys.put(0, attention_keys(n, d, random));
    values.put(0, gaussian(n, d, random));
    queries = gaussian(kMaxGroup, d, random);
  }
  [[nodiscard]] KvView kv() const { return {keys.view(), values.view()}; }
  [[nodiscard]] BuildInput input() const {
    BuildInput in;
    in.keys = keys.view();
    in.values = values.view();
    return in;
  }
  [[nodiscard]] std::unique_ptr<Index> index(const std::string& spec) const {
    auto index = make_index(spec, keys.dim(), DType::f32, context());
    index->build(input(), {});
    return index;
  }
  std::mt19937 random;
  Keys keys, values;
  std::vector<float> queries;
};

struct ListedState {
  ListedState(uint32_t group, uint32_t dim) : o(size_t{group} * dim), lse(group, kMinusInf) {}
  [[nodiscard]] StateView view() { return {o.data(), lse.data()}; }
  std::vector<float> o, lse;
};

struct ListedStep {
  ListedStep(const cpu::Kernels& k, const Index& index, const float* q, uint32_t group,
             const LogitParams& logits, uint32_t wanted)
      : search{&k, CodedRows::of(index), q, group, logits, wanted, &choice},
        coded(group, search.shape().dim),
        exact(group, search.shape().dim) {
    search.rows.goal.least = 1;  // these heads are small
  }

  void choose() {
    choice.begin(*search.rows.lists, *search.kernels, search.queries, search.group, search.logits);
    for (uint32_t p = ListChoice::rank_parts(search.rows.lists->lists()); p-- > 0;) choice.rank(p);
    choice.choose(search.rows.goal);
  }
  void attend(const KvView& kv, bool backwards = false) {
    CodeParts parts;
    parts.reserve(search.shape(), search.group, search.wanted);
    const uint32_t n = search.rows.parts();
    CodeScan scan;
    for (uint32_t i = 0; i < n; ++i) scan.scan(search, backwards ? n - 1 - i : i, {}, parts);
    const auto chosen = scan.choose(search, parts);
    rows.assign(chosen.begin(), chosen.end());
    cpu::attend_ids(*search.kernels, kv, rows, search.queries, search.group, search.logits,
                    exact.view());
    scan.finish(search, exact.lse.data(), parts, coded.view());
  }

  ListChoice choice;
  CodeSearch search;
  std::vector<uint32_t> rows;
  ListedState coded, exact;
};

}  // namespace keyhole::index::test
