#include "runtime/step/tail_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cpu/attention_state.h"

namespace keyhole::runtime {
namespace {

static_assert(static_cast<int>(index::TailMode::none) == KEYHOLE_TAIL_NONE);
static_assert(static_cast<int>(index::TailMode::mean) == KEYHOLE_TAIL_MEAN);
static_assert(static_cast<int>(index::TailMode::centroid) == KEYHOLE_TAIL_CENTROID);
static_assert(static_cast<int>(index::TailMode::second) == KEYHOLE_TAIL_SECOND);

bool wants_more(const index::ReadGoal& goal) {
  return goal.error > 0.0F || goal.mass > 0.0F || goal.min_rows > 0;
}

/// The goal with max_rows counting from nothing read. UINT32_MAX stays, and means all.
index::ReadGoal beyond(index::ReadGoal goal, size_t found) {
  constexpr size_t kMost = std::numeric_limits<uint32_t>::max();
  goal.max_rows = static_cast<uint32_t>(std::min(size_t{goal.max_rows} + found, kMost));
  return goal;
}

}  // namespace

TailWork tail_work(const Budget& budget, const index::TailTree& tree) {
  TailWork work;
  work.tree = &tree;
  work.mode = static_cast<index::TailMode>(budget.tail);
  const auto rows = static_cast<uint32_t>(tree.count());
  work.goal = {.error = budget.error_target,
               .mass = budget.mass_target,
               .min_rows = std::min(budget.min_keys, rows),
               .max_rows = budget.max_keys != 0 ? budget.max_keys : rows};
  work.goal.max_rows = std::max(work.goal.max_rows, work.goal.min_rows);
  return work;
}

/// What the stages of one attend() share.
struct TailReader::Step {
  const GroupQuery& query;
  const TailWork& work;
  index::ReadGoal goal;
  StateView read;  ///< of what has been read so far
};

void TailReader::reserve(const index::TailTree& tree, uint32_t group) {
  estimate_.reserve(tree, group);
  const size_t capacity = tree.count() > capacity_ ? tree.count() + tree.count() / 4
                                                   : capacity_;  // trees grow in steps
  const uint32_t heads = std::max(group, group_capacity_);
  // Capacities last: an array that has grown alone does no harm.
  rows_.resize(std::max(rows_.size(), capacity));
  scores_.resize(std::max(scores_.size(), heads * capacity));
  spare_o_.resize(std::max(spare_o_.size(), size_t{2} * heads * tree.dim()));
  spare_lse_.resize(std::max(spare_lse_.size(), size_t{2} * heads));
  capacity_ = capacity;
  group_capacity_ = heads;
}

bool TailReader::fits(const index::TailTree& tree, uint32_t group) const {
  return tree.count() <= capacity_ && group <= group_capacity_ &&
         spare_o_.size() >= size_t{2} * group * tree.dim() && estimate_.fits(tree, group);
}

void TailReader::see(const Step& s) {
  for (uint32_t h = 0; h < s.query.group; ++h) {
    const float other = s.work.other.lse != nullptr ? s.work.other.lse[h] : kMinusInf;
    seen_lse_[h] = cpu::add_logs(other, s.read.lse[h]);
  }
}

void TailReader::norms(const Step& s, StateView tail, float* out) {
  const uint32_t dim = s.query.dim();
  const StateView merged{spare_o_.data(), spare_lse_.data()};
  std::array<StateView, 3> states;
  size_t n = 0;
  if (s.work.other.lse != nullptr) states[n++] = s.work.other;
  states[n++] = s.read;
  if (tail.lse != nullptr) states[n++] = tail;
  cpu::merge_states({states.data(), n}, s.query.group, dim, merged);
  for (uint32_t h = 0; h < s.query.group; ++h) {
    double squares = 0.0;
    for (uint32_t j = 0; j < dim; ++j) {
      squares += double{merged.o[h * dim + j]} * merged.o[h * dim + j];
    }
    out[h] = static_cast<float>(std::sqrt(squares));
  }
}

void TailReader::stand_in(const Step& s, const float* coverage, StateView tail) {
  const std::vector<float>& mean = s.work.tree->mean_value();
  for (uint32_t h = 0; h < s.query.group; ++h) {
    // Beyond this, approximate scores say nothing.
    const double alpha = std::clamp(double{coverage[h]}, 1e-3, 1.0);
    if (alpha == 1.0 || s.read.lse[h] == kMinusInf) continue;
    std::copy(mean.begin(), mean.end(), tail.o + size_t{h} * mean.size());
    tail.lse[h] = static_cast<float>(double{s.read.lse[h]} + std::log((1.0 - alpha) / alpha));
    const double other =
        s.work.other.lse != nullptr
            ? std::exp(std::min(double{s.work.other.lse[h]} - s.read.lse[h], 300.0))
            : 0.0;
    figures_.missing[h] = static_cast<float>((1.0 - alpha) / (1.0 + alpha * other));
  }
}

void TailReader::begin(const Step& s, const Found& found) {
  const uint32_t group = s.query.group;
  figures_ = {};
  count_ = found.rows.size();
  std::copy(found.rows.begin(), found.rows.end(), rows_.begin());
  if (found.scores == nullptr) {
    s.query.score(rows(), scores_.data(), capacity_);
    return;
  }
  for (uint32_t h = 0; h < group; ++h) {
    std::copy_n(found.scores + h * found.stride, count_, scores_.data() + h * capacity_);
  }
}

StepCost TailReader::attend(const GroupQuery& query, const TailWork& work, const Found& found,
                            SearchStates out) {
  const Step s{query, work, beyond(work.goal, found.rows.size()), out.read};
  StepCost cost;
  begin(s, found);
  cpu::clear_state(out.tail, query.group, query.dim());
  if (!query.attend_scored(rows(), scores_.data(), capacity_, out.read) && count_ != 0) {
    query.attend(rows(), out.read);  // scores have overflowed: nothing can be said of the rest
    return cost;
  }
  const Stopwatch watch;
  if (work.mode == index::TailMode::mean && found.coverage != nullptr && !wants_more(s.goal)) {
    stand_in(s, found.coverage, out.tail);
    cost.search_seconds = cost.tail_seconds = watch.seconds();
    return cost;
  }
  see(s);
  estimate_.begin(*work.tree, *query.kernels,
                  {.queries = query.queries,
                   .group = query.group,
                   .logits = query.logits,
                   .mode = work.mode,
                   .seen_lse = seen_lse_,
                   .caps = found.caps},
                  {.rows = found.rows, .scores = scores_.data(), .stride = capacity_});
  if (wants_more(s.goal)) read_on(s, cost);
  if (work.mode != index::TailMode::none) estimate_.state(query.kv.values, out.tail);
  take_figures(s, out.tail);
  cost.tail_bytes_read = estimate_.bytes_read();
  cost.bytes_read += cost.tail_bytes_read;
  // The part of the time in which keys were opened counts as attention's.
  cost.tail_seconds = watch.seconds() - cost.offload_seconds;
  cost.search_seconds = cost.tail_seconds;
  return cost;
}

void TailReader::read_on(const Step& s, StepCost& cost) {
  const GroupQuery& query = s.query;
  const StateView opened{spare_o_.data() + size_t{query.group} * query.dim(),
                         spare_lse_.data() + query.group};
  float out_norms[kMaxGroup];
  for (;;) {
    norms(s, {}, out_norms);
    const auto more = estimate_.next_rows(s.goal, count_, out_norms);
    if (more.empty()) {
      cost.targets_missed += estimate_.met(s.goal, count_, out_norms) ? 0 : 1;
      return;
    }
    const Stopwatch watch;
    const size_t begin = count_;
    std::copy(more.begin(), more.end(), rows_.begin() + static_cast<std::ptrdiff_t>(begin));
    count_ += more.size();
    const std::span<const uint32_t> opened_rows = rows().subspan(begin);
    query.score(opened_rows, scores_.data() + begin, capacity_);
    if (!query.attend_scored(opened_rows, scores_.data() + begin, capacity_, opened)) {
      query.attend(opened_rows, opened);
    }
    const std::array<StateView, 2> both{s.read, opened};
    cpu::merge_states(both, query.group, query.dim(), s.read);
    cost.keys_opened += more.size();
    cost.bytes_read += 2 * more.size() * query.row_bytes();
    cost.offload_seconds += watch.seconds();
    see(s);
    estimate_.take_in(seen_lse_);
  }
}

void TailReader::take_figures(const Step& s, StateView tail) {
  float out_norms[kMaxGroup];
  norms(s, tail, out_norms);
  for (uint32_t h = 0; h < s.query.group; ++h) {
    figures_.missing[h] = estimate_.missing(h);
    figures_.error[h] = estimate_.error(h, out_norms[h]);
  }
}

size_t TailReader::bytes() const {
  return estimate_.bytes() + rows_.size() * sizeof(uint32_t) +
         (scores_.size() + spare_o_.size() + spare_lse_.size()) * sizeof(float);
}

}  // namespace keyhole::runtime
