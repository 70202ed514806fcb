// `flat`: an exact scan of all keys, the upper bound of accuracy and the yardstick for speed.
#pragma once

#include "index/spec.h"

#include "index/index.h"

namespace keyhole::index {

extern const TypeDecl kFlatType;
[[nodiscard]] std::unique_ptr<Index> make_flat(const Spec& spec, uint32_t dim, DType dtype,
                                               const Context& context);
[[nodiscard]] size_t estimate_flat(const Spec& spec, size_t count, uint32_t dim, DType dtype);

}  // namespace keyhole::index
