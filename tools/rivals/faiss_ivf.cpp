// faiss-ivf: Faiss's IndexIVFFlat with inner products, searched by one query head at a time.
//
// Douze et al., "The Faiss library" (arXiv 2401.08281). Keys are in lists by spherical k-means, as Faiss trains them
// for inner products; a search reads the `probe` lists of the largest centroid products, with a copy of the keys in
// fp32.
#include <faiss/IndexFlat.h>
#include <faiss/IndexIVFFlat.h>

#include <algorithm>

#include "tools/rivals/faiss_common.h"
#include "tools/rivals/faiss_params.h"
#include "tools/rivals/rivals.h"

namespace keyhole::tools {
namespace {

class FaissIvf : public Rival {
 public:
  explicit FaissIvf(const RivalSpec& spec) : spec_(spec) {}

  void build(const RivalData& data) override {
    dim_ = data.shape.dim;
    const FaissThreads threads(data.threads);
    const size_t lists = faiss_lists(spec_[FaissIvfParams::lists], data.shape.rows);
    coarse_ = std::make_unique<faiss::IndexFlatIP>(dim_);
    index_ = std::make_unique<faiss::IndexIVFFlat>(coarse_.get(), dim_, lists,
                                                   faiss::METRIC_INNER_PRODUCT);
    faiss_fill(*index_, data);
    bytes_ = faiss_bytes(*index_);
    set_spec(spec_);
  }
  void set_spec(const RivalSpec& spec) override {
    spec_ = spec;
    index_->nprobe = std::min(spec.size(FaissIvfParams::probe), index_->nlist);
  }

  void search(const float* queries, size_t group, size_t k, RivalAnswer& answer) override {
    const FaissThreads one(1);
    const size_t before = faiss::indexIVF_stats.ndis;
    for (size_t j = 0; j < group; ++j) {
      search_.run(*index_, queries + j * dim_, k, answer.heads[j].rows);
    }
    answer.keys_scored = faiss::indexIVF_stats.ndis - before;
    answer.bytes_read = (answer.keys_scored + group * index_->nlist) * dim_ * sizeof(float);
  }

  [[nodiscard]] uint64_t bytes() const override { return bytes_; }

 private:
  RivalSpec spec_;
  size_t dim_ = 0;
  uint64_t bytes_ = 0;
  std::unique_ptr<faiss::IndexFlatIP> coarse_;
  std::unique_ptr<faiss::IndexIVFFlat> index_;
  FaissSearch search_;
};

}  // namespace

const RivalType kFaissIvf = {.name = "faiss-ivf",
                             .meaning = kFaissIvfMeaning,
                             .params = FaissIvfParams::kTable,
                             .asks_for_k = true,
                             .check =
                                 [](const RivalSpec& spec, const RivalShape& shape) {
                                   check_faiss_lists(spec[FaissIvfParams::lists], shape.rows);
                                 },
                             .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
                               return std::make_unique<FaissIvf>(spec);
                             }};

}  // namespace keyhole::tools
