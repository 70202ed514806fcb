#include "tools/commands/bench_step/step_ranks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "tools/api/handles.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Failure = std::array<char, 512>;

// The counts that are added up over the ranks.
constexpr uint64_t keyhole_statistics::*kCounts[] = {
    &keyhole_statistics::keys_scored,    &keyhole_statistics::keys_offered,
    &keyhole_statistics::keys_attended,  &keyhole_statistics::keys_opened,
    &keyhole_statistics::targets_missed, &keyhole_statistics::bytes_read,
    &keyhole_statistics::append_blocks,  &keyhole_statistics::append_waits,
    &keyhole_statistics::host_bytes,     &keyhole_statistics::host_bytes_peak,
    &keyhole_statistics::index_bytes,    &keyhole_statistics::tail_bytes,
    &keyhole_statistics::device_bytes,   &keyhole_statistics::device_bytes_peak,
    &keyhole_statistics::code_bytes,     &keyhole_statistics::pinned_bytes,
    &keyhole_statistics::codes_doubted,  &keyhole_statistics::codes_given_up};
constexpr double keyhole_statistics::*kWorkerTimes[] = {
    &keyhole_statistics::search_seconds,     &keyhole_statistics::offload_seconds,
    &keyhole_statistics::resident_seconds,   &keyhole_statistics::append_seconds,
    &keyhole_statistics::tail_seconds,       &keyhole_statistics::append_wait_seconds,
    &keyhole_statistics::background_seconds, &keyhole_statistics::device_wait_seconds,
    &keyhole_statistics::serve_seconds};

}  // namespace

const char* StepRanks::way() const {
  if (!any()) return "";
  return ranks_.by_heads ? "tensor" : "context";
}

StepShape StepRanks::share(const StepShape& model) const {
  if (!by_heads()) return model;
  if (model.kv_heads % size() != 0) {
    throw UsageError("--parallel tensor with --kv-heads " + std::to_string(model.kv_heads) +
                     ", which " + std::to_string(size()) +
                     " ranks cannot share equally; allowed: a number of ranks that divides them");
  }
  StepShape own = model;
  own.kv_heads /= size();
  own.q_heads /= size();
  own.model_kv_heads = model.kv_heads;
  own.first_kv_head = rank() * own.kv_heads;
  return own;
}

void StepRanks::put_into(keyhole_engine_config& engine) const {
  if (!by_tokens()) return;
  engine.communicator = ranks_.communicator;
  engine.context_block = ranks_.block;
}

void StepRanks::check_context(uint64_t context, uint32_t block, uint64_t resident) const {
  if (!by_tokens()) return;
  const uint64_t fewest = fewest_tokens(context, block, size());
  if (fewest > resident) return;
  throw UsageError("--context " + format_count(context) + " in blocks of " + format_count(block) +
                   " leaves one of " + std::to_string(size()) + " ranks " + format_count(fewest) +
                   " tokens; allowed: more than --sink and --window hold there, " +
                   format_count(resident) + " (a longer --context, a smaller --parallel-block)");
}

void StepRanks::together(const std::function<void()>& work) const {
  if (!any()) return work();
  Failure own{};
  try {
    work();
  } catch (const std::exception& e) {  // not Interrupted, which ends the process
    const size_t length = std::min(std::strlen(e.what()), own.size() - 1);
    std::memcpy(own.data(), length == 0 ? "failed" : e.what(), length == 0 ? 6 : length);
  }
  std::vector<Failure> all(size());
  gather(own.data(), all.data(), own.size());
  for (size_t r = 0; r < all.size(); ++r) {
    const std::string text = all[r].data();
    if (text.empty()) continue;
    // A library error of one rank is raised on all, with the rank's number.
    throw std::runtime_error(text.starts_with("rank ") ? text
                                                       : "rank " + std::to_string(r) + ": " + text);
  }
}

void StepRanks::gather(const void* own, void* all, size_t bytes) const {
  check(keyhole_communicator_gather(ranks_.communicator, own, all, bytes));
}

std::vector<float> StepRanks::all_heads(std::vector<float> own) const {
  if (!by_heads()) return own;
  std::vector<float> all(own.size() * size());
  gather(own.data(), all.data(), own.size() * sizeof(float));
  return all;
}

