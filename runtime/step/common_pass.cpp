#include "runtime/step/common_pass.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "index/grow.h"
#include "index/scan/kv_codes.h"

namespace keyhole::runtime {
namespace {

// Query heads that a task takes side by side: their sums (4 KiB each for codes of 128 components) stay in the
// second-level cache, and what is read for each of them is a small share of the time already.
constexpr uint32_t kHeadsAtOnce = 32;

/// Offloaded rows of a head.
struct Rows {
  size_t begin, end;
  bool operator==(const Rows&) const = default;
  [[nodiscard]] size_t count() const { return end - begin; }
};

Rows rows_of_part(const HeadWork& work, uint32_t part) {
  const index::KvCodes& codes = *work.search.codes.blocks;
  const size_t rows = size_t{index::code_cut(codes.blocks()).blocks} * kCodeBlock;
  return {part * rows, std::min(codes.count(), (part + 1) * rows)};
}

Rows rows_of_chunk(const HeadWork& work, const HeadPlan& plan, uint32_t chunk) {
  const size_t begin = work.exact_begin + size_t{chunk} * plan.chunk_rows;
  return {begin, std::min(work.kv.keys.tokens, begin + plan.chunk_rows)};
}

}  // namespace

// ---- What is in common ---------------------------------------------------------------------------

void CommonPass::run(uint32_t layer, std::span<DecodeStep* const> steps,
                     const CommonRows& common_rows) {
  const LayerShape shape = engine_->model().of(layer);
  lists_.run(shape.kv_heads, steps);
  steps_ = steps;
  units_.clear();
  who_.clear();
  find(shape.kv_heads, common_rows);
  if (units_.empty()) return;
  reserve(shape.head_dim);
  engine_->pool().run(static_cast<uint32_t>(units_.size()), [&](uint32_t unit, uint32_t worker) {
    do_unit(units_[unit], workers_[worker]);
  });
  tell();
}

void CommonPass::find(uint32_t kv_heads, const CommonRows& common_rows) {
  std::vector<uint32_t> members(steps_.size());
  for (uint32_t h = 0; h < kv_heads; ++h) {
    std::iota(members.begin(), members.end(), 0U);
    divide(Kind::codes, h, members, 0, [&](uint32_t i, uint32_t j, uint32_t part) {
      const HeadPlan &a = steps_[i]->plan_of(h), &b = steps_[j]->plan_of(h);
      if (part >= a.codes || part >= b.codes) return false;
      const HeadWork &mine = steps_[i]->work(h), &theirs = steps_[j]->work(h);
      const index::KvCodes *codes = mine.search.codes.blocks, *others = theirs.search.codes.blocks;
      if (codes == nullptr || others == nullptr) return false;
      const Rows rows = rows_of_part(mine, part);
      return rows == rows_of_part(theirs, part) &&
             mine.search.exact_rows() == theirs.search.exact_rows() &&
             codes->common_blocks(*others) * kCodeBlock >= rows.end;
    });
    std::iota(members.begin(), members.end(), 0U);
    divide(Kind::exact, h, members, 0, [&](uint32_t i, uint32_t j, uint32_t chunk) {
      const HeadPlan &a = steps_[i]->plan_of(h), &b = steps_[j]->plan_of(h);
      if (chunk >= a.chunks || chunk >= b.chunks) return false;
      const Rows rows = rows_of_chunk(steps_[i]->work(h), a, chunk);
      return rows == rows_of_chunk(steps_[j]->work(h), b, chunk) && common_rows(i, j) >= rows.end;
    });
  }
}

template <class Same>
void CommonPass::divide(Kind kind, uint32_t kv_head, std::span<uint32_t> members, uint32_t number,
                        const Same& same) {
  while (members.size() > 1) {
    const uint32_t first = members[0];
    const auto end = std::partition(members.begin() + 1, members.end(),
                                    [&](uint32_t i) { return same(first, i, number); });
    const std::span<uint32_t> alike(members.begin(), end);
    if (alike.size() > 1) {
      add(kind, kv_head, number, alike);
      divide(kind, kv_head, alike, number + 1, same);
    }
    members = members.subspan(alike.size());
  }
}

void CommonPass::add(Kind kind, uint32_t kv_head, uint32_t number,
                     std::span<const uint32_t> members) {
  size_t begin = 0;
  while (begin < members.size()) {
    uint32_t heads = 0;
    size_t end = begin;
    do {
      heads += steps_[members[end++]]->query_of(kv_head).group;
    } while (end < members.size() &&
             heads + steps_[members[end]]->query_of(kv_head).group <= kHeadsAtOnce);
    units_.push_back({kind, kv_head, number, who_.size(), static_cast<uint32_t>(end - begin), 0.0});
    who_.insert(who_.end(), members.begin() + static_cast<std::ptrdiff_t>(begin),
                members.begin() + static_cast<std::ptrdiff_t>(end));
    begin = end;
  }
}

uint32_t CommonPass::heads(const Unit& unit) const {
  uint32_t heads = 0;
  for (const uint32_t i : members(unit)) heads += steps_[i]->query_of(unit.kv_head).group;
  return heads;
}

void CommonPass::reserve(uint32_t dim) {
  workers_.resize(engine_->pool().threads());
  for (const Unit& unit : units_) {
    const uint32_t n = heads(unit);
    const HeadWork& work = first(unit).work(unit.kv_head);
    for (Worker& w : workers_) {
      if (unit.kind == Kind::codes) {
        w.scan.reserve(work.search.codes.shape(), n, work.search.exact_rows());
        continue;
      }
      index::grow(w.queries, size_t{n} * dim);
      index::grow(w.o, size_t{n} * dim);
      index::grow(w.lse, n);
    }
  }
}

size_t CommonPass::bytes() const {
  size_t bytes = lists_.bytes();
  for (const Worker& w : workers_) {
    bytes += w.scan.bytes() + (w.queries.size() + w.o.size() + w.lse.size()) * sizeof(float);
  }
  return bytes;
}

// ---- Doing it ------------------------------------------------------------------------------------

void CommonPass::do_unit(Unit& unit, Worker& worker) {
  const Stopwatch watch;
  unit.kind == Kind::codes ? scan_codes(unit, worker) : attend(unit, worker);
  unit.seconds = watch.seconds();
}

void CommonPass::scan_codes(const Unit& unit, Worker& worker) {
  index::CodeAsker askers[kMaxGroup];
  index::CodeSearch search = code_search(first(unit).query_of(unit.kv_head),
                                         first(unit).work(unit.kv_head).search, nullptr);
  search.queries = nullptr;
  search.group = heads(unit);
  size_t n = 0;
  for (const uint32_t i : members(unit)) {
    const GroupQuery query = steps_[i]->query_of(unit.kv_head);
    askers[n++] = {query.queries, query.group, &steps_[i]->code_parts(unit.kv_head)};
  }
  worker.scan.scan(search, unit.number, {}, {askers, n});
}

void CommonPass::attend(const Unit& unit, Worker& worker) {
  GroupQuery together = first(unit).query_of(unit.kv_head);
  const size_t dim = together.dim();
  float* to = worker.queries.data();
  for (const uint32_t i : members(unit)) {
    const GroupQuery query = steps_[i]->query_of(unit.kv_head);
    to = std::copy_n(query.queries, query.group * dim, to);
  }
  together.queries = worker.queries.data();
  together.group = heads(unit);
  const Rows rows =
      rows_of_chunk(first(unit).work(unit.kv_head), first(unit).plan_of(unit.kv_head), unit.number);
  together.attend_range(rows.begin, rows.count(), {worker.o.data(), worker.lse.data()});
  const float *o = worker.o.data(), *lse = worker.lse.data();
  for (const uint32_t i : members(unit)) {
    const uint32_t group = steps_[i]->query_of(unit.kv_head).group;
    const StateView state = steps_[i]->chunk(unit.kv_head, unit.number);
    std::copy_n(o, group * dim, state.o);
    std::copy_n(lse, group, state.lse);
    o += group * dim;
    lse += group;
  }
}

void CommonPass::tell() {
  for (const Unit& unit : units_) {
    const HeadWork& one = first(unit).work(unit.kv_head);
    uint64_t rows = 0, bytes = 0;
    if (unit.kind == Kind::codes) {
      rows = rows_of_part(one, unit.number).count();
      bytes = rows / kCodeBlock * one.search.codes.shape().block_bytes();
    } else {
      rows = rows_of_chunk(one, first(unit).plan_of(unit.kv_head), unit.number).count();
      bytes = 2 * rows * one.kv.keys.row_bytes();
    }
    const uint32_t all = heads(unit);
    // What was read once is divided among those for whom it was; what is left over is the first one's.
    uint64_t left = bytes % unit.count;
    for (const uint32_t i : members(unit)) {
      HeadWork& work = steps_[i]->work(unit.kv_head);
      const uint32_t group = steps_[i]->query_of(unit.kv_head).group;
      const double seconds = unit.seconds * group / all;
      StepCost cost;
      cost.bytes_read = bytes / unit.count + std::exchange(left, 0);
      if (unit.kind == Kind::codes) {
        work.common.codes = unit.number + 1;
        cost.keys_scored = group * rows;
        cost.tail_bytes_read = cost.bytes_read;
        cost.search_seconds = cost.tail_seconds = seconds;
      } else {
        work.common.chunks = unit.number + 1;
        cost.keys_attended = group * rows;
        cost.offload_seconds = seconds;
      }
      steps_[i]->add_common_cost(cost);
    }
  }
}

}  // namespace keyhole::runtime
