// Saap's trained data of one KV head: fixed partitions of the keys, and a network that predicts from a query
// in which of them its attention lies (Saap, section 4). Trained by `keyhole train-saap`, read by the engine.
//
// With x for the query as it is before RoPE, and n(c) keys in partition c,
//
//     p(c) = softmax over c of  w2 relu(w1 x + b1) + w3 x + b2 + ln n(c)
//
// The paper's network is w2 relu(w1 x + b1) + b2 (batch norm folded into the first layer). The linear part
// and the sizes are ours: scale * mean key of a partition in place of w3 is a first-order prediction of the
// partition's share, so the network learns only what is missing in it, and what it learnt of one prompt's
// partition sizes is not carried over to another prompt.
#pragma once

#include "index/partitions/key_partitions.h"

namespace keyhole::index {

/// The weights of a classifier. Matrices are F16, their elements in file order (little-endian).
struct ClassifierWeights {
  uint32_t dim = 0;
  uint32_t hidden = 0;       ///< a multiple of 64, 64..8192
  KeyPartitions partitions;  ///< C >= 1 of them
  std::vector<uint16_t> w1;  ///< `[hidden, dim]`
  std::vector<float> b1;     ///< `[hidden]`
  std::vector<uint16_t> w2;  ///< `[C, hidden]`
  std::vector<float> b2;     ///< `[C]`
  std::vector<uint16_t> w3;  ///< `[C, dim]`
};

class QueryClassifier {
 public:
  /// Checks and takes over the weights. Throws Error(corrupt) where sizes do not fit each other or a number is not
  /// finite.
  QueryClassifier(const cpu::Kernels& kernels, ClassifierWeights weights);

  [[nodiscard]] uint32_t dim() const { return weights_.dim; }
  [[nodiscard]] const KeyPartitions& partitions() const { return weights_.partitions; }
  /// A hash of all weights, which tells one classifier from another.
  [[nodiscard]] uint64_t digest() const { return digest_; }
  /// Bytes of the network, all of which every search reads.
  [[nodiscard]] size_t network_bytes() const;

  /// The working memory of one thread.
  class Scratch {
   public:
    void reserve(uint32_t max_group, size_t partitions);

   private:
    friend class QueryClassifier;
    std::vector<float> hidden_;   // `[group, widest piece]`
    std::vector<float> logits_;   // `[group, C]`
    std::vector<float> partial_;  // `[group, C]`
  };

  /// Writes density[c] = sum of p(c) over the group / n(c): partitions of high density give most attention per key
  /// read. (The paper takes the largest p; see saap.h.) log_sizes `[C]`: ln n(c), -inf for an empty partition, whose
  /// density is unspecified. Allocates nothing after scratch.reserve().
  void densities(const float* queries, uint32_t group, const float* log_sizes, Scratch& scratch,
                 float* density) const;

 private:
  void add_hidden_logits(const float* queries, uint32_t group, Scratch& scratch) const;

  const cpu::Kernels* kernels_;
  ClassifierWeights weights_;
  uint64_t digest_ = 0;
};

}  // namespace keyhole::index
