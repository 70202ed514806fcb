#include "runtime/step/common_lists.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

// The least number of rows in common. With fewer, all that a step reads lies in the cache that threads share, and the
// hand-off costs more.
constexpr size_t kLeastListedRows = 16384;
// Units for each thread, so that none waits long for the last one.
constexpr size_t kUnitsPerThread = 2;

constexpr uint32_t kMostSlots = index::ListChoice::kMostParts;

}  // namespace

bool read_together(const index::CodeLists& a, const index::CodeLists& b) {
  const size_t rows = a.common_rows(b);
  return rows >= kLeastListedRows && 2 * rows >= std::max(a.count(), b.count());
}

void CommonLists::run(uint32_t kv_heads, std::span<DecodeStep* const> steps) {
  steps_ = steps;
  groups_.clear();
  who_.clear();
  find(kv_heads);
  if (groups_.empty()) return;
  reserve();
  cut([](const Group&) { return 1U; });
  for_all_units([&](const Unit& unit, Worker&) { choose(unit); });
  cut([](const Group& group) { return group.slots; });
  for_all_units([&](const Unit& unit, Worker& worker) { scan(unit, worker); });
  tell();
}

// ---- What is in common ---------------------------------------------------------------------------

void CommonLists::find(uint32_t kv_heads) {
  std::vector<uint32_t> members;
  for (uint32_t h = 0; h < kv_heads; ++h) {
    members.clear();
    for (uint32_t i = 0; i < steps_.size(); ++i) {
      if (steps_[i]->plan_of(h).ranks != 0) members.push_back(i);
    }
    for (std::span<uint32_t> left(members); left.size() > 1;) {
      const index::CodeLists& first = *steps_[left[0]]->work(h).search.codes.lists;
      const auto end = std::partition(left.begin() + 1, left.end(), [&](uint32_t i) {
        return read_together(first, *steps_[i]->work(h).search.codes.lists);
      });
      const auto n = static_cast<size_t>(end - left.begin());
      if (n > 1) add(h, left.first(n));
      left = left.subspan(n);
    }
  }
}

void CommonLists::add(uint32_t kv_head, std::span<const uint32_t> members) {
  uint32_t slots = 0;
  for (const uint32_t i : members) slots = std::max(slots, steps_[i]->plan_of(kv_head).codes);
  groups_.push_back({kv_head, who_.size(), static_cast<uint32_t>(members.size()), slots});
  who_.insert(who_.end(), members.begin(), members.end());
}

void CommonLists::reserve() {
  workers_.resize(engine_->pool().threads());
  costs_.assign(who_.size() * kMostSlots, {});
  for (const Group& group : groups_) {
    for (size_t k = group.first; k < group.first + group.count; ++k) {
      const SearchParams& search = steps_[who_[k]]->work(group.kv_head).search;
      const uint32_t heads = steps_[who_[k]]->query_of(group.kv_head).group;
      for (Worker& w : workers_) w.scan.reserve(search.codes.shape(), heads, search.exact_rows());
    }
  }
}

size_t CommonLists::bytes() const {
  size_t bytes = costs_.size() * sizeof(StepCost);
  for (const Worker& w : workers_) bytes += w.scan.bytes();
  return bytes;
}

template <class Slots>
void CommonLists::cut(const Slots& slots) {
  units_.clear();
  size_t whole = 0;  // units of whole groups
  for (const Group& group : groups_) whole += slots(group);
  if (whole == 0) return;
  const size_t wanted = kUnitsPerThread * workers_.size();
  const size_t cuts = (wanted + whole - 1) / whole;
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const auto n = static_cast<uint32_t>(std::min<size_t>(cuts, group.count));
    for (uint32_t slot = 0; slot < slots(group); ++slot) {
      for (uint32_t i = 0; i < n; ++i) {
        const uint32_t begin = group.count * i / n, end = group.count * (i + 1) / n;
        units_.push_back({g, group.first + begin, end - begin, slot});
      }
    }
  }
}

// ---- Doing it ------------------------------------------------------------------------------------

template <class Body>
void CommonLists::for_all_units(const Body& body) {
  engine_->pool().run(static_cast<uint32_t>(units_.size()), [&](uint32_t unit, uint32_t worker) {
    body(units_[unit], workers_[worker]);
  });
}

void CommonLists::choose(const Unit& unit) {
  const uint32_t h = groups_[unit.group].kv_head;
  const std::span<const uint32_t> members = std::span(who_).subspan(unit.first, unit.count);
  const Stopwatch watch;
  for (const uint32_t i : members) steps_[i]->begin_choice(h);
  for (uint32_t part = 0; part < index::ListChoice::kMostParts; ++part) {
    for (const uint32_t i : members) {
      if (part < steps_[i]->plan_of(h).ranks) steps_[i]->choice(h).rank(part);
    }
  }
  for (const uint32_t i : members) {
    steps_[i]->choice(h).choose(steps_[i]->work(h).search.codes.goal);
  }
  const double seconds = watch.seconds() / unit.count;
  for (size_t k = unit.first; k < unit.first + unit.count; ++k) {
    costs_[k * kMostSlots].search_seconds += seconds;
  }
}

void CommonLists::scan(const Unit& unit, Worker& worker) {
  const Group& group = groups_[unit.group];
  const uint32_t h = group.kv_head;
  for (size_t k = unit.first; k < unit.first + unit.count; ++k) {
    DecodeStep& step = *steps_[who_[k]];
    const uint32_t parts = step.plan_of(h).codes;
    const auto first_of = [&](uint32_t slot) {
      return (slot * parts + group.slots - 1) / group.slots;
    };
    for (uint32_t p = first_of(unit.slot); p < first_of(unit.slot + 1); ++p) {
      costs_[k * kMostSlots + unit.slot] +=
          scan_codes(worker.scan, step.query_of(h), step.work(h).search, p, &step.choice(h),
                     step.code_parts(h));
    }
  }
}

void CommonLists::tell() {
  for (const Group& group : groups_) {
    for (size_t k = group.first; k < group.first + group.count; ++k) {
      DecodeStep& step = *steps_[who_[k]];
      HeadWork::Common& common = step.work(group.kv_head).common;
      common.has_chosen = true;
      common.codes = step.plan_of(group.kv_head).codes;
      for (uint32_t slot = 0; slot < kMostSlots; ++slot) {
        step.add_common_cost(costs_[k * kMostSlots + slot]);
      }
    }
  }
}

}  // namespace keyhole::runtime
