// The heads of which bench-step makes a model of any size: those of a recorded trace, or synthetic ones.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tools/io/trace.h"

namespace keyhole::tools {

/// Heads with a context of `context` tokens and the decoding steps after it: step s brings token context + s.
/// Everything is a function of the arguments, and may be asked for from any number of threads.
class HeadSource {
 public:
  virtual ~HeadSource() = default;

  [[nodiscard]] virtual uint32_t heads() const = 0;  ///< different ones
  [[nodiscard]] virtual uint32_t dim() const = 0;

  enum class Part { keys, values };
  /// Writes `[count, dim]` fp32 rows of the tokens from `first` on.
  virtual void rows(uint32_t head, Part part, uint64_t first, size_t count, float* out) const = 0;

  /// Writes the query `[dim]` of head j of the KV head's group in a step.
  virtual void step_query(uint32_t head, uint32_t step, uint32_t j, float* out) const = 0;

  /// Number of positions, evenly spread over the context, with queries of the prompt that may guide an index.
  [[nodiscard]] virtual uint32_t training_positions() const = 0;
  virtual void training_query(uint32_t head, uint32_t position, uint32_t j, float* out) const = 0;

  [[nodiscard]] virtual float scale() const = 0;  ///< of the logits; 0: 1 / sqrt(dim)
  [[nodiscard]] virtual float softcap() const = 0;
  [[nodiscard]] virtual std::string description() const = 0;  ///< a line for people
  /// Number of tokens of the context that were not recorded but are noisy copies of recorded ones.
  [[nodiscard]] virtual uint64_t copied_tokens() const { return 0; }
};

/// Heads of a trace, whose first decoding query comes after P tokens.
///   context <= P  the first `sink` tokens and the last context - sink of those P
///   context > P   after the first `sink` tokens come copies of the tokens behind them, over and over, each number
///                 with noise of a tenth of its row's root mean square; then the trace's own tokens. A key's
///                 copies score alike: its attention weight is shared among them.
/// Steps take the recorded queries in turn, from the first again after the last. The trace must have values.
/// Throws UsageError.
[[nodiscard]] std::unique_ptr<HeadSource> make_trace_source(const Trace& trace, uint64_t context,
                                                            uint32_t sink, uint64_t seed);

/// Heads without a model, for machines that have no trace:
///   keys     mean + centre of one of 256 clusters (few large ones, many small; 32 neighbouring tokens share one)
///            + noise, all with a spectrum that falls like 1 / sqrt(i); the first 4 tokens are a sink that every
///            query is drawn to
///   queries  another distribution: they lie near the keys of no cluster, but look at three of them, more sharply
///            in later heads
///   values   a mean of each cluster + noise; those of the sink are small
/// It resembles attention in what index types have trouble with. Figures of quality on it mean little.
[[nodiscard]] std::unique_ptr<HeadSource> make_synthetic_source(uint32_t dim, uint64_t seed);

}  // namespace keyhole::tools
