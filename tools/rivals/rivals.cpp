#include "tools/rivals/rivals.h"

#include "tools/rivals/rival.h"

namespace keyhole::tools {

std::span<const RivalType* const> rival_types() {
  static const RivalType* const kTypes[] = {
      &kFaissIvf,   &kFaissIvfPq,           &kFaissHnsw,   &kHnswlib, &kLshSampling,
      &kPageBounds, &kBlockRepresentatives, &kRandomSample};
  return kTypes;
}

}  // namespace keyhole::tools