void StepRanks::slowest(std::vector<double>& sample) const {
  if (!any() || sample.empty()) return;
  const size_t n = sample.size();
  std::vector<double> all(n * size());
  gather(sample.data(), all.data(), n * sizeof(double));
  for (size_t i = 0; i < all.size(); ++i) sample[i % n] = std::max(sample[i % n], all[i]);
}

void StepRanks::add_up(StepTiming& timing) const {
  if (!any()) return;
  struct Own {
    keyhole_statistics statistics;
    double busy;
  };
  const Own own{timing.statistics, timing.busy_bandwidth.value_or(0)};
  std::vector<Own> all(size());
  gather(&own, all.data(), sizeof own);
  keyhole_statistics& sum = timing.statistics;
  double busy = 0;
  for (const auto field : kCounts) sum.*field = 0;
  for (const auto field : kWorkerTimes) sum.*field = 0;
  timing.ranks.clear();
  for (const Own& one : all) {
    const keyhole_statistics& s = one.statistics;
    for (const auto field : kCounts) sum.*field += s.*field;
    for (const auto field : kWorkerTimes) sum.*field += s.*field;
    sum.attends = std::max(sum.attends, s.attends);
    sum.attend_seconds = std::max(sum.attend_seconds, s.attend_seconds);
    busy += one.busy;
    timing.ranks.push_back({s.host_bytes, s.index_bytes, s.device_bytes, s.pinned_bytes});
  }
  if (timing.busy_bandwidth) timing.busy_bandwidth = busy;
}

void StepRanks::join(keyhole_audit& audit) const {
  if (!any() || size() == 1) return;
  std::vector<keyhole_audit> all(size());
  gather(&audit, all.data(), sizeof audit);
  keyhole_audit_init(&audit);
  constexpr double keyhole_audit::*kMeans[] = {&keyhole_audit::error_mean,
                                               &keyhole_audit::mass_mean,
                                               &keyhole_audit::recall,
                                               &keyhole_audit::missing_mean,
                                               &keyhole_audit::estimated_missing_mean,
                                               &keyhole_audit::missing_error_mean};
  for (const keyhole_audit& one : all) {
    audit.audits += one.audits;
    audit.waits += one.waits;
    audit.over_bound += one.over_bound;
    audit.actions += one.actions;
    audit.seconds += one.seconds;
    audit.error_max = std::max(audit.error_max, one.error_max);
    for (const auto field : kMeans) audit.*field += one.*field * static_cast<double>(one.audits);
  }
  for (const auto field : kMeans) {
    audit.*field /= static_cast<double>(std::max<uint64_t>(audit.audits, 1));
  }
  constexpr double keyhole_audit::*kQuantiles[] = {
      &keyhole_audit::error_median, &keyhole_audit::error_p95, &keyhole_audit::error_p99,
      &keyhole_audit::mass_p05};
  for (const auto field : kQuantiles) audit.*field = std::numeric_limits<double>::quiet_NaN();
}

std::string StepRanks::description(const StepShape& model, uint32_t block) const {
  if (!any()) return "";
  const StepShape own = share(model);
  return std::to_string(size()) + (size() == 1 ? " rank, " : " ranks, ") + way() + " parallel: " +
         (by_heads() ? std::to_string(own.q_heads) + " query and " + std::to_string(own.kv_heads) +
                           " KV heads each, outputs gathered in each layer"
                     : "blocks of " + format_count(block) +
                           " tokens in turn, states merged in each layer") +
         "; times are those of the slowest rank, memory, bytes read and worker time sums over all";
}

std::string StepRanks::share_of_comparison() const {
  if (!any()) return "";
  return "of each of " + std::to_string(size()) +
         (by_heads() ? " ranks its share of the heads, gathered"
                     : " ranks its share of the tokens, merged");
}

uint64_t fewest_tokens(uint64_t context, uint32_t block, uint32_t size) {
  const uint64_t round = uint64_t{block} * size;
  const uint64_t others = round - block;  // of a round, before the last rank's block
  const uint64_t left = context % round;
  return context / round * block + (left > others ? left - others : 0);
}

}  // namespace keyhole::tools
