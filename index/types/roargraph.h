// The query-guided graph index (RoarGraph, PVLDB 17(11); RetrievalAttention, section 3.2): edges come from what
// the prefill's queries attended to, so that decode-time queries, which lie far from all keys, find their way.
#pragma once

#include <memory>

#include "index/index.h"
#include "index/spec.h"

namespace keyhole::index {

extern const TypeDecl kRoarGraphType;

[[nodiscard]] std::unique_ptr<Index> make_roargraph(const Spec& spec, uint32_t dim, DType dtype,
                                                    const Context& context);
[[nodiscard]] size_t estimate_roargraph(const Spec& spec, size_t count, uint32_t dim, DType dtype);

}  // namespace keyhole::index
