// `ivf`: partitions of the keys by k-means (an inverted file). A search ranks the partitions by their mean
// key and scans the best ones, scoring every key it loads for the whole group.
//
// PROBING. One list of partitions serves the group. A partition's rank is sum_h exp(z_h), where z_h is its
// mean key's score with head h, standardised over all partitions: the standardising gives each head the
// same weight, the exponential lets one head alone win a partition. On the testbed model's heads this beat
// equal shares per head by 1-3 points of recall@100 below 10 % scanned and the score of the summed query by 2-5
// points above it, at the same number of keys scanned.
//
// ROPE. With rope=undo, partitions are made of keys, and ranked by queries, as they are before RoPE: whether
// a key suits a query then does not depend on how far apart they stand (Saap, section 3). Keys are scored
// as the model has them either way.
//
// SPACE. Keys are clustered, and assigned later, with each channel times its scale (scan/balance.h); mean keys are kept
// as the keys are, so that a search has nothing to scale. Outlier channels would otherwise decide alone what is near:
// with six channels times 16, recall@100 fell from 0.81 to 0.50.
//
// APPEND. New rows go to the lists of their nearest mean keys, in a second set of lists, the tail: a
// partition is scanned as two streams, and trained lists are never moved. Once `segment` rows have come in
// they are clustered on their own and become a further part (RetroInfer's segments). Appends stay
// cheap at any length, and lists adapt to new text.
#pragma once

#include "index/index.h"
#include "index/spec.h"

namespace keyhole::index {

extern const TypeDecl kIvfType;
[[nodiscard]] std::unique_ptr<Index> make_ivf(const Spec& spec, uint32_t dim, DType dtype,
                                              const Context& context);
[[nodiscard]] size_t estimate_ivf(const Spec& spec, size_t count, uint32_t dim, DType dtype);

}  // namespace keyhole::index
