// The parameters of HNSW graphs, which are the same for every library that builds them.
#pragma once

#include "tools/rivals/params.h"

namespace keyhole::tools {

struct GraphParams {
  enum Place : size_t { m, efc, ef, lift };
  static constexpr RivalParam kTable[] = {
      {"m", RivalStage::build, 16, 2, 1024,
       "links of a key and layer, twice as many in the lowest"},
      {"efc", RivalStage::build, 200, 1, 1 << 20, "candidates while a key is linked"},
      {"ef", RivalStage::search, 128, 1, 1 << 20,
       "candidates of a search, at least the keys wanted"},
      {"lift", RivalStage::build, 1, 0, 1,
       "1: edges by distance among keys lifted to one length; 0: by raw inner product"},
  };
};

}  // namespace keyhole::tools
