#include "tools/commands/common/head_truth.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <span>

#include "runtime/files/element.h"
#include "tools/llama/blas.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

// Scores of a block of queries against all keys lie in memory at once, twice (scores, weights): 64
// rows amortise the packing of the keys in the matrix product, 16M elements bound a thread's share
// at 128 MiB.
constexpr size_t kBlockRows = 64;
constexpr size_t kBlockElements = size_t{16} << 20U;

double capped(double logit, double softcap) {
  return softcap > 0 ? softcap * std::tanh(logit / softcap) : logit;
}

// One thread's working memory.
struct Scratch {
  std::vector<float> scores;   ///< `[block, n]`; become weights in place
  std::vector<float> ranking;  ///< `[offloaded]`
  std::vector<float> middle;   ///< `[block, d]` unnormalised output over the offloaded tokens
};

class Block {
 public:
  Block(HeadTruth& truth, std::span<const uint32_t> positions, size_t first, size_t count,
        double coverage, Scratch& scratch)
      : truth_(truth),
        coverage_(coverage),
        positions_(positions),
        first_(first),
        count_(count),
        tokens_(truth.keys.size() / truth.dim),
        scratch_(scratch) {}

  void compute() {
    scratch_.scores.resize(count_ * tokens_);
    gemm_nt(count_, tokens_, truth_.dim, truth_.query(first_), truth_.dim, truth_.keys.data(),
            truth_.dim, 0, scratch_.scores.data(), tokens_);
    sums_.resize(count_);
    for (size_t r = 0; r < count_; ++r) weigh(r);
    if (!truth_.values.empty()) write_outputs();
  }

 private:
  struct Sums {
    double middle = 0, resident = 0;
  };

  float* row(size_t r) { return scratch_.scores.data() + r * tokens_; }

  // Ranks the offloaded tokens, then turns the row's scores into unnormalised weights.
  void weigh(size_t r) {
    const size_t at = first_ + r;
    float* scores = row(r);
    const Offloaded off = truth_.offloaded;

    scratch_.ranking.assign(scores + off.begin, scores + off.end);
    const auto kth = scratch_.ranking.begin() + static_cast<ptrdiff_t>(truth_.k - 1);
    std::nth_element(scratch_.ranking.begin(), kth, scratch_.ranking.end(), std::greater<>());
    truth_.kth_score[at] = *kth;

    const size_t visible = size_t{positions_[at / truth_.group]} + 1;
    if (truth_.softcap > 0) {
      for (size_t i = 0; i < visible; ++i) scores[i] = static_cast<float>(truth_.logit(scores[i]));
    } else {
      for (size_t i = 0; i < visible; ++i) scores[i] *= truth_.scale;
    }
    const float top = *std::max_element(scores, scores + visible);
    for (size_t i = 0; i < visible; ++i) scores[i] = std::exp(scores[i] - top);
    std::fill(scores + visible, scores + tokens_, 0.0F);

    const auto sum = [&](size_t begin, size_t end) {
      double total = 0;
      for (size_t i = begin; i < end; ++i) total += scores[i];
      return total;
    };
    Sums& sums = sums_[r];
    sums.middle = sum(off.begin, off.end);
    sums.resident = sum(0, off.begin) + sum(off.end, visible);
    truth_.lse[at] = top + std::log(sums.middle + sums.resident);
    truth_.resident_lse[at] = top + std::log(sums.resident);  // log(0) = -inf: nothing is resident
    if (!truth_.spread.empty()) {
      const double all = sums.middle + sums.resident;
      WeightSpread& spread = truth_.spread[at];
      spread.sink = sum(0, off.begin) / all;
      spread.window = sum(off.end, visible) / all;
      spread.middle = sums.middle / all;
      spread.visible = static_cast<uint32_t>(visible);
      spread.covering = covering(scores, scores + visible, coverage_ * all);
      spread.largest = 1 / all;  // the heaviest has weight exp(0)
      spread.covering_middle =
          covering(scores + off.begin, scores + off.end, coverage_ * sums.middle);
    }
  }

