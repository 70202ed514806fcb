// Exact attention of one recorded head: the truth against which compare measures an index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/io/trace.h"
#include "tools/llama/team.h"

namespace keyhole::tools {

/// The tokens that an index answers for. With P tokens at the first decode-time query (its own included), the
/// offloaded ones are [sink, P - window), as in a session whose index was built then; everything else up to a query's
/// own position is attended exactly (sink, window, and what is generated since).
struct Offloaded {
  size_t begin = 0, end = 0;
  [[nodiscard]] size_t count() const { return end - begin; }
};

/// Throws UsageError where sink and window leave nothing to an index.
[[nodiscard]] Offloaded offloaded_tokens(const Trace& trace, size_t sink, size_t window);

struct TruthOptions {
  Offloaded offloaded;
  size_t k = 0;                 ///< of recall@k
  std::vector<size_t> queries;  ///< rows of the trace's queries that are used
  bool outputs = true;          ///< exact outputs too, where the trace has values
  /// Above 0: also computes how the weights are spread, with the tokens that hold this share of them.
  double coverage = 0;
};
/// The share that is usually asked for.
inline constexpr double kUsualCoverage = 0.9;

/// How one query's attention is spread over the tokens up to its position.
struct WeightSpread {
  double sink = 0, window = 0,
         middle = 0;      ///< shares of the softmax weight; window: all behind the offloaded tokens
  double largest = 0;     ///< weight of one token
  uint32_t visible = 0;   ///< tokens
  uint32_t covering = 0;  ///< the fewest tokens that hold the stated share of the weight
  uint32_t covering_middle = 0;  ///< of the offloaded tokens alone: of their weight
};

/// The truth of one KV head. Row r = i * group + j is query head j of the i-th used query. Logits and outputs come
/// from fp32 matrix products over the trace's own elements; sums of weights are in double.
struct HeadTruth {
  size_t dim = 0, group = 0;
  float scale = 0, softcap = 0;
  Offloaded offloaded;
  size_t k = 0;                        ///< at most offloaded.count()
  std::vector<float> keys;             ///< `[n, d]`
  std::vector<float> values;           ///< `[n, d]`; empty where the trace has none
  std::vector<float> queries;          ///< `[rows, d]`
  std::vector<uint32_t> positions;     ///< `[rows / group]` token positions of the used queries
  std::vector<float> output;           ///< `[rows, d]` of exact attention; empty without values
  std::vector<float> resident_output;  ///< `[rows, d]` over all but the offloaded tokens; likewise
  std::vector<double> lse;             ///< `[rows]` over all tokens up to the query's position
  std::vector<double> resident_lse;    ///< `[rows]`; -inf where no token is resident
  std::vector<float> kth_score;        ///< `[rows]` k-th largest inner product among the offloaded
  double middle_mass = 0;              ///< mean softmax weight of the offloaded tokens
  std::vector<WeightSpread> spread;    ///< `[rows]`, with TruthOptions::coverage

  /// The mean share of the visible tokens that is not among the fewest that hold the stated share of the weight; NaN
  /// without spreads.
  [[nodiscard]] double sparsity() const;
  [[nodiscard]] size_t rows() const { return lse.size(); }
  [[nodiscard]] const float* query(size_t row) const { return queries.data() + row * dim; }
  [[nodiscard]] const float* offloaded_key(size_t id) const {
    return keys.data() + (offloaded.begin + id) * dim;
  }
  [[nodiscard]] double logit(double inner_product) const;
};

[[nodiscard]] HeadTruth compute_truth(const Trace& trace, const TraceHead& head,
                                      const TruthOptions& options, Team& team);

}  // namespace keyhole::tools
