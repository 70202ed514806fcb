// In place of faiss_ivf.cpp, faiss_ivfpq.cpp and faiss_hnsw.cpp where Faiss was not found.
#include "tools/rivals/faiss_params.h"
#include "tools/rivals/graph_params.h"
#include "tools/rivals/rival.h"
#include "tools/rivals/rivals.h"

namespace keyhole::tools {

const RivalType kFaissIvf = {.name = "faiss-ivf",
                             .meaning = kFaissIvfMeaning,
                             .params = FaissIvfParams::kTable,
                             .needs = "libfaiss-dev"};
const RivalType kFaissIvfPq = {.name = "faiss-ivfpq",
                               .meaning = kFaissIvfPqMeaning,
                               .params = FaissIvfPqParams::kTable,
                               .needs = "libfaiss-dev"};
const RivalType kFaissHnsw = {.name = "faiss-hnsw",
                              .meaning = kFaissHnswMeaning,
                              .params = GraphParams::kTable,
                              .needs = "libfaiss-dev"};

}  // namespace keyhole::tools
