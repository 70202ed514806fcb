#include "tools/rivals/rivals.h"

#include "tools/rivals/rival.h"

namespace keyhole::tools {

std::span<const RivalType* const> rival_types() {
  static const RivalType* const kTypes[] = {
      &kFaissIvf,   &kFaissIvfPq,           &kFaissHnsw,    &kHnswlib,        &kLshSampling,
      &kPageBounds, &kBlockRepresentatives, &kRandomSample, &kCacheQ8,        &kCacheQ4,
      &kCacheKivi2, &kCacheKivi4,           &kCacheKvarn2,  &kCacheKvarnK4V2, &kCacheOscar2};
  return kTypes;
}

}  // namespace keyhole::tools
