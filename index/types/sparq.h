// `sparq`: approximate scores of all keys from a few of their components, exact scores of the best (SparQ
// Attention). Nothing is trained or clustered, and appends cost a copy.
//
// SEARCH. (1) The r components in which the group's queries are largest, by the sum over its heads of |q_j| / s_j,
// are read of every key (component_blocks.h) and give each head approximate scores. (2) The k best of each head
// are read whole: their exact scores, for all heads of the group, are the answer. The paper takes one k for the
// group, by the sum of the heads' weights; here each head has its k, and what one head found counts for the
// others as well. (3) alpha, the softmax mass that approximate scores give to what was found, is
// Hits::coverage. The softmax has the paper's temperature: logits of head h are its approximate scores times
// scale * sqrt(|q|_1 / |q_r|_1), since the components left out would have made the true ones larger.
//
// COST. Approximate scores are bytes, not keys: keys_scored counts keys that were read whole, as `scored` then
// attends to them. bytes_read is the paper's transfer (its equation 11) as far as a search goes: n*r elements of
// components, and d of each key that was read whole.
//
// LOCAL. The paper keeps the newest l tokens; the runtime's window is resident as it is, so local = 0 by
// default. With local > 0 the newest `local` indexed rows are in every head's answer and take places of its k.
#pragma once

#include "index/index.h"
#include "index/spec.h"

namespace keyhole::index {

extern const TypeDecl kSparqType;
[[nodiscard]] std::unique_ptr<Index> make_sparq(const Spec& spec, uint32_t dim, DType dtype,
                                                const Context& context);
[[nodiscard]] size_t estimate_sparq(const Spec& spec, size_t count, uint32_t dim, DType dtype);

}  // namespace keyhole::index
