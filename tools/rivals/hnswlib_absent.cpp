// In place of hnswlib.cpp where its header was not found.
#include "tools/rivals/graph_params.h"
#include "tools/rivals/rival.h"
#include "tools/rivals/rivals.h"

namespace keyhole::tools {

const RivalType kHnswlib = {.name = "hnswlib",
                            .meaning = "hnswlib's graph and search",
                            .params = GraphParams::kTable,
                            .needs = "libhnswlib-dev"};

}  // namespace keyhole::tools
