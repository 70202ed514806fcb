// `saap`: fixed partitions of keys whose RoPE is undone, chosen by a trained network (Saap).
//
// PARTITIONS. Where the engine has a classifier for the layer and KV head, its partitions are used: the keys of a new
// context are assigned, not clustered. Elsewhere spherical k-means runs over the context's own keys.
//
// Partitions of the context's own keys are made with each channel times its scale (scan/balance.h), learned from keys
// and queries whose RoPE is undone.
//
// PROBING. One search per group. With a classifier, partitions are ranked by the attention per key that it
// predicts, summed over the heads; the paper ranks by predicted attention, which prefers long lists: at the
// same number of keys scored, that recovers less. Without one, by the partitions' mean keys, as `ivf` does.
// Every key of the chosen partitions is scored for all heads; what is attended of them is the caller's choice
// (the paper's: all).
//
// APPEND. New rows are assigned. They wait in the tail, a second set of lists, until there are as many as a
// part is worth, and then become lists of their own: a partition is one list per part and one of the tail.
#pragma once

#include "index/index.h"
#include "index/spec.h"

namespace keyhole::index {

extern const TypeDecl kSaapType;
[[nodiscard]] std::unique_ptr<Index> make_saap(const Spec& spec, uint32_t dim, DType dtype,
                                               const Context& context);
[[nodiscard]] size_t estimate_saap(const Spec& spec, size_t count, uint32_t dim, DType dtype);

}  // namespace keyhole::index
