#include "runtime/audit/audit_truth.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>

#include "cpu/attention.h"
#include "cpu/row_access.h"

namespace keyhole::runtime {

AuditTruth::AuditTruth(uint32_t group, size_t numbers)
    : most_group_(group),
      scores_(group * kRows),
      chunk_o_(numbers),
      chunk_lse_(group),
      sum_o_(numbers),
      weight_(group),
      largest_(group) {}

void AuditTruth::prepare(uint32_t top_k, size_t rows) {
  best_.begin(most_group_, std::min(top_k, kMostPrepared), rows);
}

void AuditTruth::add_state(const float* o, const float* lse) {
  for (uint32_t h = 0; h < group_; ++h) {
    if (lse[h] == kMinusInf) continue;
    double* sum = sum_o_.data() + size_t{h} * dim_;
    if (lse[h] > largest_[h]) {
      const double shrink = std::exp(largest_[h] - lse[h]);  // 0 the first time
      weight_[h] *= shrink;
      for (uint32_t j = 0; j < dim_; ++j) sum[j] *= shrink;
      largest_[h] = lse[h];
    }
    const double weight = std::exp(lse[h] - largest_[h]);
    weight_[h] += weight;
    const float* from = o + size_t{h} * dim_;
    for (uint32_t j = 0; j < dim_; ++j) sum[j] += weight * from[j];
  }
}

bool AuditTruth::compute(const HeadRecord& record, const cpu::Kernels& kernels,
                         const LogitParams& logits, const std::atomic<bool>& cancel,
                         AuditResult& result) {
  const auto start = std::chrono::steady_clock::now();
  const RowsView& keys = record.kv.keys;
  const size_t rows = keys.tokens;
  group_ = record.group;
  dim_ = static_cast<uint32_t>(record.queries.size() / group_);
  std::fill(sum_o_.begin(), sum_o_.end(), 0.0);
  std::fill(weight_.begin(), weight_.end(), 0.0);
  std::fill(largest_.begin(), largest_.end(), -std::numeric_limits<double>::infinity());
  add_state(record.resident_o.data(), record.resident_lse.data());
  bool wants_recall = rows != 0 && record.knows_rows;
  try {
    best_.begin(group_, record.top_k, rows);
  } catch (const std::bad_alloc&) {
    wants_recall = false;
  }

  uint32_t ids[kRows];
  std::iota(ids, ids + kRows, 0U);
  for (size_t at = 0; at < rows; at += kRows) {
    if (cancel.load(std::memory_order_relaxed)) return false;
    const size_t n = std::min(kRows, rows - at);
    const KvView chunk = record.kv.slice(at, n);
    cpu::score_rows(kernels, chunk.keys, record.queries.data(), group_, nullptr, n, scores_.data(),
                    kRows);
    const StateView state = {chunk_o_.data(), chunk_lse_.data()};
    if (!cpu::attend_scored(kernels, chunk.values, {ids, n}, scores_.data(), kRows, group_, logits,
                            state)) {
      cpu::attend_range(kernels, chunk, record.queries.data(), group_, logits, state);
    }
    add_state(state.o, state.lse);
    for (uint32_t h = 0; h < group_ && wants_recall; ++h) {
      best_.offer(h, scores_.data() + h * kRows, static_cast<uint32_t>(at), n);
    }
  }

  for (uint32_t h = 0; h < group_; ++h) {
    double difference = 0.0;
    double norm = 0.0;
    for (size_t j = size_t{h} * dim_; j < size_t{h + 1} * dim_; ++j) {
      const double truth = weight_[h] > 0.0 ? sum_o_[j] / weight_[h] : 0.0;
      difference += (record.o[j] - truth) * (record.o[j] - truth);
      norm += truth * truth;
    }
    result.error[h] = !std::isfinite(difference) ? std::numeric_limits<float>::infinity()
                      : difference == 0.0        ? 0.0F
                      : norm == 0.0              ? 1.0F
                                                 : static_cast<float>(std::sqrt(difference / norm));
    // ln of the share that was read; rounding may put it above 0. A step that answers NaN has read nothing.
    const double share = record.read_lse[h] - (largest_[h] + std::log(weight_[h]));
    const double read =
        std::isnan(share) ? -std::numeric_limits<double>::infinity() : std::min(0.0, share);
    result.mass[h] = static_cast<float>(std::exp(read));
    result.missing[h] = static_cast<float>(-std::expm1(read));
    result.recall[h] = 0.0F;
    if (!wants_recall) continue;
    const std::span<const uint64_t> best = best_.selected(h);
    const auto attended = std::count_if(best.begin(), best.end(), [&](uint64_t rank) {
      return record.was_attended(index::rank_row(rank));
    });
    result.recall[h] = static_cast<float>(attended) / static_cast<float>(best.size());
  }
  result.has_recall = wants_recall;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return true;
}

size_t AuditTruth::bytes(uint32_t group, size_t numbers, uint32_t top_k, size_t rows) {
  const size_t best = 2 * std::min<size_t>(std::min(top_k, kMostPrepared), rows) + 64;
  return group * (kRows * sizeof(float) + best * sizeof(uint64_t)) +
         (numbers + size_t{2} * group) * (sizeof(float) + sizeof(double));
}

}  // namespace keyhole::runtime
