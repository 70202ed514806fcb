// faiss-hnsw: Faiss's IndexHNSWFlat, searched by one query head at a time.
//
// Malkov and Yashunin, TPAMI 2020, as Faiss has it (arXiv 2401.08281). Inner products throughout; with lift=1 of keys
// of one length, among which they are distances.
#include <faiss/IndexHNSW.h>

#include <algorithm>

#include "tools/rivals/faiss_common.h"
#include "tools/rivals/faiss_params.h"
#include "tools/rivals/graph_params.h"
#include "tools/rivals/lifted_rows.h"
#include "tools/rivals/rivals.h"

namespace keyhole::tools {
namespace {

// Keys that searches have scored so far: Faiss moved the count to another member in 1.7.4.
template <class Stats>
size_t scored_so_far(const Stats& stats) {
  if constexpr (requires { stats.n3; }) {
    return stats.n3 + stats.ndis;
  } else {
    return stats.ndis;
  }
}

class FaissHnsw : public Rival {
 public:
  explicit FaissHnsw(const RivalSpec& spec) : spec_(spec) {}

  void build(const RivalData& data) override {
    dim_ = data.shape.dim;
    const bool lift = spec_[GraphParams::lift] != 0;
    width_ = dim_ + (lift ? 1 : 0);
    const FaissThreads threads(data.threads);
    index_ = std::make_unique<faiss::IndexHNSWFlat>(static_cast<int>(width_),
                                                    static_cast<int>(spec_[GraphParams::m]),
                                                    faiss::METRIC_INNER_PRODUCT);
    index_->hnsw.efConstruction = static_cast<int>(spec_[GraphParams::efc]);
    const auto n = static_cast<int64_t>(data.shape.rows);
    if (lift) {
      index_->add(n, lifted_rows(data.keys, data.shape.rows, dim_).data());
    } else {
      index_->add(n, data.keys);
    }
    bytes_ = faiss_bytes(*index_);
    query_.assign(width_, 0.0F);
    set_spec(spec_);
  }
  void set_spec(const RivalSpec& spec) override {
    spec_ = spec;
    index_->hnsw.efSearch = static_cast<int>(spec[GraphParams::ef]);
  }

  void search(const float* queries, size_t group, size_t k, RivalAnswer& answer) override {
    const FaissThreads one(1);
    const size_t before = scored_so_far(faiss::hnsw_stats);
    for (size_t j = 0; j < group; ++j) {
      std::copy_n(queries + j * dim_, dim_, query_.begin());
      search_.run(*index_, query_.data(), k, answer.heads[j].rows);
    }
    // Figures are those of the lowest layer, which is nearly all. Each scored key was behind one link; Faiss does not
    // count links to keys that had been seen, so they do not count here.
    answer.keys_scored = scored_so_far(faiss::hnsw_stats) - before;
    answer.bytes_read = answer.keys_scored * (width_ * sizeof(float) + sizeof(int32_t));
  }

  [[nodiscard]] uint64_t bytes() const override { return bytes_; }

 private:
  RivalSpec spec_;
  size_t dim_ = 0, width_ = 0;
  uint64_t bytes_ = 0;
  std::unique_ptr<faiss::IndexHNSWFlat> index_;
  FaissSearch search_;
  std::vector<float> query_;  // `[width]`, its last component 0 where keys are lifted
};

}  // namespace

const RivalType kFaissHnsw = {.name = "faiss-hnsw",
                              .meaning = kFaissHnswMeaning,
                              .params = GraphParams::kTable,
                              .asks_for_k = true,
                              .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
                                return std::make_unique<FaissHnsw>(spec);
                              }};

}  // namespace keyhole::tools
