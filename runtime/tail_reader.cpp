#include "runtime/tail_reader.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

namespace keyhole::runtime {
namespace {

static_assert(static_cast<int>(index::TailMode::none) == KEYHOLE_TAIL_NONE);
static_assert(static_cast<int>(index::TailMode::mean) == KEYHOLE_TAIL_MEAN);
static_assert(static_cast<int>(index::TailMode::centroid) == KEYHOLE_TAIL_CENTROID);
static_assert(static_cast<int>(index::TailMode::second) == KEYHOLE_TAIL_SECOND);

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool wants_more(const index::ReadGoal& goal) {
  return goal.error > 0.0F || goal.mass > 0.0F || goal.min_rows > 0;
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

struct TailReader::Step {
  const cpu::Kernels& kernels;
  const KvView& kv;
  const float* queries;
  uint32_t group;
  const LogitParams& logits;
  const TailWork& work;
};

void TailReader::prepare(const index::TailTree& tree, uint32_t group) {
  estimate_.reserve(tree, group);
  if (tree.count() > room_ || group > room_group_) {
    room_ = std::max(room_, tree.count() + tree.count() / 4);
    room_group_ = std::max(room_group_, group);
    rows_.resize(room_);
    scores_.resize(room_group_ * room_);
  }
  spare_o_.resize(size_t{2} * group * tree.dim());
  spare_lse_.resize(size_t{2} * group);
}

bool TailReader::has_room(const index::TailTree& tree, uint32_t group) const {
  return tree.count() <= room_ && group <= room_group_ && estimate_.has_room(tree, group);
}

void TailReader::score(const Step& s, size_t begin, size_t end) {
  const RowsView& keys = s.kv.keys;
  s.kernels.score[static_cast<size_t>(keys.dtype)]({.queries = s.queries,
                                                    .group = s.group,
                                                    .dim = keys.dim,
                                                    .keys = keys.data,
                                                    .key_stride = keys.stride,
                                                    .ids = rows_.data() + begin,
                                                    .count = end - begin,
                                                    .scores = scores_.data() + begin,
                                                    .score_stride = room_});
}

void TailReader::see(const Step& s, StateView read) {
  for (uint32_t h = 0; h < s.group; ++h) {
    const float other = s.work.other.lse != nullptr ? s.work.other.lse[h] : kMinusInf;
    const float top = std::max(other, read.lse[h]);
    seen_lse_[h] = top == kMinusInf
                       ? kMinusInf
                       : top + std::log(std::exp(other - top) + std::exp(read.lse[h] - top));
  }
}

void TailReader::norms(const Step& s, StateView read, StateView tail, float* out) {
  const uint32_t dim = s.kv.keys.dim;
  const StateView merged{spare_o_.data(), spare_lse_.data()};
  std::array<StateView, 3> states;
  size_t n = 0;
  if (s.work.other.lse != nullptr) states[n++] = s.work.other;
  states[n++] = read;
  if (tail.lse != nullptr) states[n++] = tail;
  cpu::merge_states({states.data(), n}, s.group, dim, merged);
  for (uint32_t h = 0; h < s.group; ++h) {
    double squares = 0.0;
    for (uint32_t j = 0; j < dim; ++j) {
      squares += double{merged.o[h * dim + j]} * merged.o[h * dim + j];
    }
    out[h] = static_cast<float>(std::sqrt(squares));
  }
}

void TailReader::stand_in(const Step& s, const float* coverage, StateView read, StateView tail,
                          TailCost& cost) {
  const std::vector<float>& mean = s.work.tree->mean_value();
  for (uint32_t h = 0; h < s.group; ++h) {
    // Beyond this, approximate scores say nothing.
    const double alpha = std::clamp(double{coverage[h]}, 1e-3, 1.0);
    if (alpha == 1.0 || read.lse[h] == kMinusInf) continue;
    std::copy(mean.begin(), mean.end(), tail.o + size_t{h} * mean.size());
    tail.lse[h] = static_cast<float>(double{read.lse[h]} + std::log((1.0 - alpha) / alpha));
    const double other = s.work.other.lse != nullptr
                             ? std::exp(std::min(double{s.work.other.lse[h]} - read.lse[h], 300.0))
                             : 0.0;
    cost.missing[h] = static_cast<float>((1.0 - alpha) / (1.0 + alpha * other));
  }
}

TailCost TailReader::attend(const cpu::Kernels& kernels, const KvView& kv, const float* queries,
                            uint32_t group, const LogitParams& logits, const TailWork& work,
                            const Found& found, StateView read, StateView tail) {
  const Step s{kernels, kv, queries, group, logits, work};
  TailCost cost;
  count_ = found.rows.size();
  std::copy(found.rows.begin(), found.rows.end(), rows_.begin());
  if (found.scores == nullptr) {
    score(s, 0, count_);
  } else {
    for (uint32_t h = 0; h < group; ++h) {
      std::copy_n(found.scores + h * found.stride, count_, scores_.data() + h * room_);
    }
  }
  cpu::clear_state(tail, group, kv.keys.dim);
  if (!cpu::attend_scored(kernels, kv.values, rows(), scores_.data(), room_, group, logits, read)) {
    if (count_ != 0) {  // scores have overflowed: nothing can be said of the rest
      cpu::attend_ids(kernels, kv, rows(), queries, group, logits, read);
      return cost;
    }
  }

  auto start = Clock::now();
  if (work.mode == index::TailMode::mean && found.coverage != nullptr && !wants_more(work.goal)) {
    stand_in(s, found.coverage, read, tail, cost);
    cost.seconds = seconds_since(start);
    return cost;
  }
  see(s, read);
  const size_t row_bytes = kv.keys.dim * dtype_size(kv.keys.dtype);
  estimate_.begin(*work.tree, kernels,
                  {.queries = queries,
                   .group = group,
                   .logits = logits,
                   .mode = work.mode,
                   .seen_lse = seen_lse_,
                   .caps = found.caps},
                  {.rows = found.rows, .scores = scores_.data(), .stride = room_});
  float out_norms[kMaxGroup];
  while (wants_more(work.goal)) {
    norms(s, read, {}, out_norms);
    const auto more = estimate_.next_rows(work.goal, count_, out_norms);
    if (more.empty()) {
      cost.missed = !estimate_.met(work.goal, count_, out_norms);
      break;
    }
    cost.seconds += seconds_since(start);
    const size_t begin = count_;
    std::copy(more.begin(), more.end(), rows_.begin() + static_cast<std::ptrdiff_t>(begin));
    count_ += more.size();
    score(s, begin, count_);
    const StateView opened{spare_o_.data() + size_t{group} * kv.keys.dim,
                           spare_lse_.data() + group};
    const std::span<const uint32_t> opened_rows = rows().subspan(begin);
    if (!cpu::attend_scored(kernels, kv.values, opened_rows, scores_.data() + begin, room_, group,
                            logits, opened)) {
      cpu::attend_ids(kernels, kv, opened_rows, queries, group, logits, opened);
    }
    const std::array<StateView, 2> both{read, opened};
    cpu::merge_states(both, group, kv.keys.dim, read);
    cost.keys_opened += static_cast<uint32_t>(more.size());
    cost.key_bytes_read += 2 * more.size() * row_bytes;
    start = Clock::now();
    see(s, read);
    estimate_.take_in(seen_lse_);
  }
  if (work.mode != index::TailMode::none) estimate_.state(kv.values, tail);
  norms(s, read, tail, out_norms);
  for (uint32_t h = 0; h < group; ++h) {
    cost.missing[h] = estimate_.missing(h);
    cost.error[h] = estimate_.error(h, out_norms[h]);
  }
  cost.bytes_read = estimate_.bytes_read();
  cost.seconds += seconds_since(start);
  return cost;
}

size_t TailReader::bytes() const {
  return estimate_.bytes() + rows_.size() * sizeof(uint32_t) +
         (scores_.size() + spare_o_.size() + spare_lse_.size()) * sizeof(float);
}

}  // namespace keyhole::runtime