  // The least number of these weights whose sum is at least `wanted`: found by halving, as in a selection, in time
  // linear in their number.
  uint32_t covering(const float* begin, const float* end, double wanted) {
    std::vector<float>& left = scratch_.ranking;
    left.assign(begin, end);
    uint32_t count = 0;
    auto first = left.begin();
    auto last = left.end();
    // All weights before `first` are taken, and `wanted` is what remains to be reached; none behind `last` will be
    // taken.
    while (last - first > 1) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, std::greater<>());
      const double upper = std::accumulate(first, middle, 0.0);
      if (upper >= wanted) {
        last = middle;
      } else {
        wanted -= upper;
        count += static_cast<uint32_t>(middle - first);
        first = middle;
      }
    }
    return count + (first != last && wanted > 0 ? 1 : 0);
  }

  // out (+)= weights of the tokens [begin, end) times their values.
  void accumulate(size_t begin, size_t end, float beta, float* out) {
    if (begin == end) {
      if (beta == 0) std::fill(out, out + count_ * truth_.dim, 0.0F);
      return;
    }
    gemm_nn(count_, truth_.dim, end - begin, row(0) + begin, tokens_,
            truth_.values.data() + begin * truth_.dim, truth_.dim, beta, out, truth_.dim);
  }

  void write_outputs() {
    const size_t d = truth_.dim;
    scratch_.middle.resize(count_ * d);
    float* resident = truth_.resident_output.data() + first_ * d;
    float* output = truth_.output.data() + first_ * d;
    accumulate(truth_.offloaded.begin, truth_.offloaded.end, 0, scratch_.middle.data());
    accumulate(0, truth_.offloaded.begin, 0, resident);
    accumulate(truth_.offloaded.end, tokens_, 1, resident);
    for (size_t r = 0; r < count_; ++r) {
      const Sums& sums = sums_[r];
      const double all = sums.middle + sums.resident;
      for (size_t i = r * d; i < (r + 1) * d; ++i) {
        output[i] = static_cast<float>((double{scratch_.middle[i]} + resident[i]) / all);
        resident[i] = sums.resident > 0 ? static_cast<float>(resident[i] / sums.resident) : 0.0F;
      }
    }
  }

  HeadTruth& truth_;
  double coverage_;
  std::span<const uint32_t> positions_;
  size_t first_, count_, tokens_;
  Scratch& scratch_;
  std::vector<Sums> sums_;
};

std::vector<float> used_queries(const TraceHead& head, const std::vector<size_t>& used) {
  const size_t width = head.queries.shape[1] * head.queries.shape[2];
  const size_t row_bytes = width * element_size(head.queries.type);
  std::vector<float> out(used.size() * width);
  for (size_t i = 0; i < used.size(); ++i) {
    elements_to_f32(head.queries.type, head.queries.bytes.subspan(used[i] * row_bytes, row_bytes),
                    std::span(out).subspan(i * width, width));
  }
  return out;
}

}  // namespace

Offloaded offloaded_tokens(const Trace& trace, size_t sink, size_t window) {
  const size_t prefix = size_t{trace.query_positions().front()} + 1;
  if (sink + window >= prefix) {
    throw UsageError("sink " + std::to_string(sink) + " and window " + std::to_string(window) +
                     " cover all " + std::to_string(prefix) +
                     " tokens before the first query: nothing is left to an index; choose smaller "
                     "ones or a longer trace");
  }
  return {sink, prefix - window};
}

double HeadTruth::sparsity() const {
  double sum = spread.empty() ? std::numeric_limits<double>::quiet_NaN() : 0;
  for (const WeightSpread& row : spread) {
    sum += 1 - static_cast<double>(row.covering) / row.visible;
  }
  return sum / static_cast<double>(rows());
}

double HeadTruth::logit(double inner_product) const {
  return capped(scale * inner_product, softcap);
}

HeadTruth compute_truth(const Trace& trace, const TraceHead& head, const TruthOptions& options,
                        Team& team) {
  const TraceInfo& info = trace.info();
  HeadTruth truth;
  truth.dim = info.head_dim;
  truth.group = info.group();
  truth.scale = info.scale;
  truth.softcap = info.softcap;
  truth.offloaded = options.offloaded;
  truth.k = std::min(options.k, options.offloaded.count());
  truth.keys = head.keys.to_f32();
  const bool outputs = head.values && options.outputs;
  if (outputs) truth.values = head.values->to_f32();
  truth.queries = used_queries(head, options.queries);

  for (const size_t i : options.queries) truth.positions.push_back(trace.query_positions()[i]);
  const size_t rows = truth.positions.size() * truth.group;
  truth.lse.resize(rows);
  truth.resident_lse.resize(rows);
  truth.kth_score.resize(rows);
  if (options.coverage > 0) truth.spread.resize(rows);
  if (outputs) {
    truth.output.resize(rows * truth.dim);
    truth.resident_output.resize(rows * truth.dim);
  }

  const size_t block = std::clamp<size_t>(kBlockElements / info.tokens, 1, kBlockRows);
  std::vector<Scratch> scratch(team.size());
  const SingleThreadedBlas one_thread_each(team.size());
  team.for_each((rows + block - 1) / block, [&](size_t item, unsigned member) {
    const size_t first = item * block;
    Block(truth, truth.positions, first, std::min(block, rows - first), options.coverage,
          scratch[member])
        .compute();
  });

  double mass = 0;
  for (size_t r = 0; r < rows; ++r) mass += 1 - std::exp(truth.resident_lse[r] - truth.lse[r]);
  truth.middle_mass = mass / static_cast<double>(rows);
  return truth;
}

}  // namespace keyhole::tools
