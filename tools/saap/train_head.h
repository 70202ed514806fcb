// Trains what Saap needs for one KV head: partitions of the keys, and the query classifier over them.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "tools/io/trace.h"
#include "tools/saap/folded_mlp.h"
#include "tools/saap/probe_figures.h"
#include "tools/saap/prompt_head.h"

namespace keyhole::tools {

struct SaapTraining {
  PartitionTraining partitions;
  LongRange range;
  size_t hidden = 1024;
  size_t batch = 1024;
  uint32_t epochs = 30;   ///< at most
  uint32_t patience = 4;  ///< epochs without a better validation loss before it stops
  float rate = 1e-3F;     ///< of Adam; falls to 0 along a cosine
  float decay = 0.02F;    ///< of the matrices' weights
  uint64_t seed = 1;
};

struct SaapHead {
  uint32_t layer = 0, kv_head = 0;
  Partitions partitions;
  FoldedMlp mlp;
  double middle_mass = 0;  ///< long-range share of the validation queries' attention
  double prior_loss = 0;   ///< validation KL of the mean target: what is known without the query
  double start_loss = 0;
  double loss = 0;      ///< validation KL of the classifier
  uint32_t epochs = 0;  ///< up to the best
  double seconds = 0;
  std::vector<ProbeFigures> figures;
};

/// Called with the share done. Returns false to give up; train_head() then returns an unfinished head.
using TrainingProgress = std::function<bool(double)>;

/// Trains head number `head` of every trace (Trace::heads()). Random numbers depend on the seed alone. Runs on one
/// thread, except for BLAS.
[[nodiscard]] SaapHead train_head(std::span<const Trace> train, std::span<const Trace> validate,
                                  size_t head, const SaapTraining& training,
                                  const TrainingProgress& progress);

}  // namespace keyhole::tools
