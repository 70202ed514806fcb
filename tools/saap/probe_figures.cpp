#include "tools/saap/probe_figures.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tools/llama/blas.h"

namespace keyhole::tools {
namespace {

constexpr double kShares[] = {0.0125, 0.025, 0.05, 0.1, 0.2};
// Early queries see a part of the keys only: those of the last quarter stand for decoding.
constexpr double kLate = 0.75;
constexpr size_t kPositionsAtOnce = 64;

// Works through one prompt's late queries.
class Probing {
 public:
  Probing(const PromptHead& prompt, const FoldedMlp& mlp)
      : prompt_(prompt),
        mlp_(mlp),
        count_(prompt.sizes.size()),
        keys_(std::accumulate(prompt.sizes.begin(), prompt.sizes.end(), 0.0)),
        rank_(count_) {}

  // Adds recovered masses to `sums`; returns the whole of it.
  double add(std::vector<ProbeFigures>& sums) {
    const auto late = static_cast<uint32_t>(kLate * prompt_.positions.back());
    const size_t begin = static_cast<size_t>(
        std::lower_bound(prompt_.positions.begin(), prompt_.positions.end(), late) -
        prompt_.positions.begin());
    double total = 0;
    for (size_t at = begin; at < prompt_.positions.size(); at += kPositionsAtOnce) {
      const size_t end = std::min(at + kPositionsAtOnce, prompt_.positions.size());
      total += add_block(at * prompt_.group, end * prompt_.group, sums);
    }
    return total;
  }

 private:
  double add_block(size_t first, size_t end, std::vector<ProbeFigures>& sums) {
    const size_t n = end - first;
    const float* queries = prompt_.queries.data() + first * prompt_.dim;
    mlp_.log_probabilities(queries, prompt_.priors(first, n).data(), n, log_p_);
    scores_.resize(n * count_);
    gemm_nt(n, count_, prompt_.dim, queries, prompt_.dim, prompt_.means.data(), prompt_.dim, 0,
            scores_.data(), count_);
    double total = 0;
    for (size_t i = 0; i < n; i += prompt_.group) {
      for (size_t j = 0; j < prompt_.group; ++j) total += prompt_.mass[first + i + j];
      rank_by_classifier(first, i);
      collect(first + i, &ProbeFigures::classifier, sums);
      rank_by_truth(first + i);
      collect(first + i, &ProbeFigures::best, sums);
      rank_by_centroids(i);
      collect(first + i, &ProbeFigures::centroids, sums);
    }
    return total;
  }

  void rank_by_classifier(size_t first, size_t i) {
    const float* log_sizes = prompt_.log_sizes.data() + (first + i) / prompt_.group * count_;
    std::fill(rank_.begin(), rank_.end(), 0.0);
    for (size_t j = i; j < i + prompt_.group; ++j) {
      for (size_t c = 0; c < count_; ++c) {
        rank_[c] += std::exp(double{log_p_[j * count_ + c]} - log_sizes[c]);
      }
    }
  }

  void rank_by_truth(size_t row) {
    std::fill(rank_.begin(), rank_.end(), 0.0);
    for (size_t j = row; j < row + prompt_.group; ++j) {
      for (size_t c = 0; c < count_; ++c) {
        rank_[c] += double{prompt_.mass[j]} * prompt_.targets[j * count_ + c] /
                    std::max(prompt_.sizes[c], 1U);
      }
    }
  }

  // Ranks as `ivf` does: by the sum over heads of exp of the score, standardised over the partitions.
  void rank_by_centroids(size_t i) {
    std::fill(rank_.begin(), rank_.end(), 0.0);
    for (size_t j = i; j < i + prompt_.group; ++j) {
      const float* row = scores_.data() + j * count_;
      double sum = 0;
      double squares = 0;
      double filled = 0;
      for (size_t c = 0; c < count_; ++c) {
        if (prompt_.sizes[c] == 0) continue;
        sum += row[c];
        squares += double{row[c]} * row[c];
        ++filled;
      }
      const double mean = sum / filled;
      const double deviation = std::sqrt(std::max(squares / filled - mean * mean, 1e-12));
      for (size_t c = 0; c < count_; ++c) rank_[c] += std::exp((row[c] - mean) / deviation);
    }
  }

  // Visits partitions by falling rank_ until they hold the share of the keys; of the last one a part.
  void collect(size_t row, double ProbeFigures::*figure, std::vector<ProbeFigures>& sums) {
    order_.clear();
    for (uint32_t c = 0; c < count_; ++c) {
      if (prompt_.sizes[c] != 0) order_.push_back(c);
    }
    std::sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
      return rank_[a] != rank_[b] ? rank_[a] > rank_[b] : a < b;
    });
    for (ProbeFigures& sum : sums) {
      double left = sum.share * keys_;
      for (size_t i = 0; i < order_.size() && left > 0; ++i) {
        const double size = prompt_.sizes[order_[i]];
        double mass = 0;
        for (size_t j = row; j < row + prompt_.group; ++j) {
          mass += double{prompt_.mass[j]} * prompt_.targets[j * count_ + order_[i]];
        }
        sum.*figure += mass * std::min(1.0, left / size);
        left -= size;
      }
    }
  }

  const PromptHead& prompt_;
  const FoldedMlp& mlp_;
  size_t count_;
  double keys_;
  std::vector<float> log_p_, scores_;  // `[n, C]` of a block
  std::vector<double> rank_;           // `[C]` of a position
  std::vector<uint32_t> order_;
};

}  // namespace

std::vector<ProbeFigures> measure_probing(const std::vector<PromptHead>& prompts,
                                          const FoldedMlp& mlp) {
  std::vector<ProbeFigures> figures;
  for (const double share : kShares) figures.push_back({share});
  double total = 0;
  for (const PromptHead& prompt : prompts) total += Probing(prompt, mlp).add(figures);
  for (ProbeFigures& f : figures) {
    for (const auto figure :
         {&ProbeFigures::classifier, &ProbeFigures::centroids, &ProbeFigures::best}) {
      f.*figure = total > 0 ? f.*figure / total : 0;
    }
  }
  return figures;
}

}  // namespace keyhole::tools
