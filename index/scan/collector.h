// The destination of the keys that a search scores: the best k of each head, or a log of all.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "index/scan/topk.h"
#include "index/scan/twins.h"

namespace keyhole::index {

class Collector {
 public:
  /// Keeps the `k` best of at most `count` offers per head.
  void begin_top(uint32_t group, uint32_t k, size_t count) {
    logging_ = false;
    group_ = group;
    top_.begin(group, k, count);
  }

  /// Keeps every offer, at most `count`.
  void begin_log(uint32_t group, size_t count) {
    logging_ = true;
    group_ = group;
    size_ = 0;
    if (rows_.size() < count) rows_.resize(log_capacity(count));
    stride_ = rows_.size();
    if (scores_.size() < group * stride_) scores_.resize(group * stride_);
  }

  /// Bytes of a log of `count` rows.
  [[nodiscard]] static size_t log_bytes(uint32_t group, size_t count) {
    return log_capacity(count) * (sizeof(uint32_t) + group * sizeof(float));
  }

  [[nodiscard]] bool logging() const { return logging_; }

  /// Offers the rows first, first + 1, ... scored for all heads: scores[h * stride + i].
  void offer(const float* scores, size_t stride, uint32_t first, size_t n) {
    if (logging_) {
      for (size_t i = 0; i < n; ++i) rows_[size_ + i] = first + static_cast<uint32_t>(i);
      return log(scores, stride, n);
    }
    for (uint32_t h = 0; h < group_; ++h) top_.offer(h, scores + h * stride, first, n);
  }
  /// Offers the rows rows[i], scored for all heads: scores[h * stride + i].
  void offer(const float* scores, size_t stride, const uint32_t* rows, size_t n) {
    if (logging_) {
      std::copy_n(rows, n, rows_.data() + size_);
      return log(scores, stride, n);
    }
    for (uint32_t h = 0; h < group_; ++h) top_.offer(h, scores + h * stride, rows, n);
  }

  /// Adds the twins of the rows that it holds, none of which may be a twin: to the best of each head those that
  /// belong there, to a log all.
  void add_twins(const Twins& twins) {
    if (twins.empty()) return;
    const auto twins_of = [&](uint32_t row) { return twins.of(row); };
    if (!logging_) return top_.offer_equals(twins_of);
    const size_t logged = size_;
    for (size_t i = 0; i < logged; ++i) {
      const std::span<const uint32_t> rows = twins.of(rows_[i]);
      for (uint32_t h = 0; h < group_; ++h) {
        float* scores = scores_.data() + h * stride_;
        std::fill_n(scores + size_, rows.size(), scores[i]);
      }
      log_rows(rows.data(), rows.size());
    }
  }

  [[nodiscard]] TopK& top() { return top_; }

  /// The log: rows, and their scores, which may be overwritten by better ones.
  [[nodiscard]] std::span<uint32_t> rows() { return {rows_.data(), size_}; }
  [[nodiscard]] float* scores() { return scores_.data(); }
  [[nodiscard]] size_t stride() const { return stride_; }

  /// Logs rows whose scores are filled in later.
  void log_rows(const uint32_t* rows, size_t n) {
    std::copy_n(rows, n, rows_.data() + size_);
    size_ += n;
  }

 private:
  // Appends grow an index in steps.
  static size_t log_capacity(size_t count) { return count + count / 4; }

  void log(const float* scores, size_t stride, size_t n) {
    for (uint32_t h = 0; h < group_; ++h) {
      std::copy_n(scores + h * stride, n, scores_.data() + h * stride_ + size_);
    }
    size_ += n;
  }

  bool logging_ = false;
  uint32_t group_ = 0;
  TopK top_;
  std::vector<uint32_t> rows_;
  std::vector<float> scores_;  // `[group, stride_]`
  size_t stride_ = 0;
  size_t size_ = 0;
};

}  // namespace keyhole::index
