#include "tools/commands/calibrate/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "tools/commands/common/head_measure.h"
#include "tools/terminal/interrupt.h"

namespace keyhole::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kDefaultPartition = 16;

int32_t stop_where_interrupted(void* /*user*/, double /*fraction*/, const char* /*what*/) {
  return interrupted() ? 1 : 0;
}

}  // namespace

StepFigures measure_steps(const CalibrationHead& head, const BudgetChoice& budget,
                          QueryChoice queries, bool timed) {
  const HeadTruth& truth = head.truth;
  keyhole_search_options options = budget.search_options();
  options.budget.top_k =
      static_cast<uint32_t>(std::min<size_t>(options.budget.top_k, truth.offloaded.count()));
  std::vector<float> o(truth.group * truth.dim);
  std::vector<float> lse(truth.group);
  std::vector<float> resident_lse(truth.group);
  keyhole_search_cost cost;
  keyhole_search_cost_init(&cost);
  const auto attend = [&](size_t query) {
    const int64_t shape[] = {static_cast<int64_t>(truth.group), static_cast<int64_t>(truth.dim)};
    const size_t row = query * truth.group;
    const keyhole_tensor q = keyhole_tensor_host(truth.query(row), KEYHOLE_F32, 2, shape);
    options.position = truth.positions[query];
    std::copy_n(truth.resident_lse.begin() + static_cast<ptrdiff_t>(row), truth.group,
                resident_lse.begin());
    options.other_o = truth.resident_output.data() + row * truth.dim;
    options.other_lse = resident_lse.data();
    check(keyhole_index_attend(head.index.get(), &q, &options, o.data(), lse.data(), nullptr,
                               nullptr, &cost));
  };
  StepFigures figures;
  size_t steps = 0;
  for (size_t i = queries.first; i < head.queries(); i += queries.stride) {
    throw_if_interrupted();
    attend(i);
    for (size_t j = 0; j < truth.group; ++j) {
      const double error =
          output_error(truth, i * truth.group + j, o.data() + j * truth.dim, lse[j]);
      figures.errors.push_back(std::isnan(error) ? 0 : error);  // 0 of 0: values that are all 0
    }
    figures.bytes += static_cast<double>(cost.bytes_read);
    figures.attended += cost.keys_attended;
    ++steps;
    if (!timed) continue;
    double best = std::numeric_limits<double>::infinity();
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Clock::time_point start = Clock::now();
      attend(i);
      const std::chrono::duration<double, std::micro> taken = Clock::now() - start;
      best = std::min(best, taken.count());
    }
    figures.us += best;
  }
  const auto n = static_cast<double>(std::max<size_t>(steps, 1));
  figures.bytes /= n;
  figures.attended /= n;
  figures.us /= n;
  return figures;
}

void give_index(CalibrationHead& head, const Engine& engine, const std::string& spec) {
  if (head.index != nullptr) {
    const keyhole_status status = keyhole_index_set_spec(head.index.get(), spec.c_str());
    if (status == KEYHOLE_OK) return;
    if (status != KEYHOLE_INVALID_ARGUMENT) check(status);
    head.index.reset();
  }
  head.partition = 0;
  head.index = make_index(engine, spec, head.head->layer, head.head->kv_head);
  try {
    build_index(head.index, *head.trace, *head.head, head.truth, stop_where_interrupted, nullptr);
  } catch (const LibraryError&) {
    throw_if_interrupted();  // what the library calls cancelled
    throw;
  }
}

void give_partitions(CalibrationHead& head, const BudgetChoice& budget) {
  if (!budget.needs_partitions()) return;
  const uint32_t wanted = budget.tail.keys_per_partition == KEYHOLE_AUTO
                              ? kDefaultPartition
                              : budget.tail.keys_per_partition;
  if (head.partition == wanted) return;
  const keyhole_status status =
      keyhole_index_build_tail(head.index.get(), wanted, stop_where_interrupted, nullptr);
  throw_if_interrupted();
  check(status);
  head.partition = wanted;
}

uint64_t held_bytes(const CalibrationHead& head, const BudgetChoice& budget) {
  keyhole_index_info info;
  keyhole_index_info_init(&info);
  check(keyhole_index_get_info(head.index.get(), &info));
  return info.bytes + (budget.needs_partitions() ? info.tail_bytes : 0);
}

}  // namespace keyhole::tools
