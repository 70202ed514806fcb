// A small random trace, and exact attention over it in double precision by the definitions alone.
#pragma once

#include <filesystem>
#include <random>
#include <vector>

#include "tools/io/trace.h"

namespace keyhole::tools {

struct SyntheticTrace {
  TraceInfo info;
  TraceWriter::Options options;
  // Rows by head (layer, then KV head): `[n, d]`, `[m, g, d]`, `[t, g, d]`.
  std::vector<std::vector<float>> keys, values, queries, training;

  void write(const std::filesystem::path& path) const;
  [[nodiscard]] double logit(size_t head, size_t query, size_t j, size_t token) const;
  [[nodiscard]] double inner_product(size_t head, size_t query, size_t j, size_t token) const;
};

struct SyntheticShape {
  uint32_t layers = 2, kv_heads = 2, group = 2, dim = 64, tokens = 600, queries = 9, training = 20;
  float softcap = 0;
};
/// Makes a trace. Heads differ in how sharp their attention is, so that their middle masses differ.
[[nodiscard]] SyntheticTrace make_synthetic_trace(const SyntheticShape& shape,
                                                  std::mt19937& random);

/// The figures that compare must report for exact search of k keys or, with min_weight above 0, for attention to all
/// offloaded keys of a softmax weight above it for at least one head of the group.
struct ExactSearch {
  double middle_mass = 0, recovered_mass = 0;
  double recall = 0;  ///< share of the k best keys that are attended by all heads
  double keys_attended = 0;
  std::vector<double> errors;  ///< by query and query head
};
[[nodiscard]] ExactSearch exact_search(const SyntheticTrace& trace, size_t head, size_t k,
                                       size_t sink, size_t window, double min_weight = 0);

}  // namespace keyhole::tools
